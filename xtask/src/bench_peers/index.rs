//! Turns what `index run` measured into rows, with the targets that the project has set itself.

use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{Measurement, peers};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};

/// The bench's name in rows and files.
pub(crate) const BENCH: &str = "index";
/// The metric of answers: `ours` is how many prompts were compared, `peer` how many of their
/// answers are not ours.
pub(crate) const DIFFERENT: &str = "different answers";
/// The metric of what is held: pairs of a worker and a block.
pub(crate) const HELD: &str = "held";
/// The metric of prompts' mean length.
pub(crate) const PROMPT_BLOCKS: &str = "prompt blocks";
/// The metric of how many workers hold some of a prompt, on average.
pub(crate) const PROMPT_WORKERS: &str = "prompt workers";
/// Our own index before engines of the same hashes, as a peer of itself before others.
const PLAIN: &str = "plain";
/// How engines tell of blocks that have other hashes on each engine, or are told of twice.
const TELLINGS: [&str; 2] = ["frames, own hashes", "frames, twice"];
/// The least part of the plain rate that we want to keep before those.
const TELLING_TARGET: f64 = 0.5;
/// Our own lookups on one thread, as a peer of those on more.
const ONE_THREAD: &str = "one-thread";
/// Our own lookups beside no events, as a peer of those beside some.
const NO_EVENTS: &str = "no-events";
/// What lookups come to on so many threads; how many of them count is told by the threads, where
/// the machine has that many cores.
const SCALING: [(&str, f64); 2] =
    [("lookups alone, 2 threads", 2.0), ("lookups alone, 4 threads", 4.0)];
const BESIDE: &str = "lookups beside few events";
/// The least part of what so many threads could do, and of what goes on beside no events, that we
/// want.
const SCALING_TARGET: f64 = 0.85;
/// The metric of events as engines publish them.
const FRAMES: &str = "events, from frames";
/// The same on two threads.
const FRAMES_2_THREADS: &str = "events, from frames, 2 threads";
/// The metric of lookups by hashes.
pub(crate) const LOOKUPS: &str = "lookups";
/// The metric of lookups that hash first.
pub(crate) const LOOKUPS_FROM_TOKENS: &str = "lookups, from tokens";
/// The metric of resident memory.
pub(crate) const MEMORY: &str = "memory";

/// What a metric means.
pub(crate) struct Metric {
    /// The name that `index run` gives it.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    /// How many of what was measured make one of the unit.
    scale: f64,
    pub(crate) more_is_better: bool,
    /// How many times better than the best of the peers we have to be.
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

/// All comparisons, in the order of rows.
pub(crate) const METRICS: [Metric; 13] = [
    // What decoding puts into memory has to be fetched from there by every side, which leaves less
    // than the target to gain: docs/notes/index.md has what that takes.
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

/// The fastest peers of those that can do each; the others may have nothing to say.
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
        (TELLINGS[0], PLAIN),
        (TELLINGS[1], PLAIN),
        (BESIDE, NO_EVENTS),
    ],
}];

const RADIX_TREE: &str = "RadixTree";
const COMPRESSED_TREE: &str = "ConcurrentRadixTreeCompressed";

/// What is only ours to tell.
const FACTS: [(&str, &str, f64); 4] = [
    (HELD, "blocks of workers", 1.0),
    ("memory, own count", "MB", 1e6),
    (PROMPT_BLOCKS, "blocks", 1.0),
    (PROMPT_WORKERS, "workers", 1.0),
];

/// All rows of a run that began under some load.
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
    for (metric, unit, scale) in FACTS {
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
            // Answers that were not compared reach no target either.
            rows.push(Row { ok: row.ok.map(|ok| ok && row.equal == Some(true)), ..row });
        }
    }
    let own = |metric, than: Option<f64>, scale: f64, target: f64, row: Row| {
        let (rate, than) = value(OURS, metric).zip(than)?;
        let row = row.numbers(Some(rate / scale), Some(than / scale));
        Some(row.judged(Some(rate / than), Some(Target::AtLeast(target))))
    };
    let plain = value(OURS, "frames, plain");
    rows.extend(TELLINGS.into_iter().filter_map(|telling| {
        let different = value(OURS, &format!("{telling}, different"))?;
        let row = Row { equal: Some(different == 0.0), ..row(name, telling, "M blocks/s", PLAIN) };
        own(telling, plain, 1e6, TELLING_TARGET, row)
    }));
    let lookups = |metric, peer| row(name, metric, "k prompts/s", peer);
    let one = value(OURS, "lookups alone, 1 thread");
    rows.extend(SCALING.into_iter().filter_map(|(metric, threads)| {
        own(metric, one.map(|one| threads * one), 1e3, SCALING_TARGET, lookups(metric, ONE_THREAD))
    }));
    let no_events = value(OURS, "lookups beside no events");
    rows.extend(own(BESIDE, no_events, 1e3, SCALING_TARGET, lookups(BESIDE, NO_EVENTS)));
    rows
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::tests::find;

    /// Two fleets, two peers: the tree is faster, has no threads, and answers otherwise in the
    /// second fleet.
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
            add(OURS, HELD, 1e6);
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
    fn the_best_of_the_peers_carries_the_target_and_others_only_a_ratio() {
        let rows = rows(&measurements(), 15, None);
        let tree = find(&rows, "8 workers", FRAMES, "Tree");
        assert_eq!((tree.ours, tree.peer, tree.ratio), (Some(3.0), Some(1.0), Some(3.0)));
        assert_eq!((tree.target, tree.ok, tree.equal), (Some(3.0), Some(true), Some(true)));
        let map = find(&rows, "8 workers", FRAMES, "Map");
        assert_eq!((map.ratio, map.target, map.ok), (Some(6.0), None, None));
        // The tree can't.
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
    fn less_memory_and_time_are_better() {
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
    fn engines_that_tell_otherwise_are_measured_against_plain_ones() {
        let rows = rows(&measurements(), 15, None);
        let own = find(&rows, "8 workers", TELLINGS[0], PLAIN);
        assert_eq!(
            (own.ours, own.peer, own.ratio, own.ok),
            (Some(3.0), Some(4.0), Some(0.75), Some(true))
        );
        assert_eq!(find(&rows, "64 workers", TELLINGS[0], PLAIN).ok, Some(false), "other answers");
        assert_eq!(find(&rows, "8 workers", TELLINGS[1], PLAIN).ok, Some(false), "too slow");
    }

    #[test]
    fn threads_are_measured_against_as_many_times_one_where_there_are_cores() {
        let rows = rows(&measurements(), 15, None);
        let two = find(&rows, "8 workers", "lookups alone, 2 threads", ONE_THREAD);
        assert_eq!(
            (two.ours, two.peer, two.ratio, two.ok),
            (Some(3600.0), Some(4000.0), Some(0.9), Some(true))
        );
        assert!(!rows.iter().any(|row| row.metric == "lookups alone, 4 threads"), "not measured");
        assert_eq!(find(&rows, "8 workers", BESIDE, NO_EVENTS).ok, Some(false), "half as many");
    }

    #[test]
    fn other_answers_reach_no_target() {
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
