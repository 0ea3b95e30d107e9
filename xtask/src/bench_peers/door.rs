//! The benchmarks `door` and `stream`: frontends in front of simulated engines.

use crate::bench_peers::page::{BY_METRIC, distinct, part_if, run_value};
use crate::bench_peers::row::Target::{AtLeast, AtMost};
use crate::bench_peers::row::{BASELINE, Goal, Row};
use crate::bench_peers::runs;
use crate::bench_peers::spec::{Columns, Spec};

const VLLM_RS: &str = "vllm-rs";
const VLLM_SERVE: &str = "vllm serve";
const DYNAMO: &str = "Dynamo";
/// A frontend that only relays, which is a limit and not a peer.
const RELAY: &str = "null relay";
/// Texts without images beside them, a limit for texts beside a burst.
const WITHOUT_BURST: &str = "without the burst";
/// The metrics that have targets against peers; the second one for long streamed answers.
const PER_CPU: &str = "requests per CPU second";
const TOKENS_PER_CPU: &str = "output tokens per CPU second";
/// The metrics of CPU time, which are compared with the baseline.
const CPU: &str = "CPU per request";
const TOKEN_CPU: &str = "CPU per output token";
/// The case of the time from starting a frontend until it is ready.
const START: &str = "start";
/// The maximum of our CPU time as a multiple of the baseline's.
const BASELINE_LIMIT: f64 = 1.03;

const DOOR_GOALS: [Goal; 13] = [
    Goal { case: "repeated image", metric: PER_CPU, peer: VLLM_RS, target: AtLeast(8.0) },
    Goal { case: "repeated image", metric: PER_CPU, peer: DYNAMO, target: AtLeast(4.0) },
    Goal { case: "distinct images", metric: PER_CPU, peer: VLLM_RS, target: AtLeast(1.8) },
    Goal { case: "1k-token text, 16", metric: PER_CPU, peer: VLLM_RS, target: AtLeast(1.7) },
    Goal { case: "1k-token text, 64", metric: PER_CPU, peer: VLLM_RS, target: AtLeast(1.8) },
    Goal { case: "1k-token text", metric: PER_CPU, peer: VLLM_RS, target: AtLeast(1.3) },
    Goal { case: "1k-token text", metric: PER_CPU, peer: DYNAMO, target: AtLeast(3.0) },
    Goal { case: "conversation", metric: PER_CPU, peer: VLLM_RS, target: AtLeast(1.3) },
    Goal { case: "conversation", metric: PER_CPU, peer: DYNAMO, target: AtLeast(3.0) },
    Goal { case: "burst", metric: "TTFT mean", peer: "evenly spaced", target: AtMost(1.15) },
    Goal { case: "text beside", metric: "TTFT p99", peer: WITHOUT_BURST, target: AtMost(1.2) },
    Goal { case: "", metric: CPU, peer: BASELINE, target: AtMost(BASELINE_LIMIT) },
    Goal { case: "", metric: TOKEN_CPU, peer: BASELINE, target: AtMost(BASELINE_LIMIT) },
];

const STREAM_GOALS: [Goal; 8] = [
    Goal { case: START, metric: "exec to /ready", peer: "limit", target: AtMost(1.0) },
    Goal { case: "plain, 64 s", metric: TOKENS_PER_CPU, peer: VLLM_RS, target: AtLeast(2.0) },
    Goal { case: "plain, 512 s", metric: TOKENS_PER_CPU, peer: VLLM_RS, target: AtLeast(2.0) },
    Goal { case: "plain, 64 s", metric: TOKENS_PER_CPU, peer: DYNAMO, target: AtLeast(5.0) },
    Goal { case: "plain, 512 s", metric: TOKENS_PER_CPU, peer: DYNAMO, target: AtLeast(5.0) },
    Goal { case: "tools", metric: TOKENS_PER_CPU, peer: VLLM_RS, target: AtLeast(2.0) },
    Goal { case: "", metric: "engine to client p99", peer: RELAY, target: AtMost(2.0) },
    // A single stream has the highest cost per token.
    Goal { case: "plain, 1 s", metric: TOKEN_CPU, peer: BASELINE, target: AtMost(1.0 / 3.0) },
];

