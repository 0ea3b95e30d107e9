//! Speed of all sides in one process, which hold the same and take turns, and whether they answer
//! the same.
//!
//! Medians over the rounds. Time on the wall is without what threads waited for a core, which
//! others had.
//!
//! | metric | is |
//! |---|---|
//! | `events, filling` | stored and removed blocks per second of CPU time while the caches fill, from tokens |
//! | `events` | the same when they are full |
//! | `events, hashed` | the same where someone else has hashed the tokens for the peers, but not for us |
//! | `events, from frames` | as `events`, from the bytes that an engine publishes |
//! | `events, 2 threads` | blocks per second on the wall, from tokens, on two threads |
//! | `events, from frames, 2 threads` | the same from the bytes that an engine publishes |
//! | `lookups` | prompts per second of CPU time, by the hashes of their blocks, which were made just before |
//! | `lookups, from tokens` | the same with hashing |
//! | `lookups, 2 threads` | prompts per second on the wall, by hashes that were made long before, on two threads |
//! | `lookup p50 beside events`, `lookup p99 beside events` | µs on the wall of one lookup by hashes, while another thread applies [`PACE`] blocks a second |
//! | `compared`, `different` | prompts whose overlaps were compared with ours, and that differed |
//! | `frames, plain`, `frames, own hashes`, `frames, twice` | blocks that were told of per second of CPU time, as `events, from frames`, by engines that tell in a [`Telling`] each; only ours |
//! | the same, `different` | prompts whose overlaps are not those of `frames, plain` |
//! | `lookups alone, N threads` | prompts per second on the wall, by hashes that were made long before; only ours, and only as far as there are cores |
//! | `lookups beside few events`, `lookups beside no events` | prompts per second on the wall on one thread, while another applies [`FEW_EVENTS`] blocks a second, or waits as long |
//! | `prompt blocks`, `prompt workers` | per prompt, means: blocks, and workers that hold some of them |

use std::error::Error;
use std::ops::Range;
use std::time::Duration;

use peers::numbers;

use crate::clock::cpu;
use crate::frame::Telling;
use crate::ours::Ours;
use crate::subject::{From, Ready, Subject, Threaded};
use crate::trace::Trace;
use crate::{SIDES, Value};

/// Blocks that a side stores and removes before it is the next one's turn.
const SLICE: usize = 30_000;
/// The same while prompts are looked up.
const SLICE_BESIDE: usize = 50_000;
/// Prompts whose hashes are in a core's caches together.
const JUST_HASHED: usize = 64;
/// What 1,000 workers do that process 3,200 tokens a second each.
const PACE: f64 = 200_000.0;
/// Blocks a second that should cost lookups little.
const FEW_EVENTS: f64 = 50_000.0;
/// How often each of them looks up every prompt: some milliseconds, lest their start counts.
const TIMES: usize = 16;
/// Threads that look up at once, as far as there are cores.
const THREADS: [(usize, &str); 3] =
    [(1, "lookups alone, 1 thread"), (2, "lookups alone, 2 threads"), (4, "lookups alone, 4 threads")];

type Side = (&'static str, Box<dyn Subject>);

/// How many blocks a trace needs after the caches are full.
pub(crate) fn blocks(rounds: usize) -> usize {
    // A slice is longer than asked for by a part of a batch.
    rounds * (5 * SLICE + SLICE_BESIDE) / 100 * 110
}

/// Measures all metrics.
pub(crate) fn measure(trace: &Trace, sides: &mut [Side], rounds: usize) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut values = Vec::new();
    fill(trace, sides, &mut values);

    let prompts: Vec<Vec<Vec<u32>>> =
        trace.prompts.iter().map(|runs| runs.iter().map(|&run| trace.prompt(run)).collect()).collect();
    let mut answers = Answers::default();
    sides.iter_mut().for_each(|(_, side)| side.load_prompts(&prompts[0]));
    answers.compare(sides, prompts[0].len());
    look_up(sides, rounds, &prompts[0], &mut values);

    let mut slices = trace.slices(trace.fill..trace.batches.len(), SLICE).into_iter();
    let mut events = |from, metric, threads| -> Result<usize, Box<dyn Error>> {
        let slices: Vec<_> = slices.by_ref().take(rounds).collect();
        if slices.len() < rounds {
            return Err("the trace is too short for so many rounds".into());
        }
        apply(trace, sides, &slices, from, threads, metric, &mut values);
        Ok(slices.last().map_or(0, |slice| slice.end))
    };
    events(From::Tokens, "events", false)?;
    events(From::Hashes, "events, hashed", false)?;
    events(From::Frames, "events, from frames", false)?;
    events(From::Tokens, "events, 2 threads", true)?;
    let end = events(From::Frames, "events, from frames, 2 threads", true)?;
    let slices = trace.slices(end..trace.batches.len(), SLICE_BESIDE);
    let slices = slices.get(..rounds).ok_or("the trace is too short for so many rounds")?;
    look_up_beside(trace, sides, slices, &mut values);

    for prompts in &prompts {
        sides.iter_mut().for_each(|(_, side)| side.load_prompts(prompts));
        answers.compare(sides, prompts.len());
    }
    answers.report(sides, &mut values);
    let blocks: usize = prompts.iter().flatten().map(|tokens| tokens.len() / crate::trace::BLOCK_SIZE).sum();
    values.push((sides[0].0, "prompt blocks", blocks as f64 / prompts.iter().flatten().count() as f64));
    Ok(values)
}

