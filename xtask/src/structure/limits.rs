//! The limits of `cargo xtask structure`. They may only fall: a change that improves a number
//! lowers its limit.

use super::orders::{ORDERS, Order};

/// The maximum numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) crate_lines: usize,
    pub(super) circles: usize,
    pub(super) files_per_circle: usize,
    /// The number of files in all circles. Unlike the number of circles, it falls when a large
    /// circle is split into smaller ones.
    pub(super) files_in_circles: usize,
    pub(super) orders: &'static [Order],
}

/// The numbers measured on 2026-11-28. `crate_lines` is a goal instead.
pub(super) const LIMITS: Limits = Limits {
    crate_lines: 12_000,
    circles: 5,
    files_per_circle: 2,
    files_in_circles: 10,
    orders: ORDERS,
};
