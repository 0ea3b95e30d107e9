//! Turns what the program `door streams` measured into rows, with the targets that the project has set itself.

use crate::bench_peers::door::{BASELINE, DIFFERENT, METRICS, Measurement, Metric, OURS, ROUNDS, TOKENS_PER_CPU};
use crate::bench_peers::load::Load;
use crate::bench_peers::row::{Mandatory, Row, rounded};

/// The bench's name in rows and files.
pub(crate) const BENCH: &str = "stream";
/// The frontend that does nothing, which is a limit and no peer.
pub(crate) const RELAY: &str = "null relay";
/// Time from an engine's output until a client has it.
pub(crate) const DELAY: &str = "engine to client p99";
/// CPU time of the frontend.
const CPU: &str = "CPU per output token";
/// The case in which a token costs most.
const SINGLE: &str = "plain, 1 stream";

/// Ratios by which we want to beat peers: case, the start of the peer's name, the ratio.
const TARGETS: [(&str, &str, f64); 7] = [
    ("plain, 64 streams", "vllm-rs", 2.0),
    ("plain, 512 streams", "vllm-rs", 2.0),
    ("plain, 64 streams", "Dynamo", 5.0),
    ("plain, 512 streams", "Dynamo", 5.0),
    ("tools, 1 stream", "vllm-rs", 2.0),
    ("tools, 64 streams", "vllm-rs", 2.0),
    ("tools, 512 streams", "vllm-rs", 2.0),
];
/// Most that the delay may be, in times of the null relay's.
const DELAY_TARGET: f64 = 2.0;
/// Most that a token of a single stream may cost, as a part of what it costs at another commit.
const SINGLE_TARGET: f64 = 1.0 / 3.0;

pub(crate) const MANDATORY: [Mandatory; 2] = [
    Mandatory {
        cases: &["plain, 1 stream", "plain, 64 streams", "plain, 512 streams"],
        lines: &[
            (TOKENS_PER_CPU, "vllm-rs"),
            (TOKENS_PER_CPU, "Dynamo"),
            (TOKENS_PER_CPU, RELAY),
            (DELAY, "vllm-rs"),
            (DELAY, RELAY),
        ],
    },
    Mandatory {
        cases: &[
            "tools, 1 stream",
            "tools, 64 streams",
            "tools, 512 streams",
            "logprobs, 1 stream",
            "logprobs, 64 streams",
            "logprobs, 512 streams",
        ],
        lines: &[(TOKENS_PER_CPU, "vllm-rs"), (DELAY, "vllm-rs")],
    },
];

