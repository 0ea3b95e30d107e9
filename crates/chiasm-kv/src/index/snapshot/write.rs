//! Writing of snapshots.

use std::collections::HashMap;

use super::{MAGIC, write_source};
use crate::block_key::{KeyScheme, KeySecret};
use crate::index::cache::{Cache, EngineHash, Prompts};
use crate::index::holders::HolderId;
use crate::index::radix_tree::{NodeId, Position, RadixTree};
use crate::index::trees::Trees;
use crate::index::worker::Worker;

/// The number of blocks written with a tree locked: some ten microseconds.
const BLOCKS_PER_LOCK: usize = 512;
/// The number of bytes of chains written with a tree locked, within the same time.
const BYTES_PER_LOCK: usize = 1 << 16;

impl Worker {
    /// Writes the worker as a snapshot.
    pub(super) fn write(&self, prompts: &Prompts, out: &mut Vec<u8>) {
        out.extend(MAGIC);
        out.extend(KeySecret::for_process().fingerprint());
        let name = match self.scheme() {
            KeyScheme::Content => "",
            KeyScheme::EngineHashes(keys) => keys.name(),
        };
        // Names have at most 255 bytes.
        out.push(name.len() as u8);
        out.extend(name.as_bytes());
        out.extend(self.stats().revision.to_le_bytes());
        out.extend((self.block_size().get() as u32).to_le_bytes());
        out.push(self.first_is_named().into());
        out.push(self.caches().len() as u8);
        for (source, cache) in self.caches() {
            write_source(*source, out);
            cache.write(prompts, out);
        }
    }
}

impl Cache {
    fn write(&self, prompts: &Prompts, out: &mut Vec<u8>) {
        let mut keyed = Vec::<(Position, EngineHash)>::new();
        let mut unkeyed = Vec::new();
        for (hash, position) in self.blocks() {
            match position {
                Some(position) => keyed.push((position, hash)),
                None => unkeyed.push(hash),
            }
        }
        // Sorting makes the blocks of a node adjacent, and the nodes of a tree.
        keyed.sort_unstable();
        let mut chains = Chains::new(self.holder(), out);
        let mut blocks = Vec::with_capacity(keyed.len());
        let mut rest = keyed.into_iter().peekable();
        while let Some((first, _)) = rest.peek() {
            let number = Trees::tree_with(first.node);
            let tree = prompts.trees.read(number);
            let blocks_end = blocks.len() + BLOCKS_PER_LOCK;
            let bytes_end = chains.out.len() + BYTES_PER_LOCK;
            while blocks.len() < blocks_end && chains.out.len() < bytes_end {
                let next = rest.next_if(|(position, _)| Trees::tree_with(position.node) == number);
                let Some((position, hash)) = next else { break };
                match tree.find(position) {
                    Some(position) => {
                        let chain = chains.chain_of(&tree, position);
                        blocks.push(HashedBlock { chain, at: position.at as u16, hash });
                    }
                    None => unkeyed.push(hash),
                }
            }
        }
        chains.finish();
        write_runs(&blocks, out);
        out.extend((unkeyed.len() as u32).to_le_bytes());
        unkeyed.iter().for_each(|hash| out.extend(hash.to_le_bytes()));
        let extra_copies = self.extra_copies();
        out.extend((extra_copies.len() as u32).to_le_bytes());
        for (hash, copies) in extra_copies {
            out.extend(hash.to_le_bytes());
            out.extend(copies.to_le_bytes());
        }
    }
}

/// A block with a hash, at index `at` of a chain.
struct HashedBlock {
    chain: u32,
    at: u16,
    hash: EngineHash,
}

