//! The latest route of a request, for the log line of a request that ends without an answer.

use std::sync::{Arc, Mutex, PoisonError};

use chiasm_request::RouteOutcome;

/// The latest route of one client request, `None` until a worker was picked. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LastRoute(Arc<Mutex<Option<RouteOutcome>>>);

impl LastRoute {
    /// Sets the route, as far as it is known.
    pub(crate) fn set(&self, route: RouteOutcome) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(route);
    }

    /// Returns the route.
    pub fn get(&self) -> Option<RouteOutcome> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
