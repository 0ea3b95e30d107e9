//! The candidates of a selection: workers that may get a request, with the work that each would
//! have to do, and the media items of the request.

use chiasm_types::{PlanClassId, Role, WorkerId};

use crate::config::{RouterConfig, Weights};
use crate::cost::{CostTerms, in_blocks};
use crate::request::RouteItem;
use crate::worker::Worker;
use crate::worker_handle::WorkerHandle;
use crate::worker_table::WorkerTable;

/// A worker that may get a request, with what it holds of the request and the work it would have
/// to do.
pub(super) struct Candidate {
    pub(super) id: WorkerId,
    pub(super) handle: WorkerHandle,
    pub(super) role: Role,
    pub(super) machine: u64,
    pub(super) class: PlanClassId,
    pub(super) handover_domain: u64,
    /// The number of requests on the worker.
    pub(super) requests: usize,
    /// The index of the worker's plan among those of the request.
    pub(super) plan: u32,
    /// Blocks of the prompt, in the worker's own block size.
    pub(super) blocks: u64,
    pub(super) block_size: u32,
    /// Leading blocks that the worker holds.
    pub(super) overlap: u32,
    /// Leading blocks that the worker will hold once the requests in flight are computed.
    pub(super) expected: u32,
    /// Leading blocks that the worker holds, including those on the CPU and in storage.
    pub(super) loadable: u32,
    /// Blocks in use, in blocks of the cost formula.
    pub(super) load: f64,
    /// The work of the requests that wait on the worker, in the unit of costs.
    pub(super) waiting_work: f64,
    /// The worker's recent work beyond the mean, in the unit of costs.
    pub(super) excess: f64,
    /// Embeddings that the worker or its machine already has and need not encode, in blocks of the
    /// cost formula.
    pub(super) encode_spared: f64,
    /// Embeddings of the items whose tensors the worker already has and that need not be processed,
    /// in blocks of the cost formula.
    pub(super) process_spared: f64,
    /// Embeddings that need not be encoded because the machine's store has them, in blocks of the
    /// cost formula.
    pub(super) embedded: f64,
    /// `true` if another worker of the machine would encode the remaining embeddings.
    pub(super) encodes_elsewhere: bool,
    pub(super) cost: f64,
}

/// A worker's share of a prompt, in blocks of its own size.
pub(super) struct PromptCoverage {
    /// Leading blocks that the worker holds.
    pub(super) overlap: usize,
    /// Leading blocks that the worker holds, including those on the CPU and in storage.
    pub(super) loadable: usize,
    /// All blocks of the prompt.
    pub(super) blocks: u64,
}

impl Candidate {
    pub(super) fn new(
        table: &WorkerTable,
        worker: &Worker,
        weights: &Weights,
        mean_recent_work: f64,
        plan: usize,
        coverage: PromptCoverage,
    ) -> Self {
        let PromptCoverage { overlap, loadable, blocks } = coverage;
        Self {
            id: worker.id,
            handle: worker.handle,
            role: worker.info.role,
            machine: worker.info.machine,
            class: worker.info.class,
            handover_domain: worker.info.handover_domain,
            requests: worker.requests,
            plan: plan as u32,
            blocks,
            block_size: worker.info.block_size.get() as u32,
            overlap: overlap as u32,
            expected: overlap as u32,
            loadable: loadable as u32,
            load: in_blocks(worker.blocks_in_use as f64 * worker.info.block_size.get() as f64),
            waiting_work: worker.pending.work + other_frontends_work(table, worker, weights),
            excess: (worker.recent_work - mean_recent_work).max(0.0),
            encode_spared: 0.0,
            process_spared: 0.0,
            embedded: 0.0,
            encodes_elsewhere: false,
            cost: 0.0,
        }
    }

    /// Returns the number of leading blocks that the worker need not compute.
    pub(super) fn covered(&self) -> u32 {
        self.expected.max(self.loadable)
    }

    /// Returns the number of leading tokens that the worker need not compute.
    pub(super) fn covered_tokens(&self) -> usize {
        self.covered() as usize * self.block_size as usize
    }

