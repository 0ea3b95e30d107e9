//! The current workers of a namespace, joined from models, endpoints and event sources.

mod joining;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use chiasm_discovery::{DiscoveryError, SourceFollower, Tls, Values};
use chiasm_types::BlockSize;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use crate::address::{DynamoAddress, Registry};
use crate::card::ModelFiles;
use crate::files;
use crate::wire::Endpoint;
use joining::Joiner;

/// Follows the workers of a namespace in etcd or in the files of a folder, until it is dropped.
#[derive(Debug)]
pub struct Directory {
    workers: watch::Receiver<Workers>,
    task: JoinHandle<()>,
}

/// The registered workers. They stay as they were while etcd is silent or the folder can't be read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workers {
    /// The workers that can be used, by `COMPONENT/ENDPOINT/INSTANCE`.
    pub(crate) by_name: BTreeMap<String, Arc<Worker>>,
}

impl Workers {
    /// Returns the workers' names. A worker that is started again has another name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }
}

/// One start of a worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Worker {
    /// The endpoint for requests.
    pub(crate) endpoint: Endpoint,
    /// The worker's name of its model.
    pub(crate) model: String,
    pub(crate) context: usize,
    pub(crate) block_size: BlockSize,
    pub(crate) total_blocks: u64,
    pub(crate) max_running: usize,
    pub(crate) max_batched_tokens: usize,
    pub(crate) events: Events,
}

/// The source of a worker's KV events.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Events {
    /// A registered source.
    At(EventSource),
    /// A source that is not registered yet.
    Expected,
    /// No source, for this reason.
    None(&'static str),
}

/// A registered source of KV events.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EventSource {
    /// The endpoint for queries of the whole cache.
    pub(crate) query: Endpoint,
    pub(crate) worker_id: u64,
    pub(crate) dp_rank: u32,
    /// The ZMQ endpoint of published changes; without it changes are queried.
    pub(crate) channel: Option<String>,
}

/// The prefixes of the keys that describe workers.
const KINDS: [&str; 4] =
    ["v1/mdc/", "v1/instances/", "v1/event_sources/namespace/", "v1/event_channels/namespace/"];

impl Directory {
    /// Begins to follow the namespace of an address. `files` are those of the model served here.
    /// Needs a Tokio runtime.
    ///
    /// # Errors
    ///
    /// Returns [`DiscoveryError`] if the address or the files of `tls` can't be used.
    pub fn follow(
        address: &DynamoAddress,
        tls: &Tls,
        files: ModelFiles,
    ) -> Result<Self, DiscoveryError> {
        let (sender, workers) = watch::channel(Workers::default());
        let joiner = Joiner::new(address.namespace.clone(), address.model.clone(), files);
        let prefixes = KINDS.map(|kind| format!("{kind}{}/", address.namespace));
        let task = match &address.registry {
            Registry::Etcd(etcd) => {
                let follow = |prefix: String| etcd.with_prefix(&prefix)?.follow_values(tls.clone());
                let [models, instances, sources, channels] = prefixes.map(follow);
                let followed = [models?, instances?, sources?, channels?];
                tokio::spawn(join(followed, joiner, sender))
            }
            Registry::Folder(folder) => {
                tokio::spawn(scan(folder.clone(), prefixes, joiner, sender))
            }
        };
        Ok(Self { workers, task })
    }

    /// Returns a receiver of the registered workers.
    pub fn workers(&self) -> watch::Receiver<Workers> {
        self.workers.clone()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Joins the followed keys, again after each change.
async fn join(
    followed: [SourceFollower<Values>; 4],
    mut joiner: Joiner,
    sender: watch::Sender<Workers>,
) {
    let [mut models, mut instances, mut sources, mut channels] =
        followed.each_ref().map(SourceFollower::subscribe);
    loop {
        let workers = joiner.join([
            &models.borrow_and_update().by_key,
            &instances.borrow_and_update().by_key,
            &sources.borrow_and_update().by_key,
            &channels.borrow_and_update().by_key,
        ]);
        publish(&sender, workers);
        let changed = tokio::select! {
            changed = models.changed() => changed,
            changed = instances.changed() => changed,
            changed = sources.changed() => changed,
            changed = channels.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}

/// Scans a folder repeatedly. While it can't be read the workers stay as they were.
async fn scan(
    folder: PathBuf,
    prefixes: [String; 4],
    mut joiner: Joiner,
    sender: watch::Sender<Workers>,
) {
    let mut ticks = tokio::time::interval(files::SCAN_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_readable = true;
    loop {
        ticks.tick().await;
        let path = folder.clone();
        let prefixes = prefixes.clone();
        let read =
            tokio::task::spawn_blocking(move || files::read(&path, prefixes, SystemTime::now()))
                .await;
        let Ok(read) = read else { return };
        match read {
            Ok(keys) => {
                is_readable = true;
                publish(&sender, joiner.join(keys.each_ref()));
            }
            Err(error) if std::mem::replace(&mut is_readable, false) => {
                tracing::warn!(
                    folder = %folder.display(),
                    %error,
                    "the folder of Dynamo workers can't be read; the known workers stay in use"
                );
            }
            Err(_) => {}
        }
    }
}

fn publish(sender: &watch::Sender<Workers>, workers: Workers) {
    sender.send_if_modified(|current| {
        let has_changed = *current != workers;
        *current = workers;
        has_changed
    });
}
