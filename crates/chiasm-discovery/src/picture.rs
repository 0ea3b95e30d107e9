//! The things that a source names, as followers see them.

/// What is there now, by the account of a source.
pub(crate) trait Picture: Clone + Default + PartialEq + Send + Sync + 'static {
    /// What there is of it, for the log.
    const WHAT: &'static str;
    /// Whether the log says when it changes.
    const IS_TOLD: bool;

    /// Says whether the source answers; returns whether it was said before.
    fn set_current(&mut self, is_current: bool) -> bool;

    /// The number of things that it consists of.
    fn count(&self) -> usize;

    /// The number of things that are in only one of the two.
    fn differences(&self, other: &Self) -> usize;
}
