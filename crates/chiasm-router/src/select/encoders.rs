//! The selection of workers that encode media items for workers that compute prompts.

use chiasm_types::{MmHash, PlanClassId, Role};

use super::candidate::Candidate;
use super::{Assignment, Scratch, fits, is_busy};
use crate::config::{Policy, RouterConfig};
use crate::cost::{embedding_transfer_cost, in_blocks};
use crate::error::RouteError;
use crate::explain::Decision;
use crate::request::{RouteItem, RouteRequest};
use crate::worker::{Admission, PendingWork};
use crate::worker_handle::WorkerHandle;
use crate::worker_table::WorkerTable;

/// A worker that could encode media items for the workers of its machine and class.
pub(super) struct Encoder {
    handle: WorkerHandle,
    machine: u64,
    class: PlanClassId,
    requests: usize,
    /// The work of the requests that wait on the worker, in the unit of costs.
    waiting_work: f64,
}

/// The media items that one worker is to encode.
pub(crate) struct EncodeAssignment {
    pub(crate) assignment: Assignment,
    pub(crate) items: Vec<MmHash>,
}

/// The sources of the embeddings that a prompt needs.
#[derive(Default)]
pub(super) struct EmbeddingSources {
    /// The items whose embeddings are in the machine's store.
    pub(super) embedded: Vec<MmHash>,
    /// The workers that encode other items, each item on one of them, so that several items are
    /// encoded at the same time.
    pub(super) encode: Vec<EncodeAssignment>,
}

impl Encoder {
    /// Returns `true` if workers of this class and machine find the embeddings that this one
    /// stores.
    fn serves(&self, class: PlanClassId, machine: u64) -> bool {
        self.class == class && self.machine == machine
    }
}

/// Returns the index of the encoder with the least work among those of a class and machine.
fn least_loaded(encoders: &[Encoder], class: PlanClassId, machine: u64) -> Option<usize> {
    let by_load = |one: &usize, other: &usize| {
        let one = &encoders[*one];
        let other = &encoders[*other];
        let by_waiting = one.waiting_work.total_cmp(&other.waiting_work);
        by_waiting.then(one.requests.cmp(&other.requests))
    };
    (0..encoders.len()).filter(|at| encoders[*at].serves(class, machine)).min_by(by_load)
}

impl Candidate {
    /// Has the worker's media items encoded elsewhere if that costs less than what the worker's
    /// other requests would lose by waiting for the encoder.
    ///
    /// `encode` counts the embeddings of the items that end after the covered tokens, in blocks of
    /// the cost formula.
    pub(super) fn encode_elsewhere_if_cheaper(
        &mut self,
        encoders: &[Encoder],
        encode: f64,
        config: &RouterConfig,
    ) {
        let Some(at) = least_loaded(encoders, self.class, self.machine) else { return };
        let blocks = self.terms(encode, 0.0).encode;
        if blocks == 0.0 {
            return;
        }
        let disturbance =
            config.stages.disturb * (self.requests + 1) as f64 * config.weights.encode * blocks;
        let price = config.stages.hop
            + embedding_transfer_cost(config, blocks)
            + config.weights.queue * encoders[at].waiting_work;
        if price < disturbance {
            self.encodes_elsewhere = true;
            // The avoided disturbance is not subtracted: it is no advantage over workers that have
            // fewer requests to disturb.
            self.cost += price;
        }
    }
}

