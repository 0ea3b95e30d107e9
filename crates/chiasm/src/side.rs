//! The two kinds of process that start engines.

/// Whose engines they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// What takes requests of clients.
    Frontend,
    /// What takes jobs of frontends, whose processes make what Chiasm's own code does not.
    Agent,
}
