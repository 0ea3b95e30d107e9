//! Runs the benchmark `serve`: prepares the inputs, runs the program `serve`, and writes rows and
//! page.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::bench_peers::load::Load;
use crate::bench_peers::{Bench, built, door_inputs, door_peers, finish, peers, serve};
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env;
use crate::{models, plugin, vllm_overlay};

const MODEL: &str = "qwen25vl";

/// Runs the benchmark. The page of a short run is only printed.
pub(crate) fn run(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let base = vllm_env::ensure(setup)?;
    let env = vllm_overlay::ensure_version(setup, &base, door_peers::VLLM)?;
    let pictures = door_inputs::ensure(setup)?.join("pictures");
    let flags = [
        ("--chiasm", built::chiasm(setup)?),
        ("--replay", built::example(setup, "chiasm", "replay")?),
        ("--vllm", env.vllm()),
        ("--python", env.python()),
        ("--vllm-rs", door_peers::ensure(setup)?.vllm_rs()),
        ("--version", door_peers::VLLM.into()),
        ("--plugin", plugin::ensure(setup, &base)?),
        ("--model", models::ensure(setup, &base)?.join(MODEL)),
        ("--pictures", pictures),
        ("--rounds", rounds.to_string().into()),
    ];
    let program = peers::build(setup, serve::BENCH)?;
    let load = Load::now();
    let mut measurements = Vec::new();
    for (case, engine_flags) in serve::CASES {
        setup.output.print_line(&format!(
            "starting all sides, which import vLLM, then measuring: {case}"
        ))?;
        let mut measure = clean_command(&program);
        for (flag, value) in &flags {
            measure.arg(flag).arg(value);
        }
        measure.args(["--case", case, "--"]).args(engine_flags);
        measurements.extend(peers::results(&mut measure, "the program serve")?);
    }
    let rows = serve::rows(&measurements, rounds, load);
    finish(setup, Bench::Serve, &rows, rounds, json)
}

/// Returns a command that runs the program without environment variables that affect engines or
/// frontends.
fn clean_command(program: &Path) -> Command {
    let mut measure = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let prefixes = ["CHIASM_", "VLLM_", "PYTHON", "OMP_", "TOKIO_", "RUST_"];
        if name.to_str().is_some_and(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
        {
            measure.env_remove(name);
        }
    }
    for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy"] {
        measure.env_remove(name).env_remove(name.to_uppercase());
    }
    measure.arg("run").envs(vllm_env::ENGINE_VARIABLES).stdin(Stdio::null());
    measure
}
