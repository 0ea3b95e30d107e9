//! Converts the results of the example `handoff` to rows, with the project's targets.

use serde::Deserialize;

use crate::bench_peers::load::Load;
use crate::bench_peers::measured;
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};
use crate::error::Error;

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "handoff";
/// A copy within one process, which is a limit and not a peer.
pub(crate) const MEMCPY: &str = "memcpy";
/// A copy to buffers that are used in rotation, as slots are.
pub(crate) const MEMCPY_IN_TURN: &str = "memcpy, in turn";
/// A fixed limit, which is not measured.
pub(crate) const LIMIT: &str = "limit";
/// The reference for the first use of a slot.
pub(crate) const LATER_USE: &str = "a slot used before";
/// The whole transfer in a slot of shared memory.
pub(crate) const SHM: &str = "shm view";
/// The part of the transfer until the slot is written.
pub(crate) const WRITE: &str = "shm view, write";
/// The part of the transfer after the slot is written.
pub(crate) const SEND: &str = "shm view, send";
/// Taking and writing a slot whose memory has not been used before.
pub(crate) const FIRST_USE: &str = "write, first use";
/// A request whose image is in the engine's cache.
pub(crate) const CACHED: &str = "cached";
/// The reference for [`CACHED`]: a request without an image.
pub(crate) const TEXT: &str = "the same prompt without an image";
/// The transfer of an image inside the message.
pub(crate) const INLINE: &str = "inline";

/// The maximum time of the transfer in shared memory as a multiple of one copy, for one size.
const COPY_LIMIT: (&str, f64) = ("13 MB", 1.3);
/// The minimum ratio to a segment per image.
const SEGMENT_TARGET: f64 = 5.0;
/// The maximum milliseconds of a request whose image is in the engine's cache.
const CACHED_LIMIT_MS: f64 = 0.2;

pub(crate) const MANDATORY: [Mandatory; 1] = [Mandatory {
    cases: &["3 MB", "13 MB", "50 MB"],
    ends: &[""],
    lines: &[
        (SHM, MEMCPY),
        (SHM, "pickle"),
        (SHM, "msgpack"),
        (SHM, "aux"),
        (CACHED, LIMIT),
        (CACHED, TEXT),
        (INLINE, "aux"),
        (FIRST_USE, LATER_USE),
    ],
}];

/// The first line: the versions of the peers.
#[derive(Debug, Deserialize)]
struct Versions {
    vllm: String,
    pyzmq: String,
    python: String,
}

/// Any other line: all rounds of one image and one way of transfer, in order.
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

/// The results of a run.
#[derive(Debug)]
pub(crate) struct Run {
    versions: Versions,
    measurements: Vec<Measurement>,
}

/// Parses the lines of output, which are grouped by case.
pub(crate) fn parse(lines: &[String]) -> Result<Run, Error> {
    let (versions, measurements) = measured::parse_with_head("the example handoff", lines)?;
    Ok(Run { versions, measurements })
}

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(run: &Run, load: Option<Load>) -> Vec<Row> {
    let rounds = run.measurements.first().map_or(0, |measurement| measurement.ms.len());
    let mut rows = vec![Row::rounds(BENCH, rounds as u32, OURS)];
    rows.extend(load.map(|load| load.row(BENCH)));
    for case in run.measurements.chunk_by(|a, b| a.case == b.case) {
        rows.extend(case_rows(&run.versions, case));
    }
    rows
}

