//! The blocks of one worker.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use chiasm_types::{BlockSize, MmHash};

use super::WorkerIndexStats;
use crate::block_key::{BlockContent, BlockHasher, BlockKey};
use crate::event::{BlockRemoved, BlockStored, ExternalHash, ExtraKey};
use crate::identifier::media_identity;

/// See [`PrefixIndex`](super::PrefixIndex) for the rules.
pub(super) struct WorkerBlocks {
    block_size: BlockSize,
    copies: HashMap<ExternalHash, Copies>,
    /// How many hashes have this key, at least 1. More than one when the engine tells blocks apart that we don't, such
    /// as those of two LoRA adapters with the same name.
    held: HashMap<BlockKey, u32>,
    pub(super) stats: WorkerIndexStats,
}

struct Copies {
    count: u32,
    /// `None` matches nothing.
    key: Option<BlockKey>,
}

/// What comes before a stored block.
#[derive(Clone, Copy)]
enum Before {
    StartOfPrompt,
    Block(BlockKey),
    Unknown,
}

impl WorkerBlocks {
    pub(super) fn new(block_size: BlockSize) -> Self {
        Self { block_size, copies: HashMap::new(), held: HashMap::new(), stats: WorkerIndexStats::default() }
    }

    pub(super) fn store(&mut self, event: &BlockStored, hasher: &mut BlockHasher, added: &mut Vec<BlockKey>) {
        if !counts(event.medium.as_deref(), event.group_idx, event.locality.as_deref())
            || event.block_size as usize != self.block_size.get()
        {
            self.stats.ignored_events += 1;
            return;
        }
        let blocks = event.block_hashes.len();
        let fits = event.token_ids.len() == blocks * self.block_size.get()
            && event.extra_keys.as_ref().is_none_or(|keys| keys.len() == blocks);
        if !fits {
            self.stats.unreadable_extra_keys += blocks as u64;
            event.block_hashes.iter().for_each(|hash| self.add_copy(hash, None, added));
            return;
        }

        let mut before = match &event.parent_block_hash {
            None => Before::StartOfPrompt,
            Some(parent) => match self.copies.get(parent).and_then(|copies| copies.key) {
                Some(key) => Before::Block(key),
                None => Before::Unknown,
            },
        };
        let tokens = event.token_ids.chunks_exact(self.block_size.get());
        for (block, (hash, tokens)) in event.block_hashes.iter().zip(tokens).enumerate() {
            let extra_keys = event.extra_keys.as_ref().and_then(|keys| keys[block].as_deref()).unwrap_or_default();
            let key = match (before, Marks::read(extra_keys, event.lora_name.as_deref(), before)) {
                (Before::Unknown, _) => {
                    self.stats.unknown_parents += 1;
                    None
                }
                (_, None) => {
                    self.stats.unreadable_extra_keys += 1;
                    None
                }
                (before, Some(marks)) => Some(hasher.key(&BlockContent {
                    parent: before.key(),
                    tokens,
                    media: &marks.media,
                    lora: event.lora_name.as_deref(),
                    salt: marks.salt,
                })),
            };
            self.add_copy(hash, key, added);
            before = key.map_or(Before::Unknown, Before::Block);
        }
    }

    pub(super) fn remove(&mut self, event: &BlockRemoved) {
        if !counts(event.medium.as_deref(), event.group_idx, event.locality.as_deref()) {
            self.stats.ignored_events += 1;
            return;
        }
        for hash in &event.block_hashes {
            let Some(copies) = self.copies.get_mut(hash) else {
                self.stats.unknown_removals += 1;
                continue;
            };
            copies.count -= 1;
            if copies.count == 0 {
                let key = copies.key;
                self.copies.remove(hash);
                match key {
                    Some(key) => self.release(key),
                    None => self.stats.unkeyed_blocks -= 1,
                }
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.copies.clear();
        self.held.clear();
        self.stats.unkeyed_blocks = 0;
    }

    pub(super) fn overlap(&self, keys: &[BlockKey]) -> usize {
        keys.iter().take_while(|key| self.holds(**key)).count()
    }

    pub(super) fn holds(&self, key: BlockKey) -> bool {
        self.held.contains_key(&key)
    }

    pub(super) fn stats(&self) -> WorkerIndexStats {
        WorkerIndexStats { blocks: self.held.len(), ..self.stats }
    }

    fn add_copy(&mut self, hash: &ExternalHash, key: Option<BlockKey>, added: &mut Vec<BlockKey>) {
        let copies = match self.copies.entry(hash.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                self.stats.unkeyed_blocks += 1;
                new.insert(Copies { count: 0, key: None })
            }
        };
        copies.count += 1;
        match (copies.key, key) {
            (None, Some(key)) => {
                copies.key = Some(key);
                self.stats.unkeyed_blocks -= 1;
                let hashes = self.held.entry(key).or_insert(0);
                *hashes += 1;
                if *hashes == 1 {
                    added.push(key);
                }
            }
            (Some(known), Some(key)) if known != key => {
                copies.key = None;
                self.stats.unkeyed_blocks += 1;
                self.release(known);
            }
            _ => {}
        }
    }

    fn release(&mut self, key: BlockKey) {
        if let Entry::Occupied(mut hashes) = self.held.entry(key) {
            *hashes.get_mut() -= 1;
            if *hashes.get() == 0 {
                hashes.remove();
            }
        }
    }
}

impl Before {
    fn key(self) -> Option<BlockKey> {
        match self {
            Self::Block(key) => Some(key),
            Self::StartOfPrompt | Self::Unknown => None,
        }
    }
}

fn counts(medium: Option<&str>, group: Option<u32>, locality: Option<&str>) -> bool {
    medium.is_none_or(|medium| medium == "GPU") && group.is_none_or(|group| group == 0) && locality != Some("REMOTE")
}

/// The extra keys of one block, told apart.
struct Marks<'a> {
    media: Vec<(MmHash, i64)>,
    salt: Option<&'a str>,
}

impl<'a> Marks<'a> {
    /// `None` when there is a mark that can't be read. The wire doesn't tag them, so their order tells: LoRA name if the
    /// event has one, media, salt in a first block.
    fn read(extra_keys: &'a [ExtraKey], lora: Option<&str>, before: Before) -> Option<Self> {
        let mut rest = match (extra_keys.split_first(), lora) {
            (Some((ExtraKey::Text(first), rest)), Some(lora)) if first == lora => rest,
            _ => extra_keys,
        };
        let mut marks = Self { media: Vec::new(), salt: None };
        while let [ExtraKey::Media { identifier, offset }, after @ ..] = rest {
            marks.media.push((media_identity(identifier), *offset));
            rest = after;
        }
        if let ([ExtraKey::Text(salt), after @ ..], Before::StartOfPrompt) = (rest, before) {
            marks.salt = Some(salt);
            rest = after;
        }
        rest.is_empty().then_some(marks)
    }
}
