//! The tensors of a planned video.

use std::sync::{Arc, OnceLock};

use chiasm_backend::{
    CuttableVideo, EncodedItem, ItemField, MediaSource, SourceError, TensorBytes, TensorRequest,
};
use chiasm_fleet::PresentClass;
use chiasm_media::EncodedMedia;
use chiasm_request::MediaKwargs;
use chiasm_types::{MmHash, TokenRun};
use futures_util::future::{BoxFuture, FutureExt};
use tracing::Instrument;

use super::planned::PlannedVideo;
use super::tensors::{MadeVideo, VideoTensors};
use super::{Cause, OTHER_FRAMES, VideoPlanner};
use crate::error::RequestError;
use crate::processor_items::ProcessorItem;
use chiasm_cpu::{CpuBudget, Ticket};

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

    // Agents get the cut instead.
    fn encoded(&self) -> Option<EncodedItem> {
        None
    }

    fn cuttable(&self) -> Option<&dyn CuttableVideo> {
        Some(self)
    }
}

impl VideoSource {
    async fn make(&self, order: TensorRequest) -> Result<Option<Vec<ItemField>>, RequestError> {
        let Some(model_dtype) = order.model_dtype else {
            let cause = if self.is_stale() { OTHER_FRAMES } else { "agent" };
            return self.make_from_whole_file(cause, order).await;
        };
        match self.planned().make(&order, model_dtype, self.decode(&order)).await? {
            MadeVideo::Fields(fields) => Ok(Some(fields)),
            MadeVideo::NotNeeded => Ok(None),
            MadeVideo::NotDecoded => self.make_from_whole_file(OTHER_FRAMES, order).await,
        }
    }

    /// Returns the video without its file.
    fn planned(&self) -> VideoTensors<'_> {
        VideoTensors {
            videos: &self.videos,
            hash: self.hash,
            video: &self.video,
            class: &self.class,
            budget: &self.budget,
            ticket: &self.ticket,
        }
    }

    /// Returns `true` if the cut decodes to unexpected frames, for another engine or request.
    fn is_stale(&self) -> bool {
        matches!(self.videos.plans.get(&self.video.key), Some(Err(_)))
    }

    /// Cuts the planned frames out of the file, and decodes them. Returns `None` if they are
    /// unexpected ones, now or for another engine or request.
    async fn decode(&self, order: &TensorRequest) -> Result<Option<TensorBytes>, RequestError> {
        if self.is_stale() {
            return Ok(None);
        }
        let processor = self.planned().processor().await?;
        let slots =
            self.videos.processors.video_slots().acquire(Some(self.video.decode_cost)).await;
        // A video that takes several slots is decoded by as many processes.
        let processes = slots.as_ref().map_or(1, |slots| slots.num_permits());
        let Some(parts) = self.cut_into(processes).await? else { return Ok(None) };
        self.planned().decode(&processor, parts, processes, order).await
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
