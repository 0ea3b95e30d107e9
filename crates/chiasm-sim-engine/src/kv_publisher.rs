//! Publishes and replays KV events, like vLLM's `ZmqEventPublisher`.

use std::collections::VecDeque;

use bytes::Bytes;
use chiasm_engine::wire::handshake::KvEventsConfig;
use chiasm_kv::event::KvEventBatch;
use tokio::sync::mpsc;
use zeromq::{Endpoint, PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::config::KvEvents;
use crate::error::SimError;
use crate::faults::Faults;

/// The sequence number of the message that ends a replay: −1.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// The bound sockets, and the batches that can be replayed.
pub(crate) struct KvPublisher {
    publisher: PubSocket,
    replay: Option<RouterSocket>,
    topic: Bytes,
    /// The batches that can be replayed, the oldest first.
    buffer: VecDeque<(u64, Bytes)>,
    buffer_steps: usize,
    next: u64,
    faults: Faults,
}

impl KvPublisher {
    /// Binds the sockets, and returns the configuration that the engine reports.
    ///
    /// # Errors
    ///
    /// Returns [`SimError::Bind`] if an address can't be bound.
    pub(crate) async fn bind(
        events: &KvEvents,
        faults: &Faults,
    ) -> Result<(Self, KvEventsConfig), SimError> {
        let mut publisher = PubSocket::new();
        let endpoint = bind(&mut publisher, &events.endpoint).await?;
        let mut replay = None;
        let mut replay_endpoint = None;
        if let Some(configured) = &events.replay_endpoint {
            let mut socket = RouterSocket::new();
            replay_endpoint = Some(bind(&mut socket, configured).await?);
            replay = Some(socket);
        }
        let config = KvEventsConfig {
            enable_kv_cache_events: true,
            publisher: "zmq".to_owned(),
            endpoint,
            replay_endpoint,
            buffer_steps: events.buffer_steps as u64,
            hwm: 100_000,
            max_queue_size: 100_000,
            topic: events.topic.clone(),
        };
        let publisher = Self {
            publisher,
            replay,
            topic: Bytes::from(events.topic.clone()),
            buffer: VecDeque::new(),
            buffer_steps: events.buffer_steps,
            next: 0,
            faults: faults.clone(),
        };
        Ok((publisher, config))
    }

    /// Publishes batches until `batches` is closed and empty.
    pub(crate) async fn run(mut self, mut batches: mpsc::UnboundedReceiver<KvEventBatch>) {
        loop {
            let request = async {
                match &mut self.replay {
                    Some(socket) => socket.recv().await.ok(),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                batch = batches.recv() => match batch {
                    Some(batch) => self.publish(&batch).await,
                    None => return,
                },
                request = request => match request {
                    Some(request) => self.replay(request.into_vec()).await,
                    None => self.replay = None,
                },
            }
        }
    }

    async fn publish(&mut self, batch: &KvEventBatch) {
        let sequence = self.next;
        let payload = Bytes::from(batch.encode());
        self.next += 1;
        if !self.faults.drop_kv_batches.contains(&sequence) {
            let frames = [self.topic.clone(), sequence_frame(sequence), payload.clone()];
            // A PUB socket without subscribers drops messages, so an error is only logged.
            if let Err(error) = self.publisher.send(message(frames)).await {
                tracing::debug!(%error, sequence, "could not publish KV events");
            }
        }
        self.buffer.push_back((sequence, payload));
        while self.buffer.len() > self.buffer_steps {
            self.buffer.pop_front();
        }
    }

    /// Answers a replay request `[identity, "", first sequence number]` with `[identity, "", topic,
    /// sequence number, payload]` for each batch, and an end mark.
    async fn replay(&mut self, request: Vec<Bytes>) {
        let [identity, _, first] = &request[..] else {
            tracing::warn!(
                frames = request.len(),
                "a replay request must have one sequence number after an empty frame"
            );
            return;
        };
        let first = first.iter().fold(0u64, |value, &byte| value << 8 | u64::from(byte));
        let Some(socket) = &mut self.replay else {
            return;
        };
        let requested = self.buffer.iter().filter(|(sequence, _)| *sequence >= first);
        let batches = requested.map(|(sequence, payload)| {
            (self.topic.clone(), sequence_frame(*sequence), payload.clone())
        });
        let end = (Bytes::new(), Bytes::from_static(&END_OF_REPLAY), Bytes::new());
        for (topic, sequence, payload) in batches.chain([end]) {
            let frames = [identity.clone(), Bytes::new(), topic, sequence, payload];
            if let Err(error) = socket.send(message(frames)).await {
                tracing::debug!(%error, "the client of a replay is gone");
                return;
            }
        }
    }
}

fn sequence_frame(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    let [first, rest @ ..] = &frames[..] else {
        return ZmqMessage::from(Bytes::new());
    };
    let mut message = ZmqMessage::from(first.clone());
    rest.iter().for_each(|frame| message.push_back(frame.clone()));
    message
}

/// Binds a socket and returns the address as vLLM reports it: a wildcard host and the real port.
async fn bind(socket: &mut impl Socket, endpoint: &str) -> Result<String, SimError> {
    let address = endpoint.replacen("tcp://*:", "tcp://0.0.0.0:", 1);
    match socket.bind(&address).await {
        Ok(Endpoint::Tcp(_, port)) => Ok(format!("tcp://*:{port}")),
        Ok(other) => Ok(other.to_string()),
        Err(source) => Err(SimError::Bind { endpoint: endpoint.to_owned(), source }),
    }
}
