//! The limits of `cargo xtask structure`. They may only fall: a change that improves a number
//! lowers its limit.

use super::orders::{ORDERS, Order};

/// The largest numbers that pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) crate_lines: usize,
    /// Crates that are still larger, each with its own limit.
    pub(super) large_crates: &'static [(&'static str, usize)],
    pub(super) circles: usize,
    pub(super) files_per_circle: usize,
    /// The number of files in all circles; falls even if a large circle breaks into small ones.
    pub(super) files_in_circles: usize,
    pub(super) orders: &'static [Order],
}

/// The state of the code on 2026-11-28. The goal is fewer than 12 circles, none of more than 4
/// files, and no large crates.
pub(super) const LIMITS: Limits = Limits {
    crate_lines: 12_000,
    large_crates: &[("chiasm-server", 28_500)],
    circles: 37,
    files_per_circle: 108,
    files_in_circles: 275,
    orders: ORDERS,
};

impl Limits {
    /// Returns the most lines that a crate may have.
    pub(super) fn lines(&self, package: &str) -> usize {
        let own = self.large_crates.iter().find(|(name, _)| *name == package);
        own.map_or(self.crate_lines, |(_, lines)| *lines)
    }
}
