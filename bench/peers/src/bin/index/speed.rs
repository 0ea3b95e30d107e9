//! The speed of all sides in one process, with the same blocks and in turns, and a comparison of
//! their answers.
//!
//! Rates are medians over the rounds. Wall-clock times exclude the time in which threads waited for
//! a core.
//!
//! | metric | meaning |
//! |---|---|
//! | `events, filling` | stored and removed blocks per second of CPU time while the caches fill, from tokens |
//! | `events` | the same with full caches |
//! | `events, hashed` | the same with tokens that another process has hashed for the peers, but not for us |
//! | `events, from frames` | as `events`, from the bytes that an engine publishes |
//! | `events, 2 threads`, `events, from frames, 2 threads` | blocks per second of wall-clock time on two threads |
//! | `lookups` | prompts per second of CPU time, by hashes of their blocks that were just made |
//! | `lookups, from tokens` | the same with hashing |
//! | `lookups, 2 threads` | prompts per second of wall-clock time on two threads, by hashes that were made long before |
//! | `lookup p50 beside events`, `lookup p99 beside events` | µs of wall-clock time of a lookup by hashes, while another thread applies [`PACE`] blocks per second |
//! | `compared`, `different` | prompts whose overlaps were compared with ours, and those that differ |
//! | `frames, plain`, `frames, own hashes`, `frames, twice` | as `events, from frames`, with each [`Variant`] of engines; only ours |
//! | the same with `, different` | prompts whose overlaps differ from those with `frames, plain` |
//! | `lookups alone, N threads` | prompts per second of wall-clock time, by hashes that were made long before; only ours, and only with as many cores |
//! | `lookups beside few events`, `lookups beside no events` | prompts per second of wall-clock time on one thread, while another applies [`FEW_EVENTS`] blocks per second, or waits for that time |
//! | `prompt blocks`, `prompt workers` | means per prompt: blocks, and workers that hold some of them |

use std::error::Error;
use std::ops::Range;
use std::time::Duration;

use peers::numbers;
use peers::row::OURS;

use crate::Value;
use crate::clock::cpu;
use crate::frame::Variant;
use crate::ours::Ours;
use crate::subject::{Input, Ready, Subject};
use crate::trace::{BLOCK_SIZE, Trace};

/// The number of blocks in a turn of a side.
const SLICE: usize = 30_000;
/// The number of blocks in a turn with lookups.
const SLICE_BESIDE: usize = 50_000;
/// The number of prompts whose hashes fit into a core's caches.
const JUST_HASHED: usize = 64;
/// The blocks per second of 1,000 workers that each process 3,200 tokens per second.
const PACE: f64 = 200_000.0;
/// A rate of blocks per second that should cost lookups little.
const FEW_EVENTS: f64 = 50_000.0;
/// The number of times that a thread looks up every prompt. Together they take some milliseconds,
/// so that the thread's start hardly counts.
const TIMES: usize = 16;
/// The numbers of threads with lookups, up to the number of cores.
const THREADS: [(usize, &str); 3] = [
    (1, "lookups alone, 1 thread"),
    (2, "lookups alone, 2 threads"),
    (4, "lookups alone, 4 threads"),
];
const TOO_SHORT: &str = "the trace is too short for the number of rounds";

