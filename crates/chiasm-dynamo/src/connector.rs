//! Connects to one worker, for as long as it is registered.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{
    Backend, Capabilities, ConnectError, Connected, Connector, HandOff, InputForm, KeyScheme,
    KvSource, LargestItem, Locality, MediaForm, MediaObserver, PlaceholderForm, PlanClass,
    RemoteLifecycle, Supports, VllmItems,
};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::backend::{DynamoBackend, Images};
use crate::directory::{Events, Worker, Workers};
use crate::request::SUPPORTS;
use crate::response_listener::ResponseListener;
use crate::tensors::ReadyTensors;
use crate::wire::Wire;

/// The time that a registered worker gets to register its event source and the channel of its
/// published events.
const EVENT_SOURCE_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause before a registered but unreachable worker is tried again.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The maximum pause between two connections. A longer pause is of no use, because a restarted
/// worker has another name.
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(2);

/// Connects to one worker.
pub struct DynamoConnector {
    name: String,
    workers: watch::Receiver<Workers>,
    listener: ResponseListener,
    processor: Arc<[u8]>,
    takes_images: bool,
    largest_item: LargestItem,
    tensors: Option<ReadyTensors>,
    /// `true` while a backend is connected.
    is_up: watch::Sender<bool>,
}

impl DynamoConnector {
    /// Creates a connector for the worker with the name `name` in `workers`, as
    /// [`Workers::names`] returns it. `processor` identifies the processor of the model served
    /// here.
    pub fn new(
        name: &str,
        workers: watch::Receiver<Workers>,
        listener: ResponseListener,
        processor: Arc<[u8]>,
    ) -> Self {
        let is_up = watch::Sender::new(false);
        Self {
            name: name.to_owned(),
            workers,
            listener,
            processor,
            takes_images: false,
            largest_item: LargestItem::unknown(),
            tensors: None,
            is_up,
        }
    }

    /// Sets whether the worker accepts images.
    #[must_use]
    pub fn with_images(mut self, takes_images: bool) -> Self {
        self.takes_images = takes_images;
        self
    }

    /// Sets the tensors of images that the worker gets if it runs on this machine.
    #[must_use]
    pub fn with_tensors(mut self, tensors: Option<ReadyTensors>) -> Self {
        self.tensors = tensors;
        self
    }

    /// Sets the largest item of the model. Workers do not report the size of their encoder cache.
    #[must_use]
    pub fn with_largest_item(mut self, largest_item: LargestItem) -> Self {
        self.largest_item = largest_item;
        self
    }

    /// Returns a receiver that holds `true` while the worker is connected.
    pub fn is_up(&self) -> watch::Receiver<bool> {
        self.is_up.subscribe()
    }

    /// Waits until the worker is reachable and returns it with a connection. Returns `None` if the
    /// worker is no longer registered. A dead worker stays registered until its lease ends.
    async fn wait_until_reachable(&self) -> Option<(Arc<Worker>, TcpStream)> {
        let mut has_warned = false;
        loop {
            let worker = self.wait_until_complete().await?;
            match Wire::new(&worker.endpoint.address, self.listener.clone()).connect().await {
                Ok(stream) => return Some((worker, stream)),
                Err(error) if !std::mem::replace(&mut has_warned, true) => {
                    tracing::warn!(
                        worker = self.name,
                        %error,
                        "a registered Dynamo worker can't be connected to"
                    );
                }
                Err(_) => {}
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Waits until the worker's entry is complete, or until [`EVENT_SOURCE_TIMEOUT`], and returns
    /// it. The event source and the channel have keys of their own, which may be written later.
    async fn wait_until_complete(&self) -> Option<Arc<Worker>> {
        let mut workers = self.workers.clone();
        let entry = |workers: &Workers| workers.by_name.get(&self.name).cloned();
        let is_complete =
            |workers: &Workers| match entry(workers).as_ref().map(|worker| &worker.events) {
                None | Some(Events::None(_)) => true,
                Some(Events::At(source)) => source.channel.is_some(),
                Some(Events::Expected) => false,
            };
        let complete = timeout(EVENT_SOURCE_TIMEOUT, workers.wait_for(is_complete))
            .await
            .ok()
            .and_then(|workers| entry(&*workers.ok()?));
        complete.or_else(|| entry(&self.workers.borrow()))
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
                .wait_until_reachable()
                .await
                .ok_or_else(|| failed("it is not registered any more".to_owned()))?;
            let unconnected = |error: std::io::Error| failed(error.to_string());
            let peer = stream.peer_addr().map_err(unconnected)?.ip().to_canonical();
            let is_here =
                is_here(stream.local_addr().map_err(unconnected)?.ip().to_canonical(), peer);
            let mut capabilities = capabilities(&worker, self.processor.clone(), peer);
            if self.takes_images {
                capabilities.media = MediaForm::Encoded;
                capabilities.supports.media = true;
                // The size that vLLM would use, though the engine may be another one. Too large a
                // value does less harm than too small a value.
                let step = worker.max_batched_tokens;
                let cache = self.largest_item.encoder_cache(step, worker.context);
                capabilities.encoder_cache_tokens = cache.unwrap_or(worker.context as u64);
            }
            let tensors = self.tensors.as_ref().filter(|_| self.takes_images).map(|tensors| {
                if is_here { Images::Tensors(tensors.clone()) } else { Images::OtherMachine }
            });
            if let Some(Images::Tensors(tensors)) = &tensors {
                capabilities.media = MediaForm::Tensors(tensors.format);
                tracing::info!(
                    worker = self.name,
                    "images are sent to a Dynamo worker as tensors in shared memory"
                );
            }
            let images = tensors.unwrap_or(Images::Encoded);
            let backend = DynamoBackend::new(
                self.name.clone(),
                worker,
                self.listener.clone(),
                capabilities,
                images,
                observer,
            );
            let backend = Arc::new(backend);
            tokio::spawn(set_up_until(self.is_up.clone(), backend.when_ended()));
            Ok(Connected {
                backend: backend as Arc<dyn Backend>,
                lifecycle: Box::new(RemoteLifecycle),
            })
        }
        .boxed()
    }

    fn describe(&self) -> String {
        format!("the worker {} of Dynamo", self.name)
    }

    fn max_retry_pause(&self) -> Duration {
        MAX_RETRY_PAUSE
    }
}

/// Returns `true` if a connection from `local` to `peer` stays on this machine. A machine's own
/// address is reached from the same address.
fn is_here(local: IpAddr, peer: IpAddr) -> bool {
    peer.is_loopback() || local == peer
}

/// Sets `is_up` until `ended` completes.
async fn set_up_until(is_up: watch::Sender<bool>, ended: impl Future) {
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
            Events::Expected => unknown("it has not registered the endpoint of its KV events"),
            Events::None(why) => unknown(why),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_address_is_on_this_machine() {
        let is_local =
            |local: &str, peer: &str| is_here(local.parse().unwrap(), peer.parse().unwrap());
        assert!(
            is_local("127.0.0.1", "127.0.0.2")
                && is_local("10.0.0.1", "10.0.0.1")
                && is_local("::1", "::1")
        );
        assert!(!is_local("10.0.0.1", "10.0.0.2") && !is_local("fd00::1", "fd00::2"));
    }
}
