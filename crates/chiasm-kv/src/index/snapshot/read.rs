//! Reading of snapshots.

use std::collections::HashMap;

use super::{SnapshotError, read_source};
use crate::block_key::{BlockKey, BuildBlockKeyHasher};
use crate::index::cache::{Cache, EngineHash, Prompts};
use crate::index::radix_tree::{Position, Segment};
use crate::index::trees::Trees;
use crate::index::worker::Worker;
use crate::index::workers::Workers;

/// The unread part of a snapshot. The `part` arguments name the part for errors.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take<const N: usize>(
        &mut self,
        part: &'static str,
    ) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SnapshotError::malformed(part))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(super) fn slice(
        &mut self,
        length: usize,
        part: &'static str,
    ) -> Result<&'a [u8], SnapshotError> {
        let (taken, rest) =
            self.0.split_at_checked(length).ok_or(SnapshotError::malformed(part))?;
        self.0 = rest;
        Ok(taken)
    }

    fn u16(&mut self, part: &'static str) -> Result<u16, SnapshotError> {
        self.take(part).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, part: &'static str) -> Result<u32, SnapshotError> {
        self.take(part).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, part: &'static str) -> Result<u64, SnapshotError> {
        self.take(part).map(u64::from_le_bytes)
    }
}

impl Worker {
    /// Reads the state of a new worker that is not listed.
    pub(super) fn read(
        &mut self,
        reader: &mut Reader<'_>,
        revision: u64,
        prompts: &Prompts,
        workers: &Workers,
    ) -> Result<(), SnapshotError> {
        let [first_is_named, caches] = reader.take("the number of its caches")?;
        self.continue_from(revision, first_is_named != 0);
        if caches == 0 {
            return Err(SnapshotError::malformed("the number of its caches"));
        }
        for number in 0..usize::from(caches) {
            let source = read_source(reader)?;
            let cache = self
                .new_cache(number, source, workers)
                .ok_or(SnapshotError::malformed("a cache"))?;
            cache.read(reader, prompts)?;
        }
        if reader.0.is_empty() { Ok(()) } else { Err(SnapshotError::malformed("its end")) }
    }
}

/// A chain that was read and whose blocks are held.
struct Chain<'a> {
    keys: &'a [[u8; 16]],
    /// The positions of its blocks. There are fewer blocks than keys if the tree has no more room.
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

/// Returns `true` if two positions are of the same block.
fn is_same(one: Position, other: Position, prompts: &Prompts) -> bool {
    // Equal positions are the common case.
    one == other
        || Trees::same_tree(one.node, other.node) && {
            let tree = prompts.trees.read(Trees::tree_with(one.node));
            tree.find(one) == tree.find(other)
        }
}

impl Cache {
    /// Reads the blocks of an empty cache.
    ///
    /// The blocks of a chain are held as soon as it is read, so that events of other workers can't
    /// prune them. Lookups don't see this, because the worker is not listed. At the end, blocks
    /// without a hash are released.
    fn read(&mut self, reader: &mut Reader<'_>, prompts: &Prompts) -> Result<(), SnapshotError> {
        let mut chains = Vec::new();
        let read = self
            .read_chains(reader, &mut chains, prompts)
            .and_then(|()| self.read_blocks(reader, &chains, prompts));
        let hashed = read.as_ref().ok();
        // In reverse order, which avoids splits of nodes.
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
        reader: &mut Reader<'a>,
        chains: &mut Vec<Chain<'a>>,
        prompts: &Prompts,
    ) -> Result<(), SnapshotError> {
        for _ in 0..reader.u32("the number of chains")? {
            let chain = self.read_chain(reader, chains, prompts)?;
            chains.push(chain);
        }
        Ok(())
    }

    fn read_chain<'a>(
        &self,
        reader: &mut Reader<'a>,
        chains: &[Chain<'_>],
        prompts: &Prompts,
    ) -> Result<Chain<'a>, SnapshotError> {
        let parent = reader.u32("a chain's parent")?;
        let at = reader.u16("a chain's parent")?;
        let blocks = reader.u16("a chain's length")?;
        let (keys, _) = reader.slice(usize::from(blocks) * 16, "a chain's keys")?.as_chunks();
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

    /// Reads the hashes of blocks. Returns the positions of the blocks with a hash.
    fn read_blocks(
        &mut self,
        reader: &mut Reader<'_>,
        chains: &[Chain<'_>],
        prompts: &Prompts,
    ) -> Result<HashMap<BlockKey, Position, BuildBlockKeyHasher>, SnapshotError> {
        let mut hashed = HashMap::<_, _, BuildBlockKeyHasher>::default();
        for _ in 0..reader.u32("the number of runs")? {
            let chain = chains.get(reader.u32("a run's chain")? as usize);
            let chain = chain.ok_or(SnapshotError::malformed("a run's chain"))?;
            let at = usize::from(reader.u16("a run's first block")?);
            for at in at..at + usize::from(reader.u16("a run's length")?) {
                let key = chain.key(at).ok_or(SnapshotError::malformed("a run's block"))?;
                let hash = self.read_hash(reader)?;
                let Some(position) = chain.position(at) else {
                    self.store_unknown(hash);
                    continue;
                };
                let known = hashed.insert(key, position);
                if known.is_some_and(|known| !is_same(known, position, prompts)) {
                    return Err(SnapshotError::malformed("a run's block"));
                }
                self.insert(hash, key, position, known.is_none());
            }
        }
        for _ in 0..reader.u32("the number of unkeyed blocks")? {
            let hash = self.read_hash(reader)?;
            self.store_unknown(hash);
        }
        for _ in 0..reader.u32("the number of blocks with copies")? {
            let hash = reader.u64("a hash with copies")?;
            let copies = reader.u32("a number of copies")?;
            if copies == 0 || !self.set_extra_copies(hash, copies) {
                return Err(SnapshotError::malformed("a hash with copies"));
            }
        }
        Ok(hashed)
    }

    /// Reads a hash that the cache does not have yet.
    fn read_hash(&self, reader: &mut Reader<'_>) -> Result<EngineHash, SnapshotError> {
        let hash = reader.u64("a block's hash")?;
        if self.has(hash) { Err(SnapshotError::malformed("a block's hash")) } else { Ok(hash) }
    }
}
