//! Predicts the prompt of a request that is passed on, for workers that tell what their KV caches
//! hold: its tokens and blocks, as if the request were answered here.

use std::sync::Arc;

use chiasm_backend::{ForeseenPrompt, InputForm, JobItem, PlaceholderForm, Supports};
use chiasm_fleet::PresentClasses;
use chiasm_router::{RouteItem, RouteRequest};
use chiasm_types::{BlockSize, PlanClassId, WorkerId};

use super::Understood;
use crate::caller::Caller;
use crate::prepare::{Planned, Prepared, prepare};
use crate::shared::Pipeline;

/// The predicted prompt of a request for workers of each class.
pub(super) struct Foreseen {
    prepared: Prepared,
    /// The classes whose servers can be given names for its items, by which these will know their
    /// blocks.
    named: Vec<PlanClassId>,
    /// The classes whose servers have names of their own for its items, which are learned.
    learned: Vec<PlanClassId>,
    /// The server counts a prompt's tokens as we do.
    is_counted: bool,
}

impl Foreseen {
    /// Predicts what workers of these classes will make of a request. `None` if it is wrong, which
    /// the server says then.
    pub(super) async fn of(
        pipeline: &Pipeline,
        caller: &Caller,
        understood: Understood,
        classes: PresentClasses,
    ) -> Option<Self> {
        let Understood { request, takes_names, is_counted } = understood;
        let prepared = prepare(pipeline, request, None, caller, classes.clone()).await;
        let mut prepared = prepared
            .inspect_err(|error| tracing::debug!(%error, "a request is not foreseen"))
            .ok()?;
        // A name is only a part of what a server knows an item by that has settings.
        let has_settings = prepared.needs.processor_kwargs;
        let mut named = Vec::new();
        let mut learned = Vec::new();
        for class in classes.iter().filter(|class| class.input == InputForm::Messages) {
            match class.class.placeholders {
                PlaceholderForm::Learned if !has_settings => learned.push(class.id),
                PlaceholderForm::Marker | PlaceholderForm::Expanded
                    if takes_names && !has_settings =>
                {
                    named.push(class.id)
                }
                _ => {
                    let plan = prepared.plans.iter_mut().find(|plan| plan.class == class.id);
                    plan.into_iter().for_each(|plan| leave_items(plan, class.class.block_size));
                }
            }
        }
        Some(Self { prepared, named, learned, is_counted })
    }

    /// Returns the plans, one for each class.
    pub(super) fn plans(&self) -> &[Planned] {
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
            // A request that has all of its prompt computed can't use the server's cache.
            keys: if self.prepared.sampling.reads_prefix_cache() { &plan.keys } else { &[] },
            prompt_tokens: plan.tokens.len(),
            media: &plan.route_items,
            encoder_tokens: plan.encoder_tokens,
            session,
            exclude,
        })
    }

    /// Returns the optional parts that the request has.
    pub(super) fn needs(&self) -> Supports {
        self.prepared.needs
    }

    /// Returns `true` if there is a plan for servers of this class.
    pub(super) fn knows(&self, class: PlanClassId) -> bool {
        self.prepared.plan(class).is_some()
    }

    /// The full blocks of the prompt at a server of this class.
    pub(super) fn full_blocks(&self, class: PlanClassId, size: BlockSize) -> Option<usize> {
        self.prepared.plan(class).map(|plan| plan.tokens.len() / size.get())
    }

    /// The tokens of the prompt as a server of this class has to count them; `None` if it does so
    /// otherwise.
    pub(super) fn prompt_tokens(&self, class: PlanClassId) -> Option<usize> {
        let plan = self.prepared.plan(class).filter(|_| self.is_counted)?;
        let is_ours = plan.job_items.is_empty() || self.named.contains(&class);
        is_ours.then(|| plan.tokens.len())
    }

    /// The tokens that each item of the request becomes, in order of appearance.
    pub(super) fn item_tokens(&self) -> Vec<usize> {
        let plan = self.prepared.plans.first();
        plan.map_or_else(Vec::new, |plan| {
            plan.job_items.iter().map(|item| item.placeholder.length).collect()
        })
    }

    /// The items of the request, as the router sees them at any worker.
    pub(super) fn route_items(&self) -> &[RouteItem] {
        self.prepared.plans.first().map_or(&[], |plan| &plan.route_items)
    }

    /// The items to which a server of this class is to be given names; `None` if there are none.
    pub(super) fn items(&self, class: PlanClassId) -> Option<Arc<[JobItem]>> {
        let plan = self
            .prepared
            .plan(class)
            .filter(|plan| self.named.contains(&class) && !plan.job_items.is_empty())?;
        Some(plan.job_items.clone())
    }

    /// Returns the prompt from which the names are learned that a server of this class has for the
    /// items; `None` if it has none.
    pub(super) fn to_learn_from(&self, class: PlanClassId) -> Option<ForeseenPrompt> {
        let plan = self
            .prepared
            .plan(class)
            .filter(|plan| self.learned.contains(&class) && !plan.job_items.is_empty())?;
        // Not every version of a server tells which blocks have a salt.
        self.prepared.cache_salt.is_none().then(|| ForeseenPrompt {
            tokens: plan.tokens.clone(),
            items: plan
                .job_items
                .iter()
                .map(|item| (item.hash, item.placeholder.clone()))
                .collect(),
        })
    }
}

/// Leaves the blocks from the first item on, which a server will know by names of its own.
fn leave_items(plan: &mut Planned, size: BlockSize) {
    if let Some(first) = plan.job_items.first() {
        plan.keys.truncate(first.placeholder.offset / size.get());
        plan.route_items.clear();
    }
}
