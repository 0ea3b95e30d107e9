//! Tensors that the agent reads from this process's memory instead of receiving them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::ItemField;
use chiasm_nixl::{Lender, ReadError};
use chiasm_types::MmHash;

use super::{AgentLink, describe};
use crate::proto::{ReadTensorsReply, ReadTensorsRequest};
use crate::{CHUNK_BYTES, tensors};

/// The time that an agent has to answer after the deadline of its read.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The reason for sending tensors that should have been lent: a cause in a word, and an explanation
/// for operators.
pub(crate) struct NotLent {
    pub(crate) cause: &'static str,
    pub(crate) reason: String,
}

/// The lending of tensors to one agent, or to none.
#[derive(Clone, Default)]
pub struct Lending {
    lender: LenderState,
    /// `true` if the agent reads lent tensors.
    agent_reads: Arc<AtomicBool>,
}

#[derive(Clone, Default)]
enum LenderState {
    /// Tensors are not lent.
    #[default]
    Disabled,
    /// Tensors should be lent, but the lender failed for this reason.
    Failed(Arc<str>),
    Ready(Arc<Lender>),
}

impl Lending {
    /// Creates a lending with this lender.
    pub fn new(lender: Arc<Lender>) -> Self {
        Self { lender: LenderState::Ready(lender), agent_reads: Arc::default() }
    }

    /// Creates a lending without a lender: tensors are sent, and each time is counted as a step
    /// down.
    pub fn unavailable(reason: impl fmt::Display) -> Self {
        let lender = LenderState::Failed(reason.to_string().into());
        Self { lender, agent_reads: Arc::default() }
    }

    pub(super) fn for_one_agent(&self) -> Self {
        Self { lender: self.lender.clone(), agent_reads: Arc::default() }
    }

    /// Sets whether the agent reads lent tensors.
    pub(super) fn set_agent_reads(&self, agent_reads: bool) {
        self.agent_reads.store(agent_reads, Relaxed);
    }
}

impl fmt::Debug for Lending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lending").field("agent_reads", &self.agent_reads).finish_non_exhaustive()
    }
}

impl AgentLink {
    /// Lets the agent read an item's tensors. Returns `true` if it has read them. Tensors that fit
    /// into one message are not lent, and none are if lending is disabled.
    ///
    /// # Errors
    /// Tensors that should have been read were not.
    pub(crate) async fn lend_tensors(
        &self,
        hash: &MmHash,
        fields: &[ItemField],
    ) -> Result<bool, NotLent> {
        let not_lent = |cause, reason: &str| NotLent { cause, reason: reason.to_owned() };
        let lender = match &self.lending.lender {
            _ if tensors::total_bytes(fields) <= CHUNK_BYTES as u64 => return Ok(false),
            LenderState::Disabled => return Ok(false),
            LenderState::Failed(reason) => return Err(not_lent("nixl_not_here", reason)),
            LenderState::Ready(lender) => lender,
        };
        if !self.lending.agent_reads.load(Relaxed) {
            return Err(not_lent(
                "nixl_not_there",
                "the agent does not read by NIXL (--nixl-library)",
            ));
        }
        let blocking_lender = lender.clone();
        let parts = tensors::tensor_bytes(fields);
        let lent = tokio::task::spawn_blocking(move || blocking_lender.lend(&parts)).await;
        let loan = lent
            .ok()
            .flatten()
            .ok_or_else(|| not_lent("nixl_no_room", "the pool of lent memory is full"))?;
        let read_timeout = lender.read_timeout();
        let request = ReadTensorsRequest {
            mm_hash: Bytes::copy_from_slice(hash.as_bytes()),
            fields: tensors::describe(fields),
            memory: lender.metadata().clone(),
            address: loan.address(),
            loan: loan.number(),
            within_ms: read_timeout.as_millis().try_into().unwrap_or(u32::MAX),
        };
        let mut files = self.files.clone();
        let call = tokio::time::timeout(read_timeout + ANSWER_TIMEOUT, files.read_tensors(request));
        let reply = match call.await {
            Ok(Ok(reply)) => reply.into_inner(),
            // In both cases the agent may still read, so the memory is not reused yet.
            Ok(Err(status)) => return Err(not_lent("nixl_unanswered", &describe(&status))),
            Err(_) => return Err(not_lent("nixl_unanswered", "the agent did not answer in time")),
        };
        loan.release();
        let ReadTensorsReply { not_read, reason } = reply;
        if not_read.is_empty() {
            return Ok(true);
        }
        // Later versions may have more causes.
        let cause =
            ReadError::CAUSES.into_iter().find(|cause| *cause == not_read).unwrap_or("nixl_failed");
        if cause == "nixl_off" {
            self.lending.set_agent_reads(false);
        }
        Err(not_lent(cause, &reason))
    }
}
