//! The answer to one request, as it comes.

use std::sync::Arc;

use tokio::sync::mpsc;

use super::registry::Arrival;
use super::shared::Shared;

/// Outputs of one request, in order. Dropping it before the last one aborts the request in the engine.
#[derive(Debug)]
pub struct OutputStream {
    request_id: String,
    arrivals: mpsc::UnboundedReceiver<Arrival>,
    shared: Arc<Shared>,
    items_with_data: usize,
}

impl OutputStream {
    pub(super) fn new(
        request_id: String,
        arrivals: mpsc::UnboundedReceiver<Arrival>,
        shared: Arc<Shared>,
        items_with_data: usize,
    ) -> Self {
        Self { request_id, arrivals, shared, items_with_data }
    }

    /// Media items of the request that travelled with their data; the others were in the engine's receiver cache.
    pub fn items_with_data(&self) -> usize {
        self.items_with_data
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