fn case_rows(versions: &Versions, case: &[Measurement]) -> Vec<Row> {
    let way = |name: &str| case.iter().find(|it| it.way == name);
    let total = |name: &str| way(name).map(|it| (median(&it.ms), it.equal));
    let Some(name) = case.first().map(|it| it.case.as_str()) else { return Vec::new() };
    // The ratio to a peer is how many times faster we are. The ratio to a limit is the multiple of
    // it.
    let compare = |metric: &str,
                   ours: Option<(f64, bool)>,
                   peer_name: &str,
                   peer,
                   target: Option<Target>,
                   is_peer| {
        let ((ours, ours_equal), (peer, peer_equal)): (_, (f64, bool)) = ours.zip(peer)?;
        let ratio = if is_peer { peer / ours } else { ours / peer };
        let row = Row::new(BENCH, name, metric, "ms", peer_name).numbers(Some(ours), Some(peer));
        Some(Row { equal: Some(ours_equal && peer_equal), ..row }.judged(Some(ratio), target))
    };
    let peer = |metric, ours, name: &str, theirs, target| {
        compare(metric, ours, name, theirs, target, true)
    };
    let limit = |metric, ours, name: &str, theirs, target| {
        compare(metric, ours, name, theirs, target, false)
    };
    let Versions { vllm, pyzmq, python } = versions;
    let aux = format!("aux frames (vLLM {vllm}, pyzmq {pyzmq})");
    let pickle = format!("pickle + SharedMemory, as Dynamo 1.5.1 (Python {python})");
    let msgpack = format!("msgpack + SharedMemory, as Dynamo 1.6.1 (vLLM {vllm}, Python {python})");
    let copy = total("memcpy");
    let part = |select: fn(f64, f64) -> f64| {
        let shm = way("shm")?;
        let parts: Vec<f64> =
            shm.ms.iter().zip(&shm.write_ms).map(|(&ms, &write)| select(ms, write)).collect();
        Some((median(&parts), shm.equal))
    };
    let write = part(|_, write| write);
    let copy_limit = (name == COPY_LIMIT.0).then_some(Target::AtMost(COPY_LIMIT.1));
    let segment_target = Some(Target::AtLeast(SEGMENT_TARGET));
    let cached_limit = Some((CACHED_LIMIT_MS, true));
    [
        limit(SHM, total("shm"), MEMCPY, copy, copy_limit),
        limit(SHM, total("shm"), MEMCPY_IN_TURN, total("memcpy in turn"), None),
        limit(WRITE, write, MEMCPY, copy, None),
        limit(SEND, part(|ms, write| ms - write), MEMCPY, copy, None),
        peer(SHM, total("shm"), &pickle, total("pickle"), segment_target),
        peer(SHM, total("shm"), &msgpack, total("msgpack"), segment_target),
        peer(SHM, total("shm"), &aux, total("aux"), None),
        limit(CACHED, total("cached"), LIMIT, cached_limit, Some(Target::AtMost(1.0))),
        limit(CACHED, total("cached"), TEXT, total("text"), None),
        peer(INLINE, total("inline"), &aux, total("aux"), None),
        limit(FIRST_USE, total("first use"), LATER_USE, write, None),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the median; 0 for no times, which does not happen because a run has rounds.
fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    match times.len() {
        0 => 0.0,
        length => (times[(length - 1) / 2] + times[length / 2]) / 2.0,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a run in which shared memory takes 1.3 copies. It is ten times faster than one kind
    /// of segment and just under five times faster than the other.
    pub(crate) fn run(case: &str, equal: bool) -> Run {
        let way = |way: &str, ms: f64, write: &[f64]| Measurement {
            case: case.to_owned(),
            way: way.to_owned(),
            ms: vec![ms, 1.0, 90.0],
            write_ms: write.to_vec(),
            equal,
        };
        let measurements = vec![
            way("shm", 2.6, &[2.1, 0.9, 80.0]),
            way("cached", 1.1, &[]),
            way("text", 1.0, &[]),
            way("inline", 20.0, &[]),
            way("aux", 10.0, &[]),
            way("pickle", 26.0, &[]),
            way("msgpack", 12.9, &[]),
            way("memcpy", 2.0, &[]),
            way("memcpy in turn", 2.2, &[]),
            way("first use", 8.4, &[]),
        ];
        let [vllm, pyzmq, python] = ["0.32.0", "27.3.0", "3.11.7"].map(str::to_owned);
        Run { versions: Versions { vllm, pyzmq, python }, measurements }
    }

    pub(crate) const BUSY: Option<Load> = Some(Load { processes: 1.25, cores: 2.0 });

    fn find<'a>(rows: &'a [Row], metric: &str, peer: &str) -> &'a Row {
        rows.iter().find(|row| row.metric == metric && row.peer_name.starts_with(peer)).unwrap()
    }

    #[test]
    fn limits_are_maxima_while_peers_are_minima() {
        let rows = rows(&run("13 MB", true), None);
        let copy = find(&rows, SHM, MEMCPY);
        assert_eq!((copy.ours, copy.peer, copy.ratio), (Some(2.6), Some(2.0), Some(1.3)));
        assert_eq!((copy.target, copy.ok, copy.equal), (Some(1.3), Some(true), Some(true)));
        let pickle = find(&rows, SHM, "pickle");
        assert_eq!((pickle.ratio, pickle.target, pickle.ok), (Some(10.0), Some(5.0), Some(true)));
        assert_eq!(
            (find(&rows, SHM, "msgpack").ratio, find(&rows, SHM, "msgpack").ok),
            (Some(4.962), Some(false))
        );
        let cached = find(&rows, CACHED, LIMIT);
        assert_eq!(
            (cached.ours, cached.peer, cached.ratio, cached.ok),
            (Some(1.1), Some(0.2), Some(5.5), Some(false))
        );
        assert_eq!(find(&rows, CACHED, TEXT).ratio, Some(1.1));
        assert_eq!(find(&rows, INLINE, "aux").ratio, Some(0.5));
        assert_eq!(find(&rows, FIRST_USE, LATER_USE).ratio, Some(4.0));
    }

    #[test]
    fn parts_have_their_own_medians() {
        let rows = rows(&run("13 MB", true), None);
        assert_eq!(find(&rows, WRITE, MEMCPY).ours, Some(2.1));
        // 0.5, 0.1 and 10.
        assert_eq!(find(&rows, SEND, MEMCPY).ours, Some(0.5));
    }

    #[test]
    fn different_bytes_reach_no_target() {
        let rows = rows(&run("3 MB", false), None);
        assert!(rows.iter().all(|row| row.ok != Some(true)));
        assert_eq!(find(&rows, SHM, MEMCPY).target, None);
        assert_eq!(find(&rows, SHM, "pickle").equal, Some(false));
    }
}