pub(crate) const DOOR: Spec = Spec {
    name: "door",
    // A round takes a minute.
    min_rounds: 7,
    has_short_run: false,
    measure: runs::door,
    target: |row, _| Goal::find(&DOOR_GOALS, row),
    is_optional: |row, _| row.peer_name == BASELINE,
    template: include_str!("templates/door.md"),
    columns: Columns {
        heads: "case | against | ours | theirs",
        cells: |row| format!("{} | {}", row.case, row.peer_name),
        ..BY_METRIC
    },
    values: |rows| {
        let vllm_serve = part_if(
            rows,
            |row| row.peer_name.starts_with(VLLM_SERVE),
            include_str!("templates/door_vllm_serve.md"),
        );
        let peers = rows.iter().filter(|row| row.metric == PER_CPU).map(|row| &*row.peer_name);
        let peers = distinct(peers).join(" and ");
        let engines = run_value(rows, "engines of chiasm");
        vec![("peers", peers), ("engines", engines), ("vllm_serve", vllm_serve)]
    },
};

pub(crate) const STREAM: Spec = Spec {
    name: "stream",
    // A round takes 2.5 minutes, mostly waiting for the steps of engines.
    min_rounds: 5,
    has_short_run: false,
    measure: runs::stream,
    target: |row, _| Goal::find(&STREAM_GOALS, row),
    is_optional: |row, _| row.peer_name == BASELINE,
    template: include_str!("templates/stream.md"),
    columns: BY_METRIC,
    values: |rows| {
        let start =
            part_if(rows, |row| row.case == START, include_str!("templates/stream_start.md"));
        vec![("start", start)]
    },
};

/// Returns the row with the geometric mean of the ratios to a baseline, which varies less than each
/// ratio.
pub(crate) fn baseline_mean(rows: &[Row]) -> Option<Row> {
    let rows = rows.iter().filter(|row| row.peer_name == BASELINE && row.target.is_some());
    let ratios: Vec<f64> = rows.filter_map(|row| row.ratio).collect();
    let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    let row = Row::new("all cases, geometric mean", CPU, "", BASELINE);
    let row = Row { ratio: Some(mean), ..row };
    let row = row.with_target(DOOR.name, Some(AtMost(BASELINE_LIMIT)));
    (!ratios.is_empty()).then_some(row)
}

/// Returns the rows that a comparison with only a baseline must have: those of CPU time, in all
/// cases that older versions have.
pub(crate) fn baseline_rows(committed: &[Row]) -> Vec<Row> {
    let is_new =
        |row: &Row| ["tools", "logprobs", "burst"].iter().any(|case| row.case.starts_with(case));
    let rows = committed.iter().filter(|row| {
        [CPU, TOKEN_CPU].contains(&&*row.metric)
            && row.peer_name.starts_with(VLLM_RS)
            && !is_new(row)
    });
    rows.map(|row| Row { peer_name: BASELINE.to_owned(), ..row.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_is_compared_with_baseline_limit() {
        let row = |peer: &str, ratio| {
            let row = Row { ratio: Some(ratio), ..Row::new("text, 1 client", CPU, "ms", peer) };
            let target = (DOOR.target)(&row, &[]);
            row.with_target("door", target)
        };
        let rows = [row(BASELINE, 1.0), row(BASELINE, 1.21), row("vllm-rs 0.1", 9.0)];
        assert_eq!((rows[0].ok, rows[1].ok, rows[2].ok), (Some(true), Some(false), None));
        let mean = baseline_mean(&rows).unwrap();
        assert_eq!((mean.ratio, mean.target, mean.ok), (Some(1.1), Some(1.03), Some(false)));
        assert_eq!(baseline_mean(&rows[2..]), None);
    }
}
