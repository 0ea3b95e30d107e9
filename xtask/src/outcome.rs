//! The end of a step.

/// The end of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed(String),
    LeftOut(&'static str),
}
