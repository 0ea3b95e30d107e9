//! A modelled engine that only encodes images for others.

use std::collections::VecDeque;

use chiasm_engine_model::{EncoderCache, EncoderLookup};
use chiasm_router::Reservation;

use crate::embedding_store::EmbeddingStore;
use crate::model::EngineModel;
use crate::sequence::Image;
use crate::virtual_time::{Nanos, nanos};

/// The images of one request that an engine encodes.
pub(crate) struct EncodeJob {
    /// The number of the request.
    pub(crate) number: u64,
    /// The reservation on the engine.
    pub(crate) reservation: Reservation,
    pub(crate) images: Vec<Image>,
    /// The number of embeddings computed for the job so far.
    pub(crate) encoded: u64,
    /// The index of the first image that has not been in a step yet.
    next: usize,
}

/// A modelled engine that encodes images, first come, first served.
///
/// A step takes as many embeddings as other engines compute tokens, or one image that has more. An
/// image whose embeddings are in the engine's own cache or in the store also takes room in a step,
/// but is not computed. A step that computes `e` embeddings takes
///
/// ```text
/// overhead + e · embed
/// ```
///
/// The weights of the language model are not read, and those of the encoder are part of `embed`.
pub(crate) struct Encoder {
    model: EngineModel,
    store: EmbeddingStore,
    cache: EncoderCache<u64>,
    waiting: VecDeque<EncodeJob>,
    step: Option<Step>,
    work: f64,
}

struct Step {
    end: Nanos,
    work: f64,
    /// The images that are stored at the end of the step.
    images: Vec<Image>,
}

impl EncodeJob {
    pub(crate) fn new(number: u64, reservation: Reservation, images: Vec<Image>) -> Self {
        Self { number, reservation, images, encoded: 0, next: 0 }
    }
}

impl Encoder {
    pub(crate) fn new(model: EngineModel, store: EmbeddingStore) -> Self {
        let cache = EncoderCache::new(model.encoder_cache_tokens);
        Self { model, store, cache, waiting: VecDeque::new(), step: None, work: 0.0 }
    }

    /// Returns the time spent on computing embeddings, in seconds.
    pub(crate) fn work(&self) -> f64 {
        self.work
    }

    /// Returns `true` if no step is running.
    pub(crate) fn is_idle(&self) -> bool {
        self.step.is_none()
    }

    /// Returns the end of the running step, when [`Encoder::end_step`] must be called.
    pub(crate) fn step_end(&self) -> Option<Nanos> {
        self.step.as_ref().map(|step| step.end)
    }

    /// Queues a job.
    pub(crate) fn deliver(&mut self, job: EncodeJob, now: Nanos) {
        self.waiting.push_back(job);
        if self.is_idle() {
            self.start_step(now);
        }
    }

    /// Ends the step and starts the next one. Returns the jobs whose images are all stored.
    pub(crate) fn end_step(&mut self, now: Nanos) -> Vec<EncodeJob> {
        let Some(step) = self.step.take() else { return Vec::new() };
        self.work += step.work;
        step.images.into_iter().for_each(|image| self.store.insert(image));
        let ended = self.waiting.partition_point(|job| job.next == job.images.len());
        let ended = self.waiting.drain(..ended).collect();
        self.start_step(now);
        ended
    }

    fn start_step(&mut self, now: Nanos) {
        if self.waiting.is_empty() {
            return;
        }
        let mut images = Vec::new();
        let mut budget = self.model.max_batched_tokens as u64;
        let mut computed = 0;
        'jobs: for job in &mut self.waiting {
            while let Some(&image) = job.images.get(job.next) {
                let embeds = u64::from(image.embeds);
                if embeds > budget && !images.is_empty() {
                    break 'jobs;
                }
                budget = budget.saturating_sub(embeds);
                let is_stored = self.store.touch(image);
                if self.cache.encode(&image.id, embeds) == EncoderLookup::Miss && !is_stored {
                    job.encoded += embeds;
                    computed += embeds;
                }
                images.push(image);
                job.next += 1;
            }
        }
        let work = computed as f64 * self.model.embed;
        self.step = Some(Step { end: now + nanos(self.model.overhead + work), work, images });
    }
}
