//! Videos: planned from their containers, and decoded only for an engine that lacks them.
//!
//! The index of the file and the model's settings give the frames, the tokens and the tensors'
//! shapes. Any other video goes to vLLM's own processor as a whole file; a metric counts these.

mod cutting;
mod frames;
mod planned;
mod received;
mod source;
mod tensors;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use chiasm_backend::{PlanClass, VllmItems};
use chiasm_fleet::PresentClass;
use chiasm_limit::KeyedLimiter;
use chiasm_media::{ByteBudget, ContentHash, EncodedMedia};
use chiasm_metrics::PipelineMetrics;
use chiasm_request::MediaKwargs;
use chiasm_types::{MmHash, Modality, TokenId, VllmVersion};
use chiasm_vision::{PixelFormat, VideoModel, VideoRequest};
use futures_util::future::try_join_all;
use quick_cache::sync::Cache;
use serde_json::Map;

use super::error::RequestError;
use super::item::ItemPlan;
use super::processed::ProcessedMedia;
use super::processor_items::VllmProcessors;
use crate::model::ServedModel;
use chiasm_cpu::{CpuBudget, CpuPool, price};

pub(super) use planned::PlannedVideo;
use planned::{PlanLimits, PlanOutcome, PlanWeight};
pub(super) use received::{ReceivedVideo, VideoRefusal};
use source::VideoSource;
pub(super) use tensors::MadeVideo;

/// The maximum size of the cached plans. Most plans take a few kilobytes; that of a video of one
/// hour takes about 100 kB.
const MAX_PLAN_BYTES: u64 = 64 << 20;
/// The estimated number of cached plans.
const ESTIMATED_PLANS: usize = 1 << 12;
/// The vLLM releases whose results the plans reproduce. 0.33 differs only for videos that are never
/// planned: of one frame, of unknown length, or without a frame rate.
const PLANNED_RELEASES: [VllmVersion; 2] = [VllmVersion::minor(0, 32), VllmVersion::minor(0, 33)];

/// The reason why a video goes whole to vLLM's own processor, as a short name for metrics.
type Cause = &'static str;

/// The cause for a cut that decodes to other frames than its file's index tells.
const OTHER_FRAMES: Cause = "other_frames";

/// Plans the videos of one served model and caches the plans.
pub(crate) struct VideoPlanner {
    model: Arc<ServedModel>,
    processors: Arc<VllmProcessors>,
    /// The plans, and the causes for which there are none.
    plans: Cache<MmHash, PlanOutcome, PlanWeight>,
    single_flight: KeyedLimiter<MmHash>,
    processed: Arc<ProcessedMedia>,
    limits: PlanLimits,
    cpu: CpuPool,
    budget: ByteBudget,
    metrics: Arc<PipelineMetrics>,
}

/// The planned videos of a request: one entry per media item, `None` for an item that is no video
/// or was not planned.
#[derive(Clone, Default)]
pub(super) struct PlannedVideos(Arc<[Option<Arc<PlannedVideo>>]>);

impl PlannedVideos {
    /// Returns the plan of the request's media item `index`.
    pub(super) fn get(&self, index: usize) -> Option<&Arc<PlannedVideo>> {
        self.0.get(index)?.as_ref()
    }

    /// Returns `true` if no video was planned.
    pub(super) fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    fn iter(&self) -> impl Iterator<Item = &Arc<PlannedVideo>> {
        self.0.iter().flatten()
    }
}

impl VideoPlanner {
    /// Creates the planner of a model. `request_cost` is the maximum CPU time of a request.
    pub(super) fn new(
        model: Arc<ServedModel>,
        processors: Arc<VllmProcessors>,
        processed: Arc<ProcessedMedia>,
        request_cost: Duration,
        cpu: CpuPool,
        budget: ByteBudget,
        metrics: Arc<PipelineMetrics>,
    ) -> Self {
        if let Err(reason) = &model.videos {
            tracing::info!(%reason, "vLLM's own processor makes videos from whole files");
        }
        Self {
            limits: PlanLimits::new(&processors, request_cost),
            model,
            processors,
            plans: Cache::with_weighter(ESTIMATED_PLANS, MAX_PLAN_BYTES, PlanWeight),
            single_flight: KeyedLimiter::new(1),
            processed,
            cpu,
            budget,
            metrics,
        }
    }

    /// Returns the model's settings of videos, or the cause for which videos are not planned.
    fn video_model(&self) -> Result<&VideoModel, Cause> {
        self.model.videos.as_ref().map_err(|reason| reason.cause())
    }

    /// Returns the tokens that mark a video in a prompt.
    pub(super) fn marker(&self) -> &[TokenId] {
        self.video_model().map_or(&[], |model| &model.prompt().marker)
    }

