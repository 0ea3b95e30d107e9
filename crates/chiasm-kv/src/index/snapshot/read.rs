//! Snapshots as they are read.

use std::collections::HashMap;

use super::{SnapshotError, read_source};
use crate::block_key::{BlockKey, BuildBlockKeyHasher};
use crate::index::cache::{Cache, EngineHash, Prompts};
use crate::index::radix_tree::{Position, Segment};
use crate::index::trees::Trees;
use crate::index::worker::Worker;
use crate::index::workers::Workers;

/// What is still to be read.
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl<'a> Bytes<'a> {
    pub(super) fn take<const N: usize>(
        &mut self,
        what: &'static str,
    ) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SnapshotError::malformed(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn slice(
        &mut self,
        length: usize,
        what: &'static str,
    ) -> Result<&'a [u8], SnapshotError> {
        let (taken, rest) =
            self.0.split_at_checked(length).ok_or(SnapshotError::malformed(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self, what: &'static str) -> Result<u16, SnapshotError> {
        self.take(what).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, SnapshotError> {
        self.take(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, SnapshotError> {
        self.take(what).map(u64::from_le_bytes)
    }
}

impl Worker {
    /// Reads what a worker holds that holds nothing yet and is in no list.
    pub(super) fn read(
        &mut self,
        bytes: &mut Bytes<'_>,
        revision: u64,
        prompts: &Prompts,
        workers: &Workers,
    ) -> Result<(), SnapshotError> {
        let [named, caches] = bytes.take("the number of its caches")?;
        self.go_on_from(revision, named != 0);
        if caches == 0 {
            return Err(SnapshotError::malformed("the number of its caches"));
        }
        for number in 0..usize::from(caches) {
            let source = read_source(bytes)?;
            let cache = self
                .new_cache(number, source, workers)
                .ok_or(SnapshotError::malformed("a cache"))?;
            cache.read(bytes, prompts)?;
        }
        if bytes.0.is_empty() { Ok(()) } else { Err(SnapshotError::malformed("its end")) }
    }
}

/// A chain that was read and is held.
struct Chain<'a> {
    keys: &'a [[u8; 16]],
    /// Where its blocks are; fewer than there are keys if the tree has no room for more.
    segments: Vec<Segment>,
}

impl Chain<'_> {
    fn key(&self, at: usize) -> Option<BlockKey> {
        self.keys.get(at).and_then(|key| BlockKey::from_number(u128::from_le_bytes(*key)))
    }

    fn position(&self, at: usize) -> Option<Position> {
        let mut at = at as u32;
        for Segment { position, len, .. } in &self.segments {
            if at < *len {
                return Some(Position { node: position.node, at: position.at + at });
            }
            at -= len;
        }
        None
    }
}

/// Whether two positions are the same block's.
fn is_same(one: Position, other: Position, prompts: &Prompts) -> bool {
    // Seldom are there two.
    one == other
        || Trees::same_tree(one.node, other.node) && {
            let tree = prompts.trees.read(Trees::tree_with(one.node));
            tree.find(one) == tree.find(other)
        }
}

impl Cache {
    /// Reads what an empty cache holds.
    ///
    /// Chains are held as they come, lest others' events take them away. Nobody sees that as long
    /// as the worker is in no list; in the end, blocks without a hash are let go.
    fn read(&mut self, bytes: &mut Bytes<'_>, prompts: &Prompts) -> Result<(), SnapshotError> {
        let mut chains = Vec::new();
        let read = self
            .read_chains(bytes, &mut chains, prompts)
            .and_then(|()| self.read_blocks(bytes, &chains, prompts));
        let hashed = read.as_ref().ok();
        // Those that come last first, as nodes are not cut up that way.
        for chain in chains.iter().rev() {
            for (at, position) in
                (0..chain.keys.len()).rev().filter_map(|at| Some((at, chain.position(at)?)))
            {
                let known =
                    chain.key(at).and_then(|key| hashed.and_then(|hashed| hashed.get(&key)));
                if !known.is_some_and(|known| is_same(*known, position, prompts)) {
                    prompts.trees.write(Trees::tree_with(position.node)).release(
                        position,
                        1,
                        self.holder(),
                    );
                }
            }
        }
        read.map(drop)
    }

    fn read_chains<'a>(
        &self,
        bytes: &mut Bytes<'a>,
        chains: &mut Vec<Chain<'a>>,
        prompts: &Prompts,
    ) -> Result<(), SnapshotError> {
        for _ in 0..bytes.u32("the number of chains")? {
            let chain = self.read_chain(bytes, chains, prompts)?;
            chains.push(chain);
        }
        Ok(())
    }

    fn read_chain<'a>(
        &self,
        bytes: &mut Bytes<'a>,
        chains: &[Chain<'_>],
        prompts: &Prompts,
    ) -> Result<Chain<'a>, SnapshotError> {
        let parent = bytes.u32("a chain's parent")?;
        let (at, blocks) = (bytes.u16("a chain's parent")?, bytes.u16("a chain's length")?);
        let (keys, _) = bytes.slice(usize::from(blocks) * 16, "a chain's keys")?.as_chunks();
        let mut chain = Chain { keys, segments: Vec::new() };
        let numbers: Option<Vec<BlockKey>> = (0..keys.len()).map(|at| chain.key(at)).collect();
        let numbers = numbers.ok_or(SnapshotError::malformed("a chain's key"))?;
        let first = numbers.first().ok_or(SnapshotError::malformed("a chain's length"))?;
        let mut after = None;
        if let Some(parent) = parent.checked_sub(1) {
            let parent = chains.get(parent as usize).filter(|parent| parent.keys.len() > at.into());
            let parent = parent.ok_or(SnapshotError::malformed("a chain's parent"))?;
            let Some(position) = parent.position(at.into()) else { return Ok(chain) };
            after = Some(position);
        }
        let number = after.map_or(Trees::tree_of(*first), |after| Trees::tree_with(after.node));
        let mut tree = prompts.trees.write(number);
        tree.hold(after, &numbers, self.holder(), &prompts.uses, &mut chain.segments);
        Ok(chain)
    }

    /// Reads the hashes of blocks. Returns where those are that have some.
    fn read_blocks(
        &mut self,
        bytes: &mut Bytes<'_>,
        chains: &[Chain<'_>],
        prompts: &Prompts,
    ) -> Result<HashMap<BlockKey, Position, BuildBlockKeyHasher>, SnapshotError> {
        let mut hashed = HashMap::<_, _, BuildBlockKeyHasher>::default();
        for _ in 0..bytes.u32("the number of runs")? {
            let chain = chains.get(bytes.u32("a run's chain")? as usize);
            let chain = chain.ok_or(SnapshotError::malformed("a run's chain"))?;
            let at = usize::from(bytes.u16("a run's first block")?);
            for at in at..at + usize::from(bytes.u16("a run's length")?) {
                let key = chain.key(at).ok_or(SnapshotError::malformed("a run's block"))?;
                let hash = self.read_hash(bytes)?;
                let Some(position) = chain.position(at) else {
                    self.store_unknown(hash);
                    continue;
                };
                let known = hashed.insert(key, position);
                if known.is_some_and(|known| !is_same(known, position, prompts)) {
                    return Err(SnapshotError::malformed("a run's block"));
                }
                self.put(hash, key, position, known.is_none());
            }
        }
        for _ in 0..bytes.u32("the number of unkeyed blocks")? {
            let hash = self.read_hash(bytes)?;
            self.store_unknown(hash);
        }
        for _ in 0..bytes.u32("the number of blocks with copies")? {
            let (hash, copies) =
                (bytes.u64("a hash with copies")?, bytes.u32("a number of copies")?);
            if copies == 0 || !self.put_copies(hash, copies) {
                return Err(SnapshotError::malformed("a hash with copies"));
            }
        }
        Ok(hashed)
    }

    /// A hash that the cache does not have yet.
    fn read_hash(&self, bytes: &mut Bytes<'_>) -> Result<EngineHash, SnapshotError> {
        let hash = bytes.u64("a block's hash")?;
        if self.has(hash) { Err(SnapshotError::malformed("a block's hash")) } else { Ok(hash) }
    }
}
