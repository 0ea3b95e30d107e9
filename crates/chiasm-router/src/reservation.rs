//! What a request holds of a worker while it runs.

use std::fmt;
use std::sync::Arc;

use chiasm_types::{BlockSize, MmHash, WorkerId};

use crate::roster::Hold;
use crate::select::Assignment;
use crate::shared::Shared;
use crate::worker::Knowledge;

/// A request's place on a worker: load and promised blocks. Dropping it gives both back.
///
/// The promised blocks stay for a grace time when [`first_token`](Self::first_token) was called,
/// see [`RouterConfig::promise_grace`](crate::RouterConfig::promise_grace). Otherwise nobody
/// computed them and they go at once, so that a retry on another worker finds no trace of the
/// failed try.
#[must_use = "the request counts as load of the worker only while its reservation lives"]
pub struct Reservation {
    /// The worker that gets the request.
    pub worker: WorkerId,
    /// Leading blocks of the prompt that the worker holds, as confirmed by its events. Promised
    /// ones don't count here.
    pub overlap_blocks: usize,
    /// Blocks of the prompt, the last one possibly part full.
    pub total_blocks: usize,
    /// Tokens per block there.
    pub block_size: BlockSize,
    /// How far `overlap_blocks` could be trusted.
    pub knowledge: Knowledge,
    hold: Option<Hold>,
    computed: bool,
    shared: Arc<Shared>,
}

impl Reservation {
    pub(crate) fn new(shared: Arc<Shared>, assignment: &Assignment, hold: Hold) -> Self {
        Self {
            worker: assignment.id,
            overlap_blocks: assignment.overlap,
            total_blocks: assignment.blocks as usize,
            block_size: assignment.block_size,
            knowledge: assignment.knowledge,
            hold: Some(hold),
            computed: false,
            shared,
        }
    }

    /// The worker has left the embeddings of a media item that it was to encode, which take so many
    /// bytes: from now on workers of its machine are taken to find them.
    pub fn encoded(&self, item: MmHash, bytes: u64) {
        if let Some(hold) = &self.hold {
            self.shared.encoded(hold, item, bytes);
        }
    }

    /// The engine has answered with a token: the whole prompt is computed.
    pub fn first_token(&mut self) {
        if let Some(hold) = self.hold.as_mut().filter(|_| !self.computed) {
            self.computed = true;
            self.shared.computed(self.worker, hold);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(hold) = self.hold.take() {
            self.shared.release(hold, self.computed);
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
