//! The events of a fleet's caches and its prompts, as a file.
//!
//! A trace is made by one process and read by others, so that the memory for making it does not
//! count. The file has no tokens, which follow from the numbers of blocks.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::path::Path;

/// The number of tokens per block.
pub(crate) const BLOCK_SIZE: usize = 16;
/// The size of the vocabulary of Qwen2 and Qwen3.
const VOCABULARY: u64 = 151_936;
/// The parent of a run at the beginning of a prompt.
pub(crate) const NO_PARENT: u32 = u32::MAX;

/// Consecutive blocks of prompts that are always together: a system prompt, a document, a question
/// or an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// The run before it, or [`NO_PARENT`].
    pub(crate) parent: u32,
    /// The number of blocks.
    pub(crate) blocks: u32,
    /// The number of its first block among the blocks of all runs.
    pub(crate) first: u32,
    /// The number of blocks before it in a prompt.
    pub(crate) depth: u32,
}

/// Some blocks of a run that a worker has stored or evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) worker: u32,
    pub(crate) run: u32,
    /// The place of the first block in the run.
    pub(crate) start: u32,
    /// The number of blocks, 1 to 64.
    pub(crate) blocks: u32,
    pub(crate) stored: bool,
}

/// Events in their order, and prompts.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) workers: u32,
    /// The number of batches after which the caches are full.
    pub(crate) fill: usize,
    pub(crate) runs: Vec<Run>,
    /// The engines' hash of each block.
    pub(crate) hashes: Vec<u64>,
    pub(crate) events: Vec<Event>,
    /// The end of each batch, as an index into `events`. A batch has events of one worker.
    pub(crate) batches: Vec<u32>,
    /// The last run of each prompt that arrives right after the caches are full, and after the last
    /// event.
    pub(crate) prompts: [Vec<u32>; 2],
}

impl Trace {
    /// Returns the events of a batch.
    pub(crate) fn batch(&self, batch: usize) -> &[Event] {
        let start = batch.checked_sub(1).map_or(0, |before| self.batches[before]);
        &self.events[start as usize..self.batches[batch] as usize]
    }

    /// Cuts batches into slices of at least `blocks` stored and removed blocks each. Leaves out the
    /// rest.
    pub(crate) fn slices(&self, range: Range<usize>, blocks: usize) -> Vec<Range<usize>> {
        let mut slices = Vec::new();
        let mut start = range.start;
        let mut found = 0;
        for batch in range {
            found += self.blocks(batch..batch + 1);
            if found >= blocks {
                slices.push(start..batch + 1);
                start = batch + 1;
                found = 0;
            }
        }
        slices
    }

    /// Cuts the batches until the caches are full into slices of about `blocks` blocks, with the
    /// rest.
    pub(crate) fn filling_slices(&self, blocks: usize) -> Vec<Range<usize>> {
        let mut slices = self.slices(0..self.fill, blocks);
        slices.push(slices.last().map_or(0, |slice| slice.end)..self.fill);
        slices
    }

    /// Returns the number of stored and removed blocks.
    pub(crate) fn blocks(&self, batches: Range<usize>) -> usize {
        batches.flat_map(|batch| self.batch(batch)).map(|event| event.blocks as usize).sum()
    }

    /// Returns the engine's hashes of an event's blocks, in the order of the prompt.
    pub(crate) fn hashes(&self, event: &Event) -> &[u64] {
        let first = (self.runs[event.run as usize].first + event.start) as usize;
        &self.hashes[first..first + event.blocks as usize]
    }

    /// Returns the engine's hash of the block before an event's first one.
    pub(crate) fn parent_hash(&self, event: &Event) -> Option<u64> {
        let run = self.runs[event.run as usize];
        match event.start.checked_sub(1) {
            Some(before) => Some(self.hashes[(run.first + before) as usize]),
            None => self.last_hash(run.parent),
        }
    }

    /// Returns the engine's hash of a run's last block.
    pub(crate) fn last_hash(&self, run: u32) -> Option<u64> {
        let run = self.runs.get(run as usize)?;
        self.hashes.get((run.first + run.blocks - 1) as usize).copied()
    }

    /// Returns the tokens of an event's blocks.
    pub(crate) fn tokens(&self, event: &Event) -> impl Iterator<Item = u32> + use<> {
        let first = self.runs[event.run as usize].first + event.start;
        (first..first + event.blocks).flat_map(block_tokens)
    }