    /// Returns the text that marks a video in a message whose content is one string.
    pub(super) fn marker_texts(&self) -> [&'static str; 1] {
        [self.video_model().map_or("", |model| model.prompt().text)]
    }

    /// Plans the videos of a request, as far as possible. Counts those that are not planned.
    ///
    /// # Errors
    /// Returns an error if the request's budget does not allow reading the files' indexes.
    pub(super) async fn plan_all(
        &self,
        media: &[EncodedMedia],
        kwargs: &MediaKwargs,
        cpu: &CpuBudget,
    ) -> Result<PlannedVideos, RequestError> {
        let videos = media.iter().filter(|item| item.modality == Modality::Video).count();
        if videos == 0 {
            return Ok(PlannedVideos::default());
        }
        let request = match self.parse_settings(kwargs, videos) {
            Ok(request) => Arc::new(request),
            Err(cause) => {
                self.count_whole(cause, videos);
                return Ok(PlannedVideos::default());
            }
        };
        let plan = async |item: &EncodedMedia| {
            if item.modality != Modality::Video {
                return Ok(None);
            }
            let outcome = self.plan(item, &request, cpu).await?;
            outcome.map(Some).or_else(|cause| {
                self.count_whole(cause, 1);
                Ok::<_, RequestError>(None)
            })
        };
        let mut plans = try_join_all(media.iter().map(plan)).await?;
        self.retain_affordable(&mut plans);
        Ok(PlannedVideos(plans.into()))
    }

    /// Plans no video of a request whose plans were stale too often. Counts the videos.
    pub(super) fn plan_none(&self, media: &[EncodedMedia]) -> PlannedVideos {
        let videos = media.iter().filter(|item| item.modality == Modality::Video).count();
        self.count_whole(OTHER_FRAMES, videos);
        PlannedVideos::default()
    }

    /// Removes the plans of videos that would together take more CPU time than a request may use.
    fn retain_affordable(&self, plans: &mut [Option<Arc<PlannedVideo>>]) {
        let mut total = Duration::ZERO;
        for plan in plans {
            let Some(video) = plan else { continue };
            let with_this = total.saturating_add(video.processing);
            if with_this <= self.limits.processing {
                total = with_this;
            } else {
                *plan = None;
                self.count_whole("limit", 1);
            }
        }
    }

    /// Parses a request's settings.
    fn parse_settings(&self, kwargs: &MediaKwargs, videos: usize) -> Result<VideoRequest, Cause> {
        let model = self.video_model()?;
        if videos > self.model.max_videos {
            return Err("limit");
        }
        let MediaKwargs { processor, io } = kwargs;
        if processor.is_empty() && io.is_empty() {
            return Ok(model.default_request().clone());
        }
        if !self.limits.trusts_kwargs {
            return Err("untrusted_kwargs");
        }
        self.parse_kwargs(kwargs)
    }

    /// Parses a request's settings, whether or not requests may have them.
    fn parse_kwargs(&self, kwargs: &MediaKwargs) -> Result<VideoRequest, Cause> {
        let MediaKwargs { processor, io } = kwargs;
        // Settings of other modalities also change how vLLM reads a video.
        if io.keys().any(|modality| modality != Modality::Video.name()) {
            return Err("unknown_kwarg");
        }
        let no_kwargs = Map::new();
        let io = match io.get(Modality::Video.name()) {
            None => &no_kwargs,
            Some(io) => io.as_object().ok_or("invalid_kwarg")?,
        };
        self.video_model()?.parse_request(processor, io).map_err(|reason| reason.cause())
    }

    /// Plans a video, or returns the cached outcome. Concurrent calls for one video plan it once.
    async fn plan(
        &self,
        item: &EncodedMedia,
        request: &Arc<VideoRequest>,
        cpu: &CpuBudget,
    ) -> Result<PlanOutcome, RequestError> {
        let Ok(model) = self.video_model() else { return Ok(Err("model")) };
        let fingerprint = model.fingerprint(request);
        let key = chiasm_media::mm_hash(&item.content, &Modality::Video, &fingerprint);
        let model = self.model.clone();
        let request = request.clone();
        let file = item.bytes.clone();
        let limits = self.limits.clone();
        let build = move || PlannedVideo::build(&model, &file, request, key, fingerprint, &limits);
        self.cached_plan(key, item.bytes.len(), build, cpu).await
    }

    /// Returns the cached plan with this key, or builds it. Concurrent calls build it once.
    async fn cached_plan(
        &self,
        key: MmHash,
        file_bytes: usize,
        build: impl FnOnce() -> Result<PlannedVideo, Cause> + Send + 'static,
        cpu: &CpuBudget,
    ) -> Result<PlanOutcome, RequestError> {
        if let Some(outcome) = self.plans.get(&key) {
            return Ok(outcome);
        }
        let _permit = self.single_flight.acquire(key).await;
        if let Some(outcome) = self.plans.get(&key) {
            return Ok(outcome);
        }
        let ticket = cpu.ticket(price::video_index(file_bytes))?;
        let outcome = self.cpu.run(&ticket, build).await?.map(Arc::new);
        self.plans.insert(key, outcome.clone());
        Ok(outcome)
    }

