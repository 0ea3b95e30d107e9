//! A fake worker whose behaviour each test chooses.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::BytesMut;
use chiasm_backend::{Backend, Connected, Connector, MediaDelivery, MediaObserver};
use chiasm_types::{BlockSize, WorkerId};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::connector::DynamoConnector;
use crate::directory::{EventSource, Events, Worker, Workers};
use crate::frame::TwoPart;
use crate::response_listener::ResponseListener;
use crate::tensors::ReadyTensors;
use crate::wire::Endpoint;

pub(super) const NAME: &str = "backend/generate/1f";

/// Listens for requests until it is dropped.
pub(super) struct FakeWorker {
    pub(super) address: SocketAddr,
    pub(super) requests: mpsc::UnboundedReceiver<ReceivedRequest>,
    serving: JoinHandle<()>,
}

/// A request that was acknowledged or refused.
pub(super) struct ReceivedRequest {
    pub(super) path: String,
    pub(super) control: Value,
    pub(super) body: Value,
}

/// The connection of an answer.
pub(super) struct AnswerConnection {
    pub(super) stream: TcpStream,
}

impl FakeWorker {
    /// Starts a worker that accepts all requests, or refuses them with `refusal` if it is not
    /// empty.
    pub(super) async fn start(refusal: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, requests) = mpsc::unbounded_channel();
        let serving = tokio::spawn(async move {
            // The connections end with this task.
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.spawn(serve(stream, sender.clone(), refusal));
            }
        });
        Self { address, requests, serving }
    }

    /// Starts a worker whose connections acknowledge `served` requests each, and close at the next
    /// request. It dies at the end of the last connection.
    pub(super) async fn closing(served: &'static [usize]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, requests) = mpsc::unbounded_channel();
        let serving = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            let (first_requests, mut beginning) = mpsc::unbounded_channel();
            let mut served = served.iter();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let (mut stream, _) = accepted.unwrap();
                        let begins = first_requests.clone();
                        let sender = sender.clone();
                        connections.spawn(async move {
                            // Connections that only watch the worker send no request.
                            if read_one(&mut stream, &sender).await.is_ok() {
                                let _ = begins.send(stream);
                            }
                        });
                    }
                    Some(mut stream) = beginning.recv() => {
                        let Some(count) = served.next() else { break };
                        for _ in 0..*count {
                            stream.write_u32(0).await.unwrap();
                            read_one(&mut stream, &sender).await.unwrap();
                        }
                        if served.len() == 0 {
                            break;
                        }
                    }
                }
            }
        });
        Self { address, requests, serving }
    }

    /// Ends the worker as if its process were killed.
    pub(super) async fn kill(&mut self) {
        self.serving.abort();
        let _ = (&mut self.serving).await;
    }

    /// Returns the worker's entry in a directory.
    pub(super) fn registered(&self, has_events: bool) -> Workers {
        let endpoint = |name: &str| Endpoint {
            address: self.address.to_string(),
            path: format!("1f/ns/backend/{name}"),
        };
        let source =
            EventSource { query: endpoint("query"), worker_id: 31, dp_rank: 0, channel: None };
        let worker = Worker {
            endpoint: endpoint("generate"),
            model: "tiny".to_owned(),
            context: 4096,
            block_size: BlockSize::new(16).unwrap(),
            total_blocks: 100,
            max_running: 8,
            max_batched_tokens: 2048,
            events: if has_events {
                Events::At(source)
            } else {
                Events::None("it publishes no KV events")
            },
        };
        Workers { by_name: BTreeMap::from([(NAME.to_owned(), Arc::new(worker))]) }
    }

    /// Returns the same entry with a channel of published events.
    pub(super) fn registered_with_channel(&self, endpoint: &str) -> Workers {
        let mut workers = self.registered(true);
        let worker = Arc::make_mut(workers.by_name.get_mut(NAME).unwrap());
        let Events::At(source) = &mut worker.events else { panic!("events are registered") };
        source.channel = Some(endpoint.to_owned());
        workers
    }

    pub(super) async fn connect(&self) -> Arc<dyn Backend> {
        self.connect_with(false, false).await
    }

    pub(super) async fn connect_with(
        &self,
        has_events: bool,
        takes_images: bool,
    ) -> Arc<dyn Backend> {
        self.connect_to(has_events, takes_images, None).await
    }

    /// Connects with image tensors.
    pub(super) async fn connect_with_tensors(&self, tensors: ReadyTensors) -> Arc<dyn Backend> {
        self.connect_to(false, true, Some(tensors)).await
    }

    async fn connect_to(
        &self,
        has_events: bool,
        takes_images: bool,
        tensors: Option<ReadyTensors>,
    ) -> Arc<dyn Backend> {
        let (_, workers) = watch::channel(self.registered(has_events));
        let connector = connector(workers).with_images(takes_images).with_tensors(tensors);
        let Connected { backend, .. } =
            connector.connect(WorkerId(0), Arc::new(Unobserved)).await.unwrap();
        backend
    }

    pub(super) async fn next_request(&mut self) -> ReceivedRequest {
        self.requests.recv().await.unwrap()
    }
}

