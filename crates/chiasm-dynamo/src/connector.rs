//! Connecting to one worker, for as long as it is named.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{
    Backend, Capabilities, ConnectError, Connected, Connector, Elsewhere, HandOff, InputForm,
    KeyScheme, KvSource, LargestItem, Locality, MediaForm, MediaObserver, PlaceholderForm,
    PlanClass, Supports, VllmItems,
};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::backend::{DynamoBackend, Images};
use crate::call_home::CallHome;
use crate::directory::{Events, Worker, Workers};
use crate::request::SUPPORTS;
use crate::tensors::ReadyTensors;
use crate::wire::Wire;

/// How long a worker that is named may take to name where its events are, and where they are
/// published.
const EVENTS_WITHIN: Duration = Duration::from_secs(5);
/// Before one that is named and can't be reached is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// It is there or gone: who is started again has another name.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Connects to one worker.
pub struct DynamoConnector {
    name: String,
    workers: watch::Receiver<Workers>,
    home: CallHome,
    processor: Arc<[u8]>,
    takes_images: bool,
    largest_item: LargestItem,
    tensors: Option<ReadyTensors>,
    /// Whether it is connected to.
    is_up: watch::Sender<bool>,
}

impl DynamoConnector {
    /// A connector for the worker that [`Workers::names`] calls so, among those that `workers`
    /// tells of. `processor` is that of the model that is served here.
    pub fn new(
        name: &str,
        workers: watch::Receiver<Workers>,
        home: CallHome,
        processor: Arc<[u8]>,
    ) -> Self {
        let is_up = watch::Sender::new(false);
        Self {
            name: name.to_owned(),
            workers,
            home,
            processor,
            takes_images: false,
            largest_item: LargestItem::unknown(),
            tensors: None,
            is_up,
        }
    }

    /// The same for a worker that takes images.
    #[must_use]
    pub fn with_images(mut self, takes_images: bool) -> Self {
        self.takes_images = takes_images;
        self
    }

    /// The same for a worker that is given its images as such tensors, too, if it runs on this
    /// machine.
    #[must_use]
    pub fn with_tensors(mut self, tensors: Option<ReadyTensors>) -> Self {
        self.tensors = tensors;
        self
    }

    /// The same for a model whose largest item is known: a worker does not tell what its encoder
    /// cache holds.
    #[must_use]
    pub fn with_largest_item(mut self, largest_item: LargestItem) -> Self {
        self.largest_item = largest_item;
        self
    }

    /// Tells whether the worker is connected to.
    pub fn is_up(&self) -> watch::Receiver<bool> {
        self.is_up.subscribe()
    }

    /// The worker, and a connection to it, once it can be reached; `None` if nothing names it any
    /// more. What has died is named until its lease ends.
    async fn reached(&self) -> Option<(Arc<Worker>, TcpStream)> {
        let mut is_told = false;
        loop {
            let worker = self.named().await?;
            match Wire::new(&worker.place.address, self.home.clone()).connect().await {
                Ok(stream) => return Some((worker, stream)),
                Err(error) if !std::mem::replace(&mut is_told, true) => {
                    tracing::warn!(worker = self.name, %error, "a worker of Dynamo is named, and can't be connected to");
                }
                Err(_) => {}
            }
            sleep(AGAIN).await;
        }
    }

    /// What is named of the worker, once it has said all of where its events are, or too late.
    /// These are keys of their own.
    async fn named(&self) -> Option<Arc<Worker>> {
        let mut workers = self.workers.clone();
        let of = |workers: &Workers| workers.by_name.get(&self.name).cloned();
        let is_whole = |workers: &Workers| match of(workers).as_ref().map(|worker| &worker.events) {
            None | Some(Events::None(_)) => true,
            Some(Events::At(source)) => source.channel.is_some(),
            Some(Events::Expected) => false,
        };
        let whole = timeout(EVENTS_WITHIN, workers.wait_for(is_whole))
            .await
            .ok()
            .and_then(|whole| of(&*whole.ok()?));
        whole.or_else(|| of(&self.workers.borrow()))
    }
}

