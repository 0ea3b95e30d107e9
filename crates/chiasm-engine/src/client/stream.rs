//! The answer to one request, as it comes.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use chiasm_backend::inbox::Receiver;

use super::connection::Connection;
use super::delivery::Delivered;
use super::registry::Arrival;
use crate::error::EngineError;
use crate::wire::EngineCoreOutput;

/// Outputs of one request, in order. Dropping it before the last one aborts the request in the
/// engine.
#[derive(Debug)]
pub struct OutputStream {
    request_id: String,
    arrivals: Receiver<Arrival>,
    connection: Arc<Connection>,
    delivered: Delivered,
    /// The error that too much was unread has been returned.
    has_failed: bool,
}

impl OutputStream {
    pub(super) fn new(
        request_id: String,
        arrivals: Receiver<Arrival>,
        connection: Arc<Connection>,
        delivered: Delivered,
    ) -> Self {
        Self { request_id, arrivals, connection, delivered, has_failed: false }
    }

    /// How the request's media items travelled.
    pub fn delivered(&self) -> Delivered {
        self.delivered
    }

    /// The request's id.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// The poll form of [`next`](Self::next), for who waits for several streams at once. Without
    /// room for what outputs mostly don't have.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Arrival>> {
        let arrival = std::task::ready!(self.arrivals.poll_next(context));
        if arrival.is_none() && !self.has_failed && self.arrivals.is_cut() {
            self.has_failed = true;
            return Poll::Ready(Some(Err(EngineError::Unread)));
        }
        Poll::Ready(arrival)
    }

    /// The next output. `None` after the one with a finish reason, and after an error.
    ///
    /// Whether a request that ends with [`EngineError::Dead`](crate::EngineError::Dead) may be sent
    /// to another engine is up to the caller, who knows what has been passed on. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Box<EngineCoreOutput>, EngineError>> {
        let arrival = poll_fn(|context| self.poll_next(context)).await?;
        Some(arrival.map(|brought| brought.into_output(&self.request_id)))
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        self.connection.abort(&self.request_id);
    }
}
