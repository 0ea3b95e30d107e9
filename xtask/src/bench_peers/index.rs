//! Converts the results of `index run` to rows, with the project's targets.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{Measurement, peers};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "index";
/// The metric of answers. In its row, `ours` is the number of compared prompts and `peer` the
/// number of different answers.
pub(crate) const DIFFERENT: &str = "different answers";
/// The metric of the size of the index: the number of pairs of a worker and a block.
pub(crate) const HELD_BLOCKS: &str = "held";
/// The metric of the mean length of prompts.
pub(crate) const PROMPT_BLOCKS: &str = "prompt blocks";
/// The metric of the mean number of workers that hold some of a prompt.
pub(crate) const PROMPT_WORKERS: &str = "prompt workers";
/// Our index with engines that have the same hashes, as a peer of our index with other engines.
const PLAIN: &str = "plain";
/// The metrics of events with hashes that differ by engine, and of events that are published twice.
const FRAME_VARIANTS: [&str; 2] = ["frames, own hashes", "frames, twice"];
/// The minimum rate of these variants, as a part of the plain rate.
const FRAME_VARIANT_TARGET: f64 = 0.5;
/// Our lookups on one thread, as a peer of our lookups on several threads.
const ONE_THREAD: &str = "one-thread";
/// Our lookups without events, as a peer of our lookups with events.
const NO_EVENTS: &str = "no-events";
/// The metrics of lookups on several threads, with the numbers of threads. A metric is only
/// measured on a machine with as many cores.
const SCALING: [(&str, f64); 2] =
    [("lookups alone, 2 threads", 2.0), ("lookups alone, 4 threads", 4.0)];
/// The metric of lookups while few events arrive.
const LOOKUPS_BESIDE_EVENTS: &str = "lookups beside few events";
/// The minimum rate of lookups, as a part of perfect scaling and of the rate without events.
const SCALING_TARGET: f64 = 0.85;
/// The metric of events that are decoded from frames as engines publish them.
const FRAMES: &str = "events, from frames";
/// The metric of events from frames on two threads.
const FRAMES_2_THREADS: &str = "events, from frames, 2 threads";
/// The metric of lookups by hashes.
pub(crate) const LOOKUPS: &str = "lookups";
/// The metric of lookups that hash the tokens first.
pub(crate) const LOOKUPS_FROM_TOKENS: &str = "lookups, from tokens";
/// The metric of resident memory.
pub(crate) const MEMORY: &str = "memory";

/// A metric and its meaning.
pub(crate) struct Metric {
    /// The name in the output of `index run`.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// The divisor that converts a measured value to the unit.
    scale: f64,
    pub(crate) more_is_better: bool,
    /// The minimum ratio to the best peer.
    target: Option<f64>,
}

const fn metric(
    name: &'static str,
    unit: &'static str,
    scale: f64,
    more: bool,
    target: Option<f64>,
) -> Metric {
    Metric { name, unit, scale, more_is_better: more, target }
}

const FASTER: Option<f64> = Some(3.0);
const SMALLER: Option<f64> = Some(2.0);

/// The compared metrics in the order of rows.
pub(crate) const METRICS: [Metric; 13] = [
    // Every side has to fetch the decoded events from memory, which leaves less than the target to
    // gain: docs/notes/index.md has the cost.
    metric("events, filling", "M blocks/s", 1e6, true, None),
    metric("events", "M blocks/s", 1e6, true, None),
    metric("events, 2 threads", "M blocks/s", 1e6, true, None),
    metric(FRAMES, "M blocks/s", 1e6, true, FASTER),
    metric(FRAMES_2_THREADS, "M blocks/s", 1e6, true, FASTER),
    metric("events, hashed", "M blocks/s", 1e6, true, None),
    metric(LOOKUPS, "k prompts/s", 1e3, true, FASTER),
    metric("lookups, 2 threads", "k prompts/s", 1e3, true, FASTER),
    metric(LOOKUPS_FROM_TOKENS, "k prompts/s", 1e3, true, FASTER),
    metric("lookup p50 beside events", "µs", 1.0, false, None),
    metric("lookup p99 beside events", "µs", 1.0, false, None),
    metric(MEMORY, "MB", 1e6, false, SMALLER),
    metric("memory, cleared", "MB", 1e6, false, None),
];

