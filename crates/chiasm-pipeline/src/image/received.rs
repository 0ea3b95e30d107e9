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
    pub(crate) fn plan_of(&self, size: ImageSize, settings: &ImageSettings) -> Result<Arc<ImagePlan>, RequestError> {
        Ok(Arc::new(self.vision()?.plan(size, &settings.kwargs)?))
    }

    /// Keeps the pixels of an image, and what it becomes, for whoever wants them now or soon.
    ///
    /// # Errors
    /// In words: it is known to have another size.
    pub(crate) fn keep(&self, form: Form, plan: &Arc<ImagePlan>, pixels: &Bytes) -> Result<(), String> {
        let known =
            self.plans.get_or_make(form.hash, || Ok(ImagePlan::clone(plan))).map_err(|error| error.to_string())?;
        if known.original != plan.original {
            return Err("the image is known to have another size".to_owned());
        }
        self.processed.made(form, &TensorBytes::Here(pixels.clone()));
        Ok(())
    }

    /// The pixels of an image, if they are still somewhere; or why they could not be made a moment ago.
    pub(crate) fn kept(&self, form: &Form, plan: &ImagePlan) -> Result<Option<TensorBytes>, RequestError> {
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
/// In words: they are others.
pub(crate) fn pixels_of(plan: &ImagePlan, format: TensorFormat, fields: &[ItemField]) -> Result<Bytes, String> {
    let specs = plan.tensors(pixel_format(format));
    if fields.len() != specs.len() {
        return Err(format!("an image has {} of them, not {}", specs.len(), fields.len()));
    }
    let mut pixels = None;
    for (ItemField { name, field, value }, spec) in fields.iter().zip(specs) {
        let other = || format!("{} is not what an image of this size has there", spec.name);
        let FieldValue::Tensor(Tensor { dtype, shape, bytes: TensorBytes::Here(bytes) }) = value else {
            return Err(other());
        };
        if *name != spec.name || *field != spec.field || *dtype != spec.dtype || *shape != spec.shape {
            return Err(other());
        }
        match &spec.contents {
            Contents::Small(small) if bytes == small => {}
            Contents::Pixels if bytes.len() == plan.pixel_bytes(pixel_format(format)) => pixels = Some(bytes.clone()),
            Contents::Small(_) | Contents::Pixels => return Err(other()),
        }
    }
    pixels.ok_or_else(|| "an image has pixels".to_owned())
}
