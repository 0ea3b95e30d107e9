//! `RadixTree`, for one thread; Dynamo's router puts a channel in front of it.

use std::hint::black_box;
use std::ops::Range;

use dynamo_kv_router::indexer::RadixTree;
use dynamo_kv_router::protocols::LocalBlockHash;

use crate::dynamo::{Listeners, Work, block_hashes, cleared, overlaps};
use crate::subject::{Input, Subject};
use crate::trace::Trace;

/// The tree with its loaded events and prompts.
#[derive(Default)]
pub(crate) struct Single {
    tree: RadixTree,
    listeners: Listeners,
    work: Vec<Work>,
    tokens: Vec<Vec<u32>>,
    keys: Vec<Vec<LocalBlockHash>>,
    /// Copies of the keys, which lookups consume.
    copies: Vec<Vec<LocalBlockHash>>,
}

impl Subject for Single {
    fn load(&mut self, trace: &Trace, batches: Range<usize>, input: Input) {
        self.work = batches.map(|batch| Work::new(trace, batch, input)).collect();
    }

    fn apply(&mut self) {
        for work in std::mem::take(&mut self.work) {
            // A refused event shows as missing overlaps.
            work.for_each(&mut self.listeners, |event| {
                let _ = self.tree.apply_event(event);
            });
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
            let _ = self.tree.apply_event(cleared(worker));
        }
    }
}
