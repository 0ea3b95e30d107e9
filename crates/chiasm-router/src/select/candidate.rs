//! What a choice compares: a worker that may get a request, with what it would have to do, and the
//! media items of the request.

use chiasm_types::{PlanClassId, Role, WorkerId};

use crate::config::{RouterConfig, Weights};
use crate::cost::{Terms, in_blocks};
use crate::request::RouteItem;
use crate::roster::Roster;
use crate::seat::Seat;
use crate::worker::Worker;

/// A worker that may get a request, and what that would mean.
pub(super) struct Candidate {
    pub(super) id: WorkerId,
    pub(super) seat: Seat,
    pub(super) role: Role,
    pub(super) machine: u64,
    pub(super) class: PlanClassId,
    pub(super) hands_over_in: u64,
    /// Requests that it has.
    pub(super) requests: usize,
    /// The index of its class's plan among the request's.
    pub(super) plan: u32,
    /// Prompt blocks in its own block size.
    pub(super) blocks: u64,
    pub(super) block_size: u32,
    /// Leading blocks that it holds.
    pub(super) overlap: u32,
    /// Leading blocks that it will hold when requests in flight are computed.
    pub(super) expected: u32,
    /// Leading blocks that it holds with those on the CPU and in storage.
    pub(super) loadable: u32,
    /// Blocks in use, as costs count them.
    pub(super) load: f64,
    /// Work of the requests that wait there, in the unit of costs.
    pub(super) waiting_work: f64,
    /// What it did lately beyond the mean, in the unit of costs.
    pub(super) excess: f64,
    /// Blocks that the embeddings fill which it need not encode as it has them.
    pub(super) encode_spared: f64,
    /// Blocks that the embeddings of items fill that need not be processed as it has the tensors.
    pub(super) process_spared: f64,
    /// Blocks that the embeddings fill which it need not encode as others of its machine have.
    pub(super) embedded: f64,
    /// Others of its machine would encode what it would have to.
    pub(super) encodes_elsewhere: bool,
    pub(super) cost: f64,
}

/// Blocks of a prompt at one worker.
pub(super) struct Held {
    /// Leading blocks that it holds.
    pub(super) overlap: usize,
    /// The same with those on the CPU and in storage.
    pub(super) loadable: usize,
    /// All of the prompt.
    pub(super) blocks: u64,
}

impl Candidate {
    pub(super) fn new(
        roster: &Roster,
        worker: &Worker,
        weights: &Weights,
        mean_lately: f64,
        plan: usize,
        held: Held,
    ) -> Self {
        let Held { overlap, loadable, blocks } = held;
        Self {
            id: worker.id,
            seat: worker.seat,
            role: worker.info.role,
            machine: worker.info.machine,
            class: worker.info.class,
            hands_over_in: worker.info.hands_over_in,
            requests: worker.requests,
            plan: plan as u32,
            blocks,
            block_size: worker.info.block_size.get() as u32,
            overlap: overlap as u32,
            expected: overlap as u32,
            loadable: loadable as u32,
            load: in_blocks(worker.blocks_in_use as f64 * worker.info.block_size.get() as f64),
            waiting_work: worker.pending.work + work_of_others(roster, worker, weights),
            excess: (worker.lately - mean_lately).max(0.0),
            encode_spared: 0.0,
            process_spared: 0.0,
            embedded: 0.0,
            encodes_elsewhere: false,
            cost: 0.0,
        }
    }

    /// Leading blocks that it need not compute.
    pub(super) fn covered(&self) -> u32 {
        self.expected.max(self.loadable)
    }

    pub(super) fn covered_tokens(&self) -> usize {
        self.covered() as usize * self.block_size as usize
    }

