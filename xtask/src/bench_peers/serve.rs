//! The benchmark `serve`: frontends with real engines.

use crate::bench_peers::page::{BY_METRIC, part_if};
use crate::bench_peers::row::Goal;
use crate::bench_peers::row::Target::AtLeast;
use crate::bench_peers::runs;
use crate::bench_peers::spec::Spec;

/// The cases with goals; the others compare ways of transfer.
const DEFAULTS: &str = "vLLM's defaults";
const LARGE_STEPS: &str = "8192 tokens per step";
/// Engines without a frontend, which are a limit and not a peer.
const ALONE: &str = "engines alone";
const RATE: &str = "requests per second";

const GOALS: [Goal; 6] = [
    Goal { case: DEFAULTS, metric: RATE, peer: ALONE, target: AtLeast(0.9) },
    Goal { case: DEFAULTS, metric: "TTFT p50", peer: "vllm serve", target: AtLeast(3.0) },
    Goal { case: DEFAULTS, metric: "TTFT p90", peer: "vllm serve", target: AtLeast(3.0) },
    Goal { case: LARGE_STEPS, metric: RATE, peer: ALONE, target: AtLeast(0.9) },
    Goal { case: LARGE_STEPS, metric: "TTFT p50", peer: "vllm serve", target: AtLeast(3.0) },
    Goal { case: LARGE_STEPS, metric: "TTFT p90", peer: "vllm serve", target: AtLeast(3.0) },
];

pub(crate) const SPEC: Spec = Spec {
    name: "serve",
    // A round takes half a minute, after some minutes in which vLLM starts.
    min_rounds: 5,
    has_short_run: true,
    measure: runs::serve,
    target: |row, _| Goal::find(&GOALS, row),
    is_optional: |_, _| false,
    template: include_str!("templates/serve.md"),
    columns: BY_METRIC,
    values: |rows| {
        let part = include_str!("templates/serve_transfer.md");
        vec![("transfer", part_if(rows, |row| row.case.starts_with("transfer"), part))]
    },
};