impl Scratch {
    /// Collects the workers that could encode a request's media items.
    pub(super) fn gather_encoders(
        &mut self,
        config: &RouterConfig,
        table: &WorkerTable,
        plans: &[RouteRequest<'_>],
    ) {
        self.encoders.clear();
        if !table.has_encode_workers() {
            return;
        }
        for plan in plans.iter().filter(|plan| !plan.media.is_empty()) {
            let eligible = table.workers().filter(|(id, worker)| {
                worker.info.role == Role::Encode
                    && worker.info.class == plan.class
                    && !worker.suspect
                    && worker.admission != Admission::None
                    && !plan.exclude.contains(id)
                    && fits(worker, plan)
                    && !is_busy(&config.busy, worker)
            });
            self.encoders.extend(eligible.map(|(_, worker)| Encoder {
                handle: worker.handle,
                machine: worker.info.machine,
                class: worker.info.class,
                requests: worker.requests,
                waiting_work: worker.pending.work,
            }));
        }
    }

    /// Subtracts the encode work of one plan's candidates whose machine stores an item's
    /// embeddings.
    pub(super) fn apply_stored_embeddings(
        &mut self,
        config: &RouterConfig,
        table: &WorkerTable,
        plan: u32,
    ) {
        if table.embeddings.is_empty() {
            return;
        }
        let mut spared = std::mem::take(&mut self.spared);
        for at in 0..self.plans[plan as usize].items.sorted.len() {
            let item = self.plans[plan as usize].items.sorted[at];
            let blocks = in_blocks(item.embeds as f64);
            // A candidate's own embeddings are already subtracted.
            spared.clear();
            spared.resize(self.candidates.len(), false);
            for worker in embedding_holders(config, table, &item) {
                if let Some(at) = self.candidate_of(worker) {
                    spared[at] = true;
                }
            }
            for (candidate, _) in
                self.candidates.iter_mut().zip(&spared).filter(|(_, spared)| !**spared)
            {
                if candidate.plan == plan
                    && item.end > candidate.covered_tokens()
                    && table.embeddings.contains(candidate.machine, item.hash)
                {
                    candidate.encode_spared += blocks;
                    candidate.embedded += blocks;
                }
            }
        }
        self.spared = spared;
    }

    /// Has the media items of all candidates encoded elsewhere where an encoder serves them. For
    /// policies that do not compute costs.
    pub(super) fn encode_all_elsewhere(&mut self) {
        let Self { candidates, encoders, .. } = self;
        for candidate in candidates {
            candidate.encodes_elsewhere =
                least_loaded(encoders, candidate.class, candidate.machine).is_some();
        }
    }

    /// Returns the sources of the embeddings that the worker which computes the prompt needs.
    pub(super) fn embedding_sources(
        &mut self,
        config: &RouterConfig,
        table: &mut WorkerTable,
        prefill: &Assignment,
    ) -> Result<EmbeddingSources, RouteError> {
        let mut sources = EmbeddingSources::default();
        let worker = table.worker(prefill.handle);
        let Some(info) = worker.map(|worker| worker.info) else { return Ok(sources) };
        if table.embeddings.is_empty() {
            return Ok(sources);
        }
        let Self { plans, encoders, .. } = self;
        for item in plans[prefill.plan].items.sorted.iter().skip(prefill.first_encoded) {
            if table.embeddings.touch(info.machine, item.hash) {
                sources.embedded.push(item.hash);
                continue;
            }
            if !prefill.encodes_elsewhere
                || embedding_holders(config, table, item).any(|holder| holder == prefill.handle)
            {
                continue;
            }
            // A worker that already encodes the item for another request does so only once.
            let encoding = table.embeddings.encoding_worker(info.machine, item.hash);
            let in_progress = encoders.iter().position(|encoder| {
                Some(encoder.handle) == encoding && encoder.serves(info.class, info.machine)
            });
            let work = if in_progress.is_some() {
                0.0
            } else {
                config.weights.encode * in_blocks(item.embeds as f64)
            };
            let encoder = in_progress.or_else(|| least_loaded(encoders, info.class, info.machine));
            let Some(at) = encoder else { continue };
            encoders[at].waiting_work += work;
            assign_item(config, table, &mut sources.encode, encoders[at].handle, item, work)?;
        }
        Ok(sources)
    }
}

/// Returns the workers that are expected to have an item's embeddings in their own caches.
fn embedding_holders<'a>(
    config: &RouterConfig,
    table: &'a WorkerTable,
    item: &RouteItem,
) -> impl Iterator<Item = WorkerHandle> + use<'a> {
    let caches = |handle| table.worker(handle).map(|worker| worker.media_caches);
    let holders = table.media.holders(item.hash, item.elements, item.embeds, caches);
    let considers_media = config.policy == Policy::KvMedia;
    holders
        .filter(move |(_, reusable)| considers_media && reusable.embeddings)
        .map(|(worker, _)| worker)
}

/// Adds an item to the assignment of a worker, creating the assignment if there is none.
fn assign_item(
    config: &RouterConfig,
    table: &WorkerTable,
    assignments: &mut Vec<EncodeAssignment>,
    handle: WorkerHandle,
    item: &RouteItem,
    work: f64,
) -> Result<(), RouteError> {
    let existing = assignments.iter().position(|encode| encode.assignment.handle == handle);
    let at = match existing {
        Some(at) => at,
        None => {
            let worker = table.worker(handle).ok_or(RouteError::NoWorker)?;
            let assignment = Assignment {
                id: worker.id,
                handle,
                plan: 0,
                decision: Decision::Policy(config.policy),
                block_size: worker.info.block_size,
                knowledge: worker.knowledge(),
                blocks: 0,
                overlap: 0,
                pending: PendingWork::default(),
                first_encoded: usize::MAX,
                encodes_elsewhere: false,
            };
            assignments.push(EncodeAssignment { assignment, items: Vec::new() });
            assignments.len() - 1
        }
    };
    let EncodeAssignment { assignment: Assignment { pending, .. }, items } = &mut assignments[at];
    pending.tokens += item.embeds as u64;
    pending.work += work;
    items.push(item.hash);
    Ok(())
}
