//! The benchmark `handoff`: the transfer of tensors into the engine.

use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;

use crate::bench_peers::page::{BY_METRIC, Grid, Table, decimals, distinct, missed, part_if};
use crate::bench_peers::programs;
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{self, OURS, RUN, Row, Target};
use crate::bench_peers::spec::{Columns, Sides, Spec};
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env;

const SCRIPTS: &str = "bench/handoff";
const PLUGIN: &str = "python/chiasm_vllm";

/// A copy within one process. This name and the next four are limits and not peers.
const MEMCPY: &str = "memcpy";
/// A copy to buffers that are used in rotation, as slots are.
const MEMCPY_IN_TURN: &str = "memcpy, in turn";
/// A fixed limit, which is not measured.
const LIMIT: &str = "limit";
/// The reference for [`CACHED`]: a request without an image.
const TEXT: &str = "the same prompt without an image";
/// The reference for [`FIRST_USE`].
const LATER_USE: &str = "a slot used before";

/// The whole transfer through a slot of shared memory.
const SHM: &str = "shm view";
/// The part of [`SHM`] until the slot is written.
const WRITE: &str = "shm view, write";
/// The part of [`SHM`] after that.
const SEND: &str = "shm view, send";
/// Taking and writing a slot whose memory has not been used before.
const FIRST_USE: &str = "write, first use";
/// A request whose image is in the engine's cache.
const CACHED: &str = "cached";
/// The transfer of an image inside the message.
const INLINE: &str = "inline";

/// Hashing an image's file to its identity.
const HASH: &str = "hash";

/// The maximum milliseconds of a request whose image is in the engine's cache.
const CACHED_LIMIT_MS: f64 = 0.2;

pub(crate) const SPEC: Spec = Spec {
    name: "handoff",
    min_rounds: 21,
    has_short_run: false,
    measure,
    target,
    is_optional: |_, _| false,
    template: include_str!("templates/handoff.md"),
    columns: Columns {
        heads: "image | way | against | ours, ms | theirs, ms",
        number,
        outputs: "other bytes",
        ..BY_METRIC
    },
    values: |rows| {
        let missed = missed(rows, "The parts of the times whose target was missed:", |row| {
            profile(rows, row)
        });
        vec![
            ("missed", missed),
            ("ways", ways(rows)),
            ("first_use", first_use(rows)),
            ("hashes", hashes(rows)),
        ]
    },
};

fn target(row: &Row, _: &[Row]) -> Option<Target> {
    match (&*row.metric, &*row.peer_name) {
        (SHM, MEMCPY) if row.case == "13 MB" => Some(AtMost(1.3)),
        (SHM, peer) if peer.starts_with("pickle") || peer.starts_with("msgpack") => {
            Some(AtLeast(5.0))
        }
        (CACHED, LIMIT) => Some(AtMost(1.0)),
        _ => None,
    }
}

/// The first line of output: the versions of the peers.
#[derive(Debug, Deserialize)]
struct Versions {
    vllm: String,
    pyzmq: String,
    python: String,
}

/// Any other line: all rounds of one image and one way of transfer, in order. Lines are grouped by
/// image.
#[derive(Debug, Deserialize)]
struct Measurement {
    /// The size of the image.
    case: String,
    way: String,
    ms: Vec<f64>,
    /// The milliseconds of writing the tensor in each round; empty for ways that do not write it
    /// separately.
    write_ms: Vec<f64>,
    /// `true` if the received bytes were equal to the image's in all rounds.
    equal: bool,
}