type Side = (&'static str, Box<dyn Subject>);

/// Returns the number of blocks that a trace needs after the caches are full.
pub(crate) fn blocks(rounds: usize) -> usize {
    // A slice is longer than its target by a part of a batch.
    rounds * (5 * SLICE + SLICE_BESIDE) / 100 * 110
}

/// Measures all sides.
pub(crate) fn measure(
    trace: &Trace,
    sides: &mut [Side],
    rounds: usize,
) -> Result<Vec<Value>, Box<dyn Error>> {
    let mut values = fill(trace, sides);

    let prompts = [0, 1].map(|time| trace.all_prompts(time));
    let mut answers = Answers::default();
    answers.compare(sides, &prompts[0]);
    values.extend(look_up(sides, rounds, &prompts[0]));

    let mut slices = trace.slices(trace.fill..trace.batches.len(), SLICE).into_iter();
    let mut end = trace.fill;
    for (input, on_lanes, metric) in [
        (Input::Tokens, false, "events"),
        (Input::Hashes, false, "events, hashed"),
        (Input::Frames, false, "events, from frames"),
        (Input::Tokens, true, "events, 2 threads"),
        (Input::Frames, true, "events, from frames, 2 threads"),
    ] {
        let slices: Vec<_> = slices.by_ref().take(rounds).collect();
        end = slices.get(rounds - 1).ok_or(TOO_SHORT)?.end;
        values.extend(apply(trace, sides, &slices, input, on_lanes, metric));
    }
    let slices = trace.slices(end..trace.batches.len(), SLICE_BESIDE);
    values.extend(look_up_beside(trace, sides, slices.get(..rounds).ok_or(TOO_SHORT)?));

    for prompts in &prompts {
        answers.compare(sides, prompts);
    }
    values.extend(answers.values(sides));
    let blocks: usize = prompts.iter().flatten().map(|tokens| tokens.len() / BLOCK_SIZE).sum();
    let count = prompts.iter().flatten().count();
    values.push((OURS, "prompt blocks", blocks as f64 / count as f64));
    Ok(values)
}

/// Measures our index in turns with itself, with the frames of each [`Variant`] of engines. The
/// values are rates of blocks, and numbers of prompts with other overlaps than with plain frames.
pub(crate) fn measure_variants(trace: &Trace, rounds: usize) -> Result<Vec<Value>, Box<dyn Error>> {
    const VARIANTS: [(&str, &str, Variant); 3] = [
        ("frames, plain", "frames, plain, different", Variant::Plain),
        ("frames, own hashes", "frames, own hashes, different", Variant::OwnHashes),
        ("frames, twice", "frames, twice, different", Variant::Twice),
    ];
    let mut sides = VARIANTS.map(|(name, _, variant)| -> Side {
        (name, Box::new(Ready::new(Ours::new(trace.workers, variant))))
    });
    for slice in trace.filling_slices(SLICE) {
        for (_, side) in &mut sides {
            side.load(trace, slice.clone(), Input::Frames);
            side.apply();
        }
    }
    let slices = trace.slices(trace.fill..trace.batches.len(), SLICE);
    let slices = slices.get(..rounds).ok_or(TOO_SHORT)?;
    let mut rates = VARIANTS.map(|_| Vec::new());
    for (round, slice) in slices.iter().enumerate() {
        take_turns(&mut sides, round, |side, subject| {
            subject.load(trace, slice.clone(), Input::Frames);
            let blocks = trace.blocks(slice.clone()) * VARIANTS[side].2.times();
            rates[side].push(blocks as f64 / cpu(|| subject.apply()).as_secs_f64());
        });
    }
    let mut answers = Answers::default();
    answers.compare(&mut sides, &trace.all_prompts(1));
    let mut values = Vec::new();
    for (((rate, different, _), rates), count) in
        VARIANTS.into_iter().zip(rates).zip(answers.different)
    {
        values.extend(median(OURS, rate, rates));
        values.push((OURS, different, count as f64));
    }
    Ok(values)
}

/// Measures our index alone with full caches: lookups on more and more threads, and beside few
/// events.
pub(crate) fn measure_scaling(trace: &Trace, rounds: usize) -> Result<Vec<Value>, Box<dyn Error>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut side = Ready::new(Ours::new(trace.workers, Variant::Plain));
    side.load(trace, 0..trace.fill, Input::Frames);
    side.apply();
    let prompts = trace.all_prompts(0);
    side.load_prompts(&prompts);
    let mut rates = THREADS.map(|_| Vec::new());
    for _ in 0..rounds {
        for (&(threads, _), rates) in THREADS.iter().zip(&mut rates) {
            if threads <= cores {
                let time = side.look_up_on(threads, TIMES).unwrap_or_default();
                rates.push((threads * TIMES * prompts.len()) as f64 / time.as_secs_f64());
            }
        }
    }
    let rates = THREADS.into_iter().zip(rates);
    let mut values: Vec<Value> =
        rates.filter_map(|((_, metric), rates)| median(OURS, metric, rates)).collect();
    let slices = trace.slices(trace.fill..trace.batches.len(), SLICE_BESIDE / 4);
    let slices = slices.get(..rounds).ok_or(TOO_SHORT)?;
    let mut rates = [Vec::new(), Vec::new()];
    for slice in slices {
        // The same events twice; the first time the other thread only waits.
        for (applies, rates) in [false, true].into_iter().zip(&mut rates) {
            side.load(trace, slice.clone(), Input::Frames);
            let times = side.look_up_beside(FEW_EVENTS, applies).unwrap_or_default();
            rates.push(times.len() as f64 / times.iter().sum::<Duration>().as_secs_f64());
        }
    }
    let metrics = ["lookups beside no events", "lookups beside few events"];
    let rates = metrics.into_iter().zip(rates);
    values.extend(rates.filter_map(|(metric, rates)| median(OURS, metric, rates)));
    Ok(values)
}