/// The mandatory comparisons: for each metric the fastest peers that support it.
pub(crate) const MANDATORY: [Mandatory; 1] = [Mandatory {
    cases: &["8 workers", "64 workers", "1000 workers"],
    ends: &[""],
    lines: &[
        (DIFFERENT, RADIX_TREE),
        (DIFFERENT, COMPRESSED_TREE),
        ("events, filling", RADIX_TREE),
        ("events", RADIX_TREE),
        ("events, 2 threads", COMPRESSED_TREE),
        (FRAMES, RADIX_TREE),
        (FRAMES_2_THREADS, COMPRESSED_TREE),
        ("events, hashed", RADIX_TREE),
        (LOOKUPS, COMPRESSED_TREE),
        ("lookups, 2 threads", COMPRESSED_TREE),
        (LOOKUPS_FROM_TOKENS, COMPRESSED_TREE),
        ("lookup p50 beside events", COMPRESSED_TREE),
        ("lookup p99 beside events", COMPRESSED_TREE),
        (MEMORY, RADIX_TREE),
        (MEMORY, COMPRESSED_TREE),
        (FRAME_VARIANTS[0], PLAIN),
        (FRAME_VARIANTS[1], PLAIN),
        (LOOKUPS_BESIDE_EVENTS, NO_EVENTS),
    ],
}];

const RADIX_TREE: &str = "RadixTree";
const COMPRESSED_TREE: &str = "ConcurrentRadixTreeCompressed";

/// The metrics that only our side reports, with units and divisors.
const OWN_METRICS: [(&str, &str, f64); 4] = [
    (HELD_BLOCKS, "blocks of workers", 1.0),
    ("memory, own count", "MB", 1e6),
    (PROMPT_BLOCKS, "blocks", 1.0),
    (PROMPT_WORKERS, "workers", 1.0),
];

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let mut rows = vec![Row::rounds(BENCH, rounds, OURS)];
    rows.extend(load.map(|load| load.row(BENCH)));
    for case in measurements.chunk_by(|a, b| a.case == b.case) {
        rows.extend(case_rows(case));
    }
    rows
}

