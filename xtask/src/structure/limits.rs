//! The limits of `cargo xtask structure`. They may only fall: a change that improves a number
//! lowers its limit.

use super::orders::{ORDERS, Order};

/// The largest numbers that pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) crate_lines: usize,
    pub(super) circles: usize,
    pub(super) files_per_circle: usize,
    /// The number of files in all circles; falls even if a large circle breaks into small ones.
    pub(super) files_in_circles: usize,
    pub(super) orders: &'static [Order],
}

/// The numbers of 2026-11-28, and the goal for the lines of a crate.
pub(super) const LIMITS: Limits = Limits {
    crate_lines: 12_000,
    circles: 5,
    files_per_circle: 2,
    files_in_circles: 10,
    orders: ORDERS,
};
