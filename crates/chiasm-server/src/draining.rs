//! The state of a server that is about to end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set when the process is about to end: requests are still taken, but none should be sent. Clones
/// share it.
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
