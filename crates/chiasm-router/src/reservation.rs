//! A request's reservation on a worker, held while the request runs.

use std::fmt;
use std::sync::Arc;

use chiasm_types::{BlockSize, MmHash, WorkerId};

use crate::select::Assignment;
use crate::shared::Shared;
use crate::worker::Knowledge;
use crate::worker_table::Allocation;

/// A request's load and promised blocks on a worker. Dropping it gives both back.
///
/// If [`first_token`](Self::first_token) was called, the promised blocks stay for a grace time, see
/// [`RouterConfig::promise_grace`](crate::RouterConfig::promise_grace). Otherwise the blocks were
/// never computed and the promises end at once, so that a failed attempt does not influence a retry
/// on another worker.
#[must_use = "the request counts as load of the worker only while its reservation lives"]
pub struct Reservation {
    /// The worker that gets the request.
    pub worker: WorkerId,
    /// Leading blocks of the prompt that the worker holds, as confirmed by its events. Promised
    /// blocks don't count.
    pub overlap_blocks: usize,
    /// Blocks of the prompt, including a partial last one.
    pub total_blocks: usize,
    /// Tokens per block on the worker.
    pub block_size: BlockSize,
    /// The reliability of `overlap_blocks`.
    pub knowledge: Knowledge,
    allocation: Option<Allocation>,
    computed: bool,
    shared: Arc<Shared>,
}

impl Reservation {
    pub(crate) fn new(
        shared: Arc<Shared>,
        assignment: &Assignment,
        allocation: Allocation,
    ) -> Self {
        Self {
            worker: assignment.id,
            overlap_blocks: assignment.overlap,
            total_blocks: assignment.blocks as usize,
            block_size: assignment.block_size,
            knowledge: assignment.knowledge,
            allocation: Some(allocation),
            computed: false,
            shared,
        }
    }

    /// Records that the worker has encoded a media item and stored its embeddings, which take
    /// `bytes` bytes. From now on the workers of its machine are expected to find them.
    pub fn encoded(&self, item: MmHash, bytes: u64) {
        if let Some(allocation) = &self.allocation {
            self.shared.encoded(allocation, item, bytes);
        }
    }

    /// Records the first token of the answer: the engine has computed the whole prompt.
    pub fn first_token(&mut self) {
        if let Some(allocation) = self.allocation.as_mut().filter(|_| !self.computed) {
            self.computed = true;
            self.shared.prompt_computed(self.worker, allocation);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(allocation) = self.allocation.take() {
            self.shared.release(allocation, self.computed);
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("worker", &self.worker)
            .field("overlap_blocks", &self.overlap_blocks)
            .field("total_blocks", &self.total_blocks)
            .finish_non_exhaustive()
    }
}
