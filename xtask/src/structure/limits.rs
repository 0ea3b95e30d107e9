//! The limits of `cargo xtask structure`. They may only fall: a change that improves a number
//! lowers its limit.

use super::orders::{ORDERS, Order};

/// The maximum numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) crate_lines: usize,
    pub(super) cycles: usize,
    pub(super) files_per_cycle: usize,
    /// The number of files in all cycles. Unlike the number of cycles, it falls when a large
    /// cycle is split into smaller ones.
    pub(super) files_in_cycles: usize,
    pub(super) orders: &'static [Order],
}

/// The numbers measured on 2026-11-28. `crate_lines` is a goal instead.
pub(super) const LIMITS: Limits = Limits {
    crate_lines: 12_000,
    cycles: 5,
    files_per_cycle: 2,
    files_in_cycles: 10,
    orders: ORDERS,
};
