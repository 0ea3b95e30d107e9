//! The order of a crate's top-level modules: each may use those of the levels below its own.

use std::collections::BTreeSet;

use super::references::References;
use super::source::Package;

/// Lines that are printed, in order.
pub(super) type Lines = BTreeSet<String>;

/// The levels of a crate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) package: &'static str,
    /// The top level first.
    pub(super) levels: &'static [Level],
}

/// The modules of one level.
#[derive(Clone, Copy, Debug)]
pub(super) enum Level {
    /// Modules that may not use each other.
    Separate(&'static [&'static str]),
    /// Modules that may use each other.
    #[allow(dead_code, reason = "no crate needs it yet")]
    Together(&'static [&'static str]),
}

/// The crates that have an order. Others are not checked.
pub(super) const ORDERS: &[Order] = &[Order {
    package: "chiasm-otlp",
    levels: &[Level::Separate(&["exporter"]), Level::Separate(&["endpoint", "span"])],
}];

impl Level {
    fn modules(self) -> &'static [&'static str] {
        let (Self::Separate(modules) | Self::Together(modules)) = self;
        modules
    }
}

impl Order {
    fn level(&self, module: &str) -> Option<usize> {
        self.levels.iter().position(|level| level.modules().contains(&module))
    }

    fn allows(&self, from: &str, to: &str) -> bool {
        match (self.level(from), self.level(to)) {
            (Some(from), Some(to)) if from == to => matches!(self.levels[from], Level::Together(_)),
            (Some(from), Some(to)) => from < to,
            // Reported as a module without a level.
            _ => true,
        }
    }

    /// Returns a line for each arrow against the order, and for each module that only the crate or
    /// only the order has.
    pub(super) fn violations(&self, package: &Package, references: &References) -> Lines {
        let name = self.package;
        let mut lines = Lines::new();
        let modules = package.modules.iter().filter_map(|module| module.top_level.as_deref());
        let modules: BTreeSet<&str> = modules.collect();
        let ordered = self.levels.iter().flat_map(|level| level.modules()).copied();
        let ordered: BTreeSet<&str> = ordered.collect();
        for module in modules.difference(&ordered) {
            lines.insert(format!("{name}: `{module}` has no level in structure/orders.rs"));
        }
        for module in ordered.difference(&modules) {
            lines.insert(format!("{name}: structure/orders.rs names `{module}`, which is gone"));
        }
        for reference in references {
            let from = &package.modules[reference.from].top_level;
            let to = &package.modules[reference.to].top_level;
            if let (Some(from), Some(to)) = (from, to)
                && from != to
                && !self.allows(from, to)
            {
                lines.insert(format!("{name}: `{from}` may not use `{to}::{}`", reference.item));
            }
        }
        lines
    }
}
