//! The tensors of a planned video: made once for all engines, from the parts of its cut.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use chiasm_backend::{FieldValue, ItemField, TensorBytes, TensorRequest};
use chiasm_fleet::PresentClass;
use chiasm_metrics::Stage;
use chiasm_processor::Processor;
use chiasm_types::{Dtype, MmHash, TensorField};
use tokio::time::Instant;

use super::VideoPlanner;
use super::planned::PlannedVideo;
use crate::error::RequestError;
use crate::processed::{TensorKey, TensorWriter, to_field};
use chiasm_cpu::{CpuBudget, Ticket, price};

/// A planned video for workers of one class. Its file may be on another machine.
#[derive(Clone, Copy)]
pub(crate) struct VideoTensors<'a> {
    pub(super) videos: &'a VideoPlanner,
    pub(super) hash: MmHash,
    pub(super) video: &'a Arc<PlannedVideo>,
    pub(super) class: &'a PresentClass,
    /// The request's budget.
    pub(super) budget: &'a CpuBudget,
    /// The ticket for processing one frame. Its first use charges all frames; if the request moves
    /// to another engine, they are not charged again.
    pub(super) ticket: &'a OnceLock<Ticket>,
}

/// The outcome of making a video's tensors.
pub(crate) enum MadeVideo {
    /// The tensors.
    Fields(Vec<ItemField>),
    /// Nothing: the engine no longer needs the tensors.
    NotNeeded,
    /// Nothing: the cut was not decoded, or to other frames than were planned.
    NotDecoded,
}

impl VideoTensors<'_> {
    /// Makes the tensors, from memory or with the pixels of `decode`. Concurrent calls decode the
    /// video once.
    ///
    /// # Errors
    /// Returns the error of `decode`, or of a failed attempt within the last second.
    pub(crate) async fn make(
        &self,
        order: &TensorRequest,
        model_dtype: Dtype,
        decode: impl Future<Output = Result<Option<TensorBytes>, RequestError>>,
    ) -> Result<MadeVideo, RequestError> {
        let VideoPlanner { processed, metrics, .. } = self.videos;
        let key = TensorKey { hash: self.hash, format: order.format };
        let _permit = processed.lock(key).await;
        // The previous holder of the permit may have sent the item to the same engine.
        if !(order.is_still_needed)() {
            return Ok(MadeVideo::NotNeeded);
        }
        let cached = processed.get(&key)?;
        let is_new = cached.is_none();
        let pixels = match cached {
            Some(pixels) if order.memory.takes(&pixels) => pixels,
            Some(pixels) => self.copy(pixels, order).await?,
            None => {
                let started = Instant::now();
                let decoded = decode.await;
                metrics.observe_stage(Stage::Process, started.elapsed());
                match decoded.inspect_err(|error| processed.record_failure(key, error))? {
                    Some(pixels) => pixels,
                    None => return Ok(MadeVideo::NotDecoded),
                }
            }
        };
        processed.insert(key, &pixels);
        if is_new { &metrics.media_decoded } else { &metrics.media_reused }.inc();
        self.fields(key, model_dtype, &pixels).map(MadeVideo::Fields)
    }

    /// Returns the processor that decodes the video, started if necessary.
    ///
    /// # Errors
    /// Returns an error if no processor of the engine's release can be started.
    pub(crate) async fn processor(&self) -> Result<Processor, RequestError> {
        self.videos.processors.for_class(self.class).await?.processor().await
    }

    /// Copies pixels from another engine's memory, or from this process, to the engine's memory.
    async fn copy(
        &self,
        pixels: TensorBytes,
        order: &TensorRequest,
    ) -> Result<TensorBytes, RequestError> {
        let VideoPlanner { cpu, budget, .. } = self.videos;
        let ticket = self.budget.ticket(price::copy(pixels.as_ref().len()))?;
        let memory = order.memory.clone();
        let budget = budget.clone();
        let copy = move || {
            let bytes = pixels.as_ref();
            let mut tensor = TensorWriter::reserve(&*memory, &budget, bytes.len())?;
            tensor.bytes().copy_from_slice(bytes);
            Ok(tensor.publish())
        };
        cpu.run(&ticket, copy).await?
    }

    /// Returns the video's fields, in the order of the model's own processor.
    fn fields(
        &self,
        key: TensorKey,
        model_dtype: Dtype,
        pixels: &TensorBytes,
    ) -> Result<Vec<ItemField>, RequestError> {
        let plan = &self.video.plan;
        let tensors = plan.tensors(key.pixel_format(), model_dtype)?;
        let timestamps = plan.timestamps.as_ref().map(|seconds| ItemField {
            name: Cow::Borrowed("timestamps"),
            field: TensorField::Batched { keep_on_cpu: true },
            value: FieldValue::List(seconds.iter().copied().map(FieldValue::Float).collect()),
        });
        Ok(tensors.into_iter().map(|spec| to_field(spec, pixels)).chain(timestamps).collect())
    }
}
