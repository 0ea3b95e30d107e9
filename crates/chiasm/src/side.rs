//! The two kinds of process that start engines.

/// The kind of process that owns engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// A frontend: takes requests from clients.
    Frontend,
    /// An agent: takes jobs from frontends. The frontends run vLLM's processor for media that
    /// Chiasm's own code does not process.
    Agent,
}
