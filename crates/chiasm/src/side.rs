//! The two kinds of process that start engines.

/// The kind of process that owns engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// A frontend: takes requests from clients.
    Frontend,
    /// An agent: takes jobs from frontends. Its own processor of vLLM only decodes planned videos;
    /// the frontends run theirs for other media that Chiasm's own code does not process.
    Agent,
}
