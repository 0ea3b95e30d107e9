//! What is measured, and what all of them have in common.

use std::hint::black_box;
use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::clock::{Thread, wall};
use crate::trace::Trace;

/// Threads that apply events, each those of its own workers.
pub(crate) const LANES: usize = 2;

/// The form in which an index gets events, which decides how much of the way from the engine is
/// measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// What an engine says: tokens and its own hash of each block.
    Tokens,
    /// Dynamo's form, in which someone else has hashed the tokens of each block.
    Hashes,
    /// What an engine publishes: bytes.
    Frames,
}

/// An index with the events that it is to apply next and the prompts that it is asked for.
///
/// What comes from the trace is made ready outside of the measured calls.
pub(crate) trait Subject {
    /// Makes some batches ready, and forgets those made ready before.
    fn load(&mut self, trace: &Trace, batches: Range<usize>, from: From);

    /// Applies what was made ready, all on one thread, or one after the other.
    fn apply(&mut self);

    /// Makes prompts ready.
    fn load_prompts(&mut self, prompts: &[Vec<u32>]);

    /// Does what must precede each [`Subject::look_up`] and is not measured.
    fn prepare(&mut self) {}

    /// Looks up every prompt once, by the hashes of its blocks.
    fn look_up(&mut self);

    /// Hashes and looks up every prompt once.
    fn look_up_tokens(&mut self);

    /// Each worker that holds something of a prompt, and how many of its leading blocks.
    fn overlaps(&mut self, prompt: usize) -> Vec<(u32, u32)>;

    /// Forgets all blocks of all workers.
    fn clear(&mut self, workers: u32);

    /// Its own count of its bytes on the heap.
    fn bytes(&self) -> Option<usize> {
        None
    }

    /// What only an index that several threads may use can do.
    fn threaded(&mut self) -> Option<&mut dyn Threaded> {
        None
    }
}

/// Measurements that several threads make at once on one index.
pub(crate) trait Threaded {
    /// Applies what was made ready on [`LANES`] threads. Returns how long the slower one took.
    fn apply_on_all(&mut self) -> Duration;

    /// Looks up every prompt so many times, by the hashes of its blocks, on each of some threads.
    /// Returns how long the slowest one took.
    fn look_up_on(&mut self, threads: usize, times: usize) -> Duration;

    /// Applies what was made ready at a pace of so many blocks a second, or only waits for as long,
    /// and meanwhile looks up prompts on another thread. Returns how long each lookup took.
    fn look_up_beside(&mut self, pace: f64, applies: bool) -> Vec<Duration>;
}

/// An index that several threads may use.
pub(crate) trait Index: Sync {
    /// A batch of one worker, in the index's own form.
    type Work: Send;
    /// A token as the index takes it.
    type Token: Send + Sync;
    /// The hash of a block as lookups want it.
    type Key: Send + Sync;
    /// What a thread keeps from lookup to lookup.
    type Buffers: Default;

    fn work(&self, trace: &Trace, batch: usize, from: From) -> Self::Work;
    /// Applies, or hands over to the thread that applies, the batches of one lane.
    fn apply(&self, lane: usize, work: Vec<Self::Work>);
    /// Waits until all that was handed over is applied.
    fn settle(&self, _lane: usize) {}
    /// The threads of its own that apply a lane's batches.
    fn threads(&self, _lane: usize) -> &[Thread] {
        &[]
    }
    fn text(tokens: &[u32]) -> Vec<Self::Token>;
    fn keys(text: &[Self::Token]) -> Vec<Self::Key>;
    fn look_up(&self, keys: &[Self::Key], buffers: &mut Self::Buffers);
    fn look_up_text(&self, text: &[Self::Token], buffers: &mut Self::Buffers) {
        self.look_up(&Self::keys(text), buffers);
    }
    fn overlaps(&self, keys: &[Self::Key]) -> Vec<(u32, u32)>;
    fn clear(&self, worker: u32);
    fn bytes(&self) -> Option<usize> {
        None
    }
}

/// The lane that applies a worker's events.
pub(crate) fn lane(worker: u32) -> usize {
    worker as usize % LANES
}

/// An [`Index`] with what is ready for it.
pub(crate) struct Ready<I: Index> {
    index: I,
    work: [Vec<I::Work>; LANES],
    /// Lane and number of blocks of each batch, in the order of the trace.
    order: Vec<(usize, usize)>,
    texts: Vec<Vec<I::Token>>,
    keys: Vec<Vec<I::Key>>,
    buffers: I::Buffers,
}

impl<I: Index> Ready<I> {
    pub(crate) fn new(index: I) -> Self {
        let work = [(); LANES].map(|()| Vec::new());
        let buffers = I::Buffers::default();
        Self { index, work, order: Vec::new(), texts: Vec::new(), keys: Vec::new(), buffers }
    }
}

impl<I: Index> Subject for Ready<I> {
    fn load(&mut self, trace: &Trace, batches: Range<usize>, from: From) {
        self.work.iter_mut().for_each(Vec::clear);
        self.order.clear();
        for batch in batches {
            let lane = lane(trace.batch(batch)[0].worker);
            self.work[lane].push(self.index.work(trace, batch, from));
            self.order.push((lane, trace.blocks(batch..batch + 1)));
        }
    }