/// Calls `turn` for every side. The order is reversed in every other round.
fn take_turns(sides: &mut [Side], round: usize, mut turn: impl FnMut(usize, &mut dyn Subject)) {
    for number in 0..sides.len() {
        let side = if round.is_multiple_of(2) { number } else { sides.len() - 1 - number };
        turn(side, sides[side].1.as_mut());
    }
}

fn fill(trace: &Trace, sides: &mut [Side]) -> Vec<Value> {
    let mut times = vec![Duration::ZERO; sides.len()];
    for (round, slice) in trace.filling_slices(SLICE).into_iter().enumerate() {
        take_turns(sides, round, |side, subject| {
            subject.load(trace, slice.clone(), Input::Tokens);
            times[side] += cpu(|| subject.apply());
        });
    }
    let blocks = trace.blocks(0..trace.fill) as f64;
    let rates = sides.iter().zip(times);
    rates.map(|((name, _), time)| (*name, "events, filling", blocks / time.as_secs_f64())).collect()
}

fn apply(
    trace: &Trace,
    sides: &mut [Side],
    slices: &[Range<usize>],
    input: Input,
    on_lanes: bool,
    metric: &'static str,
) -> Vec<Value> {
    let mut rates = vec![Vec::new(); sides.len()];
    for (round, slice) in slices.iter().enumerate() {
        let blocks = trace.blocks(slice.clone()) as f64;
        take_turns(sides, round, |side, subject| {
            subject.load(trace, slice.clone(), input);
            if !on_lanes {
                rates[side].push(blocks / cpu(|| subject.apply()).as_secs_f64());
            } else if let Some(time) = subject.apply_on_lanes() {
                rates[side].push(blocks / time.as_secs_f64());
            } else {
                // The side stays up to date.
                subject.apply();
            }
        });
    }
    medians(sides, metric, rates)
}

fn look_up(sides: &mut [Side], rounds: usize, prompts: &[Vec<u32>]) -> Vec<Value> {
    let [mut hashed, mut tokens, mut threads] = [(); 3].map(|()| vec![Vec::new(); sides.len()]);
    let count = prompts.len() as f64;
    for round in 0..rounds {
        take_turns(sides, round, |side, subject| {
            // A router has just hashed a prompt when it looks it up.
            let times = prompts.chunks(JUST_HASHED).map(|prompts| {
                subject.load_prompts(prompts);
                subject.prepare();
                cpu(|| subject.look_up())
            });
            hashed[side].push(count / times.sum::<Duration>().as_secs_f64());
            subject.load_prompts(prompts);
        });
        take_turns(sides, round, |side, subject| {
            tokens[side].push(count / cpu(|| subject.look_up_tokens()).as_secs_f64());
            let time = subject.look_up_on(2, 1);
            threads[side].extend(time.map(|time| 2.0 * count / time.as_secs_f64()));
        });
    }
    let mut values = medians(sides, "lookups", hashed);
    values.extend(medians(sides, "lookups, from tokens", tokens));
    values.extend(medians(sides, "lookups, 2 threads", threads));
    values
}

fn look_up_beside(trace: &Trace, sides: &mut [Side], slices: &[Range<usize>]) -> Vec<Value> {
    let mut times = vec![Vec::new(); sides.len()];
    for (round, slice) in slices.iter().enumerate() {
        take_turns(sides, round, |side, subject| {
            subject.load(trace, slice.clone(), Input::Tokens);
            match subject.look_up_beside(PACE, true) {
                Some(lookups) => times[side].extend(lookups),
                None => subject.apply(),
            }
        });
    }
    let mut values = Vec::new();
    for ((name, _), mut times) in sides.iter().zip(times) {
        times.sort_unstable();
        for (metric, percent) in
            [("lookup p50 beside events", 50), ("lookup p99 beside events", 99)]
        {
            let time = times.get(times.len() * percent / 100);
            values.extend(time.map(|time| (*name, metric, time.as_secs_f64() * 1e6)));
        }
    }
    values
}

