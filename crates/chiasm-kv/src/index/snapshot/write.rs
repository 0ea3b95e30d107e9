//! Snapshots as they are written.

use std::collections::HashMap;

use super::{MAGIC, write_source};
use crate::block_key::{KeyScheme, KeySecret};
use crate::index::cache::{Cache, EngineHash, Prompts};
use crate::index::holders::HolderId;
use crate::index::radix_tree::{NodeId, Position, RadixTree};
use crate::index::trees::Trees;
use crate::index::worker::Worker;

/// Blocks that are looked at with a tree locked, and bytes that are written: some ten microseconds.
const BLOCKS: usize = 512;
const BYTES: usize = 1 << 16;

impl Worker {
    pub(super) fn write(&self, prompts: &Prompts, out: &mut Vec<u8>) {
        out.extend(MAGIC);
        out.extend(KeySecret::of_process().fingerprint());
        let name = match self.scheme() {
            KeyScheme::Content => "",
            KeyScheme::EngineHashes(keys) => keys.name(),
        };
        // No more than a byte tells.
        out.push(name.len() as u8);
        out.extend(name.as_bytes());
        out.extend(self.stats().revision.to_le_bytes());
        out.extend((self.block_size().get() as u32).to_le_bytes());
        out.push(self.named().into());
        out.push(self.caches().len() as u8);
        for (source, cache) in self.caches() {
            write_source(*source, out);
            cache.write(prompts, out);
        }
    }
}

impl Cache {
    fn write(&self, prompts: &Prompts, out: &mut Vec<u8>) {
        let (mut keyed, mut unkeyed) = (Vec::<(Position, EngineHash)>::new(), Vec::new());
        for (hash, position) in self.blocks() {
            match position {
                Some(position) => keyed.push((position, hash)),
                None => unkeyed.push(hash),
            }
        }
        // Those of a node follow each other, and so do nodes of a tree.
        keyed.sort_unstable();
        let mut chains = Chains::new(self.holder(), out);
        let mut blocks = Vec::with_capacity(keyed.len());
        let mut rest = keyed.into_iter().peekable();
        while let Some((first, _)) = rest.peek() {
            let number = Trees::tree_with(first.node);
            let tree = prompts.trees.read(number);
            let (blocks_end, bytes_end) = (blocks.len() + BLOCKS, chains.out.len() + BYTES);
            while blocks.len() < blocks_end && chains.out.len() < bytes_end {
                let next = rest.next_if(|(position, _)| Trees::tree_with(position.node) == number);
                let Some((position, hash)) = next else { break };
                match tree.find(position) {
                    Some(position) => {
                        blocks.push((chains.of(&tree, position), position.at as u16, hash))
                    }
                    None => unkeyed.push(hash),
                }
            }
        }
        chains.finish();
        write_runs(&blocks, out);
        out.extend((unkeyed.len() as u32).to_le_bytes());
        unkeyed.iter().for_each(|hash| out.extend(hash.to_le_bytes()));
        let several = self.several();
        out.extend((several.len() as u32).to_le_bytes());
        for (hash, copies) in several {
            out.extend(hash.to_le_bytes());
            out.extend(copies.to_le_bytes());
        }
    }
}

/// Blocks by chain and place, with their hashes.
fn write_runs(blocks: &[(u32, u16, EngineHash)], out: &mut Vec<u8>) {
    let follow = |(chain, at, _): &(u32, u16, EngineHash),
                  (next, next_at, _): &(u32, u16, EngineHash)| {
        chain == next && at.checked_add(1) == Some(*next_at)
    };
    let count = out.len();
    let mut runs = 0_u32;
    out.extend(runs.to_le_bytes());
    for run in blocks.chunk_by(follow) {
        let (chain, at, _) = run[0];
        out.extend(chain.to_le_bytes());
        out.extend(at.to_le_bytes());
        // They are in one node.
        out.extend((run.len() as u16).to_le_bytes());
        run.iter().for_each(|(_, _, hash)| out.extend(hash.to_le_bytes()));
        runs += 1;
    }
    out[count..][..4].copy_from_slice(&runs.to_le_bytes());
}

/// The chains of a cache: nodes that its holder has blocks of, and those that they come after. Each
/// is written once, unless others split it meanwhile.
struct Chains<'a> {
    holder: HolderId,
    out: &'a mut Vec<u8>,
    /// Where their number is written down.
    count: usize,
    /// The number and the length of each node's.
    written: HashMap<NodeId, (u32, u32)>,
    next: u32,
    /// The last one that was asked for.
    last: Option<(NodeId, (u32, u32))>,
}

impl<'a> Chains<'a> {
    fn new(holder: HolderId, out: &'a mut Vec<u8>) -> Self {
        let count = out.len();
        out.extend(0_u32.to_le_bytes());
        Self { holder, out, count, written: HashMap::new(), next: 0, last: None }
    }

    fn finish(self) {
        self.out[self.count..][..4].copy_from_slice(&self.next.to_le_bytes());
    }

    /// The chain that a held block is in: at the same place as in its node.
    fn of(&mut self, tree: &RadixTree, block: Position) -> u32 {
        let has = |(_, blocks): &(u32, u32)| *blocks > block.at;
        if let Some((_, chain)) =
            self.last.filter(|(node, chain)| *node == block.node && has(chain))
        {
            return chain.0;
        }
        let node = tree.node(block.node);
        let end = node.holders.get(self.holder, node.len()).map_or(0, |(_, to)| to);
        let chain = self.written_to(tree, Position { at: end.max(block.at + 1) - 1, ..block });
        self.last = Some((block.node, chain));
        chain.0
    }

    /// The chain that goes as far as this block at least; written now if there was none, after all
    /// those that it comes after.
    fn written_to(&mut self, tree: &RadixTree, block: Position) -> (u32, u32) {
        let mut missing = Vec::new();
        let mut before = Some(block);
        let mut known = None;
        while let Some(block) = before {
            known = self.written.get(&block.node).copied().filter(|(_, blocks)| *blocks > block.at);
            if known.is_some() {
                break;
            }
            missing.push(block);
            before = tree.parent(block.node);
        }
        let mut parent = before.zip(known).map(|(block, (chain, _))| (chain, block.at));
        let mut written = known.unwrap_or_default();
        for block in missing.into_iter().rev() {
            written = self.write(tree, parent, block);
            parent = Some((written.0, block.at));
        }
        written
    }

    /// Writes the blocks of a node up to this one.
    fn write(
        &mut self,
        tree: &RadixTree,
        parent: Option<(u32, u32)>,
        block: Position,
    ) -> (u32, u32) {
        let (parent, at) = parent.map_or((0, 0), |(chain, at)| (chain + 1, at));
        let keys = &tree.node(block.node).keys()[..=block.at as usize];
        self.out.extend(parent.to_le_bytes());
        // Nodes have no more blocks than 16 bits tell.
        self.out.extend((at as u16).to_le_bytes());
        self.out.extend((keys.len() as u16).to_le_bytes());
        self.out.extend(keys.iter().flat_map(|key| key.get().to_le_bytes()));
        let chain = (self.next, keys.len() as u32);
        self.next += 1;
        self.written.insert(block.node, chain);
        chain
    }
}
