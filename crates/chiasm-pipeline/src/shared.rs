//! The parts that all requests share on their way.

use std::sync::Arc;

use chiasm_fleet::Fleet;
use chiasm_media::{EncodedMedia, MediaDoor, MediaHeader};
use chiasm_prompt::ChatTemplate;
use chiasm_router::WorkerSnapshot;
use chiasm_types::Modality;

use super::displaced::Displaced;
use super::error::RequestError;
use super::helped::{HelperOptions, Helpers};
use super::image::Images;
use super::limits::PipelineLimits;
use super::metrics::{MediaState, Objectives, PipelineMetrics};
use super::observer::RouteObserver;
use super::retries::Retries;
use crate::cpu::CpuPool;
use crate::model::ServedModel;

/// The least number of requests that may be in flight, if no limit is set.
const MIN_IN_FLIGHT: usize = 1024;

/// One model, its workers, and all that brings requests to them.
pub struct Pipeline {
    /// The served model.
    pub model: Arc<ServedModel>,
    /// Opens media items.
    pub media: MediaDoor,
    /// Plans images and makes their tensors.
    pub images: Arc<Images>,
    /// vLLM's own processors; `None` if there are none.
    pub helpers: Option<Helpers>,
    /// The workers.
    pub fleet: Arc<Fleet>,
    /// The bounds on the work for a request.
    pub limits: PipelineLimits,
    /// Runs CPU-heavy work.
    pub cpu: CpuPool,
    /// Counts of requests on their way.
    pub metrics: Arc<PipelineMetrics>,
    /// The budget of requests that lose their workers, and the prompts that are not tried again.
    pub retries: Retries,
    /// Requests that wait for suspect workers.
    pub(super) displaced: Displaced,
    /// The observer of routes, such as the live page; `None` if there is none.
    pub observer: Option<Arc<dyn RouteObserver>>,
}

impl Pipeline {
    /// Creates the pipeline of a model in front of a fleet. Media items are opened by `media`.
    pub fn new(
        model: Arc<ServedModel>,
        media: MediaDoor,
        fleet: Arc<Fleet>,
        limits: PipelineLimits,
    ) -> Self {
        let metrics = Arc::new(PipelineMetrics::default());
        let cpu = CpuPool::new(limits.cpu_threads, &metrics.cpu);
        let budget = media.budget().clone();
        let images = Images::new(
            model.clone(),
            cpu.clone(),
            budget,
            metrics.clone(),
            limits.processed_bytes,
        );
        let of_departed = metrics.clone();
        fleet.on_departure(move |worker| of_departed.forget(worker));
        Self {
            model,
            media: media.with_workers(Arc::new(cpu.clone())),
            images: Arc::new(images),
            helpers: None,
            fleet,
            cpu,
            metrics,
            retries: Retries::new(limits.quarantine),
            displaced: Displaced::default(),
            observer: None,
            limits,
        }
    }

    /// Has vLLM's own processor make the media items that can't be made here.
    #[must_use]
    pub fn with_processor(self, options: HelperOptions) -> Self {
        let helpers = Helpers::new(options, &self.cpu, self.media.budget(), &self.metrics);
        Self { helpers: Some(helpers), ..self }
    }

    /// Lets an observer note the routes of requests.
    #[must_use]
    pub fn with_observer(self, observer: Arc<dyn RouteObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Counts requests by whether they meet these objectives.
    #[must_use]
    pub fn with_objectives(self, objectives: Objectives) -> Self {
        self.metrics.set_objectives(objectives);
        self
    }

    /// Returns the number of requests that may be in flight: twice as many as the workers run at
    /// once, but at least 1024, if no limit is set.
    pub fn in_flight_limit(&self) -> usize {
        self.limits
            .requests
            .unwrap_or_else(|| MIN_IN_FLIGHT.max(self.fleet.seats().saturating_mul(2)))
    }

    /// Brings the gauges among the metrics up to date. `workers` is the router's current snapshot.
    pub fn refresh_metrics(&self, workers: &[WorkerSnapshot]) {
        let media = MediaState {
            counts: self.media.counts(),
            held: self.media.budget().held(),
            processed: self.images.kept_bytes(),
            texts: self.model.tokenizer.token_cache(),
        };
        let present: Vec<_> = self.fleet.workers().iter().map(|worker| worker.id).collect();
        self.metrics.refresh(&media, workers, &present);
    }

    /// Returns `true` if items of this modality are taken at all.
    pub(super) fn takes(&self, modality: &Modality) -> bool {
        self.helpers.is_some() || (*modality == Modality::Image && self.model.vision.is_some())
    }

    /// Returns `true` if vLLM's own processor has to make an item.
    pub(super) fn needs_help(&self, item: &EncodedMedia) -> bool {
        let is_native = self.model.vision.is_some() && matches!(item.header, MediaHeader::Image(_));
        self.helpers.is_some() && !is_native
    }

    /// Returns vLLM's processors if a conversation needs them: for items that can't be made here,
    /// or to write all of it.
    ///
    /// # Errors
    /// A processor has to be there, and is not.
    pub(super) async fn helped_with(
        &self,
        items: &[EncodedMedia],
    ) -> Result<Option<&Helpers>, RequestError> {
        let Some(helpers) = &self.helpers else { return Ok(None) };
        let is_needed = items.iter().any(|item| self.needs_help(item))
            || helpers.writes_conversations().await?;
        Ok(is_needed.then_some(helpers))
    }

    /// Returns `true` if the model's conversations may have a system message at their head only.
    /// vLLM's own code is taken to demand that.
    ///
    /// # Errors
    /// A processor has to be there, and is not.
    pub async fn takes_system_first_alone(&self) -> Result<bool, RequestError> {
        if let Some(helpers) = &self.helpers
            && helpers.writes_conversations().await?
        {
            return Ok(true);
        }
        Ok(self.model.template.as_ref().is_some_and(ChatTemplate::takes_system_first_alone))
    }
}