    /// Returns the tokens of the prompts after the caches are full (0), or after the last event
    /// (1).
    pub(crate) fn all_prompts(&self, time: usize) -> Vec<Vec<u32>> {
        self.prompts[time].iter().map(|&run| self.prompt(run)).collect()
    }

    /// Returns the tokens of the prompt that ends with a run.
    pub(crate) fn prompt(&self, run: u32) -> Vec<u32> {
        let runs = self.chain(run).into_iter().map(|run| self.runs[run as usize]);
        runs.flat_map(|run| run.first..run.first + run.blocks).flat_map(block_tokens).collect()
    }

    /// Returns a run and those before it, in the order of the prompt.
    pub(crate) fn chain(&self, run: u32) -> Vec<u32> {
        let parent =
            |run: &u32| Some(self.runs[*run as usize].parent).filter(|it| *it != NO_PARENT);
        let mut chain: Vec<u32> = std::iter::successors(Some(run), parent).collect();
        chain.reverse();
        chain
    }

    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        let mut table = |words: &mut dyn Iterator<Item = u32>, length: usize| {
            file.write_all(&(length as u64).to_le_bytes())?;
            for word in words {
                file.write_all(&word.to_le_bytes())?;
            }
            Ok::<(), io::Error>(())
        };
        let runs = self.runs.iter().flat_map(|it| [it.parent, it.blocks, it.first, it.depth]);
        let hashes = self.hashes.iter().flat_map(|hash| [*hash as u32, (hash >> 32) as u32]);
        let events = self.events.iter();
        let events =
            events.flat_map(|it| [it.worker, it.run, it.start, it.blocks, it.stored.into()]);
        table(&mut [self.workers, self.fill as u32].into_iter(), 2)?;
        table(&mut { runs }, 4 * self.runs.len())?;
        table(&mut { hashes }, 2 * self.hashes.len())?;
        table(&mut { events }, 5 * self.events.len())?;
        for words in [&self.batches, &self.prompts[0], &self.prompts[1]] {
            table(&mut words.iter().copied(), words.len())?;
        }
        file.flush()
    }

    /// Reads the file that [`Trace::write`] wrote. Allocates each table once, with its final size.
    pub(crate) fn read(path: &Path) -> io::Result<Self> {
        let mut file = BufReader::new(File::open(path)?);
        let sizes = table(&mut file, |words: [u32; 2]| words)?;
        let [workers, fill] = sizes.first().copied().unwrap_or_default();
        let runs = table(&mut file, |[parent, blocks, first, depth]| Run {
            parent,
            blocks,
            first,
            depth,
        })?;
        let hashes = table(&mut file, |[low, high]| u64::from(low) | u64::from(high) << 32)?;
        let events = table(&mut file, |[worker, run, start, blocks, stored]| Event {
            worker,
            run,
            start,
            blocks,
            stored: stored == 1,
        })?;
        let mut words = || table(&mut file, |[word]| word);
        let batches = words()?;
        let prompts = [words()?, words()?];
        Ok(Self { workers, fill: fill as usize, runs, hashes, events, batches, prompts })
    }
}

fn table<T, const N: usize>(
    file: &mut impl Read,
    row: impl Fn([u32; N]) -> T,
) -> io::Result<Vec<T>> {
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

/// Returns the tokens of a block, by its number.
pub(crate) fn block_tokens(block: u32) -> [u32; BLOCK_SIZE] {
    let mut state = u64::from(block).wrapping_mul(0xd134_2543_de82_ef95);
    // SplitMix64 (Steele, Lea, Flood 2014), then a multiplication in place of a division by the
    // size of the vocabulary.
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
    fn read_trace_equals_written_trace() -> io::Result<()> {
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
    fn slices_are_contiguous_with_enough_blocks() {
        let trace = make(&Fleet { workers: 2, blocks: 2_500 }, 20_000, 1);
        let slices = trace.slices(trace.fill..trace.batches.len(), 1_000);
        assert!(slices.len() >= 15, "{}", slices.len());
        assert_eq!(slices[0].start, trace.fill);
        assert!(slices.windows(2).all(|pair| pair[0].end == pair[1].start));
        assert!(slices.iter().all(|slice| trace.blocks(slice.clone()) >= 1_000));
    }
}