/// Our index in turns with itself, before engines that tell of blocks in several ways. Says for
/// each way how many blocks that were told of are applied per second of CPU time, and how many
/// prompts have another answer than before plain engines.
pub(crate) fn measure_tellings(trace: &Trace, rounds: usize) -> Result<Vec<Value>, Box<dyn Error>> {
    const TELLINGS: [(&str, &str, Telling); 3] = [
        ("frames, plain", "frames, plain, different", Telling::Plain),
        ("frames, own hashes", "frames, own hashes, different", Telling::OwnHashes),
        ("frames, twice", "frames, twice, different", Telling::Twice),
    ];
    let side = |telling| -> Box<dyn Subject> { Box::new(Ready::new(Ours::new(trace.workers, telling))) };
    let mut sides = TELLINGS.map(|(name, _, telling)| (name, side(telling)));
    let mut slices = trace.slices(0..trace.fill, SLICE);
    let rest = slices.last().map_or(0, |slice| slice.end)..trace.fill;
    slices.push(rest);
    for slice in slices {
        for (_, side) in &mut sides {
            side.load(trace, slice.clone(), From::Frames);
            side.apply();
        }
    }
    let slices = trace.slices(trace.fill..trace.batches.len(), SLICE);
    let slices = slices.get(..rounds).ok_or("the trace is too short for so many rounds")?;
    let mut rates = TELLINGS.map(|_| Vec::new());
    for (round, slice) in slices.iter().enumerate() {
        turns(&mut sides, round, |side, subject| {
            subject.load(trace, slice.clone(), From::Frames);
            let blocks = trace.blocks(slice.clone()) * TELLINGS[side].2.times();
            rates[side].push(blocks as f64 / cpu(|| subject.apply()).as_secs_f64());
        });
    }
    let mut values = Vec::new();
    for ((metric, _, _), rates) in TELLINGS.into_iter().zip(rates) {
        values.extend(median(rates).map(|rate| (SIDES[0], metric, rate)));
    }
    let prompts: Vec<_> = trace.prompts[1].iter().map(|&run| trace.prompt(run)).collect();
    let mut answers = Answers::default();
    sides.iter_mut().for_each(|(_, side)| side.load_prompts(&prompts));
    answers.compare(&mut sides, prompts.len());
    let different = TELLINGS.iter().zip(answers.different);
    values.extend(different.map(|((_, metric, _), different)| (SIDES[0], *metric, different as f64)));
    Ok(values)
}

