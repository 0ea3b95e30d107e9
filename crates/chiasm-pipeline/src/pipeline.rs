//! The state that all requests share.

use std::sync::Arc;

use chiasm_fleet::Fleet;
use chiasm_media::{EncodedMedia, MediaHeader, MediaLoader};
use chiasm_metrics::{MediaState, Objectives, PipelineMetrics};
use chiasm_prompt::ChatTemplate;
use chiasm_request::MediaKwargs;
use chiasm_router::WorkerSnapshot;
use chiasm_types::Modality;

use super::displaced::Displaced;
use super::error::RequestError;
use super::image::Images;
use super::limits::PipelineLimits;
use super::observer::RouteObserver;
use super::processed::ProcessedMedia;
use super::processor_items::{VllmProcessorOptions, VllmProcessors};
use super::retries::Retries;
use super::video::{PlannedVideos, VideoPlanner};
use crate::model::ServedModel;
use chiasm_cpu::{CpuBudget, CpuPool};

/// The minimum of the limit on requests in flight, if no limit is configured.
const MIN_IN_FLIGHT: usize = 1024;

/// One model, its workers, and the state that its requests share.
pub struct Pipeline {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// The loader of media items.
    pub media: MediaLoader,
    /// The planner of images and maker of their tensors.
    pub images: Arc<Images>,
    /// The tensors that were made for any engine.
    pub(super) processed: Arc<ProcessedMedia>,
    /// vLLM's own processors; `None` if there are none.
    pub vllm_processors: Option<Arc<VllmProcessors>>,
    /// The planner of videos and maker of their tensors; `None` without vLLM's own processors,
    /// which decode the frames.
    pub(super) videos: Option<Arc<VideoPlanner>>,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// The bounds on the work for a request.
    pub limits: PipelineLimits,
    /// The threads for CPU-heavy work.
    pub cpu: CpuPool,
    /// The metrics of requests.
    pub metrics: Arc<PipelineMetrics>,
    /// The retry budget, and the quarantined prompts.
    pub retries: Retries,
    /// The requests on suspect workers that may move.
    pub(super) displaced: Displaced,
    /// The observer of routes, such as the live page.
    pub observer: Option<Arc<dyn RouteObserver>>,
}

impl Pipeline {
    /// Creates the pipeline of a model in front of a fleet. `media` opens media items.
    pub fn new(
        model: Arc<ServedModel>,
        media: MediaLoader,
        fleet: Arc<Fleet>,
        limits: PipelineLimits,
    ) -> Self {
        let metrics = Arc::new(PipelineMetrics::default());
        let cpu = CpuPool::new(limits.cpu_threads, &metrics.cpu);
        let budget = media.budget().clone();
        let processed = Arc::new(ProcessedMedia::new(limits.processed_bytes));
        let images =
            Images::new(model.clone(), cpu.clone(), budget, metrics.clone(), processed.clone());
        let departure_metrics = metrics.clone();
        fleet.on_departure(move |worker| departure_metrics.forget(worker));
        Self {
            model,
            media: media.with_executor(Arc::new(cpu.clone())),
            images: Arc::new(images),
            processed,
            vllm_processors: None,
            videos: None,
            fleet,
            cpu,
            metrics,
            retries: Retries::new(limits.quarantine),
            displaced: Displaced::default(),
            observer: None,
            limits,
        }
    }

    /// Uses vLLM's own processor for media items that Chiasm can't process.
    #[must_use]
    pub fn with_processor(self, options: VllmProcessorOptions) -> Self {
        let processors =
            VllmProcessors::new(options, &self.cpu, self.media.budget(), &self.metrics);
        let processors = Arc::new(processors);
        let videos = VideoPlanner::new(
            self.model.clone(),
            processors.clone(),
            self.processed.clone(),
            self.limits.request_cost,
            self.cpu.clone(),
            self.media.budget().clone(),
            self.metrics.clone(),
        );
        Self { vllm_processors: Some(processors), videos: Some(Arc::new(videos)), ..self }
    }

    /// Sets the observer of routes.
    #[must_use]
    pub fn with_observer(self, observer: Arc<dyn RouteObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Sets the objectives, and counts the tokens that meet or miss them.
    #[must_use]
    pub fn with_objectives(self, objectives: Objectives) -> Self {
        self.metrics.set_objectives(objectives);
        self
    }

    /// Returns the limit on requests in flight. Without a configured limit that is twice as many as
    /// the workers run at once, but at least 1024.
    pub fn in_flight_limit(&self) -> usize {
        self.limits
            .requests
            .unwrap_or_else(|| MIN_IN_FLIGHT.max(self.fleet.max_running().saturating_mul(2)))
    }

    /// Updates all gauges. `workers` is the router's current snapshot.
    pub fn refresh_metrics(&self, workers: &[WorkerSnapshot]) {
        let media = MediaState {
            counts: self.media.counts(),
            held: self.media.budget().held(),
            processed: self.images.kept_bytes(),
            texts: self.model.tokenizer.token_cache_counts(),
        };
        let present: Vec<_> = self.fleet.workers().iter().map(|worker| worker.id).collect();
        self.metrics.refresh(&media, workers, &present);
    }

    /// Returns `true` if the pipeline accepts items of this modality.
    pub(super) fn accepts(&self, modality: &Modality) -> bool {
        self.vllm_processors.is_some()
            || (*modality == Modality::Image && self.model.vision.is_some())
    }

    /// Returns `true` if vLLM's own processor must make an item that is no planned video.
    pub(super) fn needs_vllm_processor(&self, item: &EncodedMedia) -> bool {
        let is_native = self.model.vision.is_some() && matches!(item.header, MediaHeader::Image(_));
        self.vllm_processors.is_some() && !is_native
    }

    /// Plans the videos of a request, as far as possible, from their files' indexes.
    ///
    /// # Errors
    /// Returns an error if the request's budget does not allow that.
    pub(super) async fn plan_videos(
        &self,
        media: &[EncodedMedia],
        kwargs: &MediaKwargs,
        cpu: &CpuBudget,
    ) -> Result<PlannedVideos, RequestError> {
        match &self.videos {
            Some(videos) => videos.plan_all(media, kwargs, cpu).await,
            None => Ok(PlannedVideos::default()),
        }
    }

    /// Plans no video of a request whose plans were stale too often.
    pub(super) fn plan_no_videos(&self, media: &[EncodedMedia]) -> PlannedVideos {
        self.videos.as_ref().map(|videos| videos.plan_none(media)).unwrap_or_default()
    }

    /// Returns `true` if the model accepts a system message only at the start of a conversation.
    /// vLLM's own code is presumed to require that.
    ///
    /// # Errors
    /// Returns an error if a required processor is unavailable.
    pub async fn requires_system_first(&self) -> Result<bool, RequestError> {
        if let Some(processors) = &self.vllm_processors
            && processors.renders_conversations().await?
        {
            return Ok(true);
        }
        Ok(self.model.template.as_ref().is_some_and(ChatTemplate::requires_system_first))
    }
}
