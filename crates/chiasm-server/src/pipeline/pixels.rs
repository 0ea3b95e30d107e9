//! From encoded images to the features that the engine is sent: decode and process, off the async threads, only what the
//! engine lacks, and once for all requests and engines that want it at the same time.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_engine::wire::{MmFeature, MmField, MmItem, WireTensor};
use chiasm_media::{ByteBudget, EncodedMedia};
use chiasm_transfer::{Arena, SlotWriter};
use chiasm_types::{MmHash, TensorField};
use chiasm_vision::{Contents, ImagePlan, Parallelism, PixelFormat, RgbView, TensorSpec};
use futures_util::future::try_join_all;

use super::prepare::MediaItem;
use super::processed::{Form, Pixels};
use crate::cpu::CpuPool;
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

    /// Gets the tensors of the items that are wanted, each once however often it appears. What is not wanted any more when its
    /// turn comes is left out.
    pub(super) async fn make(&mut self, wanted: impl Fn(&MediaItem) -> bool) -> Result<(), ApiError> {
        let mut distinct: HashMap<MmHash, &MediaItem> = HashMap::new();
        for item in self.items.iter().filter(|item| !self.made.contains_key(&item.hash) && wanted(item)) {
            distinct.entry(item.hash).or_insert(item);
        }
        let making = distinct.into_values().map(|item| self.process(item, &wanted));
        let made = try_join_all(making).await?;
        self.made.extend(made.into_iter().flatten());
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

    async fn process(
        &self,
        item: &MediaItem,
        wanted: &impl Fn(&MediaItem) -> bool,
    ) -> Result<Option<(MmHash, MmItem)>, ApiError> {
        let Frontend { model, cpu, metrics, processed, door, .. } = self.frontend;
        let form = Form { hash: item.hash, format: self.worker.pixel_format };
        let _turn = processed.turn(form).await;
        // The one before may have sent it to the same engine.
        if !wanted(item) {
            return Ok(None);
        }
        let at_field = |error: ApiError| error.at(&item.field);
        let found = processed.find(&form).map_err(at_field)?;
        let job = Job {
            model: model.clone(),
            metrics: metrics.clone(),
            budget: door.budget().clone(),
            place: self.place.clone(),
            format: form.format,
            plan: item.plan.clone(),
        };
        let is_new = found.is_none();
        let pixels = match found {
            Some(pixels) if job.is_in_place(&pixels) => Ok(pixels),
            Some(pixels) => cpu.run(move || job.copy(&pixels)).await?,
            None => {
                let (image, pool) = (item.image.clone(), cpu.clone());
                cpu.run(move || job.make(&image, &pool)).await?
            }
        };
        let pixels = pixels.inspect_err(|error| processed.failed(form, error)).map_err(at_field)?;
        processed.made(form, &pixels);
        if is_new { &metrics.media_decoded } else { &metrics.media_reused }.inc();
        Ok(Some((form.hash, to_item(&item.plan, form.format, pixels)?)))
    }
}

/// What is needed to process one image, on any thread.
struct Job {
    model: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    budget: ByteBudget,
    place: Place,
    format: PixelFormat,
    plan: Arc<ImagePlan>,
}

impl Job {
    /// Whether the engine can be sent these pixels as they are.
    fn is_in_place(&self, pixels: &Pixels) -> bool {
        match (&self.place, pixels) {
            (Place::Arena(arena), Pixels::Slot(slot)) => arena.owns(slot),
            (Place::Arena(_), Pixels::Here(_)) | (_, Pixels::Slot(_)) => false,
            (Place::Here | Place::HereFor(_), Pixels::Here(_)) => true,
        }
    }

    /// Decodes and processes.
    fn make(&self, image: &EncodedMedia, pool: &CpuPool) -> Result<Pixels, ApiError> {
        let vision = self.model.vision.as_ref().ok_or_else(|| ApiError::internal("the model takes no images"))?;
        chiasm_media::with_pixels(image, |decoded| {
            let original = self.plan.original;
            let parallelism = pool.shared(original.area()).map_or(Parallelism::Single, Parallelism::Pool);
            let view = RgbView::new(original, decoded.pixels)?;
            self.fill(self.plan.pixel_bytes(self.format), |out| {
                Ok(vision.process_with(view, &self.plan, self.format, parallelism, out)?)
            })
        })?
    }

    /// Brings pixels from another engine's arena, or from this process, to where they are needed.
    fn copy(&self, pixels: &Pixels) -> Result<Pixels, ApiError> {
        let bytes = pixels.bytes();
        self.fill(bytes.len(), |out| {
            out.copy_from_slice(bytes);
            Ok(())
        })
    }

    /// Memory of the right kind, filled.
    fn fill(&self, bytes: usize, write: impl FnOnce(&mut [u8]) -> Result<(), ApiError>) -> Result<Pixels, ApiError> {
        if let Some(mut slot) = self.slot(bytes) {
            write(&mut slot)?;
            return Ok(Pixels::Slot(slot.publish()));
        }
        let mut buffer = self.budget.buffer();
        write(buffer.extend_zeroed(bytes)?)?;
        Ok(Pixels::Here(buffer.freeze()))
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

/// The engine's named tensors of an item.
fn to_item(plan: &ImagePlan, format: PixelFormat, pixels: Pixels) -> Result<MmItem, ApiError> {
    let mut fields = Vec::new();
    for spec in plan.tensors(format) {
        let TensorSpec { name, dtype, shape, contents, field } = spec;
        let tensor = match (contents, &pixels) {
            (Contents::Small(bytes), _) => WireTensor::new(dtype, shape, Bytes::from(bytes)),
            (Contents::Pixels, Pixels::Slot(slot)) => WireTensor::in_slot(dtype, shape, slot.clone()),
            (Contents::Pixels, Pixels::Here(bytes)) => WireTensor::new(dtype, shape, bytes.clone()),
        };
        let tensor = tensor.ok_or_else(|| ApiError::internal(format!("'{name}' does not fit its shape")))?;
        let field = match field {
            TensorField::Flat { rows } => MmField::flat(tensor, rows),
            TensorField::Batched { keep_on_cpu } => MmField::batched(tensor, keep_on_cpu),
            TensorField::Shared { keep_on_cpu } => MmField::shared(tensor, keep_on_cpu),
        };
        fields.push((name.to_owned(), field));
    }
    Ok(MmItem(fields))
}
