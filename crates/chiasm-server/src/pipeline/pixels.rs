//! From encoded images to the features that the engine is sent: decode and process, off the async threads, and only what
//! the engine lacks.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_engine::wire::{MmFeature, MmField, MmItem, WireTensor};
use chiasm_transfer::{Arena, SlotWriter};
use chiasm_types::MmHash;
use chiasm_vision::{Contents, Field, ImagePlan, Parallelism, PixelFormat, RgbView, TensorSpec};
use futures_util::future::try_join_all;

use super::prepare::MediaItem;
use crate::error::ApiError;
use crate::fleet::Worker;
use crate::frontend::Frontend;
use crate::metrics::Metrics;
use crate::model::ServedModel;

/// The media items of a request, and the tensors of those that have been processed so far for one worker.
pub(super) struct Tensors<'a> {
    frontend: &'a Frontend,
    items: &'a [MediaItem],
    worker: &'a Worker,
    place: Place,
    made: HashMap<MmHash, MmItem>,
}

/// Where tensors are written.
#[derive(Clone)]
enum Place {
    /// In slots of the engine's arena, as long as there is room.
    Arena(Arena),
    /// In this process.
    Here,
    /// In this process although shared memory was wanted, for this cause.
    HereFor(&'static str),
}

impl<'a> Tensors<'a> {
    /// `refused`: the engine has failed to read this request's slots.
    pub(super) fn new(frontend: &'a Frontend, items: &'a [MediaItem], worker: &'a Worker, refused: bool) -> Self {
        let place = match worker.client.arena() {
            Some(_) if refused => Place::HereFor("engine_refused"),
            Some(arena) => Place::Arena(arena.clone()),
            None if worker.wants_arena => Place::HereFor("no_arena"),
            None => Place::Here,
        };
        Self { frontend, items, worker, place, made: HashMap::new() }
    }

    /// Decodes and processes the items that are wanted, each once however often it appears.
    pub(super) async fn make(&mut self, wanted: impl Fn(&MediaItem) -> bool) -> Result<(), ApiError> {
        let mut distinct: HashMap<MmHash, &MediaItem> = HashMap::new();
        for item in self.items.iter().filter(|item| !self.made.contains_key(&item.hash) && wanted(item)) {
            distinct.entry(item.hash).or_insert(item);
        }
        let processing = distinct.into_values().map(|item| self.process(item));
        self.made.extend(try_join_all(processing).await?);
        Ok(())
    }

    /// Features of all items, in order of appearance; with data where it has been made. Places of one item share it.
    pub(super) fn features(&self) -> Vec<MmFeature> {
        self.items
            .iter()
            .map(|item| MmFeature {
                data: self.made.get(&item.hash).cloned(),
                modality: "image".to_owned(),
                identifier: item.name(),
                position: item.placeholder.clone(),
                mm_hash: Some(item.name()),
            })
            .collect()
    }

    async fn process(&self, item: &MediaItem) -> Result<(MmHash, MmItem), ApiError> {
        let Frontend { model, cpu, metrics, .. } = self.frontend;
        let job = Job {
            model: model.clone(),
            metrics: metrics.clone(),
            place: self.place.clone(),
            format: self.worker.pixel_format,
            plan: item.plan.clone(),
        };
        let (image, pool, hash) = (item.image.clone(), cpu.clone(), item.hash);
        let made = cpu
            .run(move || {
                chiasm_media::with_pixels(&image, |decoded| {
                    let original = job.plan.original;
                    let parallelism = pool.shared(original.area()).map_or(Parallelism::Single, Parallelism::Pool);
                    job.item(RgbView::new(original, decoded.pixels)?, parallelism)
                })?
            })
            .await?
            .map_err(|error| error.at(&item.field))?;
        metrics.media_decoded.inc();
        Ok((hash, made))
    }
}

/// What is needed to process one image, on any thread.
struct Job {
    model: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    place: Place,
    format: PixelFormat,
    plan: ImagePlan,
}

impl Job {
    /// Processes the image into the engine's named tensors.
    fn item(&self, image: RgbView<'_>, parallelism: Parallelism<'_>) -> Result<MmItem, ApiError> {
        let vision = self.model.vision.as_ref().ok_or_else(|| ApiError::internal("the model takes no images"))?;
        let mut fields = Vec::new();
        for spec in self.plan.tensors(self.format) {
            let TensorSpec { name, dtype, shape, contents, field } = spec;
            let tensor = match contents {
                Contents::Small(bytes) => WireTensor::new(dtype, shape, Bytes::from(bytes)),
                Contents::Pixels => {
                    let bytes = self.plan.pixel_bytes(self.format);
                    match self.slot(bytes) {
                        Some(mut slot) => {
                            vision.process_with(image, &self.plan, self.format, parallelism, &mut slot)?;
                            WireTensor::in_slot(dtype, shape, slot.publish())
                        }
                        None => {
                            let mut pixels = vec![0; bytes];
                            vision.process_with(image, &self.plan, self.format, parallelism, &mut pixels)?;
                            WireTensor::new(dtype, shape, Bytes::from(pixels))
                        }
                    }
                }
            };
            let tensor = tensor.ok_or_else(|| ApiError::internal(format!("'{name}' does not fit its shape")))?;
            let field = match field {
                Field::Flat { rows } => MmField::flat(tensor, rows),
                Field::Batched { keep_on_cpu } => MmField::batched(tensor, keep_on_cpu),
                Field::Shared { keep_on_cpu } => MmField::shared(tensor, keep_on_cpu),
            };
            fields.push((name.to_owned(), field));
        }
        Ok(MmItem(fields))
    }

    /// Shared memory for a tensor; `None` when it has to be in this process.
    fn slot(&self, bytes: usize) -> Option<SlotWriter> {
        match &self.place {
            Place::Arena(arena) => arena.slot(bytes).inspect_err(|no| self.metrics.stepped_down(no.cause(), no)).ok(),
            Place::Here => None,
            Place::HereFor(cause) => {
                self.metrics.stepped_down(cause, &"images travel in messages");
                None
            }
        }
    }
}
