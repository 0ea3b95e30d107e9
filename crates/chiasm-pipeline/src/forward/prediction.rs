//! Prediction of the prompt that workers make of a forwarded request: its tokens and blocks.
//!
//! It is for workers that report their KV caches.

use std::sync::Arc;

use chiasm_backend::{InputForm, JobItem, PlaceholderForm, PredictedPrompt, Supports};
use chiasm_fleet::PresentClasses;
use chiasm_router::{RouteItem, RouteRequest};
use chiasm_types::{BlockSize, PlanClassId, WorkerId};

use super::ParsedRequest;
use crate::Pipeline;
use crate::prepare::{ClassPlan, Prepared, prepare};
use crate::request_context::RequestContext;

/// The predicted prompt of a request, for each class of workers.
pub(super) struct PromptPrediction {
    prepared: Prepared,
    /// The classes whose servers accept names for the items, and identify blocks by these names.
    named: Vec<PlanClassId>,
    /// The classes whose servers choose names for the items, which are learned.
    learned: Vec<PlanClassId>,
    /// `true` if the server counts the prompt's tokens as this process does.
    has_same_token_count: bool,
}

impl PromptPrediction {
    /// Predicts the prompts that workers of these classes make of a request. Returns `None` if the
    /// request is invalid; the server reports the error then.
    pub(super) async fn new(
        pipeline: &Pipeline,
        context: &RequestContext,
        parsed: ParsedRequest,
        classes: PresentClasses,
    ) -> Option<Self> {
        let ParsedRequest { request, accepts_item_names, has_same_token_count } = parsed;
        let prepared = prepare(pipeline, request, None, context, classes.clone()).await;
        let mut prepared = prepared
            .inspect_err(|error| tracing::debug!(%error, "a request's prompt can't be predicted"))
            .ok()?;
        // Servers identify an item with settings by more than its name.
        let has_settings = prepared.needs.processor_kwargs;
        let mut named = Vec::new();
        let mut learned = Vec::new();
        for class in classes.iter().filter(|class| class.input == InputForm::Messages) {
            match class.class.placeholders {
                PlaceholderForm::Learned if !has_settings => learned.push(class.id),
                PlaceholderForm::Marker | PlaceholderForm::Expanded
                    if accepts_item_names && !has_settings =>
                {
                    named.push(class.id)
                }
                _ => {
                    let plan = prepared.plans.iter_mut().find(|plan| plan.class == class.id);
                    if let Some(plan) = plan {
                        drop_item_blocks(plan, class.class.block_size);
                    }
                }
            }
        }
        Some(Self { prepared, named, learned, has_same_token_count })
    }

    /// Returns the plans, one for each class.
    pub(super) fn plans(&self) -> &[ClassPlan] {
        &self.prepared.plans
    }

    /// Returns the request as the router sees it, for each class.
    pub(super) fn routes<'a>(
        &'a self,
        session: Option<u64>,
        exclude: &'a [WorkerId],
    ) -> impl Iterator<Item = RouteRequest<'a>> {
        self.prepared.plans.iter().map(move |plan| RouteRequest {
            class: plan.class,
            // Cached blocks are useless to a request whose whole prompt must be computed.
            keys: if self.prepared.sampling.reads_prefix_cache() { &plan.keys } else { &[] },
            prompt_tokens: plan.tokens.len(),
            media: &plan.route_items,
            encoder_tokens: plan.encoder_tokens,
            session,
            exclude,
        })
    }

    /// Returns the optional parts of the request.
    pub(super) fn needs(&self) -> Supports {
        self.prepared.needs
    }

    /// Returns `true` if there is a plan for servers of this class.
    pub(super) fn covers(&self, class: PlanClassId) -> bool {
        self.prepared.plan(class).is_some()
    }

    /// Returns the number of full blocks of the prompt at a server of this class.
    pub(super) fn full_blocks(&self, class: PlanClassId, size: BlockSize) -> Option<usize> {
        self.prepared.plan(class).map(|plan| plan.tokens.len() / size.get())
    }

    /// Returns the number of prompt tokens that a server of this class must count. Returns `None`
    /// if the server counts in another way.
    pub(super) fn prompt_tokens(&self, class: PlanClassId) -> Option<usize> {
        let plan = self.prepared.plan(class).filter(|_| self.has_same_token_count)?;
        let is_exact = plan.job_items.is_empty() || self.named.contains(&class);
        is_exact.then(|| plan.tokens.len())
    }

    /// Returns the number of tokens of each item, in order of appearance.
    pub(super) fn item_tokens(&self) -> Vec<usize> {
        let plan = self.prepared.plans.first();
        plan.map_or_else(Vec::new, |plan| {
            plan.job_items.iter().map(|item| item.placeholder.length).collect()
        })
    }

    /// Returns the items as the router sees them at any worker.
    pub(super) fn route_items(&self) -> &[RouteItem] {
        self.prepared.plans.first().map_or(&[], |plan| &plan.route_items)
    }

    /// Returns the items to name for a server of this class. Returns `None` if there are none.
    pub(super) fn items_to_name(&self, class: PlanClassId) -> Option<Arc<[JobItem]>> {
        let plan = self
            .prepared
            .plan(class)
            .filter(|plan| self.named.contains(&class) && !plan.job_items.is_empty())?;
        Some(plan.job_items.clone())
    }

    /// Returns the prompt from which a server's own names of the items are learned. Returns `None`
    /// if servers of this class have no such names.
    pub(super) fn prompt_to_learn(&self, class: PlanClassId) -> Option<PredictedPrompt> {
        let plan = self
            .prepared
            .plan(class)
            .filter(|plan| self.learned.contains(&class) && !plan.job_items.is_empty())?;
        // Not every server version reports which blocks have a salt.
        self.prepared.cache_salt.is_none().then(|| PredictedPrompt {
            tokens: plan.tokens.clone(),
            items: plan
                .job_items
                .iter()
                .map(|item| (item.hash, item.placeholder.clone()))
                .collect(),
        })
    }
}

/// Drops the blocks from the first item on, because the server identifies them by its own names.
fn drop_item_blocks(plan: &mut ClassPlan, size: BlockSize) {
    if let Some(first) = plan.job_items.first() {
        plan.keys.truncate(first.placeholder.offset / size.get());
        plan.route_items.clear();
    }
}
