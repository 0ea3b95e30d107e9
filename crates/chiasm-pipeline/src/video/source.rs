//! The tensors of a planned video.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};

use chiasm_backend::{
    EncodedItem, FieldValue, ItemField, MediaSource, SourceError, TensorBytes, TensorRequest,
};
use chiasm_fleet::PresentClass;
use chiasm_media::EncodedMedia;
use chiasm_request::MediaKwargs;
use chiasm_types::{Dtype, MmHash, TensorField, TokenRun};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::Instant;
use tracing::Instrument;

use super::planned::PlannedVideo;
use super::{Cause, OTHER_FRAMES, VideoPlanner};
use crate::error::RequestError;
use crate::metrics::Stage;
use crate::processed::{TensorKey, TensorWriter, to_field};
use crate::processor_items::ProcessorItem;
use chiasm_cpu::{CpuBudget, Ticket, price};

/// The tensors of one planned video of a request.
pub(super) struct VideoSource {
    pub(super) videos: Arc<VideoPlanner>,
    pub(super) hash: MmHash,
    pub(super) video: Arc<PlannedVideo>,
    pub(super) encoded: EncodedMedia,
    /// The request's settings.
    pub(super) kwargs: Arc<MediaKwargs>,
    pub(super) class: PresentClass,
    pub(super) field: String,
    /// The request's budget.
    pub(super) budget: CpuBudget,
    /// The ticket for processing one frame. Its first use charges all frames; if the request moves
    /// to another engine, they are not charged again.
    pub(super) ticket: OnceLock<Ticket>,
    /// The item that vLLM's own processor made although the plan is stale. It keeps its tensors in
    /// memory until the request has been planned again.
    pub(super) whole: OnceLock<ProcessorItem>,
}

impl MediaSource for VideoSource {
    fn tensors(
        &self,
        order: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        let span = tracing::debug_span!("process", hash = %self.hash);
        let fields = async {
            self.make(order).await.map_err(|error| SourceError::new(error.at(&self.field)))
        };
        fields.instrument(span).boxed()
    }

    // The file alone is not enough: agents do not decode videos.
    fn encoded(&self) -> Option<EncodedItem> {
        None
    }
}

impl VideoSource {
    async fn make(&self, order: TensorRequest) -> Result<Option<Vec<ItemField>>, RequestError> {
        let Some(model_dtype) = order.model_dtype else {
            return self.make_from_whole_file("agent", order).await;
        };
        let VideoPlanner { processed, metrics, .. } = &*self.videos;
        let key = TensorKey { hash: self.hash, format: order.format };
        let permit = processed.lock(key).await;
        // The previous holder of the permit may have sent the item to the same engine.
        if !(order.is_still_needed)() {
            return Ok(None);
        }
        let cached = processed.get(&key)?;
        let is_new = cached.is_none();
        let pixels = match cached {
            Some(pixels) if order.memory.takes(&pixels) => pixels,
            Some(pixels) => self.copy(pixels, &order).await?,
            None => match self.decode_unless_stale(key, &order).await? {
                Some(pixels) => pixels,
                None => {
                    drop(permit);
                    return self.make_from_whole_file(OTHER_FRAMES, order).await;
                }
            },
        };
        processed.insert(key, &pixels);
        if is_new { &metrics.media_decoded } else { &metrics.media_reused }.inc();
        self.fields(key, model_dtype, &pixels).map(Some)
    }

    /// Decodes and processes the planned frames. Returns `None` if the cut decodes to unexpected
    /// frames, now or for another engine or request.
    async fn decode_unless_stale(
        &self,
        key: TensorKey,
        order: &TensorRequest,
    ) -> Result<Option<TensorBytes>, RequestError> {
        let VideoPlanner { plans, processed, metrics, .. } = &*self.videos;
        if matches!(plans.get(&self.video.key), Some(Err(_))) {
            return Ok(None);
        }
        let started = Instant::now();
        let decoded = self.decode(order).await;
        metrics.observe_stage(Stage::Process, started.elapsed());
        decoded.inspect_err(|error| processed.record_failure(key, error))
    }

    /// Copies pixels from another engine's memory, or from this process, to the engine's memory.
    async fn copy(
        &self,
        pixels: TensorBytes,
        order: &TensorRequest,
    ) -> Result<TensorBytes, RequestError> {
        let VideoPlanner { cpu, budget, .. } = &*self.videos;
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

    /// Lets vLLM's own processor make the tensors from the whole file.
    ///
    /// # Errors
    /// Returns [`StalePlan`](crate::Cause::StalePlan) if they do not belong to the prompt that was
    /// planned. The cached plan is replaced by the cause then, so the request's next plan has the
    /// whole file.
    async fn make_from_whole_file(
        &self,
        cause: Cause,
        order: TensorRequest,
    ) -> Result<Option<Vec<ItemField>>, RequestError> {
        let Self { videos, video, .. } = self;
        let processor = videos.processors.for_class(&self.class).await?;
        let settings = processor.settings(&self.kwargs).await?;
        let item = processor.open(&self.encoded, &settings, &self.field, false).await?;
        let is_planned = item.replacement().is_some_and(|(marker, runs)| {
            marker == videos.marker() && joined(&runs) == joined(&video.runs)
        });
        if !is_planned || cause == OTHER_FRAMES {
            // Decoding the same cut again would fail again.
            videos.plans.insert(video.key, Err(OTHER_FRAMES));
        }
        if !is_planned {
            self.whole.get_or_init(|| item);
            return Err(RequestError::stale_plan(
                "the video's frames differ from its container's index",
            ));
        }
        videos.count_whole(cause, 1);
        let source = item.source(&processor, &self.budget);
        source.tensors(order).await.map_err(into_request_error)
    }
}

/// Joins adjacent runs of one token.
fn joined(runs: &[TokenRun]) -> Vec<TokenRun> {
    let mut joined: Vec<TokenRun> = Vec::with_capacity(runs.len());
    for run in runs.iter().filter(|run| run.count > 0) {
        match joined.last_mut() {
            Some(last) if last.token == run.token && last.embeds == run.embeds => {
                last.count += run.count;
            }
            _ => joined.push(*run),
        }
    }
    joined
}

/// Returns the error of one of our own sources.
fn into_request_error(error: SourceError) -> RequestError {
    error.downcast().map_or_else(|other| RequestError::internal(other.to_string()), |error| *error)
}
