//! The plan of one video, from its file's index.

use std::sync::Arc;
use std::time::Duration;

use chiasm_processor::ItemLimits;
use chiasm_types::{Dtype, MmHash, TokenRun};
use chiasm_video::VideoIndex;
use chiasm_vision::{
    PixelFormat, VideoModel, VideoPiece, VideoPlan, VideoProperties, VideoRequest,
};
use quick_cache::Weighter;

use super::Cause;
use crate::model::{ServedModel, TokenizerVocabulary};
use crate::processor_items::VllmProcessors;
use chiasm_cpu::price;

/// The format of pixels that takes the most memory and time.
pub(super) const LARGEST_FORMAT: PixelFormat = PixelFormat::Normalized(Dtype::F32);

/// The cause for a video that exceeds one of [`PlanLimits`].
pub(super) const LIMIT: Cause = "limit";

/// A plan, or the cause for which vLLM's own processor makes the video.
pub(super) type PlanOutcome = Result<Arc<PlannedVideo>, Cause>;

/// A planned video, independent of any class of workers.
pub(crate) struct PlannedVideo {
    pub(super) plan: VideoPlan,
    /// The settings of the request that the plan was made for.
    pub(super) request: Arc<VideoRequest>,
    /// The key of the plan in the cache.
    pub(super) key: MmHash,
    /// Everything that changes the video's tensors, apart from its file.
    pub(super) fingerprint: Vec<u8>,
    /// The tokens that replace the video's marker.
    pub(crate) runs: Vec<TokenRun>,
    /// The number of tokens in `runs` that embed.
    pub(crate) embeds: usize,
    /// The cost of decoding the planned frames: samples times pixels. 0 if only another machine
    /// has the file.
    pub(super) decode_cost: u64,
    /// The estimated CPU time of processing the planned frames.
    pub(super) processing: Duration,
}

/// The limits beyond which a video is not planned. It goes to vLLM's own processor then, which
/// checks the limits of items itself.
#[derive(Clone)]
pub(super) struct PlanLimits {
    item: ItemLimits,
    item_bytes: u64,
    /// The maximum CPU time of processing the frames of a request's videos.
    pub(super) processing: Duration,
    /// `true` if requests may change the settings of videos.
    pub(super) trusts_kwargs: bool,
}

impl PlanLimits {
    /// Returns the limits of vLLM's processors. Processing takes at most half of `request_cost`,
    /// the maximum CPU time of a request.
    pub(super) fn new(processors: &VllmProcessors, request_cost: Duration) -> Self {
        let options = processors.options();
        Self {
            item: options.processor.limits,
            item_bytes: options.processor.item_bytes,
            processing: request_cost / 2,
            trusts_kwargs: options.trust_request_kwargs,
        }
    }

    fn allow_file(&self, video: &VideoProperties, bytes: usize) -> bool {
        let ItemLimits { video_duration, video_pixels, audio_duration: _ } = self.item;
        let pixels = u64::from(video.width) * u64::from(video.height);
        let seconds = video.frames as f64 / video.fps;
        // An unknown duration is not allowed either.
        let is_short = video_duration.is_zero() || seconds <= video_duration.as_secs_f64();
        is_short && (video_pixels == 0 || pixels <= video_pixels) && bytes as u64 <= self.item_bytes
    }

    fn allow_plan(&self, plan: &VideoPlan, bytes: usize) -> bool {
        let needed = (plan.pixel_bytes(LARGEST_FORMAT) as u64).saturating_add(bytes as u64);
        needed <= self.item_bytes && processing_price(plan) <= self.processing
    }
}

/// Estimates the time to process all planned frames.
fn processing_price(plan: &VideoPlan) -> Duration {
    let frames = u32::try_from(plan.frames.len()).unwrap_or(u32::MAX);
    frame_price(plan, LARGEST_FORMAT).saturating_mul(frames)
}

