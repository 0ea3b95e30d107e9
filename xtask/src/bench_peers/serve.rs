//! The benchmark `serve`: frontends with real engines.

use crate::bench_peers::page::BY_METRIC;
use crate::bench_peers::row::Goal;
use crate::bench_peers::row::Target::AtLeast;
use crate::bench_peers::runs;
use crate::bench_peers::spec::Spec;

const GOALS: [Goal; 3] = [
    // Engines without a frontend are a limit and not a peer.
    Goal { case: "", metric: "requests per second", peer: "engines alone", target: AtLeast(0.9) },
    Goal { case: "", metric: "TTFT p50", peer: "vllm serve", target: AtLeast(3.0) },
    Goal { case: "", metric: "TTFT p90", peer: "vllm serve", target: AtLeast(3.0) },
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
    values: |_| Vec::new(),
};
