//! Which workers a namespace has now: models, endpoints and event sources, joined.

mod joining;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use chiasm_discovery::{DiscoveryError, Following, Tls, Values};
use chiasm_types::BlockSize;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use crate::address::{DynamoAddress, NamedIn};
use crate::card::ModelFiles;
use crate::files;
use crate::wire::Place;
use joining::Joining;

/// The workers of a namespace, as etcd or the files of a folder name them, followed until this is
/// dropped.
#[derive(Debug)]
pub struct Directory {
    workers: watch::Receiver<Workers>,
    task: JoinHandle<()>,
}

/// What is named now. While etcd is silent, or the folder can't be read, this stays as it was.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workers {
    /// Workers that can be served, by `COMPONENT/ENDPOINT/INSTANCE`.
    pub(crate) by_name: BTreeMap<String, Arc<Worker>>,
}

impl Workers {
    /// Their names. One that is started again has another.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }
}

/// One start of a worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Worker {
    /// Where it takes requests.
    pub(crate) place: Place,
    /// What it calls its model.
    pub(crate) model: String,
    pub(crate) context: usize,
    pub(crate) block_size: BlockSize,
    pub(crate) total_blocks: u64,
    pub(crate) max_running: usize,
    pub(crate) max_batched_tokens: usize,
    pub(crate) events: Events,
}

/// Where it can be known from what a worker's cache holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Events {
    /// This source tells it.
    At(EventSource),
    /// It will be told, soon.
    Expected,
    /// Nowhere, for this reason.
    None(&'static str),
}

/// Who tells what a worker's cache holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EventSource {
    /// Where it can be asked for all of that.
    pub(crate) query: Place,
    pub(crate) worker_id: u64,
    pub(crate) dp_rank: u32,
    /// Where changes are published, over ZMQ; without it they are asked for.
    pub(crate) channel: Option<String>,
}

/// The kinds of keys that tell of workers.
const KINDS: [&str; 4] =
    ["v1/mdc/", "v1/instances/", "v1/event_sources/namespace/", "v1/event_channels/namespace/"];

impl Directory {
    /// Begins to follow the namespace of an address. `files` are those of the model that is served
    /// here. Needs a Tokio runtime.
    ///
    /// # Errors
    /// [`DiscoveryError`] if the address or the files of `tls` can't be used.
    pub fn follow(
        address: &DynamoAddress,
        tls: &Tls,
        files: ModelFiles,
    ) -> Result<Self, DiscoveryError> {
        let (told, workers) = watch::channel(Workers::default());
        let joining = Joining::new(address.namespace.clone(), address.model.clone(), files);
        let prefixes = KINDS.map(|kind| format!("{kind}{}/", address.namespace));
        let task = match &address.named_in {
            NamedIn::Etcd(etcd) => {
                let follow = |prefix: String| etcd.with_prefix(&prefix)?.follow_values(tls.clone());
                let [models, instances, sources, channels] = prefixes.map(follow);
                let followed = [models?, instances?, sources?, channels?];
                tokio::spawn(join(followed, joining, told))
            }
            NamedIn::Folder(folder) => tokio::spawn(look(folder.clone(), prefixes, joining, told)),
        };
        Ok(Self { workers, task })
    }

    /// Tells of the workers that are named, now and after each change.
    pub fn workers(&self) -> watch::Receiver<Workers> {
        self.workers.clone()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Joins what is followed, again after each change.
async fn join(
    followed: [Following<Values>; 4],
    mut joining: Joining,
    told: watch::Sender<Workers>,
) {
    let [mut models, mut instances, mut sources, mut channels] =
        followed.each_ref().map(Following::named);
    loop {
        let workers = joining.join([
            &models.borrow_and_update().by_key,
            &instances.borrow_and_update().by_key,
            &sources.borrow_and_update().by_key,
            &channels.borrow_and_update().by_key,
        ]);
        tell(&told, workers);
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

/// Looks at a folder again and again. While it can't be read the workers stay as they were.
async fn look(
    folder: PathBuf,
    prefixes: [String; 4],
    mut joining: Joining,
    told: watch::Sender<Workers>,
) {
    let mut looks = tokio::time::interval(files::LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_read = true;
    loop {
        looks.tick().await;
        let (path, prefixes) = (folder.clone(), prefixes.clone());
        let read =
            tokio::task::spawn_blocking(move || files::read(&path, prefixes, SystemTime::now()))
                .await;
        let Ok(read) = read else { return };
        match read {
            Ok(keys) => {
                is_read = true;
                tell(&told, joining.join(keys.each_ref()));
            }
            Err(error) if std::mem::replace(&mut is_read, false) => {
                tracing::warn!(folder = %folder.display(), %error, "workers of Dynamo can't be looked for: who is known goes on");
            }
            Err(_) => {}
        }
    }
}

fn tell(told: &watch::Sender<Workers>, workers: Workers) {
    told.send_if_modified(|known| {
        let is_other = *known != workers;
        *known = workers;
        is_other
    });
}
