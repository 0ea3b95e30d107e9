//! The attempts of a request so far. `generation/attempts.rs` decides about the next one.

use chiasm_fleet::WorkerFault;
use chiasm_types::WorkerId;

/// The workers that a request has been sent to, and their faults.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// The workers to exclude, in this order: those that lost the request, those that declined it,
    /// and those that could not accept it. The last may be tried again.
    pub exclude: Vec<WorkerId>,
    /// The number of workers that the request moved away from: dead, failed or suspect. They are
    /// first in `exclude`.
    pub lost: usize,
    /// The number of workers that declined the request. They come next in `exclude`, and are not
    /// tried again.
    pub declined: usize,
    /// The faults of the workers that the request was sent to.
    pub faults: Vec<WorkerFault>,
    /// The number of lost workers that accept tokens. Only these count for the quarantine: the
    /// failure of a server that accepts messages does not prove that a prompt kills engines.
    pub lost_in_engines: usize,
    /// `true` if the request may also be forwarded to a server that accepts messages.
    pub can_forward: bool,
}
