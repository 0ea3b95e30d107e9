//! Planning a request again, after a media item turned out to differ from its plan.
//!
//! Some items are planned from their containers, before anything is decoded. If the decoded item
//! differs, its source replaces the cached plan and fails with [`Cause::StalePlan`]. The request is
//! then planned again, with the same identity, deadlines, budget and attempts.
//!
//! [`Cause::StalePlan`]: crate::Cause::StalePlan

use std::sync::Arc;

use chiasm_fleet::PresentClasses;
use chiasm_media::{Charge, EncodedMedia};
use chiasm_prompt::ChatMessage;
use chiasm_request::{MediaKwargs, Prompt};
use chiasm_types::Modality;
use tokio::time::Instant;
use tracing::Instrument;

use super::{CacheNamespace, ClassPlan, Preparation, Prepared};
use crate::Pipeline;
use crate::deadlines::within;
use crate::error::RequestError;
use crate::video::PlannedVideos;
use chiasm_cpu::CpuBudget;

/// The maximum number of times that a request is planned again. The last time, no item is planned
/// from its container, so no plan can be stale.
const MAX_REPLANS: usize = 2;

/// The inputs of a request's plans.
#[derive(Clone, Debug)]
pub(super) struct PlanInputs {
    pub(super) prompt: Prompt,
    /// The opened media items.
    pub(super) media: Vec<EncodedMedia>,
    pub(super) classes: PresentClasses,
    pub(super) namespace: CacheNamespace,
    pub(super) cpu: CpuBudget,
    /// Lets recordings be planned from their headers.
    pub(super) predicts_recordings: bool,
}

/// The inputs for planning a request again.
#[derive(Clone, Debug)]
pub(super) struct Replanning {
    inputs: PlanInputs,
    /// The number of times that the request may be planned again.
    left: usize,
    /// The charge for the texts in `inputs`.
    _charge: Arc<Charge>,
}

impl PlanInputs {
    /// Plans the videos, as far as possible, from their files' indexes.
    ///
    /// # Errors
    /// Returns an error if the request's budget does not allow that.
    pub(super) async fn plan_videos(
        &self,
        pipeline: &Pipeline,
    ) -> Result<PlannedVideos, RequestError> {
        match &self.prompt {
            Prompt::Chat(chat) => {
                let kwargs: &MediaKwargs = &chat.media_kwargs;
                pipeline.plan_videos(&self.media, kwargs, &self.cpu).await
            }
            Prompt::Text(_) | Prompt::Tokens(_) => Ok(PlannedVideos::default()),
        }
    }

    /// Plans the prompt for each class of workers.
    pub(super) async fn plan(
        self,
        pipeline: &Pipeline,
        videos: PlannedVideos,
    ) -> Result<Vec<ClassPlan>, RequestError> {
        let Self { prompt, media, classes, namespace, cpu, predicts_recordings } = self;
        let preparation =
            Preparation { pipeline, cpu: &cpu, classes, namespace, videos, predicts_recordings };
        match prompt {
            Prompt::Chat(chat) => preparation.plan_conversation(chat, media).await,
            prompt => preparation.plan(prompt, media).await,
        }
    }

    /// Returns the bytes of the prompt's text.
    fn text_bytes(&self) -> usize {
        match &self.prompt {
            Prompt::Chat(chat) => chat.messages.iter().map(ChatMessage::text_bytes).sum(),
            Prompt::Text(text) => text.len(),
            Prompt::Tokens(tokens) => size_of_val(&**tokens),
        }
    }
}

impl Replanning {
    /// Keeps the inputs of a request whose plans may turn out to be stale. Returns `None` for other
    /// requests, and if memory is exhausted: a stale plan then fails its request.
    pub(super) fn new(
        pipeline: &Pipeline,
        inputs: &PlanInputs,
        videos: &PlannedVideos,
    ) -> Option<Box<Self>> {
        let has_recordings = inputs.media.iter().any(|item| item.modality == Modality::Audio);
        if videos.is_empty() && !has_recordings {
            return None;
        }
        let charge = pipeline.media.budget().charge(inputs.text_bytes() as u64).ok()?;
        let inputs = inputs.clone();
        Some(Box::new(Self { inputs, left: MAX_REPLANS, _charge: Arc::new(charge) }))
    }

    async fn plan(self, pipeline: &Pipeline) -> Result<Vec<ClassPlan>, RequestError> {
        let Self { mut inputs, left, _charge } = self;
        let videos = if left == 0 {
            inputs.predicts_recordings = false;
            pipeline.plan_no_videos(&inputs.media)
        } else {
            inputs.plan_videos(pipeline).await?
        };
        inputs.plan(pipeline, videos).await
    }
}

impl Prepared {
    /// Replaces the plans, because `stale` says that a media item differs from its plan.
    ///
    /// # Errors
    /// Returns `stale` if the request may not be planned again, and an error if that fails or if
    /// the deadline for the first token passes.
    pub(crate) async fn plan_again(
        &mut self,
        pipeline: &Pipeline,
        stale: RequestError,
    ) -> Result<(), RequestError> {
        let Some(mut replanning) = self.replanning.take() else { return Err(stale) };
        tracing::info!(item = stale.field, "a media item differs from its plan; planning again");
        pipeline.metrics.count_replanned();
        replanning.left -= 1;
        if replanning.left > 0 {
            self.replanning = Some(replanning.clone());
        }
        let started = Instant::now();
        let field = replanning.inputs.prompt.field();
        let span = tracing::debug_span!("plan", items = replanning.inputs.media.len());
        let plans = replanning.plan(pipeline).instrument(span);
        let plans = within(self.deadlines.first_token, plans).await?;
        // The old plans are dropped only now: their items keep tensors that the new ones use.
        self.plans = plans.map_err(|error| error.at(field))?;
        self.stage_times.plan += started.elapsed();
        Ok(())
    }
}
