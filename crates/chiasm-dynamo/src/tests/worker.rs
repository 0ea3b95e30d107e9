//! A worker that does what a test has it do.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::BytesMut;
use chiasm_backend::{Backend, Connected, Connector, Delivered, MediaObserver};
use chiasm_types::{BlockSize, WorkerId};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::call_home::CallHome;
use crate::connector::DynamoConnector;
use crate::directory::{EventSource, Events, Worker, Workers};
use crate::frame::TwoPart;
use crate::tensors::ReadyTensors;
use crate::wire::Place;

pub(super) const NAME: &str = "backend/generate/1f";

/// Listens where a worker takes requests, until it is dropped.
pub(super) struct FakeWorker {
    pub(super) address: SocketAddr,
    pub(super) asked: mpsc::UnboundedReceiver<Asked>,
    serving: JoinHandle<()>,
}

/// A request, which was acknowledged.
pub(super) struct Asked {
    pub(super) path: String,
    pub(super) control: Value,
    pub(super) body: Value,
}

/// The connection over which an answer goes home.
pub(super) struct Home {
    pub(super) stream: TcpStream,
}

impl FakeWorker {
    /// One that takes all requests, or refuses them with these words.
    pub(super) async fn start(words: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, asked) = mpsc::unbounded_channel();
        let serving = tokio::spawn(async move {
            // All of them end with this.
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.spawn(serve(stream, sender.clone(), words));
            }
        });
        Self { address, asked, serving }
    }

    /// Starts a worker whose connections acknowledge `served` requests each, and close at the next
    /// request. It dies at the end of the last connection.
    pub(super) async fn closing(served: &'static [usize]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, asked) = mpsc::unbounded_channel();
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
        Self { address, asked, serving }
    }

    /// Ends like a worker whose process is killed.
    pub(super) async fn kill(&mut self) {
        self.serving.abort();
        let _ = (&mut self.serving).await;
    }

    /// Returns its entry in a directory.
    pub(super) fn named(&self, has_events: bool) -> Workers {
        let place = |endpoint: &str| Place {
            address: self.address.to_string(),
            path: format!("1f/ns/backend/{endpoint}"),
        };
        let source =
            EventSource { query: place("query"), worker_id: 31, dp_rank: 0, channel: None };
        let worker = Worker {
            place: place("generate"),
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

    /// The same once it has named where its events are published.
    pub(super) fn published_at(&self, endpoint: &str) -> Workers {
        let mut workers = self.named(true);
        let worker = Arc::make_mut(workers.by_name.get_mut(NAME).unwrap());
        let Events::At(source) = &mut worker.events else { panic!("it has events") };
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

    /// To one that is given its images as tensors.
    pub(super) async fn connect_with_tensors(&self, tensors: ReadyTensors) -> Arc<dyn Backend> {
        self.connect_to(false, true, Some(tensors)).await
    }

    async fn connect_to(
        &self,
        has_events: bool,
        takes_images: bool,
        tensors: Option<ReadyTensors>,
    ) -> Arc<dyn Backend> {
        let (_, workers) = watch::channel(self.named(has_events));
        let connector = connector(workers).with_images(takes_images).with_tensors(tensors);
        let Connected { backend, .. } =
            connector.connect(WorkerId(0), Arc::new(Unobserved)).await.unwrap();
        backend
    }

    pub(super) async fn asked(&mut self) -> Asked {
        self.asked.recv().await.unwrap()
    }
}

pub(super) fn connector(workers: watch::Receiver<Workers>) -> DynamoConnector {
    DynamoConnector::new(NAME, workers, CallHome::new(None, None), Arc::from(&b"p"[..]))
}

async fn serve(
    mut stream: TcpStream,
    asked: mpsc::UnboundedSender<Asked>,
    words: &str,
) -> std::io::Result<()> {
    loop {
        serve_one(&mut stream, &asked, words).await?;
    }
}

async fn serve_one(
    stream: &mut TcpStream,
    asked: &mpsc::UnboundedSender<Asked>,
    words: &str,
) -> std::io::Result<()> {
    read_one(stream, asked).await?;
    stream.write_u32(words.len() as u32).await?;
    stream.write_all(words.as_bytes()).await
}

async fn read_one(
    stream: &mut TcpStream,
    asked: &mpsc::UnboundedSender<Asked>,
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
    let _ = asked.send(Asked { path, control, body });
    Ok(())
}

async fn read(stream: &mut TcpStream, length: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

impl Asked {
    /// Calls home, and opens the answer.
    pub(super) async fn call(&self) -> Home {
        let mut home = self.call_with(json!({"error": null})).await;
        home.stream.flush().await.unwrap();
        home
    }

    /// The same with another opening.
    pub(super) async fn call_with(&self, prologue: Value) -> Home {
        let info: Value =
            serde_json::from_str(self.control["connection_info"]["info"].as_str().unwrap())
                .unwrap();
        let stream = TcpStream::connect(info["address"].as_str().unwrap()).await.unwrap();
        let mut home = Home { stream };
        home.header(&json!({"subject": info["subject"], "stream_type": "response"})).await;
        home.header(&prologue).await;
        home
    }
}

impl Home {
    async fn header(&mut self, header: &Value) {
        self.raw(&TwoPart::encode(header.to_string().as_bytes(), b"")).await;
    }

    pub(super) async fn raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// A message of an engine.
    pub(super) async fn output(&mut self, output: Value) {
        self.item(json!({"data": {"data": output}, "complete_final": false})).await;
    }

    pub(super) async fn item(&mut self, item: Value) {
        self.raw(&TwoPart::encode(b"", &rmp_serde::to_vec_named(&item).unwrap())).await;
    }

    /// All has come.
    pub(super) async fn end(&mut self) {
        self.item(json!({"complete_final": true})).await;
        self.header(&json!("sentinel")).await;
    }

    /// Returns the bytes that come back until the connection ends.
    pub(super) async fn told(mut self) -> Vec<u8> {
        let mut told = Vec::new();
        let _ = self.stream.read_to_end(&mut told).await;
        told
    }
}

pub(super) struct Unobserved;

impl MediaObserver for Unobserved {
    fn delivered(&self, _: Delivered) {}
    fn missed(&self, _: usize) {}
    fn stepped_down(&self, _: &'static str, _: &dyn std::fmt::Display) {}
}
