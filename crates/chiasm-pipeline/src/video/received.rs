//! Videos whose files another machine has: planned from their properties, decoded from their cuts.

use std::sync::{Arc, OnceLock};

use chiasm_backend::{TensorBytes, TensorRequest, VideoDescription, VideoPart};
use chiasm_fleet::PresentClass;
use chiasm_media::ContentHash;
use chiasm_processor::Processor;
use chiasm_request::MediaKwargs;
use chiasm_types::{MmHash, Modality};
use chiasm_vision::{PixelFormat, VideoProperties};

use super::planned::{LIMIT, PlannedVideo};
use super::tensors::VideoTensors;
use super::{Cause, VideoPlanner, identify};
use crate::error::RequestError;
use chiasm_cpu::{CpuBudget, Ticket};

/// The reason why a received video is not planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VideoRefusal {
    /// The video exceeds a limit of this process.
    Limit,
    /// The model, or this version, does not plan such videos.
    NotPlanned(Cause),
}

impl VideoPlanner {
    /// Returns the number of slots in which videos of workers of a class are decoded; `None` if
    /// they can't be decoded here.
    pub(crate) fn slots_for(&self, class: &PresentClass) -> Option<u32> {
        let decodes = self.model.videos.is_ok() && self.may_decode_for(class);
        decodes.then(|| self.processors.video_slots().total())
    }

    /// Plans a video whose file another machine has.
    ///
    /// # Errors
    /// Returns an error if this process is overloaded.
    pub(crate) async fn plan_received(
        self: &Arc<Self>,
        description: &VideoDescription,
        class: &PresentClass,
    ) -> Result<Result<ReceivedVideo, VideoRefusal>, RequestError> {
        let &VideoDescription { frames, fps, width, height, .. } = description;
        let properties = VideoProperties { frames, fps, width, height };
        let content = ContentHash::new(description.content);
        let settings = self
            .video_model()
            .and_then(|model| Ok((model, self.parse_kwargs(&parse_kwargs(description)?)?)));
        let (model, request) = match settings {
            Ok(settings) => settings,
            Err(cause) => return Ok(Err(VideoRefusal::NotPlanned(cause))),
        };
        let fingerprint = model.fingerprint(&request);
        // The properties are not verified, so a wrong plan must not replace a right one.
        let mut key = fingerprint.clone();
        key.extend(frames.to_le_bytes());
        key.extend(fps.to_bits().to_le_bytes());
        key.extend([width, height].into_iter().flat_map(u32::to_le_bytes));
        let key = chiasm_media::mm_hash(&content, &Modality::Video, &key);
        let model = self.model.clone();
        let request = Arc::new(request);
        let limits = self.limits.clone();
        let build = move || {
            PlannedVideo::from_properties(&model, properties, request, key, fingerprint, &limits, 0)
        };
        let budget = CpuBudget::shared();
        let plan = match self.cached_plan(key, 0, build, &budget).await? {
            Ok(plan) => plan,
            Err(LIMIT) => return Ok(Err(VideoRefusal::Limit)),
            Err(cause) => return Ok(Err(VideoRefusal::NotPlanned(cause))),
        };
        Ok(Ok(ReceivedVideo {
            hash: identify(&content, &plan, class)?,
            videos: self.clone(),
            plan,
            class: class.clone(),
            budget,
            ticket: OnceLock::new(),
        }))
    }

    /// Returns the maximum number of embeddings of one item that every worker of a class can encode
    /// at once, as their processor reports it. Starts the processor if necessary.
    ///
    /// # Errors
    /// Returns an error if no processor of the workers' release can be started.
    pub(crate) async fn max_embeds(&self, class: &PresentClass) -> Result<usize, RequestError> {
        self.processors.for_class(class).await?;
        Ok(self.processors.max_embeds(class).unwrap_or(0))
    }
}

/// Parses the settings of the video's request.
fn parse_kwargs(description: &VideoDescription) -> Result<MediaKwargs, Cause> {
    let parse = |json: &str| serde_json::from_str(json).map_err(|_| "invalid_kwarg");
    let VideoDescription { processor_kwargs, io_kwargs, .. } = description;
    Ok(MediaKwargs { processor: parse(processor_kwargs)?, io: parse(io_kwargs)? })
}

/// A planned video whose file another machine has.
pub(crate) struct ReceivedVideo {
    videos: Arc<VideoPlanner>,
    /// The video's identity.
    pub(crate) hash: MmHash,
    pub(crate) plan: Arc<PlannedVideo>,
    class: PresentClass,
    budget: CpuBudget,
    /// The ticket for processing one frame.
    ticket: OnceLock<Ticket>,
}

impl ReceivedVideo {
    /// Returns the number of elements of the largest tensor.
    pub(crate) fn elements(&self) -> u64 {
        // A raw value is one byte.
        self.plan.plan.pixel_bytes(PixelFormat::RawU8) as u64
    }

    /// Returns a check that a cut has each planned frame once.
    pub(crate) fn cut_check(&self) -> impl Fn(&[VideoPart]) -> bool + Send + Sync + 'static {
        let video = self.plan.clone();
        move |parts| {
            let frames = parts.iter().flat_map(|part| &part.frames);
            let mut frames: Vec<u64> = frames.map(|frame| frame.frame).collect();
            frames.sort_unstable();
            frames == video.plan.frames
        }
    }

    /// Returns the video's tensors.
    pub(crate) fn tensors(&self) -> VideoTensors<'_> {
        VideoTensors {
            videos: &self.videos,
            hash: self.hash,
            video: &self.plan,
            class: &self.class,
            budget: &self.budget,
            ticket: &self.ticket,
        }
    }

    /// Decodes and processes a cut with the planned frames. Returns `None` if it decodes to
    /// unexpected frames.
    ///
    /// # Errors
    /// Returns an error if the processor takes too long or fails, or if memory is exhausted.
    pub(crate) async fn decode(
        &self,
        processor: &Processor,
        parts: Vec<VideoPart>,
        order: &TensorRequest,
    ) -> Result<Option<TensorBytes>, RequestError> {
        let samples = parts.iter().map(|part| u64::from(part.samples)).sum::<u64>();
        let VideoProperties { width, height, .. } = self.plan.plan.video;
        let cost = samples.saturating_mul(u64::from(width) * u64::from(height));
        let slots = self.videos.processors.video_slots().acquire(Some(cost)).await;
        let processes = slots.as_ref().map_or(1, |slots| slots.num_permits());
        self.tensors().decode(processor, parts, processes, order).await
    }
}
