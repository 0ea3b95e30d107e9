//! `RadixTree`: for one thread only; Dynamo's router puts it behind a channel.

use std::hint::black_box;
use std::ops::Range;

use dynamo_kv_router::indexer::RadixTree;
use dynamo_kv_router::protocols::LocalBlockHash;

use crate::dynamo::{Listeners, Work, block_hashes, cleared, overlaps};
use crate::subject::{From, Subject};
use crate::trace::Trace;

/// The tree with what is ready for it.
#[derive(Default)]
pub(crate) struct Single {
    tree: RadixTree,
    listeners: Listeners,
    work: Vec<Work>,
    tokens: Vec<Vec<u32>>,
    keys: Vec<Vec<LocalBlockHash>>,
    /// Lookups take them away.
    copies: Vec<Vec<LocalBlockHash>>,
    /// Events that it did not take.
    refused: usize,
}

impl Subject for Single {
    fn load(&mut self, trace: &Trace, batches: Range<usize>, from: From) {
        self.work = batches.map(|batch| Work::new(trace, batch, from)).collect();
    }

    fn apply(&mut self) {
        for work in std::mem::take(&mut self.work) {
            work.each(&mut self.listeners, |event| self.refused += usize::from(self.tree.apply_event(event).is_err()));
        }
    }

    fn load_prompts(&mut self, prompts: &[Vec<u32>]) {
        self.tokens = prompts.to_vec();
        self.keys = prompts.iter().map(|tokens| block_hashes(tokens)).collect();
    }

    fn prepare(&mut self) {
        self.copies.clone_from(&self.keys);
    }

    fn look_up(&mut self) {
        for keys in std::mem::take(&mut self.copies) {
            black_box(self.tree.find_matches(keys, false));
        }
    }

    fn look_up_tokens(&mut self) {
        for tokens in &self.tokens {
            black_box(self.tree.find_matches(block_hashes(tokens), false));
        }
    }

    fn overlaps(&mut self, prompt: usize) -> Vec<(u32, u32)> {
        overlaps(&self.tree.find_matches(self.keys[prompt].clone(), false))
    }

    fn clear(&mut self, workers: u32) {
        for worker in 0..workers {
            self.refused += usize::from(self.tree.apply_event(cleared(worker)).is_err());
        }
    }
}