/// Our index alone, with full caches: how lookups go on more and more threads, and beside few
/// events.
pub(crate) fn measure_scaling(trace: &Trace, rounds: usize) -> Result<Vec<Value>, Box<dyn Error>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut side = Ready::new(Ours::new(trace.workers, Telling::Plain));
    side.load(trace, 0..trace.fill, From::Frames);
    side.apply();
    let prompts: Vec<_> = trace.prompts[0].iter().map(|&run| trace.prompt(run)).collect();
    side.load_prompts(&prompts);
    let count = prompts.len() as f64;
    let mut rates = THREADS.map(|_| Vec::new());
    for _ in 0..rounds {
        for ((threads, _), rates) in THREADS.iter().zip(&mut rates).filter(|((threads, _), _)| *threads <= cores) {
            rates.push((threads * TIMES) as f64 * count / side.look_up_on(*threads, TIMES).as_secs_f64());
        }
    }
    let mut values = Vec::new();
    for ((_, metric), rates) in THREADS.into_iter().zip(rates) {
        values.extend(median(rates).map(|rate| (SIDES[0], metric, rate)));
    }
    let slices = trace.slices(trace.fill..trace.batches.len(), SLICE_BESIDE / 4);
    let slices = slices.get(..rounds).ok_or("the trace is too short for so many rounds")?;
    let mut rates = [false, true].map(|_| Vec::new());
    for slice in slices {
        // The same events twice: first they are only waited for.
        for (applies, rates) in [false, true].into_iter().zip(&mut rates) {
            side.load(trace, slice.clone(), From::Frames);
            let times = side.look_up_beside(FEW_EVENTS, applies);
            rates.push(times.len() as f64 / times.iter().sum::<Duration>().as_secs_f64());
        }
    }
    for (metric, rates) in ["lookups beside no events", "lookups beside few events"].into_iter().zip(rates) {
        values.extend(median(rates).map(|rate| (SIDES[0], metric, rate)));
    }
    Ok(values)
}

/// Every side has its turn, in an order that turns round each time.
fn turns(sides: &mut [Side], round: usize, mut turn: impl FnMut(usize, &mut dyn Subject)) {
    for at in 0..sides.len() {
        let side = if round.is_multiple_of(2) { at } else { sides.len() - 1 - at };
        turn(side, sides[side].1.as_mut());
    }
}

fn fill(trace: &Trace, sides: &mut [Side], values: &mut Vec<Value>) {
    let mut times = vec![Duration::ZERO; sides.len()];
    let mut slices = trace.slices(0..trace.fill, SLICE);
    let rest = slices.last().map_or(0, |slice| slice.end)..trace.fill;
    slices.push(rest);
    for (round, slice) in slices.into_iter().enumerate() {
        turns(sides, round, |side, subject| {
            subject.load(trace, slice.clone(), From::Tokens);
            times[side] += cpu(|| subject.apply());
        });
    }
    let blocks = trace.blocks(0..trace.fill) as f64;
    values.extend(
        sides.iter().zip(times).map(|((name, _), time)| (*name, "events, filling", blocks / time.as_secs_f64())),
    );
}

fn apply(
    trace: &Trace,
    sides: &mut [Side],
    slices: &[Range<usize>],
    from: From,
    threads: bool,
    metric: &'static str,
    values: &mut Vec<Value>,
) {
    let mut rates = vec![Vec::new(); sides.len()];
    for (round, slice) in slices.iter().enumerate() {
        let blocks = trace.blocks(slice.clone()) as f64;
        turns(sides, round, |side, subject| {
            subject.load(trace, slice.clone(), from);
            match subject.threaded() {
                Some(subject) if threads => {
                    rates[side].push(blocks / subject.apply_on_all().as_secs_f64());
                }
                // Stays up to date.
                None if threads => subject.apply(),
                _ => rates[side].push(blocks / cpu(|| subject.apply()).as_secs_f64()),
            }
        });
    }
    report(sides, metric, rates, values);
}

fn look_up(sides: &mut [Side], rounds: usize, all: &[Vec<u32>], values: &mut Vec<Value>) {
    let [mut hashed, mut tokens, mut threads] = [(); 3].map(|()| vec![Vec::new(); sides.len()]);
    let prompts = all.len() as f64;
    for round in 0..rounds {
        turns(sides, round, |side, subject| {
            // Who asks has just hashed the prompt.
            let just_hashed = all.chunks(JUST_HASHED).map(|some| {
                subject.load_prompts(some);
                subject.prepare();
                cpu(|| subject.look_up())
            });
            hashed[side].push(prompts / just_hashed.sum::<Duration>().as_secs_f64());
            subject.load_prompts(all);
        });
        turns(sides, round, |side, subject| {
            tokens[side].push(prompts / cpu(|| subject.look_up_tokens()).as_secs_f64());
            if let Some(subject) = subject.threaded() {
                threads[side].push(2.0 * prompts / subject.look_up_on(2, 1).as_secs_f64());
            }
        });
    }
    report(sides, "lookups", hashed, values);
    report(sides, "lookups, from tokens", tokens, values);
    report(sides, "lookups, 2 threads", threads, values);
}