/// Runs the example `handoff`.
fn measure(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let root = &setup.workspace.root;
    let env = vllm_env::ensure(setup)?;
    let mut measure =
        Command::new(programs::example(setup, sides.profile, "chiasm-engine", "handoff")?);
    measure.envs(vllm_env::ENGINE_VARIABLES);
    for (flag, value) in [
        ("--python", env.python()),
        ("--scripts", root.join(SCRIPTS)),
        ("--plugin", root.join(PLUGIN)),
        ("--rounds", PathBuf::from(rounds.to_string())),
    ] {
        measure.arg(flag).arg(value);
    }
    let mut rows: Vec<Row> = Row::load().into_iter().collect();
    let what = "the example handoff";
    let lines = programs::lines(&mut measure, what)?;
    let (head, lines) = lines.split_at(lines.len().min(1));
    let unreadable = || Error::Unreadable { what: what.to_owned(), printed: String::new() };
    let versions = row::parse(what, head)?.pop().ok_or_else(unreadable)?;
    let measurements: Vec<Measurement> = row::parse(what, lines)?;
    let rounds = Some(f64::from(rounds));
    rows.push(Row { ours: rounds, peer: rounds, ..Row::new(RUN, "rounds", "rounds", OURS) });
    for case in measurements.chunk_by(|a, b| a.case == b.case) {
        rows.extend(case_rows(&versions, case));
    }
    Ok(rows)
}

/// Returns the rows of an image.
fn case_rows(versions: &Versions, case: &[Measurement]) -> Vec<Row> {
    let way = |name: &str| case.iter().find(|it| it.way == name);
    let total = |name: &str| way(name).map(|it| (median(it.ms.clone()), it.equal));
    let part = |select: fn(f64, f64) -> f64| {
        let shm = way("shm")?;
        let parts = shm.ms.iter().zip(&shm.write_ms).map(|(&ms, &write)| select(ms, write));
        Some((median(parts.collect()), shm.equal))
    };
    let compare = |metric: &str, ours: Option<(f64, bool)>, peer: &str, theirs| {
        let ((ours, ours_equal), (theirs, peer_equal)): (_, (f64, bool)) = ours.zip(theirs)?;
        let is_limit = [MEMCPY, MEMCPY_IN_TURN, LIMIT, TEXT, LATER_USE].contains(&peer);
        Some(Row {
            ours: Some(ours),
            peer: Some(theirs),
            ratio: Some(if is_limit { ours / theirs } else { theirs / ours }),
            equal: Some(ours_equal && peer_equal),
            ..Row::new(&case[0].case, metric, "ms", peer)
        })
    };
    let Versions { vllm, pyzmq, python } = versions;
    if let Some(((ours, _), (theirs, _))) = total("hash").zip(total("hash, vLLM")) {
        let peer = format!("vLLM {vllm}");
        return vec![Row {
            ours: Some(1e3 * ours),
            peer: Some(1e3 * theirs),
            ratio: Some(theirs / ours),
            ..Row::new(&case[0].case, HASH, "µs", &peer)
        }];
    }
    let aux = format!("aux frames (vLLM {vllm}, pyzmq {pyzmq})");
    let pickle = format!("pickle + SharedMemory, as Dynamo 1.5.1 (Python {python})");
    let msgpack = format!("msgpack + SharedMemory, as Dynamo 1.6.1 (vLLM {vllm}, Python {python})");
    let copy = total("memcpy");
    let write = part(|_, write| write);
    let rows = [
        compare(SHM, total("shm"), MEMCPY, copy),
        compare(SHM, total("shm"), MEMCPY_IN_TURN, total("memcpy in turn")),
        compare(WRITE, write, MEMCPY, copy),
        compare(SEND, part(|ms, write| ms - write), MEMCPY, copy),
        compare(SHM, total("shm"), &pickle, total("pickle")),
        compare(SHM, total("shm"), &msgpack, total("msgpack")),
        compare(SHM, total("shm"), &aux, total("aux")),
        compare(CACHED, total("cached"), LIMIT, Some((CACHED_LIMIT_MS, true))),
        compare(CACHED, total("cached"), TEXT, total("text")),
        compare(INLINE, total("inline"), &aux, total("aux")),
        compare(FIRST_USE, total("first use"), LATER_USE, write),
    ];
    rows.into_iter().flatten().collect()
}

