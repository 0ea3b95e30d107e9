//! Runs the benchmark of vLLM's processor: prepares the inputs, runs `bench/processor/measure.py`,
//! and writes rows and page.

use std::process::Stdio;

use crate::bench_peers::load::Load;
use crate::bench_peers::{Bench, SHORT_ROUNDS, built, finish, peers, processor};
use crate::error::Error;
use crate::models;
use crate::setup::Setup;
use crate::vllm_env;

const MEASURE: &str = "bench/processor/measure.py";
const MODEL: &str = "qwen25vl";

/// Runs the benchmark. The page of a short run is only printed.
pub(crate) fn run(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let script = setup.workspace.file(MEASURE)?;
    let env = vllm_env::ensure(setup)?;
    let model = models::ensure(setup, &env)?.join(MODEL);
    let chiasm = built::chiasm(setup)?;
    let item = built::example(setup, "chiasm-processor", "item")?;
    let mut measure = env.python_command();
    // -s: ignores packages of the user. -B: no __pycache__ beside the script.
    measure
        .args(["-s", "-B"])
        .arg(script)
        .args(["--rounds", &rounds.to_string()])
        .stdin(Stdio::null());
    for (flag, value) in
        [("--chiasm", chiasm), ("--vllm", env.vllm()), ("--item", item), ("--model", model)]
    {
        measure.arg(flag).arg(value);
    }
    if rounds == SHORT_ROUNDS {
        measure.arg("--short");
    }
    setup.output.print_line(
        "making pictures and clips, starting all sides, which import vLLM, then measuring",
    )?;
    let load = Load::now();
    let rows =
        processor::rows(&processor::parse(&peers::lines(&mut measure, MEASURE)?)?, rounds, load);
    finish(setup, Bench::Processor, &rows, rounds, json)?;
    for row in
        rows.iter().filter(|row| row.metric == processor::DIFFERENT && row.equal == Some(false))
    {
        setup
            .output
            .print_line(&format!("!!! others are made: {}, {}", row.case, row.peer_name))?;
    }
    Ok(())
}