    /// Returns `true` if the workers of all these classes accept the planned videos of a request.
    /// Counts the videos.
    pub(super) fn check_and_count(&self, classes: &[PresentClass], videos: &PlannedVideos) -> bool {
        let count = videos.iter().count();
        match classes.iter().try_for_each(|class| self.check_class(class, videos)) {
            Ok(()) => {
                self.metrics.count_planned_videos(count);
                true
            }
            Err(cause) => {
                self.count_whole(cause, count);
                false
            }
        }
    }

    /// Checks that the workers of a class accept the planned videos of a request.
    fn check_class(&self, class: &PresentClass, videos: &PlannedVideos) -> Result<(), Cause> {
        if !self.may_decode_for(class) {
            return Err("release");
        }
        let fits = videos.iter().all(|video| self.encoder_tokens(class, video).is_some());
        if fits { Ok(()) } else { Err("encoder_cache") }
    }

    /// Returns `true` if the workers of a class are of a release whose videos are planned, and a
    /// processor of that release decodes them, or may do so once it has started.
    fn may_decode_for(&self, class: &PresentClass) -> bool {
        let VllmItems::Release(release) = class.class.vllm_items else { return false };
        PLANNED_RELEASES.contains(&VllmVersion::minor(release.major, release.minor))
            // Frames of another release's decoder may differ.
            && self.processors.may_serve(class)
    }

    /// Returns the number of embeddings that a worker chosen for the video must be able to encode
    /// at once: 0 if every worker of the class can. Returns `None` if perhaps none can: an engine
    /// never schedules an item that is larger than its encoder cache.
    fn encoder_tokens(&self, class: &PresentClass, video: &PlannedVideo) -> Option<usize> {
        let max_embeds = || self.processors.max_embeds(class).unwrap_or(0);
        if video.embeds <= class.min_batched_tokens || video.embeds <= max_embeds() {
            return Some(0);
        }
        (video.embeds <= class.max_batched_tokens).then_some(video.embeds)
    }

    /// Plans a video for workers of a class that passed [`Self::check_and_count`].
    ///
    /// # Errors
    /// Returns an error if no worker of the class can encode the video.
    pub(super) fn plan_item(
        self: &Arc<Self>,
        item: &EncodedMedia,
        video: &Arc<PlannedVideo>,
        kwargs: &Arc<MediaKwargs>,
        class: &PresentClass,
        field: &str,
        cpu: &CpuBudget,
    ) -> Result<ItemPlan, RequestError> {
        let encoder_tokens = self
            .encoder_tokens(class, video)
            .ok_or_else(|| RequestError::internal("no engine can encode the video"))?;
        let hash = identify(&item.content, video, class)?;
        Ok(ItemPlan {
            modality: Modality::Video,
            hash,
            runs: video.runs.clone(),
            embeds: video.embeds,
            // A raw value is one byte.
            elements: video.plan.pixel_bytes(PixelFormat::RawU8) as u64,
            encoder_tokens,
            source: Arc::new(VideoSource {
                videos: self.clone(),
                hash,
                video: video.clone(),
                encoded: item.clone(),
                kwargs: kwargs.clone(),
                class: class.clone(),
                field: field.to_owned(),
                budget: cpu.clone(),
                ticket: OnceLock::new(),
                whole: OnceLock::new(),
            }),
        })
    }

    /// Counts and logs videos that go to vLLM's own processor as whole files.
    fn count_whole(&self, cause: Cause, videos: usize) {
        tracing::debug!(cause, videos, "vLLM's own processor makes videos from whole files");
        self.metrics.count_whole_videos(cause, videos);
    }
}

/// Returns the identity of a planned video for the workers of a class.
///
/// # Errors
/// Returns an error if the workers' release is unknown.
fn identify(
    content: &ContentHash,
    video: &PlannedVideo,
    class: &PresentClass,
) -> Result<MmHash, RequestError> {
    // Each release decodes with its own OpenCV.
    let VllmItems::Release(release) = class.class.vllm_items else {
        return Err(RequestError::internal("engines of unknown release get no planned videos"));
    };
    let mut fingerprint = video.fingerprint.clone();
    fingerprint.extend_from_slice(format!("vLLM {release}").as_bytes());
    let identity = PlanClass::item_identity(&class.class.processor, &fingerprint);
    Ok(chiasm_media::mm_hash(content, &Modality::Video, &identity))
}

#[cfg(test)]
mod tests;
