//! The context of a request.

use bytes::Bytes;
use chiasm_backend::{RequestId, TraceContext};
use tokio::time::Instant;

use super::last_route::LastRoute;
use super::observer::PageEntries;
use super::past_attempts::Attempts;
use chiasm_cpu::CpuBudget;

/// The context of a request: its identity and client, its CPU budget, and its attempts so far.
#[derive(Clone, Debug)]
pub struct RequestContext {
    /// The request's id: the client's `x-request-id`, or a generated one.
    pub id: RequestId,
    /// The trace that the request belongs to.
    pub trace: Option<TraceContext>,
    /// The time at which the request's head had been read.
    pub arrived: Instant,
    /// The budget for the request's CPU-heavy work.
    pub cpu: CpuBudget,
    /// A session number. Requests with the same number go to the same worker if possible.
    pub session: Option<u64>,
    /// The header with the client's key. It scopes the names of media items (`uuid`) to the client.
    pub credentials: Option<Bytes>,
    /// The attempts so far.
    pub attempts: Attempts,
    /// The request's entries on the live page.
    pub entries: PageEntries,
    /// The latest route.
    pub last_route: LastRoute,
}