    /// What its cost is made of. `encode` and `process` are the blocks that the embeddings of items
    /// fill which end after what it need not compute, and of all items, whatever it is spared.
    pub(super) fn terms(&self, encode: f64, process: f64) -> Terms {
        let size = f64::from(self.block_size);
        Terms {
            compute: in_blocks(self.blocks.saturating_sub(self.covered().into()) as f64 * size),
            fetch: in_blocks(f64::from(self.covered() - self.expected) * size),
            // What is spared is a sum in another order: no less than nothing is left.
            encode: (encode - self.encode_spared).max(0.0),
            process: (process - self.process_spared).max(0.0),
            waiting: self.waiting_work,
            load: self.load,
            excess: self.excess,
        }
    }

    /// What it has to do before the first token, in the unit of costs.
    pub(super) fn work(&self, encode: f64, weights: &Weights) -> f64 {
        let encode = if self.encodes_elsewhere { 0.0 } else { encode };
        let Terms { compute, fetch, encode, .. } = self.terms(encode, 0.0);
        Terms { compute, fetch, encode, ..Terms::default() }.cost(weights)
    }

    /// Blocks of the prompt that it has to be sent by whoever computes it.
    pub(super) fn missing(&self) -> f64 {
        in_blocks(
            self.blocks.saturating_sub(self.covered().into()) as f64 * f64::from(self.block_size),
        )
    }

    /// Returns the cost of answering behind a prompt that another worker computes; `transfer` is
    /// the cost of sending one block. While the other worker does `work_before`, this one does as
    /// much of the work that waits here: only the rest delays the request.
    pub(super) fn cost_behind(
        &self,
        config: &RouterConfig,
        transfer: f64,
        work_before: f64,
    ) -> f64 {
        let Self { waiting_work, load, excess, .. } = *self;
        let waiting = (waiting_work - work_before).max(0.0);
        let terms = Terms { waiting, load, excess, ..Terms::default() };
        transfer * self.missing() + terms.cost(&config.weights)
    }

    /// Blocks that the embeddings fill which it has to encode, whatever it is spared.
    pub(super) fn encode(&self, items: &Items) -> f64 {
        in_blocks(items.embeds_from(items.encoded_from(self.covered_tokens())) as f64)
    }

    /// Blocks that the embeddings of all items fill.
    pub(super) fn process(&self, items: &Items) -> f64 {
        in_blocks(items.embeds_from(0) as f64)
    }
}

/// A request's media items in the order in which they end, each once.
#[derive(Default)]
pub(super) struct Items {
    pub(super) sorted: Vec<RouteItem>,
    /// Embeddings of the item and those after it, in tokens.
    pub(super) embeds_from: Vec<usize>,
}

impl Items {
    pub(super) fn fill(&mut self, media: &[RouteItem]) {
        let Self { sorted, embeds_from } = self;
        sorted.clear();
        sorted.extend_from_slice(media);
        // An item that comes twice is encoded for its last place if the KV cache does not cover
        // that.
        sorted.sort_unstable_by(|one, other| (one.hash, other.end).cmp(&(other.hash, one.end)));
        sorted.dedup_by_key(|item| item.hash);
        sorted.sort_unstable_by_key(|item| item.end);
        embeds_from.clear();
        embeds_from.extend(sorted.iter().map(|item| item.embeds));
        for at in (1..embeds_from.len()).rev() {
            embeds_from[at - 1] += embeds_from[at];
        }
    }

    /// The first item that is not wholly within so many tokens: vLLM runs the encoder for it and
    /// those after it.
    pub(super) fn encoded_from(&self, tokens: usize) -> usize {
        self.sorted.partition_point(|item| item.end <= tokens)
    }

    pub(super) fn embeds_from(&self, first: usize) -> usize {
        self.embeds_from.get(first).copied().unwrap_or(0)
    }
}

/// What requests that this router did not send make the engine do, in the unit of costs: as their
/// frontends tell, or what so many usually do.
fn work_of_others(roster: &Roster, worker: &Worker, weights: &Weights) -> f64 {
    let told = worker.engine.map_or(0, |engine| engine.pending_tokens_of_others);
    match told {
        0 => roster.typical.work * worker.waiting_of_others as f64,
        tokens => weights.prefill * in_blocks(tokens as f64),
    }
}
