//! The state of a server that is about to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A flag that is set when the process is about to end: requests are still accepted but should be
/// sent elsewhere. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub(crate) struct Draining(Arc<AtomicBool>);

impl Draining {
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
