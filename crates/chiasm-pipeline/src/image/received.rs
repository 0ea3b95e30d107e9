//! Images whose tensors another process has made, from the same files.

use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{FieldValue, ItemField, Tensor, TensorBytes, TensorFormat, TensorRequest};
use chiasm_types::MmHash;
use chiasm_vision::{Contents, ImagePlan, ImageSize};

use super::{ImageSettings, Images, PixelJob, item_fields, pixel_format};
use crate::error::RequestError;
use crate::processed::TensorKey;
use chiasm_cpu::{CpuBudget, price};

impl Images {
    /// Plans an image of this size. The plan is not cached, because the size may be wrong.
    pub(crate) fn plan_size(
        &self,
        size: ImageSize,
        settings: &ImageSettings,
    ) -> Result<Arc<ImagePlan>, RequestError> {
        Ok(Arc::new(self.vision()?.plan(size, &settings.kwargs)?))
    }

    /// Caches the pixels and the plan of an image.
    ///
    /// # Errors
    /// Returns [`TensorsError::OtherSize`] if the image is known to have another size.
    pub(crate) fn keep(
        &self,
        key: TensorKey,
        plan: &Arc<ImagePlan>,
        pixels: &Bytes,
    ) -> Result<(), TensorsError> {
        let known = self.plans.get_or_build(key.hash, || Ok(ImagePlan::clone(plan)))?;
        if known.original != plan.original {
            return Err(TensorsError::OtherSize);
        }
        self.processed.insert(key, &TensorBytes::Here(pixels.clone()));
        Ok(())
    }

    /// Returns the pixels of an image, if they are still in memory.
    ///
    /// # Errors
    /// Returns the error of a failed attempt within the last second.
    pub(crate) fn cached_pixels(
        &self,
        key: &TensorKey,
        plan: &ImagePlan,
    ) -> Result<Option<TensorBytes>, RequestError> {
        let bytes = plan.pixel_bytes(pixel_format(key.format));
        Ok(self.processed.get(key)?.filter(|pixels| pixels.as_ref().len() == bytes))
    }

    /// Copies pixels to memory that an engine reads. Returns `None` if the engine no longer needs
    /// them.
    ///
    /// # Errors
    /// Returns an error if the copy fails.
    pub async fn place(
        &self,
        hash: MmHash,
        plan: &Arc<ImagePlan>,
        pixels: TensorBytes,
        order: TensorRequest,
    ) -> Result<Option<Vec<ItemField>>, RequestError> {
        let key = TensorKey { hash, format: order.format };
        let _permit = self.processed.lock(key).await;
        // The previous holder of the permit may have sent the item to the same engine.
        if !(order.is_still_needed)() {
            return Ok(None);
        }
        let job = PixelJob {
            model: self.model.clone(),
            budget: self.budget.clone(),
            memory: order.memory,
            format: pixel_format(key.format),
            plan: plan.clone(),
        };
        let pixels = if job.memory.takes(&pixels) {
            pixels
        } else {
            let ticket = CpuBudget::shared().ticket(price::copy(pixels.as_ref().len()))?;
            self.cpu.run(&ticket, move || job.copy(&pixels)).await??
        };
        self.processed.insert(key, &pixels);
        self.metrics.media_reused.inc();
        Ok(Some(item_fields(plan, pixel_format(key.format), &pixels)))
    }
}

/// Checks an image's tensors against its plan, and returns the pixels.
///
/// # Errors
/// Returns an error if the tensors are not those of the plan.
pub(crate) fn find_pixels(
    plan: &ImagePlan,
    format: TensorFormat,
    fields: &[ItemField],
) -> Result<Bytes, TensorsError> {
    let specs = plan.tensors(pixel_format(format));
    if fields.len() != specs.len() {
        return Err(TensorsError::Count { expected: specs.len(), given: fields.len() });
    }
    let mut pixels = None;
    for (ItemField { name, field, value }, spec) in fields.iter().zip(specs) {
        let mismatch = || TensorsError::Other(spec.name.to_string());
        let FieldValue::Tensor(Tensor { dtype, shape, bytes: TensorBytes::Here(bytes) }) = value
        else {
            return Err(mismatch());
        };
        if *name != spec.name
            || *field != spec.field
            || *dtype != spec.dtype
            || *shape != spec.shape
        {
            return Err(mismatch());
        }
        match &spec.contents {
            Contents::Small(small) if bytes == small => {}
            Contents::Pixels if bytes.len() == plan.pixel_bytes(pixel_format(format)) => {
                pixels = Some(bytes.clone())
            }
            Contents::Small(_) | Contents::Pixels => return Err(mismatch()),
        }
    }
    pixels.ok_or(TensorsError::NoPixels)
}

/// The reason why tensors are not accepted instead of a file.
#[derive(Debug, thiserror::Error)]
pub enum TensorsError {
    /// An image has another number of tensors.
    #[error("an image has {expected} tensors, got {given}")]
    Count {
        /// The number of tensors of the model's images.
        expected: usize,
        /// The number of received tensors.
        given: usize,
    },
    /// A tensor has another name, type, shape or content.
    #[error("'{0}' does not match an image of this size")]
    Other(String),
    /// No tensor holds pixels.
    #[error("the pixels are missing")]
    NoPixels,
    /// The file was received before, and has another size.
    #[error("the image is known to have another size")]
    OtherSize,
    /// The image can't be planned.
    #[error(transparent)]
    Plan(#[from] RequestError),
}