/// Writes the hashes of blocks as runs.
fn write_runs(blocks: &[HashedBlock], out: &mut Vec<u8>) {
    let are_consecutive = |block: &HashedBlock, next: &HashedBlock| {
        block.chain == next.chain && block.at.checked_add(1) == Some(next.at)
    };
    let count_at = out.len();
    let mut runs = 0_u32;
    out.extend(runs.to_le_bytes());
    for run in blocks.chunk_by(are_consecutive) {
        out.extend(run[0].chain.to_le_bytes());
        out.extend(run[0].at.to_le_bytes());
        // The blocks of a run are in one node, so their number fits.
        out.extend((run.len() as u16).to_le_bytes());
        run.iter().for_each(|block| out.extend(block.hash.to_le_bytes()));
        runs += 1;
    }
    out[count_at..][..4].copy_from_slice(&runs.to_le_bytes());
}

/// A writer of a cache's chains: the nodes in which its holder has blocks, and their ancestors.
/// Each node is written once, unless it is split during the writing.
struct Chains<'a> {
    holder: HolderId,
    out: &'a mut Vec<u8>,
    /// The index in `out` of the number of chains.
    count_at: usize,
    /// The chains written for each node.
    written: HashMap<NodeId, WrittenChain>,
    /// The number of the next chain.
    next: u32,
    /// The node of the last request, with its chain.
    last: Option<(NodeId, WrittenChain)>,
}

#[derive(Clone, Copy, Default)]
struct WrittenChain {
    number: u32,
    /// The number of blocks.
    len: u32,
}

impl<'a> Chains<'a> {
    fn new(holder: HolderId, out: &'a mut Vec<u8>) -> Self {
        let count_at = out.len();
        out.extend(0_u32.to_le_bytes());
        Self { holder, out, count_at, written: HashMap::new(), next: 0, last: None }
    }

    /// Writes the number of chains.
    fn finish(self) {
        self.out[self.count_at..][..4].copy_from_slice(&self.next.to_le_bytes());
    }

    /// Returns the number of the chain that contains a held block, at the same index as in its
    /// node.
    fn chain_of(&mut self, tree: &RadixTree, block: Position) -> u32 {
        if let Some((_, chain)) =
            self.last.filter(|(node, chain)| *node == block.node && chain.len > block.at)
        {
            return chain.number;
        }
        let node = tree.node(block.node);
        let end = node.holders.get(self.holder, node.len()).map_or(0, |(_, to)| to);
        let chain = self.write_up_to(tree, Position { at: end.max(block.at + 1) - 1, ..block });
        self.last = Some((block.node, chain));
        chain.number
    }

    /// Returns the chain of a node that contains `block`. If there is none, writes it now, after
    /// all missing chains before it.
    fn write_up_to(&mut self, tree: &RadixTree, block: Position) -> WrittenChain {
        let mut missing = Vec::new();
        let mut before = Some(block);
        let mut known = None;
        while let Some(block) = before {
            known = self.written.get(&block.node).copied().filter(|written| written.len > block.at);
            if known.is_some() {
                break;
            }
            missing.push(block);
            before = tree.parent(block.node);
        }
        let mut parent = before.zip(known).map(|(block, written)| (written.number, block.at));
        let mut written = known.unwrap_or_default();
        for block in missing.into_iter().rev() {
            written = self.write(tree, parent, block);
            parent = Some((written.number, block.at));
        }
        written
    }

    /// Writes the blocks of a node up to `block`. `parent` is the number of a chain and an index in
    /// it.
    fn write(
        &mut self,
        tree: &RadixTree,
        parent: Option<(u32, u32)>,
        block: Position,
    ) -> WrittenChain {
        let (parent, at) = parent.map_or((0, 0), |(chain, at)| (chain + 1, at));
        let keys = &tree.node(block.node).keys()[..=block.at as usize];
        self.out.extend(parent.to_le_bytes());
        // Nodes have at most 256 blocks, so these numbers fit into 16 bits.
        self.out.extend((at as u16).to_le_bytes());
        self.out.extend((keys.len() as u16).to_le_bytes());
        self.out.extend(keys.iter().flat_map(|key| key.get().to_le_bytes()));
        let chain = WrittenChain { number: self.next, len: keys.len() as u32 };
        self.next += 1;
        self.written.insert(block.node, chain);
        chain
    }
}