/// Returns the medians of the sides that have rates.
fn medians(sides: &[Side], metric: &'static str, rates: Vec<Vec<f64>>) -> Vec<Value> {
    let rates = sides.iter().zip(rates);
    rates.filter_map(|((name, _), rates)| median(name, metric, rates)).collect()
}

/// Returns the median, if there are rates.
fn median(side: &'static str, metric: &'static str, rates: Vec<f64>) -> Option<Value> {
    let median = numbers::median(rates);
    (!median.is_nan()).then_some((side, metric, median))
}

/// A comparison of the sides' answers with those of the first side.
#[derive(Default)]
struct Answers {
    compared: usize,
    /// The number of different answers of each side.
    different: Vec<usize>,
    /// The number of workers with an overlap, summed over all prompts.
    workers: usize,
}

impl Answers {
    fn compare(&mut self, sides: &mut [Side], prompts: &[Vec<u32>]) {
        sides.iter_mut().for_each(|(_, side)| side.load_prompts(prompts));
        self.different.resize(sides.len(), 0);
        for prompt in 0..prompts.len() {
            let answers: Vec<_> = sides.iter_mut().map(|(_, side)| side.overlaps(prompt)).collect();
            for (different, answer) in self.different.iter_mut().zip(&answers) {
                *different += usize::from(*answer != answers[0]);
            }
            self.workers += answers[0].len();
        }
        self.compared += prompts.len();
    }

    fn values(&self, sides: &[Side]) -> Vec<Value> {
        let compared = self.compared as f64;
        let mut values = vec![(OURS, "prompt workers", self.workers as f64 / compared)];
        for ((name, _), different) in sides.iter().zip(&self.different).skip(1) {
            values.extend([(*name, "compared", compared), (*name, "different", *different as f64)]);
        }
        values
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::workload::{Fleet, make};
    use crate::{SIDES, all_sides};

    #[test]
    fn sides_answer_alike_with_all_metrics() -> Result<(), Box<dyn Error>> {
        let trace = make(&Fleet { workers: 5, blocks: 3_000 }, blocks(1), 11);
        let mut sides = all_sides(trace.workers)?;
        let values = measure(&trace, &mut sides, 1)?;
        let find = |values: &[Value], side: &str, metric: &str| {
            values.iter().find(|it| it.0 == side && it.1 == metric).map(|it| it.2)
        };
        for peer in &SIDES[1..] {
            assert_eq!(find(&values, peer, "different"), Some(0.0), "{peer}");
            assert_eq!(find(&values, peer, "compared"), Some(3.0 * 4096.0), "{peer}");
        }
        let metrics = |side: &str| -> HashSet<&str> {
            values.iter().filter(|it| it.0 == side).map(|it| it.1).collect()
        };
        let missing: HashSet<_> =
            metrics(OURS).difference(&metrics("RadixTree")).copied().collect();
        let expected = HashSet::from([
            "events, 2 threads",
            "events, from frames, 2 threads",
            "lookups, 2 threads",
            "lookup p50 beside events",
            "lookup p99 beside events",
            "prompt blocks",
            "prompt workers",
        ]);
        assert_eq!(missing, expected);
        assert!(find(&values, OURS, "prompt workers").is_some_and(|workers| workers > 1.0));
        let variants = measure_variants(&trace, 1)?;
        for variant in ["frames, own hashes", "frames, twice"] {
            assert!(find(&variants, OURS, variant).is_some_and(|rate| rate > 0.0));
            let different = find(&variants, OURS, &format!("{variant}, different"));
            assert_eq!(different, Some(0.0), "{variant}");
        }
        sides[1].1.clear(trace.workers);
        let mut answers = Answers::default();
        answers.compare(&mut sides, &trace.all_prompts(1)[..100]);
        assert_eq!(answers.different, [0, 100, 0, 0]);
        Ok(())
    }
}
