//! The interface of all sides.

use std::hint::black_box;
use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::clock::{Thread, wall};
use crate::trace::Trace;

/// The number of threads that apply events. Each applies the events of its own workers.
pub(crate) const LANES: usize = 2;

/// The form of events, which decides how much of the way from the engine is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// The engine's form: tokens and a hash of each block.
    Tokens,
    /// Dynamo's form, in which another process has hashed the tokens of each block.
    Hashes,
    /// The bytes that an engine publishes.
    Frames,
}

/// An index with loaded events and prompts. Loading is not measured.
pub(crate) trait Subject {
    /// Loads batches and forgets those loaded before.
    fn load(&mut self, trace: &Trace, batches: Range<usize>, input: Input);

    /// Applies the loaded batches, one after the other.
    fn apply(&mut self);

    fn load_prompts(&mut self, prompts: &[Vec<u32>]);

    /// Does unmeasured work before each [`Subject::look_up`].
    fn prepare(&mut self) {}

    /// Looks up every prompt once, by the hashes of its blocks.
    fn look_up(&mut self);

    /// Hashes and looks up every prompt once.
    fn look_up_tokens(&mut self);

    /// Returns each worker that holds the beginning of a prompt, with its number of leading blocks.
    fn overlaps(&mut self, prompt: usize) -> Vec<(u32, u32)>;

    /// Drops all blocks of all workers.
    fn clear(&mut self, workers: u32);

    /// Returns the index's own count of its bytes on the heap.
    fn bytes(&self) -> Option<usize> {
        None
    }

    // An index for one thread does not support the following methods.

    /// Applies the loaded batches on [`LANES`] threads. Returns the time of the slowest thread.
    fn apply_on_lanes(&mut self) -> Option<Duration> {
        None
    }

    /// Looks up every prompt `times` times on each of some threads, by the hashes of its blocks.
    /// Returns the time of the slowest thread.
    fn look_up_on(&mut self, _threads: usize, _times: usize) -> Option<Duration> {
        None
    }

    /// Looks up prompts while another thread applies the loaded batches at a pace of blocks per
    /// second, or only waits for that time. Returns the time of each lookup.
    fn look_up_beside(&mut self, _pace: f64, _applies: bool) -> Option<Vec<Duration>> {
        None
    }
}

/// An index for several threads.
pub(crate) trait Index: Sync {
    /// A batch of one worker in the index's own form.
    type Work: Send;
    /// A token in the index's own form.
    type Token: Send + Sync;
    /// The hash of a block for lookups.
    type Key: Send + Sync;
    /// The memory that a thread reuses for lookups.
    type Buffers: Default;

    /// Converts a batch into the index's own form.
    fn work(&self, trace: &Trace, batch: usize, input: Input) -> Self::Work;
    /// Applies the batches of a lane, or passes them to the lane's own thread.
    fn apply(&self, lane: usize, work: Vec<Self::Work>);
    /// Waits until all passed batches are applied.
    fn flush(&self, _lane: usize) {}
    /// Returns a lane's own threads.
    fn threads(&self, _lane: usize) -> &[Thread] {
        &[]
    }
    /// Converts tokens into the index's own form.
    fn text(tokens: &[u32]) -> Vec<Self::Token>;
    /// Returns the hashes of a text's full blocks.
    fn keys(text: &[Self::Token]) -> Vec<Self::Key>;
    fn look_up(&self, keys: &[Self::Key], buffers: &mut Self::Buffers);
    fn overlaps(&self, keys: &[Self::Key]) -> Vec<(u32, u32)>;
    fn clear(&self, worker: u32);
    fn bytes(&self) -> Option<usize> {
        None
    }
}

/// Returns the lane of a worker's events.
pub(crate) fn lane(worker: u32) -> usize {
    worker as usize % LANES
}

/// An [`Index`] with loaded events and prompts.
pub(crate) struct Ready<I: Index> {
    index: I,
    work: [Vec<I::Work>; LANES],
    /// The lane and the number of blocks of each batch, in the order of the trace.
    order: Vec<(usize, usize)>,
    texts: Vec<Vec<I::Token>>,
    keys: Vec<Vec<I::Key>>,
    buffers: I::Buffers,
}

impl<I: Index> Ready<I> {
    pub(crate) fn new(index: I) -> Self {
        Self {
            index,
            work: [const { Vec::new() }; LANES],
            order: Vec::new(),
            texts: Vec::new(),
            keys: Vec::new(),
            buffers: I::Buffers::default(),
        }
    }
}

impl<I: Index> Subject for Ready<I> {
    fn load(&mut self, trace: &Trace, batches: Range<usize>, input: Input) {
        self.work.iter_mut().for_each(Vec::clear);
        self.order.clear();
        for batch in batches {
            let lane = lane(trace.batch(batch)[0].worker);
            self.work[lane].push(self.index.work(trace, batch, input));
            self.order.push((lane, trace.blocks(batch..batch + 1)));
        }
    }

    fn apply(&mut self) {
        for (lane, work) in self.work.iter_mut().enumerate() {
            self.index.apply(lane, std::mem::take(work));
            self.index.flush(lane);
        }
    }

    fn load_prompts(&mut self, prompts: &[Vec<u32>]) {
        self.texts = prompts.iter().map(|tokens| I::text(tokens)).collect();
        self.keys = self.texts.iter().map(|text| I::keys(text)).collect();
    }

