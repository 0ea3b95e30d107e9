//! Snapshots: the state of one worker as bytes, from which another index can continue.
//!
//! Numbers are little-endian. Hashes are the engine's in the form that tables use; keys are
//! [`BlockKey`](crate::BlockKey)s.
//!
//! ```text
//! snapshot  magic: 16 bytes  fingerprint of the secret: 16 bytes  scheme  revision: u64
//!           block size: u32  named: u8  caches: u8  cache…
//! scheme    length: u8  the name of the engine's hashes, or nothing for keys of content
//! cache     tier: u8  group: u32  need: u32  chains: u32  chain…  runs: u32  run…
//!           unkeyed: u32  hash…  several: u32  (hash copies: u32)…
//! chain     parent: u32  at: u16  blocks: u16  key…
//! run       chain: u32  at: u16  blocks: u16  hash…
//! ```
//!
//! - `named` is 1 if events have named the group of the first cache.
//! - `need` is 0 for groups that need all leading blocks, else the number of last blocks that they
//!   need.
//! - A chain is a sequence of consecutive blocks of a prompt, held or not. It follows block `at` of
//!   the earlier chain `parent - 1`. If `parent` is 0, the chain starts a prompt and `at` is
//!   unused. A block may be in several chains.
//! - A run assigns hashes to consecutive blocks of a chain. The reader holds exactly the blocks
//!   with a hash. A block may have several hashes, in several runs.
//! - `unkeyed` counts the hashes of blocks without a key.
//! - `several` counts the hashes with several copies; `copies` is the number beyond the first.

mod read;
mod write;

use std::sync::{Arc, Mutex};

use chiasm_types::{BlockSize, WorkerId};

use super::PrefixIndex;
use super::source::{Need, Source, Tier};
use super::worker::Worker;
use crate::block_key::{EngineHashKeys, KeyScheme, KeySecret};
use read::Reader;

/// The start of every snapshot. Its number is the version of the format.
const MAGIC: &[u8; 16] = b"chiasm index   1";

/// The reason why bytes can't be read as a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The bytes are not a snapshot, or have the format of another version of Chiasm.
    #[error("not a snapshot of a worker's blocks, or one in a format of another version")]
    OtherForm,
    /// The snapshot's keys were made with another [`KeySecret`].
    #[error("the snapshot's block keys were made with another secret than this process's")]
    OtherSecret,
    /// The snapshot is truncated or inconsistent.
    #[error("malformed snapshot of a worker's blocks: {part} is missing or invalid")]
    Malformed {
        /// The part that could not be read.
        part: &'static str,
    },
}

/// The state of one worker at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The worker's [revision](super::WorkerIndexStats::revision).
    pub revision: u64,
    /// The bytes that [`PrefixIndex::restore`] reads.
    pub bytes: Vec<u8>,
}

impl SnapshotError {
    const fn malformed(part: &'static str) -> Self {
        Self::Malformed { part }
    }
}

impl PrefixIndex {
    /// Returns the state of one worker's blocks, or `None` if the worker is unknown.
    ///
    /// [`PrefixIndex::restore`] can read it in another index, also in another process with the same
    /// [`KeySecret`]. A snapshot takes about 25 bytes for each block that the worker holds.
    ///
    /// The snapshot is consistent: it is the state after the call that made its
    /// [revision](super::WorkerIndexStats::revision). During the call the worker's own events wait,
    /// about 80 ns for each block. Events of other workers and lookups continue, because a tree is
    /// locked for some microseconds at a time.
    pub fn snapshot(&self, worker: WorkerId) -> Option<Snapshot> {
        self.core.workers.change(worker, |worker| {
            let mut bytes = Vec::new();
            worker.write(&self.core.prompts, &mut bytes);
            Snapshot { revision: worker.stats().revision, bytes }
        })
    }

    /// Restores a worker from a snapshot and returns its revision. Adds the worker if necessary.
    ///
    /// Calls that followed the snapshot in the other index can then be repeated on this one.
    /// Lookups see the worker's old state until the whole snapshot is read. The counts of blocks
    /// are restored; all other counts start at 0.
    ///
    /// # Errors
    /// [`SnapshotError`] if the bytes can't be read. Then nothing has changed.
    pub fn restore(&self, worker: WorkerId, snapshot: &[u8]) -> Result<u64, SnapshotError> {
        let (new, revision) = self.read(worker, snapshot)?;
        self.release_in_background(self.core.workers.list_worker(&new), Vec::new());
        self.shed_if_needed();
        Ok(revision)
    }

    /// Reads a snapshot into a new worker that is not listed.
    fn read(
        &self,
        worker: WorkerId,
        snapshot: &[u8],
    ) -> Result<(Arc<Mutex<Worker>>, u64), SnapshotError> {
        let mut reader = Reader(snapshot);
        if reader.take("its magic") != Ok(*MAGIC) {
            return Err(SnapshotError::OtherForm);
        }
        if reader.take("the secret's fingerprint")? != KeySecret::for_process().fingerprint() {
            return Err(SnapshotError::OtherSecret);
        }
        let scheme = read_scheme(&mut reader)?;
        let revision = reader.u64("its revision")?;
        let block_size = BlockSize::new(reader.u32("its block size")?);
        let block_size = block_size.ok_or(SnapshotError::malformed("its block size"))?;
        let workers = &self.core.workers;
        let new = workers.new_worker(worker, block_size, scheme);
        let read =
            |worker: &mut Worker| worker.read(&mut reader, revision, &self.core.prompts, workers);
        match workers.with(&new, read) {
            Some(Ok(())) => Ok((new, revision)),
            Some(Err(error)) => {
                self.release_in_background(Some(new), Vec::new());
                Err(error)
            }
            None => Err(SnapshotError::malformed("its worker")),
        }
    }
}

fn read_scheme(reader: &mut Reader<'_>) -> Result<KeyScheme, SnapshotError> {
    const NAME: &str = "the name of its keys";
    let [length] = reader.take(NAME)?;
    let name = str::from_utf8(reader.slice(length.into(), NAME)?)
        .map_err(|_| SnapshotError::malformed(NAME))?;
    if name.is_empty() {
        return Ok(KeyScheme::Content);
    }
    EngineHashKeys::new(name).map(KeyScheme::EngineHashes).ok_or(SnapshotError::malformed(NAME))
}

/// The tiers by their numbers in a snapshot.
const TIERS: [Tier; 3] = [Tier::Device, Tier::Cpu, Tier::Storage];

fn write_source(source: Source, out: &mut Vec<u8>) {
    let tier = TIERS
        .iter()
        .zip(0_u8..)
        .find(|(tier, _)| **tier == source.tier)
        .map_or(0, |(_, number)| number);
    let need = match source.need {
        Need::Leading => 0,
        Need::Last(blocks) => blocks as u32,
    };
    out.push(tier);
    out.extend(source.group.to_le_bytes());
    out.extend(need.to_le_bytes());
}

fn read_source(reader: &mut Reader<'_>) -> Result<Source, SnapshotError> {
    let [tier] = reader.take("a cache's tier")?;
    let tier = *TIERS.get(usize::from(tier)).ok_or(SnapshotError::malformed("a cache's tier"))?;
    let group = reader.u32("a cache's group")?;
    let need = match reader.u32("the number of blocks that a cache needs")? {
        0 => Need::Leading,
        blocks => Need::Last(blocks as usize),
    };
    Ok(Source { tier, group, need })
}
