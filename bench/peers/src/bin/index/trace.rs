//! What is measured with: the events of a fleet's caches and the prompts that come in, as a file.
//!
//! A trace is made by one process and read by others, so that what the making took from the
//! allocator is not there when memory is measured. Tokens are not in it: they follow from the
//! block's number.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::path::Path;

/// Tokens per block.
pub(crate) const BLOCK_SIZE: usize = 16;

/// Number of distinct tokens, that of Qwen2 and Qwen3.
const VOCABULARY: u64 = 151_936;

/// No run before this one.
pub(crate) const NO_PARENT: u32 = u32::MAX;

/// Consecutive blocks of prompts that are always together: a system prompt, a document, a question,
/// an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// The run before it, or [`NO_PARENT`].
    pub(crate) parent: u32,
    /// How many blocks.
    pub(crate) blocks: u32,
    /// Number of its first block among the blocks of all runs.
    pub(crate) first: u32,
    /// Blocks before it.
    pub(crate) depth: u32,
}

/// A worker came to hold, or evicted, some of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) worker: u32,
    pub(crate) run: u32,
    /// The first of the blocks, as a place in the run.
    pub(crate) start: u32,
    /// How many; 1 to 64.
    pub(crate) blocks: u32,
    pub(crate) stored: bool,
}

/// Events in the order in which they happen, and prompts.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) workers: u32,
    /// Batches after which the caches are full.
    pub(crate) fill: usize,
    pub(crate) runs: Vec<Run>,
    /// The engines' hash of each block.
    pub(crate) hashes: Vec<u64>,
    pub(crate) events: Vec<Event>,
    /// End of each batch, as an index into `events`. All events of a batch are of one worker.
    pub(crate) batches: Vec<u32>,
    /// The last run of each prompt that comes in right after the caches are full, and after the
    /// last event.
    pub(crate) prompts: [Vec<u32>; 2],
}

impl Trace {
    /// The events of a batch.
    pub(crate) fn batch(&self, batch: usize) -> &[Event] {
        let start = batch.checked_sub(1).map_or(0, |before| self.batches[before]);
        &self.events[start as usize..self.batches[batch] as usize]
    }

    /// Cuts the batches in `range` into slices of about so many stored and removed blocks; the rest
    /// is left out.
    pub(crate) fn slices(&self, range: Range<usize>, blocks: usize) -> Vec<Range<usize>> {
        let (mut slices, mut start, mut found) = (Vec::new(), range.start, 0);
        for batch in range {
            found += self.blocks(batch..batch + 1);
            if found >= blocks {
                slices.push(start..batch + 1);
                (start, found) = (batch + 1, 0);
            }
        }
        slices
    }

    /// How many blocks are stored and removed.
    pub(crate) fn blocks(&self, batches: Range<usize>) -> usize {
        batches.flat_map(|batch| self.batch(batch)).map(|event| event.blocks as usize).sum()
    }

    /// The engine's hashes of an event's blocks, in prompt order.
    pub(crate) fn hashes(&self, event: &Event) -> &[u64] {
        let first = (self.runs[event.run as usize].first + event.start) as usize;
        &self.hashes[first..first + event.blocks as usize]
    }

    /// The engine's hash of the block before an event's first.
    pub(crate) fn parent_hash(&self, event: &Event) -> Option<u64> {
        let run = self.runs[event.run as usize];
        match event.start.checked_sub(1) {
            Some(before) => Some(self.hashes[(run.first + before) as usize]),
            None => self.last_hash(run.parent),
        }
    }

    /// The engine's hash of a run's last block.
    pub(crate) fn last_hash(&self, run: u32) -> Option<u64> {
        let run = self.runs.get(run as usize)?;
        self.hashes.get((run.first + run.blocks - 1) as usize).copied()
    }

    /// The tokens of an event's blocks.
    pub(crate) fn tokens(&self, event: &Event) -> impl Iterator<Item = u32> + use<> {
        let first = self.runs[event.run as usize].first + event.start;
        (first..first + event.blocks).flat_map(block_tokens)
    }

    /// The tokens of the prompt that ends with a run.
    pub(crate) fn prompt(&self, run: u32) -> Vec<u32> {
        let chain = self.chain(run);
        let blocks = chain.iter().map(|&run| self.runs[run as usize]).flat_map(|run| run.first..run.first + run.blocks);
        blocks.flat_map(block_tokens).collect()
    }