fn case_rows(case: &[Measurement]) -> Vec<Row> {
    let Some(name) = case.first().map(|it| it.case.as_str()) else { return Vec::new() };
    let value = |side: &str, metric: &str| {
        Some(case.iter().find(|it| it.side == side && it.metric == metric)?.value)
    };
    let peers = peers(case);
    let answers = |peer: &str| Some((value(peer, "compared")?, value(peer, "different")?));
    let equal =
        |peer: &str| answers(peer).map(|(compared, different)| compared > 0.0 && different == 0.0);

    let mut rows = Vec::new();
    for (metric, unit, scale) in OWN_METRICS {
        let ours = value(OURS, metric).map(|value| value / scale);
        rows.extend(ours.map(|ours| row(name, metric, unit, OURS).numbers(Some(ours), None)));
    }
    for peer in &peers {
        rows.extend(answers(peer).map(|(compared, different)| Row {
            ours: Some(compared),
            peer: Some(different),
            equal: equal(peer),
            ..row(name, DIFFERENT, "prompts", peer)
        }));
    }
    for metric in &METRICS {
        let ours = value(OURS, metric.name);
        let theirs: Vec<(&str, f64)> =
            peers.iter().filter_map(|peer| Some((*peer, value(peer, metric.name)?))).collect();
        let better = |a: f64, b: f64| if metric.more_is_better { a > b } else { a < b };
        let best = theirs
            .iter()
            .copied()
            .reduce(|best, other| if better(other.1, best.1) { other } else { best });
        for (peer, theirs) in theirs {
            let ratio =
                ours.map(|ours| if metric.more_is_better { ours / theirs } else { theirs / ours });
            let target = metric
                .target
                .filter(|_| best.is_some_and(|(best, _)| best == peer))
                .map(Target::AtLeast);
            let row = row(name, metric.name, metric.unit, peer);
            let row =
                row.numbers(ours.map(|ours| ours / metric.scale), Some(theirs / metric.scale));
            let row = Row { equal: equal(peer), ..row }.judged(ratio, target);
            // Answers that were not compared reach no target.
            rows.push(Row { ok: row.ok.map(|ok| ok && row.equal == Some(true)), ..row });
        }
    }
    // Compares a rate of ours with another rate of ours.
    let own = |metric, reference: Option<f64>, scale: f64, target: f64, row: Row| {
        let (rate, reference) = value(OURS, metric).zip(reference)?;
        let row = row.numbers(Some(rate / scale), Some(reference / scale));
        Some(row.judged(Some(rate / reference), Some(Target::AtLeast(target))))
    };
    let plain = value(OURS, "frames, plain");
    rows.extend(FRAME_VARIANTS.into_iter().filter_map(|variant| {
        let different = value(OURS, &format!("{variant}, different"))?;
        let row = Row { equal: Some(different == 0.0), ..row(name, variant, "M blocks/s", PLAIN) };
        own(variant, plain, 1e6, FRAME_VARIANT_TARGET, row)
    }));
    let lookups = |metric, peer| row(name, metric, "k prompts/s", peer);
    let one = value(OURS, "lookups alone, 1 thread");
    rows.extend(SCALING.into_iter().filter_map(|(metric, threads)| {
        own(metric, one.map(|one| threads * one), 1e3, SCALING_TARGET, lookups(metric, ONE_THREAD))
    }));
    let no_events = value(OURS, "lookups beside no events");
    let beside_events = lookups(LOOKUPS_BESIDE_EVENTS, NO_EVENTS);
    rows.extend(own(LOOKUPS_BESIDE_EVENTS, no_events, 1e3, SCALING_TARGET, beside_events));
    rows
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::tests::find;

    /// Returns the measurements of two fleets and two peers. The tree is the faster peer, has no
    /// threads, and gives different answers in the second fleet.
    pub(crate) fn measurements() -> Vec<Measurement> {
        let mut measurements = Vec::new();
        for (case, different) in [("8 workers", 0.0), ("64 workers", 3.0)] {
            let mut add = |side: &str, metric: &str, value: f64| {
                measurements.push(Measurement::new(case, None, side, metric, value));
            };
            for (side, factor) in [(OURS, 3.0), ("Tree (d 1.0)", 1.0), ("Map (d 1.0)", 0.5)] {
                add(side, "events", factor * 2e6);
                add(side, FRAMES, factor * 1e6);
                if side != "Tree (d 1.0)" {
                    add(side, FRAMES_2_THREADS, factor * 2e6);
                }
                add(side, LOOKUPS, factor * 1e5);
                add(side, LOOKUPS_FROM_TOKENS, factor * 2e4);
                add(side, "lookup p50 beside events", 6.0 / factor);
                add(side, MEMORY, 1e8 / factor);
                if side != OURS {
                    add(side, "compared", 4096.0);
                    add(side, "different", if side == "Tree (d 1.0)" { different } else { 0.0 });
                }
            }
            add(OURS, HELD_BLOCKS, 1e6);
            add(OURS, "memory, own count", 3e7);
            for (metric, value) in [
                ("plain", 4e6),
                ("own hashes", 3e6),
                ("own hashes, different", different),
                ("twice", 1e6),
            ] {
                add(OURS, &format!("frames, {metric}"), value);
            }
            add(OURS, "frames, twice, different", 0.0);
            for (metric, value) in [
                ("alone, 1 thread", 2e6),
                ("alone, 2 threads", 3.6e6),
                ("beside no events", 2e6),
                ("beside few events", 1e6),
            ] {
                add(OURS, &format!("lookups {metric}"), value);
            }
            add(OURS, PROMPT_BLOCKS, 240.0);
            add(OURS, PROMPT_WORKERS, 7.5);
        }
        measurements
    }

    #[test]
    fn target_is_set_on_best_peer_only() {
        let rows = rows(&measurements(), 15, None);
        let tree = find(&rows, "8 workers", FRAMES, "Tree");
        assert_eq!((tree.ours, tree.peer, tree.ratio), (Some(3.0), Some(1.0), Some(3.0)));
        assert_eq!((tree.target, tree.ok, tree.equal), (Some(3.0), Some(true), Some(true)));
        let map = find(&rows, "8 workers", FRAMES, "Map");
        assert_eq!((map.ratio, map.target, map.ok), (Some(6.0), None, None));
        // The tree does not support threads.
        assert_eq!(find(&rows, "8 workers", FRAMES_2_THREADS, "Map").target, Some(3.0));
        assert!(
            !rows
                .iter()
                .any(|row| row.metric == FRAMES_2_THREADS && row.peer_name.starts_with("Tree"))
        );
        let decoded = find(&rows, "8 workers", "events", "Tree");
        assert_eq!((decoded.ratio, decoded.target, decoded.ok), (Some(3.0), None, None));
    }

    #[test]
    fn lower_memory_or_latency_is_better() {
        let rows = rows(&measurements(), 15, None);
        let memory = find(&rows, "8 workers", MEMORY, "Tree");
        assert_eq!(
            (memory.ours, memory.peer, memory.ratio),
            (Some(33.333), Some(100.0), Some(3.0))
        );
        assert_eq!((memory.target, memory.ok), (Some(2.0), Some(true)));
        assert_eq!(find(&rows, "8 workers", MEMORY, "Map").target, None);
        assert_eq!(find(&rows, "8 workers", "lookup p50 beside events", "Map").ratio, Some(6.0));
    }

    #[test]
    fn frame_variants_are_compared_with_plain_frames() {
        let rows = rows(&measurements(), 15, None);
        let own = find(&rows, "8 workers", FRAME_VARIANTS[0], PLAIN);
        assert_eq!(
            (own.ours, own.peer, own.ratio, own.ok),
            (Some(3.0), Some(4.0), Some(0.75), Some(true))
        );
        assert_eq!(
            find(&rows, "64 workers", FRAME_VARIANTS[0], PLAIN).ok,
            Some(false),
            "other answers"
        );
        assert_eq!(find(&rows, "8 workers", FRAME_VARIANTS[1], PLAIN).ok, Some(false), "too slow");
    }

    #[test]
    fn thread_scaling_is_compared_with_multiple_of_one_thread() {
        let rows = rows(&measurements(), 15, None);
        let two = find(&rows, "8 workers", "lookups alone, 2 threads", ONE_THREAD);
        assert_eq!(
            (two.ours, two.peer, two.ratio, two.ok),
            (Some(3600.0), Some(4000.0), Some(0.9), Some(true))
        );
        assert!(!rows.iter().any(|row| row.metric == "lookups alone, 4 threads"), "not measured");
        assert_eq!(
            find(&rows, "8 workers", LOOKUPS_BESIDE_EVENTS, NO_EVENTS).ok,
            Some(false),
            "half as many"
        );
    }

    #[test]
    fn different_answers_reach_no_target() {
        let rows = rows(&measurements(), 15, None);
        let tree = find(&rows, "64 workers", LOOKUPS, "Tree");
        assert_eq!((tree.ratio, tree.ok, tree.equal), (Some(3.0), Some(false), Some(false)));
        let answers = find(&rows, "64 workers", DIFFERENT, "Tree");
        assert_eq!(
            (answers.ours, answers.peer, answers.equal),
            (Some(4096.0), Some(3.0), Some(false))
        );
        assert_eq!(find(&rows, "64 workers", DIFFERENT, "Map").equal, Some(true));
    }
}