/// Returns the median; 0 for no times, which does not happen because a run has rounds.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    match times.len() {
        0 => 0.0,
        length => (times[(length - 1) / 2] + times[length / 2]) / 2.0,
    }
}

/// Describes the parts of the time of a missed target.
fn profile(rows: &[Row], Row { case, metric, peer_name, .. }: &Row) -> String {
    let find = |is_match: &dyn Fn(&Row) -> bool| {
        rows.iter().find(|row| row.case == *case && is_match(row))
    };
    let part = |metric| number(find(&|row| row.metric == metric).and_then(|row| row.ours));
    let peer = |name| number(find(&|row| row.peer_name == name).and_then(|row| row.peer));
    let parts = if metric == CACHED {
        format!("{TEXT} takes {} ms", peer(TEXT))
    } else {
        let [write, send] = [part(WRITE), part(SEND)];
        let mut copy = String::new();
        if peer_name == MEMCPY {
            copy = format!("one copy to memory used in turn {} ms, ", peer(MEMCPY_IN_TURN));
        }
        format!(
            "writing the slot takes {write} ms, {copy}sending the rest of the request {send} ms"
        )
    };
    format!("{case}, {metric}, {peer_name}: {parts}")
}

/// Returns the table of all ways of transfer with a column per image.
fn ways(rows: &[Row]) -> String {
    let images = rows.iter().filter(|row| row.case != RUN && row.metric != HASH);
    let mut grid = Grid::new(distinct(images.map(|row| &*row.case)));
    for (metric, name) in
        [(SHM, "**shm view**"), (WRITE, WRITE), (SEND, SEND), (CACHED, CACHED), (INLINE, INLINE)]
    {
        for row in rows.iter().filter(|row| row.metric == metric) {
            grid.set(name, &row.case, number(row.ours));
        }
        for row in rows.iter().filter(|row| metric == CACHED && row.peer_name == TEXT) {
            grid.set(TEXT, &row.case, number(row.peer));
        }
    }
    for row in rows.iter().filter(|row| row.metric == SHM) {
        grid.set(&row.peer_name, &row.case, number(row.peer));
    }
    grid.table("way", "")
}

/// Returns the table of first uses of slots.
fn first_use(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.metric == FIRST_USE && row.peer_name == LATER_USE);
    Table::new("image | first use, ms | used before, ms | ratio").rows(rows.map(|row| {
        let [first, before, ratio] = [row.ours, row.peer, row.ratio].map(number);
        format!("{} | {first} | {before} | {ratio}", row.case)
    }))
}

/// Returns the section with the table of hashing by file size, if it was measured.
fn hashes(rows: &[Row]) -> String {
    let text = part_if(rows, |row| row.metric == HASH, include_str!("templates/handoff_hashes.md"));
    if text.is_empty() {
        return text;
    }
    let rows = rows.iter().filter(|row| row.metric == HASH);
    let table =
        Table::new("file | chiasm, µs | against | theirs, µs | ratio").rows(rows.map(|row| {
            let [ours, theirs] = [row.ours, row.peer].map(|time| decimals(time, 1, ""));
            format!("{} | {ours} | {} | {theirs} | {}", row.case, row.peer_name, number(row.ratio))
        }));
    format!("\n{text}\n\n{table}")
}