    /// Returns the terms of the worker's cost.
    ///
    /// `encode` counts the embeddings of the items that end after the covered tokens; `process`
    /// counts the embeddings of all items. Both are in blocks of the cost formula. The embeddings
    /// that the worker need not encode or process are not subtracted from them yet.
    pub(super) fn terms(&self, encode: f64, process: f64) -> CostTerms {
        let size = f64::from(self.block_size);
        CostTerms {
            compute: in_blocks(self.blocks.saturating_sub(self.covered().into()) as f64 * size),
            fetch: in_blocks(f64::from(self.covered() - self.expected) * size),
            // The spared embeddings were summed in another order, so rounding may make them more.
            encode: (encode - self.encode_spared).max(0.0),
            process: (process - self.process_spared).max(0.0),
            waiting: self.waiting_work,
            load: self.load,
            excess: self.excess,
        }
    }

    /// Returns the worker's work before the first token, in the unit of costs.
    pub(super) fn work(&self, encode: f64, weights: &Weights) -> f64 {
        let encode = if self.encodes_elsewhere { 0.0 } else { encode };
        let CostTerms { compute, fetch, encode, .. } = self.terms(encode, 0.0);
        CostTerms { compute, fetch, encode, ..CostTerms::default() }.cost(weights)
    }

    /// Returns the part of the prompt that another worker has to send if it computes the prompt,
    /// in blocks of the cost formula.
    pub(super) fn missing(&self) -> f64 {
        in_blocks(
            self.blocks.saturating_sub(self.covered().into()) as f64 * f64::from(self.block_size),
        )
    }

    /// Returns the cost of answering after another worker has computed the prompt; `transfer` is
    /// the cost of sending one block.
    ///
    /// While the other worker does `prefill_work`, this worker works off as much of its own queue.
    /// Only the remainder delays the request.
    pub(super) fn decode_cost(
        &self,
        config: &RouterConfig,
        transfer: f64,
        prefill_work: f64,
    ) -> f64 {
        let Self { waiting_work, load, excess, .. } = *self;
        let waiting = (waiting_work - prefill_work).max(0.0);
        let terms = CostTerms { waiting, load, excess, ..CostTerms::default() };
        transfer * self.missing() + terms.cost(&config.weights)
    }

    /// Returns the embeddings of the items that end after the covered tokens, in blocks of the cost
    /// formula. Those that the worker already has count, too.
    pub(super) fn encode(&self, items: &Items) -> f64 {
        in_blocks(items.embeds_from(items.first_encoded(self.covered_tokens())) as f64)
    }

    /// Returns the embeddings of all items, in blocks of the cost formula.
    pub(super) fn process(&self, items: &Items) -> f64 {
        in_blocks(items.embeds_from(0) as f64)
    }
}

/// The distinct media items of a request, ordered by their ends.
#[derive(Default)]
pub(super) struct Items {
    pub(super) sorted: Vec<RouteItem>,
    /// The embeddings of each item and all items after it, in tokens.
    embeds_from: Vec<usize>,
}

impl Items {
    /// Replaces the items.
    pub(super) fn fill(&mut self, media: &[RouteItem]) {
        let Self { sorted, embeds_from } = self;
        sorted.clear();
        sorted.extend_from_slice(media);
        // An item that occurs twice is encoded for its last occurrence if the KV cache does not
        // cover that.
        sorted.sort_unstable_by(|one, other| (one.hash, other.end).cmp(&(other.hash, one.end)));
        sorted.dedup_by_key(|item| item.hash);
        sorted.sort_unstable_by_key(|item| item.end);
        embeds_from.clear();
        embeds_from.extend(sorted.iter().map(|item| item.embeds));
        for at in (1..embeds_from.len()).rev() {
            embeds_from[at - 1] += embeds_from[at];
        }
    }

    /// Returns the index of the first item that is not wholly within the first `tokens` tokens:
    /// vLLM runs the encoder for this item and the later items.
    pub(super) fn first_encoded(&self, tokens: usize) -> usize {
        self.sorted.partition_point(|item| item.end <= tokens)
    }

    /// Returns the embeddings of the items from index `first` on, in tokens.
    pub(super) fn embeds_from(&self, first: usize) -> usize {
        self.embeds_from.get(first).copied().unwrap_or(0)
    }
}

/// Returns the waiting work of requests that this router did not send, in the unit of costs: as
/// reported for other frontends, otherwise estimated as that of typical requests.
fn other_frontends_work(table: &WorkerTable, worker: &Worker, weights: &Weights) -> f64 {
    let reported = worker.engine.map_or(0, |engine| engine.pending_tokens_of_others);
    if reported == 0 {
        table.typical_work * worker.waiting_of_others as f64
    } else {
        weights.prefill * in_blocks(reported as f64)
    }
}
