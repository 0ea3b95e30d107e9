//! Converts the results of the program `door streams` to rows, with the project's targets.

use crate::bench_peers::door::{BASELINE, METRICS, TOKENS_PER_CPU};
use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{Measurement, counts_alike, lengths, value};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "stream";
/// A frontend that only relays, which is a limit and not a peer.
pub(crate) const RELAY: &str = "null relay";
/// The metric of the time from an engine's output to the client.
pub(crate) const DELAY: &str = "engine to client p99";
/// The metric of the frontend's CPU time.
const CPU: &str = "CPU per output token";
/// The case with the highest cost per token.
const SINGLE: &str = "plain, 1 stream";

/// The minimum ratios to peers: case, the beginning of the peer's name, and the ratio.
const TARGETS: [(&str, &str, f64); 7] = [
    ("plain, 64 streams", "vllm-rs", 2.0),
    ("plain, 512 streams", "vllm-rs", 2.0),
    ("plain, 64 streams", "Dynamo", 5.0),
    ("plain, 512 streams", "Dynamo", 5.0),
    ("tools, 1 stream", "vllm-rs", 2.0),
    ("tools, 64 streams", "vllm-rs", 2.0),
    ("tools, 512 streams", "vllm-rs", 2.0),
];
/// The maximum delay as a multiple of the null relay's.
const DELAY_TARGET: f64 = 2.0;
/// The maximum cost of a token of a single stream, as a part of its cost at another commit.
const SINGLE_TARGET: f64 = 1.0 / 3.0;

pub(crate) const MANDATORY: [Mandatory; 2] = [
    Mandatory {
        cases: &["plain"],
        ends: &[", 1 stream", ", 64 streams", ", 512 streams"],
        lines: &[
            (TOKENS_PER_CPU, "vllm-rs"),
            (TOKENS_PER_CPU, "Dynamo"),
            (TOKENS_PER_CPU, RELAY),
            (DELAY, "vllm-rs"),
            (DELAY, RELAY),
        ],
    },
    Mandatory {
        cases: &["tools", "logprobs"],
        ends: &[", 1 stream", ", 64 streams", ", 512 streams"],
        lines: &[(TOKENS_PER_CPU, "vllm-rs"), (DELAY, "vllm-rs")],
    },
];

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let mut rows = vec![Row::rounds(BENCH, rounds, OURS)];
    rows.extend(load.map(|load| load.row(BENCH)));
    rows.extend(lengths(BENCH, measurements));
    let theirs = measurements.iter().filter(|it| it.side != OURS);
    rows.extend(theirs.filter_map(|theirs| compare(measurements, theirs)));
    rows
}

/// Returns the row of a peer's result if ours was measured too.
fn compare(measurements: &[Measurement], theirs: &Measurement) -> Option<Row> {
    let Measurement { case, clients: Some(streams), side: peer, metric, value: number } = theirs
    else {
        return None;
    };
    let ours = value(measurements, (case, Some(*streams)), OURS, metric)?;
    let definition = METRICS.iter().find(|it| it.name == metric)?;
    let name = format!("{case}, {streams} stream{}", if *streams == 1 { "" } else { "s" });
    let row = row(&name, metric, definition.unit, peer).numbers(Some(ours), Some(*number));
    let row = Row { equal: counts_alike(measurements, case, peer), ..row };
    let limit = match (&**peer, &**metric) {
        (RELAY, DELAY) => Some(DELAY_TARGET),
        (BASELINE, CPU) if name == SINGLE => Some(SINGLE_TARGET),
        _ => None,
    };
    if let Some(limit) = limit {
        return Some(row.judged(Some(ours / number), Some(Target::AtMost(limit))));
    }
    let is_target = |it: &&(&str, &str, f64)| {
        metric == TOKENS_PER_CPU && name == it.0 && peer.starts_with(it.1)
    };
    let target = TARGETS.iter().find(is_target).map(|it| Target::AtLeast(it.2));
    Some(row.judged(definition.ratio(ours, *number), target))
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::measured::DIFFERENT;
    use crate::bench_peers::row::missing;
    use crate::bench_peers::row::tests::find;

    /// Returns the measurements of a run. vllm-rs takes twice our CPU time, Dynamo four times, the
    /// relay half.
    pub(crate) fn measurements() -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let mut add = |case: &str, clients, side: &str, metric: &str, value| {
            measurements.push(Measurement::new(case, clients, side, metric, value));
        };
        for case in ["plain", "tools", "logprobs"] {
            add(case, None, "vllm-rs 0.1", "compared", 1.0);
            add(case, None, "vllm-rs 0.1", "different", 0.0);
            for clients in [1, 64, 512] {
                for (side, cpu) in [
                    (OURS, 10.0),
                    ("vllm-rs 0.1", 20.0),
                    ("Dynamo 0.2", 40.0),
                    (RELAY, 5.0),
                    (BASELINE, 15.0),
                ] {
                    if case != "plain" && !["chiasm", "vllm-rs 0.1"].contains(&side) {
                        continue;
                    }
                    add(case, Some(clients), side, TOKENS_PER_CPU, 1e6 / cpu);
                    add(case, Some(clients), side, CPU, cpu);
                    if !side.starts_with("Dynamo") {
                        add(case, Some(clients), side, DELAY, 10.0 * cpu);
                    }
                }
            }
        }
        measurements
    }

    #[test]
    fn targets_depend_on_kind_of_side() {
        let rows = rows(&measurements(), 5, None);
        let vllm = find(&rows, "plain, 64 streams", TOKENS_PER_CPU, "vllm-rs");
        assert_eq!(
            (vllm.ratio, vllm.target, vllm.ok, vllm.equal),
            (Some(2.0), Some(2.0), Some(true), Some(true))
        );
        let dynamo = find(&rows, "plain, 512 streams", TOKENS_PER_CPU, "Dynamo");
        assert_eq!((dynamo.ratio, dynamo.ok, dynamo.equal), (Some(4.0), Some(false), None));
        let delay = find(&rows, "plain, 1 stream", DELAY, RELAY);
        assert_eq!((delay.ratio, delay.target, delay.ok), (Some(2.0), Some(2.0), Some(true)));
        let single = find(&rows, "plain, 1 stream", CPU, BASELINE);
        assert_eq!(
            (single.ratio, single.target, single.ok),
            (Some(0.667), Some(0.333), Some(false))
        );
        let logprobs = find(&rows, "logprobs, 1 stream", TOKENS_PER_CPU, "vllm-rs");
        assert_eq!((logprobs.ratio, logprobs.target), (Some(2.0), None));
        assert_eq!(missing(&rows, &MANDATORY), [""; 0]);
    }

    #[test]
    fn different_prompt_lengths_reach_no_target() {
        let mut measurements = measurements();
        measurements.iter_mut().filter(|it| it.metric == "different").for_each(|it| it.value = 1.0);
        let rows = rows(&measurements, 5, None);
        assert_eq!(find(&rows, "plain, 64 streams", TOKENS_PER_CPU, "vllm-rs").ok, Some(false));
        assert_eq!(find(&rows, "plain", DIFFERENT, "vllm-rs").equal, Some(false));
    }
}