impl Connector for DynamoConnector {
    fn connect(
        &self,
        _worker: WorkerId,
        observer: Arc<dyn MediaObserver>,
    ) -> BoxFuture<'_, Result<Connected, ConnectError>> {
        async move {
            let failed = |why: String| ConnectError::new(format!("{}: {why}", self.name));
            let (worker, stream) = self
                .reached()
                .await
                .ok_or_else(|| failed("nothing names it any more".to_owned()))?;
            let unconnected = |error: std::io::Error| failed(error.to_string());
            let peer = stream.peer_addr().map_err(unconnected)?.ip().to_canonical();
            let is_here =
                is_here(stream.local_addr().map_err(unconnected)?.ip().to_canonical(), peer);
            let mut capabilities = capabilities(&worker, self.processor.clone(), peer);
            if self.takes_images {
                capabilities.media = MediaForm::Encoded;
                capabilities.supports.media = true;
                // As much as vLLM has room for, though other engines may be behind it: too much is
                // the lesser error.
                let step = worker.max_batched_tokens;
                let cache = self.largest_item.encoder_cache(step, worker.context);
                capabilities.encoder_cache_tokens = cache.unwrap_or(worker.context as u64);
            }
            let tensors =
                self.tensors.as_ref().filter(|_| self.takes_images).map(|tensors| match is_here {
                    true => Images::Tensors(tensors.clone()),
                    false => Images::OfAnotherMachine,
                });
            if let Some(Images::Tensors(tensors)) = &tensors {
                capabilities.media = MediaForm::Tensors(tensors.format);
                tracing::info!(
                    worker = self.name,
                    "images are given to a worker of Dynamo as tensors in shared memory"
                );
            }
            let images = tensors.unwrap_or(Images::AsTheyCame);
            let home = self.home.clone();
            let backend =
                DynamoBackend::new(self.name.clone(), worker, home, capabilities, images, observer);
            let backend = Arc::new(backend);
            tokio::spawn(tell_up(self.is_up.clone(), backend.when_ended()));
            Ok(Connected { backend: backend as Arc<dyn Backend>, life: Box::new(Elsewhere) })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        format!("the worker {} of Dynamo", self.name)
    }

    fn longest_pause(&self) -> Duration {
        LONGEST_PAUSE
    }
}

/// Whether who is connected to at `peer`, from `local`, is on this machine: its own addresses are
/// reached from themselves.
fn is_here(local: IpAddr, peer: IpAddr) -> bool {
    peer.is_loopback() || local == peer
}

/// Tells that a worker is connected to until it has ended.
async fn tell_up(is_up: watch::Sender<bool>, ended: impl Future) {
    is_up.send_replace(true);
    ended.await;
    is_up.send_replace(false);
}

fn capabilities(worker: &Worker, processor: Arc<[u8]>, peer: IpAddr) -> Capabilities {
    let unknown = |why: &str| KvSource::Unknown { why: why.to_owned() };
    Capabilities {
        engine: "a worker of Dynamo".to_owned(),
        class: PlanClass {
            processor,
            vllm_items: VllmItems::None,
            placeholders: PlaceholderForm::Marker,
            keys: KeyScheme::Dynamo,
            block_size: worker.block_size,
        },
        role: Role::Aggregated,
        embedding_store_bytes: 0,
        max_model_len: worker.context,
        max_batched_tokens: worker.max_batched_tokens,
        max_running: worker.max_running,
        total_blocks: worker.total_blocks,
        encoder_cache_tokens: 0,
        receiver_cache_bytes: 0,
        max_loras: 0,
        adapters: BTreeMap::new(),
        supports: Supports { media: false, ..SUPPORTS },
        input: InputForm::Tokens,
        media: MediaForm::None,
        hand_off: HandOff::None,
        locality: if peer.is_loopback() { Locality::Here } else { Locality::Host(peer) },
        private_network: None,
        kv: match worker.events {
            Events::At(_) => KvSource::Backend,
            Events::Expected => unknown("it has not said where it publishes its KV events"),
            Events::None(why) => unknown(why),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_here_if_its_address_is_ours() {
        let here = |local: &str, peer: &str| is_here(local.parse().unwrap(), peer.parse().unwrap());
        assert!(
            here("127.0.0.1", "127.0.0.2") && here("10.0.0.1", "10.0.0.1") && here("::1", "::1")
        );
        assert!(!here("10.0.0.1", "10.0.0.2") && !here("fd00::1", "fd00::2"));
    }
}
