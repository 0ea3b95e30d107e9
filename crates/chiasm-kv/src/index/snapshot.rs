//! What the index knows of one worker as bytes, from which another index goes on.
//!
//! Numbers are little-endian. Hashes are the engine's as tables have them, keys those of
//! [`BlockKey`](crate::BlockKey).
//!
//! ```text
//! snapshot  magic  fingerprint of the secret: 16 bytes  scheme  revision: u64  block size: u32  named: u8  caches: u8  cache…
//! scheme    length: u8  the name of the engine's hashes, or nothing for keys of content
//! cache     tier: u8  group: u32  need: u32  chains: u32  chain…  runs: u32  run…  unkeyed: u32  hash…  several: u32  (hash copies)…
//! chain     parent: u32  at: u16  blocks: u16  key…
//! run       chain: u32  at: u16  blocks: u16  hash…
//! ```
//!
//! - `need` is 0 for groups that need all leading blocks, else how many of the last ones they need.
//! - A chain is consecutive blocks of a prompt, held or not. It comes after block `at` of chain
//!   `parent - 1`, which was told of before, or starts a prompt if `parent` is 0, where `at` means
//!   nothing. A block may be in several chains.
//! - A run gives consecutive blocks of a chain their hashes. Who reads holds the blocks that have
//!   one, and nothing else. A block may have several, in several runs.
//! - `unkeyed` are hashes of blocks without a key.
//! - `copies` are those beyond one, of the hashes that have some.

mod read;
mod write;

use std::sync::{Arc, Mutex};

use chiasm_types::{BlockSize, WorkerId};

use super::PrefixIndex;
use super::source::{Need, Source, Tier};
use super::worker::Worker;
use crate::block_key::{EngineHashKeys, KeyScheme, KeySecret};
use read::Bytes;

/// What a snapshot begins with. The number is that of its form.
const MAGIC: &[u8; 16] = b"chiasm index   1";

/// Bytes can't be read as a worker's snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// They are something else, or of another version of Chiasm that writes them in another form.
    #[error("not a snapshot of a worker's blocks in the form that this version reads")]
    OtherForm,
    /// The keys were made with another [`KeySecret`].
    #[error("the snapshot's block keys were made with another secret than this process's")]
    OtherSecret,
    /// They break off or contradict themselves.
    #[error("malformed snapshot of a worker's blocks: {what} is missing or impossible")]
    Malformed {
        /// What could not be read.
        what: &'static str,
    },
}

/// What an index knew of one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The worker's [revision](super::WorkerIndexStats::revision) that it is of.
    pub revision: u64,
    /// What [`PrefixIndex::restore`] reads.
    pub bytes: Vec<u8>,
}

impl SnapshotError {
    const fn malformed(what: &'static str) -> Self {
        Self::Malformed { what }
    }
}

impl PrefixIndex {
    /// All that is known of one worker's blocks, for [`PrefixIndex::restore`] in another index,
    /// whose process may be another one with the same [`KeySecret`]. `None` when the worker is
    /// unknown. Some 25 bytes for each block that it holds.
    ///
    /// It says what the worker held after the call that made its
    /// [revision](super::WorkerIndexStats::revision), whatever happens meanwhile: its own events
    /// wait, some 80 ns for each block. Others' events and lookups go on; a tree is locked for some
    /// microseconds at a time.
    pub fn snapshot(&self, worker: WorkerId) -> Option<Snapshot> {
        self.core.workers.change(worker, |worker| {
            let mut bytes = Vec::new();
            worker.write(&self.core.prompts, &mut bytes);
            Snapshot { revision: worker.stats().revision, bytes }
        })
    }

    /// Makes a worker what it was to the index that wrote the snapshot, and returns its revision:
    /// what that index heard since can be told to this one, call by call. The worker is added if it
    /// is not there. Lookups see what was known of it before until all of the snapshot is read.
    /// Counts other than those of blocks begin again.
    ///
    /// # Errors
    /// [`SnapshotError`]; nothing has changed then.
    pub fn restore(&self, worker: WorkerId, snapshot: &[u8]) -> Result<u64, SnapshotError> {
        let (new, revision) = self.read(worker, snapshot)?;
        self.leave(self.core.workers.list_worker(&new), Vec::new());
        self.shed_if_needed();
        Ok(revision)
    }

    /// Reads a worker that is in no list.
    fn read(
        &self,
        worker: WorkerId,
        snapshot: &[u8],
    ) -> Result<(Arc<Mutex<Worker>>, u64), SnapshotError> {
        let mut bytes = Bytes(snapshot);
        if bytes.take("its magic") != Ok(*MAGIC) {
            return Err(SnapshotError::OtherForm);
        }
        if bytes.take("the secret's fingerprint")? != KeySecret::of_process().fingerprint() {
            return Err(SnapshotError::OtherSecret);
        }
        let scheme = read_scheme(&mut bytes)?;
        let revision = bytes.u64("its revision")?;
        let block_size = BlockSize::new(bytes.u32("its block size")?);
        let block_size = block_size.ok_or(SnapshotError::malformed("its block size"))?;
        let workers = &self.core.workers;
        let new = workers.make(worker, block_size, scheme);
        let read =
            |worker: &mut Worker| worker.read(&mut bytes, revision, &self.core.prompts, workers);
        match workers.with(&new, read) {
            Some(Ok(())) => Ok((new, revision)),
            Some(Err(error)) => {
                self.leave(Some(new), Vec::new());
                Err(error)
            }
            None => Err(SnapshotError::malformed("its worker")),
        }
    }
}

fn read_scheme(bytes: &mut Bytes<'_>) -> Result<KeyScheme, SnapshotError> {
    const NAME: &str = "the name of its keys";
    let [length] = bytes.take(NAME)?;
    let name = str::from_utf8(bytes.slice(length.into(), NAME)?)
        .map_err(|_| SnapshotError::malformed(NAME))?;
    if name.is_empty() {
        return Ok(KeyScheme::Content);
    }
    EngineHashKeys::new(name).map(KeyScheme::EngineHashes).ok_or(SnapshotError::malformed(NAME))
}

const TIERS: [Tier; 3] = [Tier::Device, Tier::Cpu, Tier::Storage];

fn write_source(source: Source, out: &mut Vec<u8>) {
    let tier = TIERS
        .iter()
        .zip(0_u8..)
        .find(|(tier, _)| **tier == source.tier)
        .map_or(0, |(_, number)| number);
    let need = match source.role {
        Need::Leading => 0,
        Need::Last(blocks) => blocks as u32,
    };
    out.push(tier);
    out.extend(source.group.to_le_bytes());
    out.extend(need.to_le_bytes());
}

fn read_source(bytes: &mut Bytes<'_>) -> Result<Source, SnapshotError> {
    let [tier] = bytes.take("a cache's tier")?;
    let tier = *TIERS.get(usize::from(tier)).ok_or(SnapshotError::malformed("a cache's tier"))?;
    let group = bytes.u32("a cache's group")?;
    let role = match bytes.u32("what a cache needs")? {
        0 => Need::Leading,
        blocks => Need::Last(blocks as usize),
    };
    Ok(Source { tier, group, role })
}
