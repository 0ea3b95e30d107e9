//! The attempts of a request so far.

use chiasm_fleet::WorkerFault;
use chiasm_types::WorkerId;

/// The workers that a request has been given to, and how they failed.
///
/// Its methods, which decide whether another attempt follows, are beside the attempts, in
/// `generation/attempts.rs`.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    /// The workers not to pick, in this order: those that it was moved away from, those that
    /// declined it, and those that could not take it, which may be tried again.
    pub exclude: Vec<WorkerId>,
    /// The number of workers that it was moved away from: dead, failed or suspect. They are first
    /// in `exclude`.
    pub lost: usize,
    /// The number of workers that declined it. They are next in `exclude`, and not tried again.
    pub declined: usize,
    /// The faults of the workers that it has been to.
    pub faults: Vec<WorkerFault>,
    /// The number of those workers that were given tokens. Only they count for the
    /// quarantine: the failure of a server that is given messages does not say that a prompt kills
    /// engines.
    pub lost_in_engines: usize,
    /// A server that is given messages may answer it, too.
    pub may_be_passed_on: bool,
}
