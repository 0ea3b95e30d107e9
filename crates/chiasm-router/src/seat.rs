//! Handles of workers that never mean a later worker of the same id or place.

/// A worker in one of its lives: what earlier workers of the same id or place were given does not
/// concern it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Seat {
    pub(crate) place: u32,
    pub(crate) life: u32,
}