fn look_up_beside(trace: &Trace, sides: &mut [Side], slices: &[Range<usize>], values: &mut Vec<Value>) {
    let mut times = vec![Vec::new(); sides.len()];
    for (round, slice) in slices.iter().enumerate() {
        turns(sides, round, |side, subject| {
            subject.load(trace, slice.clone(), From::Tokens);
            match subject.threaded() {
                Some(subject) => times[side].extend(subject.look_up_beside(PACE, true)),
                None => subject.apply(),
            }
        });
    }
    for ((name, _), mut times) in sides.iter().zip(times) {
        times.sort_unstable();
        for (metric, percent) in [("lookup p50 beside events", 50), ("lookup p99 beside events", 99)] {
            let time = times.get(times.len() * percent / 100);
            values.extend(time.map(|time| (*name, metric, time.as_secs_f64() * 1e6)));
        }
    }
}

/// The median over the rounds, for those sides that have any.
fn report(sides: &[Side], metric: &'static str, rates: Vec<Vec<f64>>, values: &mut Vec<Value>) {
    for ((name, _), rates) in sides.iter().zip(rates) {
        values.extend(median(rates).map(|rate| (*name, metric, rate)));
    }
}

/// Returns the median, if there is any.
fn median(rates: Vec<f64>) -> Option<f64> {
    Some(numbers::median(rates)).filter(|rate| !rate.is_nan())
}

/// How many answers were compared with those of the first side.
#[derive(Default)]
struct Answers {
    compared: usize,
    /// Answers that are not the first side's, one count for each side.
    different: Vec<usize>,
    /// Workers with an overlap, of all prompts.
    workers: usize,
}

impl Answers {
    fn compare(&mut self, sides: &mut [Side], prompts: usize) {
        self.different.resize(sides.len(), 0);
        for prompt in 0..prompts {
            let answers: Vec<_> = sides.iter_mut().map(|(_, side)| side.overlaps(prompt)).collect();
            for (different, answer) in self.different.iter_mut().zip(&answers) {
                *different += usize::from(*answer != answers[0]);
            }
            self.workers += answers[0].len();
        }
        self.compared += prompts;
    }

    fn report(&self, sides: &[Side], values: &mut Vec<Value>) {
        for ((name, _), different) in sides.iter().zip(&self.different).skip(1) {
            values.push((*name, "compared", self.compared as f64));
            values.push((*name, "different", *different as f64));
        }
        values.push((sides[0].0, "prompt workers", self.workers as f64 / self.compared as f64));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::side;
    use crate::workload::{Fleet, make};

    #[test]
    fn all_sides_hold_the_same_and_what_can_be_measured_is() -> Result<(), Box<dyn Error>> {
        let trace = make(&Fleet { workers: 5, blocks: 3_000 }, blocks(1), 11);
        let mut sides = Vec::new();
        for name in SIDES {
            sides.push((name, side(name, trace.workers).ok_or("no such side")?));
        }
        let values = measure(&trace, &mut sides, 1)?;
        let of = |side: &str, metric: &str| values.iter().find(|it| it.0 == side && it.1 == metric).map(|it| it.2);
        for peer in &SIDES[1..] {
            assert_eq!(of(peer, "different"), Some(0.0), "{peer}");
            assert_eq!(of(peer, "compared"), Some(3.0 * 4096.0), "{peer}");
        }
        let metrics = |side: &str| values.iter().filter(|it| it.0 == side).map(|it| it.1).collect::<HashSet<_>>();
        let missing: HashSet<_> = metrics(SIDES[0]).difference(&metrics("RadixTree")).copied().collect();
        let threaded = [
            "events, 2 threads",
            "events, from frames, 2 threads",
            "lookups, 2 threads",
            "lookup p50 beside events",
            "lookup p99 beside events",
        ];
        assert_eq!(missing, threaded.into_iter().chain(["prompt blocks", "prompt workers"]).collect());
        assert!(of(SIDES[0], "prompt workers").is_some_and(|workers| workers > 1.0));
        let tellings = measure_tellings(&trace, 1)?;
        let told = |metric: &str| tellings.iter().find(|it| it.1 == metric).map(|it| it.2);
        for telling in ["frames, own hashes", "frames, twice"] {
            assert!(told(telling).is_some_and(|rate| rate > 0.0));
            assert_eq!(told(&format!("{telling}, different")), Some(0.0), "{telling}");
        }
        // A side that forgot everything answers otherwise.
        sides[1].1.clear(trace.workers);
        let mut answers = Answers::default();
        answers.compare(&mut sides, 100);
        assert_eq!(answers.different, [0, 100, 0, 0]);
        Ok(())
    }
}
