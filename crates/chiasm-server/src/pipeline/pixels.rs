//! From encoded images to the features that the engine is sent: decode and process, off the async threads, and only what
//! the engine lacks.

use std::collections::HashMap;

use bytes::Bytes;
use chiasm_engine::wire::{MmFeature, MmField, MmItem, WireTensor};
use chiasm_types::MmHash;
use chiasm_vision::{Contents, Field, Parallelism, PixelFormat, RgbView, VisionModel};
use futures_util::future::try_join_all;

use super::prepare::MediaItem;
use crate::error::ApiError;
use crate::frontend::Frontend;

/// The media items of a request, and the tensors of those that have been processed so far.
pub(super) struct Tensors<'a> {
    frontend: &'a Frontend,
    items: &'a [MediaItem],
    format: PixelFormat,
    made: HashMap<MmHash, MmItem>,
}

impl<'a> Tensors<'a> {
    pub(super) fn new(frontend: &'a Frontend, items: &'a [MediaItem], format: PixelFormat) -> Self {
        Self { frontend, items, format, made: HashMap::new() }
    }

    /// Decodes and processes the items that are wanted, each once however often it appears.
    pub(super) async fn make(&mut self, wanted: impl Fn(&MediaItem) -> bool) -> Result<(), ApiError> {
        let mut distinct: HashMap<MmHash, &MediaItem> = HashMap::new();
        for item in self.items.iter().filter(|item| !self.made.contains_key(&item.hash) && wanted(item)) {
            distinct.entry(item.hash).or_insert(item);
        }
        let processing = distinct.into_values().map(|item| process(self.frontend, item, self.format));
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
}

async fn process(frontend: &Frontend, item: &MediaItem, format: PixelFormat) -> Result<(MmHash, MmItem), ApiError> {
    let model = frontend.model.clone();
    let (image, plan, hash) = (item.image.clone(), item.plan.clone(), item.hash);
    let cpu = frontend.cpu.clone();
    let made = frontend
        .cpu
        .run(move || {
            let vision = model.vision.as_ref().ok_or_else(|| ApiError::internal("the model takes no images"))?;
            chiasm_media::with_pixels(&image, |decoded| {
                let parallelism = cpu.shared(plan.original.area()).map_or(Parallelism::Single, Parallelism::Pool);
                mm_item(vision, RgbView::new(plan.original, decoded.pixels)?, &plan, format, parallelism)
            })?
        })
        .await?
        .map_err(|error| error.at(&item.field))?;
    frontend.metrics.media_decoded.inc();
    Ok((hash, made))
}

/// Processes one image into the engine's named tensors.
fn mm_item(
    vision: &VisionModel,
    image: RgbView<'_>,
    plan: &chiasm_vision::ImagePlan,
    format: PixelFormat,
    parallelism: Parallelism<'_>,
) -> Result<MmItem, ApiError> {
    let mut fields = Vec::new();
    for spec in plan.tensors(format) {
        let bytes = match spec.contents {
            Contents::Pixels => {
                let mut pixels = vec![0; plan.pixel_bytes(format)];
                vision.process_with(image, plan, format, parallelism, &mut pixels)?;
                Bytes::from(pixels)
            }
            Contents::Small(bytes) => Bytes::from(bytes),
        };
        let tensor = WireTensor::new(spec.dtype, spec.shape, bytes)
            .ok_or_else(|| ApiError::internal(format!("'{}' does not fit its shape", spec.name)))?;
        let field = match spec.field {
            Field::Flat { rows } => MmField::flat(tensor, rows),
            Field::Batched { keep_on_cpu } => MmField::batched(tensor, keep_on_cpu),
            Field::Shared { keep_on_cpu } => MmField::shared(tensor, keep_on_cpu),
        };
        fields.push((spec.name.to_owned(), field));
    }
    Ok(MmItem(fields))
}
