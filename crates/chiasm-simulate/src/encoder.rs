//! A modelled engine that encodes images for others and does nothing else.

use std::collections::VecDeque;

use chiasm_engine_model::{Encoded, EncoderCache};
use chiasm_router::Reservation;

use crate::embedding_store::EmbeddingStore;
use crate::model::EngineModel;
use crate::sequence::Image;
use crate::virtual_time::{Nanos, nanos};

/// Images of one request that an engine encodes.
pub(crate) struct Encoding {
    /// The request's.
    pub(crate) number: u64,
    /// Its place on the engine.
    pub(crate) reservation: Reservation,
    pub(crate) images: Vec<Image>,
    /// Embeddings that had to be made for it so far.
    pub(crate) encoded: u64,
    /// The first image that is in no step yet.
    next: usize,
}

/// What waits is encoded first come, first served, as many embeddings a step as other engines
/// compute tokens, or one image that has more. An image whose embeddings are in the engine's own
/// cache or in the store has its place in a step, in which nothing is made for it.
///
/// ```text
/// overhead + e · embed
/// ```
///
/// is what a step takes that makes `e` embeddings: the weights of the language model are not read,
/// and those of the encoder are part of `embed`.
pub(crate) struct Encoder {
    model: EngineModel,
    store: EmbeddingStore,
    cache: EncoderCache<u64>,
    waiting: VecDeque<Encoding>,
    step: Option<Step>,
    work: f64,
}

struct Step {
    end: Nanos,
    work: f64,
    /// What is in the store when it has ended.
    images: Vec<Image>,
}

impl Encoding {
    pub(crate) fn new(number: u64, reservation: Reservation, images: Vec<Image>) -> Self {
        Self { number, reservation, images, encoded: 0, next: 0 }
    }
}

impl Encoder {
    pub(crate) fn new(model: EngineModel, store: EmbeddingStore) -> Self {
        let cache = EncoderCache::new(model.encoder_cache_tokens);
        Self { model, store, cache, waiting: VecDeque::new(), step: None, work: 0.0 }
    }

    /// Seconds of its steps in which it made embeddings.
    pub(crate) fn work(&self) -> f64 {
        self.work
    }

    /// Whether it has nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.step.is_none()
    }

    /// When the step ends that is under way. [`Encoder::wake`] is to be called then.
    pub(crate) fn step_end(&self) -> Option<Nanos> {
        self.step.as_ref().map(|step| step.end)
    }

    /// Queues images.
    pub(crate) fn deliver(&mut self, encoding: Encoding, now: Nanos) {
        self.waiting.push_back(encoding);
        if self.is_idle() {
            self.start_step(now);
        }
    }

    /// Ends the step and starts the next one. Returns the requests of which all images are in the
    /// store.
    pub(crate) fn wake(&mut self, now: Nanos) -> Vec<Encoding> {
        let Some(step) = self.step.take() else { return Vec::new() };
        self.work += step.work;
        step.images.into_iter().for_each(|image| self.store.leave(image));
        let ended = self.waiting.partition_point(|encoding| encoding.next == encoding.images.len());
        let ended = self.waiting.drain(..ended).collect();
        self.start_step(now);
        ended
    }

    fn start_step(&mut self, now: Nanos) {
        if self.waiting.is_empty() {
            return;
        }
        let (mut images, mut room, mut made) =
            (Vec::new(), self.model.max_batched_tokens as u64, 0);
        'filled: for encoding in &mut self.waiting {
            while let Some(&image) = encoding.images.get(encoding.next) {
                let embeds = u64::from(image.embeds);
                if embeds > room && !images.is_empty() {
                    break 'filled;
                }
                room = room.saturating_sub(embeds);
                let is_left = self.store.has(image);
                if self.cache.encode(&image.id, embeds) == Encoded::Now && !is_left {
                    encoding.encoded += embeds;
                    made += embeds;
                }
                images.push(image);
                encoding.next += 1;
            }
        }
        let work = made as f64 * self.model.embed;
        self.step = Some(Step { end: now + nanos(self.model.overhead + work), work, images });
    }
}
