//! What time it is for answers that age and for failures that are forgotten.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The machine's clocks, or what a test has moved them on to. Clones tell the same time.
///
/// Only what is remembered goes by it. Timeouts of connections and bodies run in the time of the
/// async runtime.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// Nanoseconds that both clocks are ahead of the machine's.
    ahead: Arc<AtomicU64>,
}

impl Clock {
    /// Lets time pass at once.
    pub fn advance(&self, by: Duration) {
        self.ahead.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }

    pub(crate) fn now(&self) -> Instant {
        Instant::now() + self.ahead()
    }

    pub(crate) fn date(&self) -> SystemTime {
        SystemTime::now() + self.ahead()
    }

    fn ahead(&self) -> Duration {
        Duration::from_nanos(self.ahead.load(Ordering::SeqCst))
    }
}