/// Estimates the time to process one decoded frame.
pub(super) fn frame_price(plan: &VideoPlan, format: PixelFormat) -> Duration {
    let pixels = u64::from(plan.video.width) * u64::from(plan.video.height);
    price::tensor(pixels, plan.pixel_bytes(format) / plan.frames.len().max(1))
}

impl PlannedVideo {
    /// Plans a video. CPU-bound. Decodes nothing.
    ///
    /// # Errors
    /// Returns the cause for which vLLM's own processor must make the video.
    pub(super) fn build(
        model: &ServedModel,
        file: &[u8],
        request: Arc<VideoRequest>,
        key: MmHash,
        fingerprint: Vec<u8>,
        limits: &PlanLimits,
    ) -> Result<Self, Cause> {
        let index = VideoIndex::read(file).map_err(|reason| reason.cause())?;
        let properties = index.properties();
        let video = VideoProperties {
            frames: properties.frames,
            fps: properties.fps,
            width: properties.width,
            height: properties.height,
        };
        let planned =
            Self::from_properties(model, video, request, key, fingerprint, limits, file.len())?;
        let cut = index.cut(file, &planned.plan.frames).map_err(|reason| reason.cause())?;
        Ok(Self { decode_cost: cut.decode_cost(), ..planned })
    }

    /// Plans a video of these properties and of `file_bytes` bytes, whose cost of decoding is not
    /// known. CPU-bound.
    ///
    /// # Errors
    /// Returns the cause for which vLLM's own processor must make the video.
    pub(super) fn from_properties(
        model: &ServedModel,
        video: VideoProperties,
        request: Arc<VideoRequest>,
        key: MmHash,
        mut fingerprint: Vec<u8>,
        limits: &PlanLimits,
        file_bytes: usize,
    ) -> Result<Self, Cause> {
        // Other properties are another item: a machine that reads the file's index differently, or
        // states wrong properties, must not exchange tensors with this one.
        fingerprint.extend(video.frames.to_le_bytes());
        fingerprint.extend(video.fps.to_bits().to_le_bytes());
        fingerprint.extend([video.width, video.height].into_iter().flat_map(u32::to_le_bytes));
        let videos: &VideoModel = model.videos.as_ref().map_err(|reason| reason.cause())?;
        if !limits.allow_file(&video, file_bytes) {
            return Err(LIMIT);
        }
        let plan = videos.plan(video, &request).map_err(|reason| reason.cause())?;
        if !limits.allow_plan(&plan, file_bytes) {
            return Err(LIMIT);
        }
        let vocabulary = TokenizerVocabulary(&model.tokenizer);
        let runs = plan.tokenize(&vocabulary).map_err(|_| "tokenizer")?;
        let embeds = runs.iter().filter(|run| run.embeds).map(|run| run.count).sum();
        let processing = processing_price(&plan);
        let decode_cost = 0;
        Ok(Self { plan, request, key, fingerprint, runs, embeds, decode_cost, processing })
    }

    /// Estimates the memory that the plan takes.
    fn bytes(&self) -> usize {
        let Self { plan, fingerprint, runs, .. } = self;
        let texts = plan.placeholder.iter().map(|piece| match piece {
            VideoPiece::Text { text, .. } => 64 + text.len(),
            VideoPiece::Tokens(_) => 64,
        });
        let frames = plan.frames.len() + plan.loaded_frames.len();
        let timestamps = plan.timestamps.as_ref().map_or(0, Vec::len);
        texts.sum::<usize>() + 8 * (frames + timestamps) + 24 * runs.len() + fingerprint.len()
    }
}

/// The weight of a plan in the cache: its bytes.
#[derive(Clone)]
pub(super) struct PlanWeight;

impl Weighter<MmHash, PlanOutcome> for PlanWeight {
    fn weight(&self, _: &MmHash, outcome: &PlanOutcome) -> u64 {
        512 + outcome.as_ref().map_or(0, |video| video.bytes()) as u64
    }
}