    /// A run and those before it, first one first.
    pub(crate) fn chain(&self, run: u32) -> Vec<u32> {
        let mut chain: Vec<u32> = std::iter::successors(Some(run), |&run| {
            Some(self.runs[run as usize].parent).filter(|&parent| parent != NO_PARENT)
        })
        .collect();
        chain.reverse();
        chain
    }

    /// Writes the file.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        let mut table = |words: &mut dyn Iterator<Item = u32>, length: usize| {
            file.write_all(&(length as u64).to_le_bytes())?;
            for word in words {
                file.write_all(&word.to_le_bytes())?;
            }
            Ok::<(), io::Error>(())
        };
        let runs = self.runs.iter().flat_map(|run| [run.parent, run.blocks, run.first, run.depth]);
        let hashes = self.hashes.iter().flat_map(|hash| [*hash as u32, (hash >> 32) as u32]);
        let events = self.events.iter().flat_map(|it| [it.worker, it.run, it.start, it.blocks, u32::from(it.stored)]);
        table(&mut [self.workers, self.fill as u32].into_iter(), 2)?;
        table(&mut { runs }, 4 * self.runs.len())?;
        table(&mut { hashes }, 2 * self.hashes.len())?;
        table(&mut { events }, 5 * self.events.len())?;
        table(&mut self.batches.iter().copied(), self.batches.len())?;
        for prompts in &self.prompts {
            table(&mut prompts.iter().copied(), prompts.len())?;
        }
        file.flush()
    }

    /// Reads the file that [`Trace::write`] wrote. Allocates each table once, at its final size.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let mut file = BufReader::new(File::open(path)?);
        let [workers, fill] = table(&mut file, |words: [u32; 2]| words)?.first().copied().unwrap_or_default();
        let runs = table(&mut file, |[parent, blocks, first, depth]| Run { parent, blocks, first, depth })?;
        let hashes = table(&mut file, |[low, high]| u64::from(low) | u64::from(high) << 32)?;
        let event =
            |[worker, run, start, blocks, stored]: [u32; 5]| Event { worker, run, start, blocks, stored: stored == 1 };
        let events = table(&mut file, event)?;
        let mut words = || table(&mut file, |[word]| word);
        let (batches, prompts) = (words()?, [words()?, words()?]);
        Ok(Self { workers, fill: fill as usize, runs, hashes, events, batches, prompts })
    }
}

fn table<T, const N: usize>(file: &mut impl Read, row: impl Fn([u32; N]) -> T) -> io::Result<Vec<T>> {
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let rows = u64::from_le_bytes(length) as usize / N;
    let mut table = Vec::with_capacity(rows);
    for _ in 0..rows {
        let mut words = [0; N];
        for word in &mut words {
            let mut bytes = [0; 4];
            file.read_exact(&mut bytes)?;
            *word = u32::from_le_bytes(bytes);
        }
        table.push(row(words));
    }
    Ok(table)
}

/// The tokens of a block, by its number.
pub(crate) fn block_tokens(block: u32) -> [u32; BLOCK_SIZE] {
    let mut state = u64::from(block).wrapping_mul(0xd134_2543_de82_ef95);
    // SplitMix64 (Steele, Lea, Flood 2014), then a multiplication instead of a division to get into
    // the vocabulary.
    [(); BLOCK_SIZE].map(|()| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        (((mixed >> 32) * VOCABULARY) >> 32) as u32
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Fleet, make};

    #[test]
    fn a_trace_comes_back_from_its_file() -> io::Result<()> {
        let trace = make(&Fleet { workers: 3, blocks: 2_500 }, 50_000, 7);
        let file = tempfile::NamedTempFile::new()?;
        trace.write(file.path())?;
        let read = Trace::read(file.path())?;
        assert_eq!((read.workers, read.fill, read.runs.len()), (3, trace.fill, trace.runs.len()));
        assert_eq!((&read.hashes, &read.events), (&trace.hashes, &trace.events));
        assert_eq!((&read.batches, &read.prompts), (&trace.batches, &trace.prompts));
        let last = *read.prompts[0].last().unwrap_or(&0);
        assert_eq!(read.prompt(last), trace.prompt(last));
        Ok(())
    }

    #[test]
    fn slices_follow_each_other_and_are_as_long_as_asked() {
        let trace = make(&Fleet { workers: 2, blocks: 2_500 }, 20_000, 1);
        let slices = trace.slices(trace.fill..trace.batches.len(), 1_000);
        assert!(slices.len() >= 15, "{}", slices.len());
        assert_eq!(slices[0].start, trace.fill);
        assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(slices.iter().all(|slice| trace.blocks(slice.clone()) >= 1_000));
    }
}
