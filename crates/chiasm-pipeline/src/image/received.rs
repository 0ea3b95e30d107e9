//! Images whose tensors were made elsewhere, of the same files.

use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{FieldValue, ItemField, Tensor, TensorBytes, TensorFormat, TensorOrder};
use chiasm_types::MmHash;
use chiasm_vision::{Contents, ImagePlan, ImageSize};

use super::{ImageSettings, Images, PixelJob, named, pixel_format};
use crate::cpu::{CpuBudget, price};
use crate::error::RequestError;
use crate::processed::Form;

impl Images {
    /// What an image of this size becomes. Nothing is remembered: the size may be wrong.
    pub(crate) fn plan_of(
        &self,
        size: ImageSize,
        settings: &ImageSettings,
    ) -> Result<Arc<ImagePlan>, RequestError> {
        Ok(Arc::new(self.vision()?.plan(size, &settings.kwargs)?))
    }

    /// Keeps the pixels of an image, and what it becomes, for whoever wants them now or soon.
    ///
    /// # Errors
    /// It is known to have another size.
    pub(crate) fn keep(
        &self,
        form: Form,
        plan: &Arc<ImagePlan>,
        pixels: &Bytes,
    ) -> Result<(), TensorsError> {
        let known = self.plans.get_or_make(form.hash, || Ok(ImagePlan::clone(plan)))?;
        if known.original != plan.original {
            return Err(TensorsError::OtherSize);
        }
        self.processed.made(form, &TensorBytes::Here(pixels.clone()));
        Ok(())
    }

    /// The pixels of an image, if they are still somewhere; or why they could not be made a moment
    /// ago.
    pub(crate) fn kept(
        &self,
        form: &Form,
        plan: &ImagePlan,
    ) -> Result<Option<TensorBytes>, RequestError> {
        let bytes = plan.pixel_bytes(pixel_format(form.format));
        Ok(self.processed.find(form)?.filter(|pixels| pixels.as_ref().len() == bytes))
    }

    /// Brings pixels to where an engine wants them. `None` if it does not want them any more.
    pub async fn place(
        &self,
        hash: MmHash,
        plan: &Arc<ImagePlan>,
        pixels: TensorBytes,
        order: TensorOrder,
    ) -> Result<Option<Vec<ItemField>>, RequestError> {
        let form = Form { hash, format: order.format };
        let _turn = self.processed.turn(form).await;
        // The one before may have sent it to the same engine.
        if !(order.still_wanted)() {
            return Ok(None);
        }
        let job = PixelJob {
            model: self.model.clone(),
            budget: self.budget.clone(),
            memory: order.memory,
            format: pixel_format(form.format),
            plan: plan.clone(),
        };
        let pixels = match job.memory.takes(&pixels) {
            true => pixels,
            false => {
                let ticket = CpuBudget::shared().ticket(price::copy(pixels.as_ref().len()))?;
                self.cpu.run(&ticket, move || job.copy(&pixels)).await??
            }
        };
        self.processed.made(form, &pixels);
        self.metrics.media_reused.inc();
        Ok(Some(named(plan, pixel_format(form.format), &pixels)))
    }
}

/// The pixels among an image's tensors, which have to be those of its plan.
///
/// # Errors
/// They are others.
pub(crate) fn pixels_of(
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
        let other = || TensorsError::Other(spec.name.to_string());
        let FieldValue::Tensor(Tensor { dtype, shape, bytes: TensorBytes::Here(bytes) }) = value
        else {
            return Err(other());
        };
        if *name != spec.name
            || *field != spec.field
            || *dtype != spec.dtype
            || *shape != spec.shape
        {
            return Err(other());
        }
        match &spec.contents {
            Contents::Small(small) if bytes == small => {}
            Contents::Pixels if bytes.len() == plan.pixel_bytes(pixel_format(format)) => {
                pixels = Some(bytes.clone())
            }
            Contents::Small(_) | Contents::Pixels => return Err(other()),
        }
    }
    pixels.ok_or(TensorsError::NoPixels)
}

/// Why tensors are not taken in place of a file.
#[derive(Debug, thiserror::Error)]
pub enum TensorsError {
    /// An image has another number of tensors.
    #[error("an image has {expected} of them, not {given}")]
    Count {
        /// As many as the model's images have.
        expected: usize,
        /// As many as came.
        given: usize,
    },
    /// A tensor has another name, type, shape or content.
    #[error("{0} is not what an image of this size has there")]
    Other(String),
    /// None of them holds pixels.
    #[error("an image has pixels")]
    NoPixels,
    /// The file came before, and has another size.
    #[error("the image is known to have another size")]
    OtherSize,
    /// What is known of the image is an error.
    #[error(transparent)]
    Plan(#[from] RequestError),
}
