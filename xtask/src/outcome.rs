//! The outcome of a step.

/// The outcome of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    /// The step failed, with this error.
    Failed(String),
    /// The step did not run, for this reason.
    Skipped(&'static str),
}
