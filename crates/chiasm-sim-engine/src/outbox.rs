//! Queues of messages for the frontend's output sockets.

use bytes::Bytes;
use chiasm_engine::wire::{EngineCoreOutputs, output};
use tokio::sync::mpsc;

/// The queues of the output sockets, by `client_index`. An empty message ends a queue.
#[derive(Clone)]
pub(crate) struct Outbox {
    rank: u32,
    queues: Vec<mpsc::UnboundedSender<Vec<Bytes>>>,
}

impl Outbox {
    /// Creates the queues of `clients` clients; also returns their receivers, by client.
    pub(crate) fn new(
        rank: u16,
        clients: usize,
    ) -> (Self, Vec<mpsc::UnboundedReceiver<Vec<Bytes>>>) {
        let (queues, receivers) = (0..clients).map(|_| mpsc::unbounded_channel()).unzip();
        (Self { rank: u32::from(rank), queues }, receivers)
    }

    /// Queues a message for one client.
    pub(crate) fn send(&self, client: u32, mut outputs: EngineCoreOutputs) {
        outputs.engine_index = self.rank;
        match self.queues.get(client as usize) {
            // The receiver is gone only during shutdown.
            Some(queue) => drop(queue.send(output::encode(&outputs))),
            None => tracing::warn!(
                client,
                "dropped a message: the frontend has no output socket with this index"
            ),
        }
    }

    /// Ends the queues. Later messages are lost.
    pub(crate) fn close(&self) {
        for queue in &self.queues {
            drop(queue.send(Vec::new()));
        }
    }

    /// Queues ENGINE_CORE_DEAD for all clients.
    pub(crate) fn send_dead(&self) {
        for queue in &self.queues {
            drop(queue.send(output::encode_dead()));
        }
    }
}