    fn look_up(&mut self) {
        self.keys.iter().for_each(|keys| self.index.look_up(keys, &mut self.buffers));
    }

    fn look_up_tokens(&mut self) {
        for text in &self.texts {
            self.index.look_up(&I::keys(text), &mut self.buffers);
        }
    }

    fn overlaps(&mut self, prompt: usize) -> Vec<(u32, u32)> {
        self.index.overlaps(&self.keys[prompt])
    }

    fn clear(&mut self, workers: u32) {
        (0..workers).for_each(|worker| self.index.clear(worker));
        (0..LANES).for_each(|lane| self.index.flush(lane));
    }

    fn bytes(&self) -> Option<usize> {
        self.index.bytes()
    }

    fn apply_on_lanes(&mut self) -> Option<Duration> {
        let index = &self.index;
        let apply = |(lane, work): (usize, &mut Vec<I::Work>)| {
            let work = std::mem::take(work);
            move || {
                wall(index.threads(lane), || {
                    index.apply(lane, work);
                    index.flush(lane);
                })
            }
        };
        Some(slowest(self.work.iter_mut().enumerate().map(apply)))
    }

    fn look_up_on(&mut self, threads: usize, times: usize) -> Option<Duration> {
        let index = &self.index;
        let keys = &self.keys;
        let barrier = &Barrier::new(threads);
        let look_up = |start: usize| {
            move || {
                let mut buffers = I::Buffers::default();
                let (last, first) = keys.split_at(start);
                barrier.wait();
                wall(&[], || {
                    for _ in 0..times {
                        let keys = first.iter().chain(last);
                        keys.for_each(|keys| index.look_up(keys, &mut buffers));
                    }
                })
            }
        };
        // Threads do not look up the same prompt at the same time.
        Some(slowest((0..threads).map(|thread| keys.len() * thread / threads).map(look_up)))
    }

    fn look_up_beside(&mut self, pace: f64, applies: bool) -> Option<Vec<Duration>> {
        let mut lanes =
            std::mem::replace(&mut self.work, [const { Vec::new() }; LANES]).map(Vec::into_iter);
        let index = &self.index;
        let order = &self.order;
        let applied = AtomicBool::new(false);
        let times = thread::scope(|scope| {
            scope.spawn(|| {
                let start = Instant::now();
                let mut blocks = 0;
                for &(lane, batch) in order {
                    let work = lanes[lane].next().into_iter().collect();
                    if applies {
                        index.apply(lane, work);
                    }
                    blocks += batch;
                    let time = Duration::from_secs_f64(blocks as f64 / pace);
                    let ahead = time.saturating_sub(start.elapsed());
                    // Shorter sleeps take longer than they should.
                    if ahead > Duration::from_micros(200) {
                        thread::sleep(ahead);
                    }
                }
                (0..LANES).for_each(|lane| index.flush(lane));
                applied.store(true, Ordering::Relaxed);
            });
            let mut times = Vec::new();
            let mut buffers = I::Buffers::default();
            for keys in self.keys.iter().cycle() {
                if applied.load(Ordering::Relaxed) {
                    break;
                }
                let start = Instant::now();
                index.look_up(black_box(keys), &mut buffers);
                times.push(start.elapsed());
            }
            times
        });
        Some(times)
    }
}

/// Runs each function on a thread of its own, all at once. Returns the longest time.
fn slowest(work: impl Iterator<Item = impl FnOnce() -> Duration + Send>) -> Duration {
    thread::scope(|scope| {
        let threads: Vec<_> = work.map(|work| scope.spawn(work)).collect();
        // A thread that panicked has printed it.
        let times = threads.into_iter().map(|thread| thread.join().unwrap_or(Duration::MAX));
        times.max().unwrap_or_default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Event, NO_PARENT, Run};
    use crate::{SIDES, side};

    /// Returns the overlaps of each side for a prompt of three blocks, after these events of an
    /// engine with hashes of its own.
    fn overlaps(events: &[(bool, u32, u32)]) -> Vec<Vec<(u32, u32)>> {
        let event = |&(stored, start, blocks)| Event { worker: 0, run: 0, start, blocks, stored };
        let trace = Trace {
            workers: 1,
            runs: vec![Run { parent: NO_PARENT, blocks: 3, first: 0, depth: 0 }],
            hashes: vec![71, 72, 73],
            events: events.iter().map(event).collect(),
            batches: vec![events.len() as u32],
            ..Trace::default()
        };
        let overlap = |name, input| {
            let mut side = side(name, 1).ok()?;
            side.load_prompts(&[trace.prompt(0)]);
            side.load(&trace, 0..1, input);
            side.apply();
            Some(side.overlaps(0))
        };
        let overlaps =
            |input| SIDES.into_iter().filter_map(|name| overlap(name, input)).collect::<Vec<_>>();
        assert_eq!(overlaps(Input::Frames), overlaps(Input::Tokens));
        overlaps(Input::Tokens)
    }

    #[test]
    fn own_hashes_are_unknown_to_positional_index_only() {
        let whole = vec![(0, 3)];
        assert_eq!(overlaps(&[(true, 0, 3)]), [whole.clone(), whole.clone(), whole, vec![]]);
    }

    #[test]
    fn only_ours_counts_copies_of_a_block() {
        let overlaps = overlaps(&[(true, 0, 3), (true, 2, 1), (false, 2, 1)]);
        assert_eq!(overlaps[..3], [vec![(0, 3)], vec![(0, 2)], vec![(0, 2)]]);
    }
}