    fn apply(&mut self) {
        for (lane, work) in self.work.iter_mut().enumerate() {
            self.index.apply(lane, std::mem::take(work));
            self.index.settle(lane);
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
        self.texts.iter().for_each(|text| self.index.look_up_text(text, &mut self.buffers));
    }

    fn overlaps(&mut self, prompt: usize) -> Vec<(u32, u32)> {
        self.index.overlaps(&self.keys[prompt])
    }

    fn clear(&mut self, workers: u32) {
        (0..workers).for_each(|worker| self.index.clear(worker));
        (0..LANES).for_each(|lane| self.index.settle(lane));
    }

    fn bytes(&self) -> Option<usize> {
        self.index.bytes()
    }

    fn threaded(&mut self) -> Option<&mut dyn Threaded> {
        Some(self)
    }
}

/// Runs each on a thread of its own, all at once.
fn slowest(work: impl Iterator<Item = impl FnOnce() -> Duration + Send>) -> Duration {
    thread::scope(|scope| {
        let threads: Vec<_> = work.map(|work| scope.spawn(work)).collect();
        // One that panicked has said so.
        threads.into_iter().map(|thread| thread.join().unwrap_or(Duration::MAX)).max().unwrap_or_default()
    })
}

impl<I: Index> Threaded for Ready<I> {
    fn apply_on_all(&mut self) -> Duration {
        let index = &self.index;
        let apply = |(lane, work): (usize, &mut Vec<I::Work>)| {
            let work = std::mem::take(work);
            move || {
                wall(index.threads(lane), || {
                    index.apply(lane, work);
                    index.settle(lane);
                })
            }
        };
        slowest(self.work.iter_mut().enumerate().map(apply))
    }

    fn look_up_on(&mut self, threads: usize, times: usize) -> Duration {
        let (index, keys, all) = (&self.index, &self.keys, &Barrier::new(threads));
        let look_up = |start: usize| {
            move || {
                let mut buffers = I::Buffers::default();
                let (last, first) = keys.split_at(start);
                all.wait();
                wall(&[], || {
                    for _ in 0..times {
                        first.iter().chain(last).for_each(|keys| index.look_up(keys, &mut buffers));
                    }
                })
            }
        };
        // Not the same prompts at the same time.
        slowest((0..threads).map(|thread| keys.len() * thread / threads).map(look_up))
    }

    fn look_up_beside(&mut self, pace: f64, applies: bool) -> Vec<Duration> {
        let mut lanes = [(); LANES].map(|()| Vec::new());
        std::mem::swap(&mut lanes, &mut self.work);
        let mut lanes = lanes.map(Vec::into_iter);
        let (index, keys, order) = (&self.index, &self.keys, &self.order);
        let applied = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (start, mut blocks) = (Instant::now(), 0);
                for &(lane, batch) in order {
                    let work = lanes[lane].next().into_iter().collect();
                    if applies {
                        index.apply(lane, work);
                    }
                    blocks += batch;
                    let ahead = Duration::from_secs_f64(blocks as f64 / pace).saturating_sub(start.elapsed());
                    // Shorter sleeps take longer than they should.
                    if ahead > Duration::from_micros(200) {
                        thread::sleep(ahead);
                    }
                }
                (0..LANES).for_each(|lane| index.settle(lane));
                applied.store(true, Ordering::Relaxed);
            });
            let (mut times, mut buffers) = (Vec::new(), I::Buffers::default());
            for keys in keys.iter().cycle() {
                if applied.load(Ordering::Relaxed) {
                    break;
                }
                let start = Instant::now();
                index.look_up(black_box(keys), &mut buffers);
                times.push(start.elapsed());
            }
            times
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Event, NO_PARENT, Run};
    use crate::{SIDES, side};

    /// What each side says of a prompt of three blocks after an engine with hashes of its own told
    /// these events.
    fn overlaps(events: &[(bool, u32, u32)], hashes: [u64; 3]) -> Vec<Vec<(u32, u32)>> {
        let event = |&(stored, start, blocks)| Event { worker: 0, run: 0, start, blocks, stored };
        let trace = Trace {
            workers: 1,
            runs: vec![Run { parent: NO_PARENT, blocks: 3, first: 0, depth: 0 }],
            hashes: hashes.to_vec(),
            events: events.iter().map(event).collect(),
            batches: vec![events.len() as u32],
            ..Trace::default()
        };
        let answer = |name, from| {
            let mut side = side(name, 1)?;
            side.load_prompts(&[trace.prompt(0)]);
            side.load(&trace, 0..1, from);
            side.apply();
            Some(side.overlaps(0))
        };
        let answers = |from| SIDES.into_iter().filter_map(|name| answer(name, from)).collect::<Vec<_>>();
        let told = answers(From::Tokens);
        assert_eq!(answers(From::Frames), told);
        told
    }

    const OWN: [u64; 3] = [71, 72, 73];

    #[test]
    fn engines_that_hash_in_their_own_way_are_unknown_to_the_positional_index_alone() {
        let (whole, none) = (vec![(0, 3)], vec![]);
        assert_eq!(overlaps(&[(true, 0, 3)], OWN), [whole.clone(), whole.clone(), whole, none]);
    }

    #[test]
    fn only_ours_counts_the_copies_of_a_block() {
        let answers = overlaps(&[(true, 0, 3), (true, 2, 1), (false, 2, 1)], OWN);
        assert_eq!(answers[..3], [vec![(0, 3)], vec![(0, 2)], vec![(0, 2)]]);
    }
}
