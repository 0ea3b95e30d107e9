//! Videos whose files another machine has: planned from their properties, decoded from their cuts.

use std::sync::{Arc, OnceLock};

use chiasm_backend::{TensorBytes, TensorRequest, VideoPart};
use chiasm_fleet::PresentClass;
use chiasm_media::ContentHash;
use chiasm_processor::Processor;
use chiasm_request::MediaKwargs;
use chiasm_types::{MmHash, Modality, TokenRun};
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

    /// Plans a video of which this process has only the properties and the file's hash.
    ///
    /// # Errors
    /// Returns an error if this process is overloaded.
    pub(crate) async fn plan_received(
        self: &Arc<Self>,
        content: &ContentHash,
        properties: VideoProperties,
        kwargs: &MediaKwargs,
        class: &PresentClass,
    ) -> Result<Result<ReceivedVideo, VideoRefusal>, RequestError> {
        let settings = self
            .video_model()
            .and_then(|model| self.parse_kwargs(kwargs).map(|request| (model, request)));
        let (model, request) = match settings {
            Ok(settings) => settings,
            Err(cause) => return Ok(Err(VideoRefusal::NotPlanned(cause))),
        };
        let fingerprint = model.fingerprint(&request);
        // The properties are not verified, so a wrong plan must not replace a right one.
        let key = [&fingerprint, format!("{properties:?}").as_bytes()].concat();
        let key = chiasm_media::mm_hash(content, &Modality::Video, &key);
        let model = self.model.clone();
        let request = Arc::new(request);
        let limits = self.limits.clone();
        let build = move || {
            PlannedVideo::from_properties(
                &model,
                properties,
                request,
                key,
                fingerprint,
                &limits,
                0,
            )
        };
        let budget = CpuBudget::shared();
        let video = match self.cached_plan(key, 0, build, &budget).await? {
            Ok(video) => video,
            Err(LIMIT) => return Ok(Err(VideoRefusal::Limit)),
            Err(cause) => return Ok(Err(VideoRefusal::NotPlanned(cause))),
        };
        Ok(Ok(ReceivedVideo {
            hash: identify(content, &video, class)?,
            videos: self.clone(),
            video,
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

/// A planned video whose file another machine has.
pub(crate) struct ReceivedVideo {
    videos: Arc<VideoPlanner>,
    hash: MmHash,
    video: Arc<PlannedVideo>,
    class: PresentClass,
    budget: CpuBudget,
    /// The ticket for processing one frame.
    ticket: OnceLock<Ticket>,
}

impl ReceivedVideo {
    /// Returns the video's identity.
    pub(crate) fn hash(&self) -> MmHash {
        self.hash
    }

    /// Returns the tokens that replace the video's marker.
    pub(crate) fn runs(&self) -> &[TokenRun] {
        &self.video.runs
    }

    /// Returns the number of those tokens that embed.
    pub(crate) fn embeds(&self) -> usize {
        self.video.embeds
    }

    /// Returns the number of elements of the largest tensor.
    pub(crate) fn elements(&self) -> u64 {
        // A raw value is one byte.
        self.video.plan.pixel_bytes(PixelFormat::RawU8) as u64
    }

    /// Returns a check that a cut has each planned frame once.
    pub(crate) fn cut_check(&self) -> impl Fn(&[VideoPart]) -> bool + Send + Sync + 'static {
        let video = self.video.clone();
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
            video: &self.video,
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
        let VideoProperties { width, height, .. } = self.video.plan.video;
        let cost = samples.saturating_mul(u64::from(width) * u64::from(height));
        let slots = self.videos.processors.video_slots().acquire(Some(cost)).await;
        let processes = slots.as_ref().map_or(1, |slots| slots.num_permits());
        self.tensors().decode(processor, parts, processes, order).await
    }
}
