//! The stream of outputs of one request.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use chiasm_backend::inbox::Receiver;

use super::connection::Connection;
use super::delivery::ItemDelivery;
use super::registry::StreamItem;
use crate::error::EngineError;
use crate::wire::EngineCoreOutput;

/// The outputs of one request, in order. Dropping the stream before its last output aborts the
/// request in the engine.
#[derive(Debug)]
pub struct OutputStream {
    request_id: String,
    receiver: Receiver<StreamItem>,
    connection: Arc<Connection>,
    delivered: ItemDelivery,
    /// `true` once [`EngineError::Unread`] has been returned for a stream that was cut.
    has_failed: bool,
}

impl OutputStream {
    pub(super) fn new(
        request_id: String,
        receiver: Receiver<StreamItem>,
        connection: Arc<Connection>,
        delivered: ItemDelivery,
    ) -> Self {
        Self { request_id, receiver, connection, delivered, has_failed: false }
    }

    /// Returns the number of the request's media items by their way to the engine.
    pub fn delivered(&self) -> ItemDelivery {
        self.delivered
    }

    /// Returns the request's id.
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Polls for the next output in its compact form; lets one task poll several streams.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<StreamItem>> {
        let item = std::task::ready!(self.receiver.poll_next(context));
        if item.is_none() && !self.has_failed && self.receiver.is_cut() {
            self.has_failed = true;
            return Poll::Ready(Some(Err(EngineError::Unread)));
        }
        Poll::Ready(item)
    }

    /// Returns the next output; `None` after the output with a finish reason, and after an error.
    /// Cancel-safe.
    ///
    /// The caller decides whether to send a request that ends with
    /// [`EngineError::Dead`](crate::EngineError::Dead) to another engine.
    pub async fn next(&mut self) -> Option<Result<Box<EngineCoreOutput>, EngineError>> {
        let item = poll_fn(|context| self.poll_next(context)).await?;
        Some(item.map(|payload| payload.into_output(&self.request_id)))
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        self.connection.abort(&self.request_id);
    }
}