pub(super) fn connector(workers: watch::Receiver<Workers>) -> DynamoConnector {
    DynamoConnector::new(NAME, workers, ResponseListener::new(None, None), Arc::from(&b"p"[..]))
}

async fn serve(
    mut stream: TcpStream,
    requests: mpsc::UnboundedSender<ReceivedRequest>,
    refusal: &str,
) -> std::io::Result<()> {
    loop {
        serve_one(&mut stream, &requests, refusal).await?;
    }
}

async fn serve_one(
    stream: &mut TcpStream,
    requests: &mpsc::UnboundedSender<ReceivedRequest>,
    refusal: &str,
) -> std::io::Result<()> {
    read_one(stream, requests).await?;
    stream.write_u32(refusal.len() as u32).await?;
    stream.write_all(refusal.as_bytes()).await
}

async fn read_one(
    stream: &mut TcpStream,
    requests: &mpsc::UnboundedSender<ReceivedRequest>,
) -> std::io::Result<()> {
    let length = stream.read_u16().await?;
    let path = read(stream, length.into()).await?;
    let length = stream.read_u16().await?;
    assert_eq!(read(stream, length.into()).await?, b"{}");
    let length = stream.read_u32().await?;
    let mut payload = BytesMut::from(&read(stream, length as usize).await?[..]);
    let bounds = crate::frame::Bounds { header: 1 << 20, body: 1 << 20 };
    let TwoPart { header, body } = TwoPart::decode(&mut payload, bounds).unwrap().unwrap();
    let path = String::from_utf8(path).unwrap();
    let control = serde_json::from_slice(&header).unwrap();
    let body = rmp_serde::from_slice(&body).unwrap();
    let _ = requests.send(ReceivedRequest { path, control, body });
    Ok(())
}

async fn read(stream: &mut TcpStream, length: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

impl ReceivedRequest {
    /// Opens the connection of the answer and sends the prologue.
    pub(super) async fn open_answer(&self) -> AnswerConnection {
        let mut connection = self.open_answer_with(json!({"error": null})).await;
        connection.stream.flush().await.unwrap();
        connection
    }

    /// Opens the connection of the answer with another prologue.
    pub(super) async fn open_answer_with(&self, prologue: Value) -> AnswerConnection {
        let info: Value =
            serde_json::from_str(self.control["connection_info"]["info"].as_str().unwrap())
                .unwrap();
        let stream = TcpStream::connect(info["address"].as_str().unwrap()).await.unwrap();
        let mut connection = AnswerConnection { stream };
        connection.header(&json!({"subject": info["subject"], "stream_type": "response"})).await;
        connection.header(&prologue).await;
        connection
    }
}

impl AnswerConnection {
    async fn header(&mut self, header: &Value) {
        self.raw(&TwoPart::encode(header.to_string().as_bytes(), b"")).await;
    }

    pub(super) async fn raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Sends an output of an engine.
    pub(super) async fn output(&mut self, output: Value) {
        self.item(json!({"data": {"data": output}, "complete_final": false})).await;
    }

    pub(super) async fn item(&mut self, item: Value) {
        self.raw(&TwoPart::encode(b"", &rmp_serde::to_vec_named(&item).unwrap())).await;
    }

    /// Sends the end of the answer.
    pub(super) async fn end(&mut self) {
        self.item(json!({"complete_final": true})).await;
        self.header(&json!("sentinel")).await;
    }

    /// Returns the bytes received from the frontend until the connection ends.
    pub(super) async fn received(mut self) -> Vec<u8> {
        let mut received = Vec::new();
        let _ = self.stream.read_to_end(&mut received).await;
        received
    }
}

pub(super) struct Unobserved;

impl MediaObserver for Unobserved {
    fn delivered(&self, _: MediaDelivery) {}
    fn missed(&self, _: usize) {}
    fn stepped_down(&self, _: &'static str, _: &dyn std::fmt::Display) {}
}