fn number(number: Option<f64>) -> String {
    decimals(number, 2, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rows of a run in which shared memory takes as long as 1.3 copies. It is ten
    /// times faster than one kind of segment and just under five times faster than the other.
    fn rows() -> Vec<Row> {
        let [vllm, pyzmq, python] = ["0.32.0", "27.3.0", "3.11.7"].map(str::to_owned);
        let way = |(way, ms, write): (&str, f64, &[f64])| Measurement {
            case: "13 MB".to_owned(),
            way: way.to_owned(),
            ms: vec![ms, 1.0, 90.0],
            write_ms: write.to_vec(),
            equal: true,
        };
        let measurements: [(&str, f64, &[f64]); 10] = [
            ("shm", 2.6, &[2.1, 0.9, 80.0]),
            ("cached", 1.1, &[]),
            ("text", 1.0, &[]),
            ("inline", 20.0, &[]),
            ("aux", 10.0, &[]),
            ("pickle", 26.0, &[]),
            ("msgpack", 12.9, &[]),
            ("memcpy", 2.0, &[]),
            ("memcpy in turn", 2.2, &[]),
            ("first use", 8.4, &[]),
        ];
        let rows = case_rows(&Versions { vllm, pyzmq, python }, &measurements.map(way));
        let with_target = |row: Row| row.clone().with_target("handoff", target(&row, &[]));
        rows.into_iter().map(with_target).collect()
    }

    fn find(metric: &str, peer: &str) -> Row {
        let is_match = |row: &Row| row.metric == metric && row.peer_name.starts_with(peer);
        rows().into_iter().find(is_match).unwrap()
    }

    #[test]
    fn limits_are_maxima_while_peers_are_minima() {
        let copy = find(SHM, MEMCPY);
        assert_eq!((copy.ours, copy.peer, copy.ratio), (Some(2.6), Some(2.0), Some(1.3)));
        assert_eq!((copy.target, copy.ok, copy.equal), (Some(1.3), Some(true), Some(true)));
        let pickle = find(SHM, "pickle");
        assert_eq!((pickle.ratio, pickle.target, pickle.ok), (Some(10.0), Some(5.0), Some(true)));
        assert_eq!(
            (find(SHM, "msgpack").ratio, find(SHM, "msgpack").ok),
            (Some(4.962), Some(false))
        );
        let cached = find(CACHED, LIMIT);
        assert_eq!((cached.peer, cached.ratio, cached.ok), (Some(0.2), Some(5.5), Some(false)));
        assert_eq!(find(INLINE, "aux").ratio, Some(0.5));
        assert_eq!(find(FIRST_USE, LATER_USE).ratio, Some(4.0));
    }

    #[test]
    fn hashes_are_compared_in_microseconds() {
        let [vllm, pyzmq, python] = ["0.32.0", "27.3.0", "3.11.7"].map(str::to_owned);
        let way = |(way, ms): (&str, f64)| Measurement {
            case: "1 MB".to_owned(),
            way: way.to_owned(),
            ms: vec![ms],
            write_ms: Vec::new(),
            equal: true,
        };
        let measurements = [("hash", 0.25), ("hash, vLLM", 0.5)].map(way);
        let rows = case_rows(&Versions { vllm, pyzmq, python }, &measurements);
        assert_eq!((rows.len(), rows[0].ours, rows[0].ratio), (1, Some(250.0), Some(2.0)));
        assert!(hashes(&rows).ends_with("| 1 MB | 250.0 | vLLM 0.32.0 | 500.0 | 2.00 |"));
        assert!(!ways(&rows).contains("1 MB"));
    }

    #[test]
    fn parts_have_their_own_medians() {
        assert_eq!(find(WRITE, MEMCPY).ours, Some(2.1));
        // 0.5, 0.1 and 10.
        assert_eq!(find(SEND, MEMCPY).ours, Some(0.5));
    }

    #[test]
    fn missed_targets_are_described_by_parts() {
        let rows = rows();
        assert_eq!(
            profile(&rows, &find(SHM, MEMCPY)),
            "13 MB, shm view, memcpy: writing the slot takes 2.10 ms, one copy to memory used in \
             turn 2.20 ms, sending the rest of the request 0.50 ms"
        );
        assert_eq!(
            profile(&rows, &find(CACHED, LIMIT)),
            "13 MB, cached, limit: the same prompt without an image takes 1.00 ms"
        );
    }
}
