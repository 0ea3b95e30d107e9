//! The client that a request is from.

use bytes::Bytes;
use chiasm_backend::{RequestId, TraceContext};
use tokio::time::Instant;

use super::observer::Entries;
use super::tried::Attempts;
use crate::cpu::CpuBudget;

/// The client that a request is from, by the request's headers, and the attempts of the request so
/// far.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The request's identity: the client's `x-request-id`, or one that was made.
    pub id: RequestId,
    /// The trace that the request belongs to.
    pub trace: Option<TraceContext>,
    /// When its head had been read.
    pub arrived: Instant,
    /// The work that the request may have done.
    pub cpu: CpuBudget,
    /// Requests with the same number go to the same worker if they can.
    pub session: Option<u64>,
    /// The header with the client's key. Names of media items (`uuid`) belong to the client that
    /// gave them.
    pub credentials: Option<Bytes>,
    /// What the request has been through.
    pub tried: Attempts,
    /// The request's entries on the live page.
    pub entries: Entries,
}