/// All rows of a run that began under some load.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32, load: Option<Load>) -> Vec<Row> {
    let rounds = Some(f64::from(rounds));
    let mut rows = vec![Row { ours: rounds, peer: rounds, ..row("all", ROUNDS, "rounds", OURS) }];
    rows.extend(load.map(|load| load.row(BENCH)));
    let value = |of: &Measurement, clients: Option<u32>, side: &str, metric: &str| {
        let is =
            |it: &&Measurement| (&*it.case, it.clients, &*it.side, &*it.metric) == (&*of.case, clients, side, metric);
        measurements.iter().find(is).map(|it| it.value)
    };
    for theirs in measurements.iter().filter(|it| it.side != OURS) {
        let Measurement { side: peer, clients, metric, value: number, .. } = theirs;
        let different = value(theirs, None, peer, "different");
        let equal = different.map(|different| different == 0.0);
        let Some(clients) = clients else {
            if metric == "different" {
                let compared = value(theirs, None, peer, "compared");
                let row = row(&theirs.case, DIFFERENT, "prompts", peer);
                rows.push(Row { ours: compared, peer: different, equal, ..row });
            }
            continue;
        };
        let (Some(ours), Some(Metric { unit, more_is_better, .. })) =
            (value(theirs, Some(*clients), OURS, metric), METRICS.iter().find(|it| it.name == metric))
        else {
            continue;
        };
        let case = format!("{}, {clients} stream{}", theirs.case, if *clients == 1 { "" } else { "s" });
        let row =
            Row { ours: Some(rounded(ours)), peer: Some(rounded(*number)), equal, ..row(&case, metric, unit, peer) };
        let at_most = match (&**peer, &**metric) {
            (RELAY, DELAY) => Some((ours / number, DELAY_TARGET)),
            (BASELINE, CPU) if case == SINGLE => Some((ours / number, SINGLE_TARGET)),
            _ => None,
        };
        if let Some((ratio, most)) = at_most {
            rows.push(Row { ratio: Some(rounded(ratio)), target: Some(rounded(most)), ok: Some(ratio <= most), ..row });
            continue;
        }
        let ratio = more_is_better.map(|more| if more { ours / number } else { number / ours });
        let is_target = |(c, p, _): &&(&str, &str, f64)| metric == TOKENS_PER_CPU && case == *c && peer.starts_with(p);
        let target = TARGETS.iter().find(is_target).map(|&(_, _, target)| target);
        let reached = |target: f64| ratio.is_some_and(|ratio| ratio >= target) && equal != Some(false);
        rows.push(Row { ratio: ratio.map(rounded), target, ok: target.map(reached), ..row });
    }
    rows
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row { metric: metric.to_owned(), unit, ..Row::milliseconds(BENCH, case, peer) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::missing;

    /// All that a run measures: vllm-rs takes twice our CPU time, Dynamo four times, the relay half.
    pub(crate) fn measurements() -> Vec<Measurement> {
        let mut measurements = Vec::new();
        let mut add = |case: &str, clients, side: &str, metric: &str, value| {
            let [case, side, metric] = [case, side, metric].map(str::to_owned);
            measurements.push(Measurement { case, clients, side, metric, value });
        };
        for case in ["plain", "tools", "logprobs"] {
            add(case, None, "vllm-rs 0.1", "compared", 1.0);
            add(case, None, "vllm-rs 0.1", "different", 0.0);
            for clients in [1, 64, 512] {
                for (side, cpu) in
                    [(OURS, 10.0), ("vllm-rs 0.1", 20.0), ("Dynamo 0.2", 40.0), (RELAY, 5.0), (BASELINE, 15.0)]
                {
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

    fn find<'a>(rows: &'a [Row], case: &str, metric: &str, peer: &str) -> &'a Row {
        rows.iter().find(|row| row.case == case && row.metric == metric && row.peer_name.starts_with(peer)).unwrap()
    }

    #[test]
    fn peers_limits_and_other_commits_have_targets_of_their_own() {
        let rows = rows(&measurements(), 5, None);
        let vllm = find(&rows, "plain, 64 streams", TOKENS_PER_CPU, "vllm-rs");
        assert_eq!((vllm.ratio, vllm.target, vllm.ok, vllm.equal), (Some(2.0), Some(2.0), Some(true), Some(true)));
        let dynamo = find(&rows, "plain, 512 streams", TOKENS_PER_CPU, "Dynamo");
        assert_eq!((dynamo.ratio, dynamo.ok, dynamo.equal), (Some(4.0), Some(false), None));
        let delay = find(&rows, "plain, 1 stream", DELAY, RELAY);
        assert_eq!((delay.ratio, delay.target, delay.ok), (Some(2.0), Some(2.0), Some(true)));
        let single = find(&rows, "plain, 1 stream", CPU, BASELINE);
        assert_eq!((single.ratio, single.target, single.ok), (Some(0.667), Some(0.333), Some(false)));
        let logprobs = find(&rows, "logprobs, 1 stream", TOKENS_PER_CPU, "vllm-rs");
        assert_eq!((logprobs.ratio, logprobs.target), (Some(2.0), None));
        assert_eq!(missing(&rows, &MANDATORY), [""; 0]);
    }

    #[test]
    fn prompts_of_another_length_reach_no_target() {
        let mut measurements = measurements();
        measurements.iter_mut().filter(|it| it.metric == "different").for_each(|it| it.value = 1.0);
        let rows = rows(&measurements, 5, None);
        assert_eq!(find(&rows, "plain, 64 streams", TOKENS_PER_CPU, "vllm-rs").ok, Some(false));
        assert_eq!(find(&rows, "plain", DIFFERENT, "vllm-rs").equal, Some(false));
    }
}
