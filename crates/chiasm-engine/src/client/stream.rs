//! The answer to one request, as it comes.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::delivery::Delivered;
use super::registry::Arrival;
use super::shared::Shared;

/// Outputs of one request, in order. Dropping it before the last one aborts the request in the engine.
#[derive(Debug)]
pub struct OutputStream {
    request_id: String,
    arrivals: mpsc::UnboundedReceiver<Arrival>,
    shared: Arc<Shared>,
    delivered: Delivered,
}

impl OutputStream {
    pub(super) fn new(
        request_id: String,
        arrivals: mpsc::UnboundedReceiver<Arrival>,
        shared: Arc<Shared>,
        delivered: Delivered,
    ) -> Self {
        Self { request_id, arrivals, shared, delivered }
    }

    /// How the request's media items travelled.
    pub fn delivered(&self) -> Delivered {
        self.delivered
    }

    /// The request's id.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// The next output. `None` after the one with a finish reason, and after an error.
    ///
    /// Whether a request that ends with [`EngineError::Dead`](crate::EngineError::Dead) may be sent to another
    /// engine is up to the caller, who knows what has been passed on. Cancel safe.
    pub async fn next(&mut self) -> Option<Arrival> {
        self.arrivals.recv().await
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        self.shared.abort(&self.request_id);
    }
}
