//! The runs of measuring programs: their inputs and flags.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::bench_peers::row::{self, Row};
use crate::bench_peers::spec::Sides;
use crate::bench_peers::{SHORT_ROUNDS, door_peers, inputs, programs};
use crate::error::Error;
use crate::setup::Setup;
use crate::vllm_env;
use crate::{child, etcd, models, nginx, plugin, vllm_overlay};

const PIXEL_MODELS: &str = "bench/peers/models";
const TRANSFORMERS_PEER: &str = "bench/peers/transformers_peer.py";
const MEASURE_PROCESSOR: &str = "bench/processor/measure.py";
const MEASURE_VIDEOS: &str = "bench/processor/videos.py";
/// The tiny model with vLLM's processor and with real engines.
const TINY_MODEL: &str = "qwen25vl";
/// The numbers of conversations about shared images, in a run and in a short run.
const CONVERSATIONS: [u32; 2] = [1_000, 200];

pub(crate) type Flags = Vec<(&'static str, PathBuf)>;

/// Runs a measuring program and returns its rows, after the row of the machine's load.
fn run(command: Command, what: &str, flags: Flags) -> Result<Vec<Row>, Error> {
    let mut rows: Vec<Row> = Row::load().into_iter().collect();
    rows.extend(run_further(command, what, flags)?);
    Ok(rows)
}

/// Runs a measuring program after another one and returns its rows.
pub(crate) fn run_further(
    mut command: Command,
    what: &str,
    flags: Flags,
) -> Result<Vec<Row>, Error> {
    for (flag, value) in flags {
        command.arg(flag).arg(value);
    }
    row::parse(what, &programs::lines(&mut command, what)?)
}

pub(crate) fn pixels(setup: &Setup, rounds: u32, _: &Sides) -> Result<Vec<Row>, Error> {
    let script = setup.workspace.file(TRANSFORMERS_PEER)?;
    let env = vllm_env::ensure(setup)?;
    let pictures = inputs::pictures(setup, &env)?;
    let program = programs::measuring(setup, "pixels")?;
    let has_library = child::read(Command::new(&program).arg("has-libturbojpeg"), "pixels")?;
    let mut measure = Command::new(program);
    // Chiasm uses its fastest kernels.
    measure.arg("run").env_remove("CHIASM_KERNELS");
    if has_library != "true" {
        match door_peers::turbojpeg(setup) {
            Ok(libraries) => {
                measure.env("LD_LIBRARY_PATH", libraries);
            }
            Err(error) => setup.output.print_line(&format!("no libturbojpeg: {error}"))?,
        }
    }
    let flags = vec![
        ("--models", setup.workspace.root.join(PIXEL_MODELS)),
        ("--pictures", pictures),
        ("--python", env.python()),
        ("--script", script),
        ("--rounds", rounds.to_string().into()),
    ];
    run(measure, "the program pixels", flags)
}

pub(crate) fn index(setup: &Setup, rounds: u32, _: &Sides) -> Result<Vec<Row>, Error> {
    let mut measure = Command::new(programs::measuring(setup, "index")?);
    measure.arg("run");
    run(measure, "the program index", vec![("--rounds", rounds.to_string().into())])
}

pub(crate) fn processor(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let flags = vec![
        ("--item", programs::example(setup, sides.profile, "chiasm-processor", "item")?),
        ("--dynamo", door_peers::DYNAMO.into()),
    ];
    run_with_vllm(setup, MEASURE_PROCESSOR, rounds, sides, flags)
}

pub(crate) fn video(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let index = programs::example(setup, sides.profile, "chiasm-video", "video_index")?;
    run_with_vllm(setup, MEASURE_VIDEOS, rounds, sides, vec![("--index", index)])
}

/// Runs a script in the Python environment with vLLM, with its own flags and the common ones.
fn run_with_vllm(
    setup: &Setup,
    script: &'static str,
    rounds: u32,
    sides: &Sides,
    own: Flags,
) -> Result<Vec<Row>, Error> {
    let env = vllm_env::ensure(setup)?;
    let mut measure = env.python_command();
    // -s: ignores packages of the user. -B: no __pycache__ beside the script.
    measure.args(["-s", "-B"]).arg(setup.workspace.file(script)?);
    if rounds == SHORT_ROUNDS {
        measure.arg("--short");
    }
    let mut flags = vec![
        ("--rounds", rounds.to_string().into()),
        ("--chiasm", programs::chiasm(setup, sides.profile)?),
        ("--vllm", env.vllm()),
        ("--model", models::ensure(setup, &env)?.join(TINY_MODEL)),
    ];
    flags.extend(own);
    run(measure, script, flags)
}

/// Runs a command of the program `door` with its own flags and the common ones.
fn run_door(
    setup: &Setup,
    command: &str,
    rounds: u32,
    sides: &Sides,
    own: Flags,
) -> Result<Vec<Row>, Error> {
    let inputs = inputs::for_door(setup)?;
    let mut flags = vec![
        ("--pictures", inputs.join("pictures")),
        ("--burst", inputs.join("burst")),
        ("--rounds", rounds.to_string().into()),
    ];
    let lacks = |flag| own.iter().all(|(name, _)| *name != flag);
    if lacks("--chiasm") {
        flags.push(("--chiasm", programs::chiasm(setup, sides.profile)?));
    }
    if lacks("--model") {
        flags.push(("--model", inputs.join("model")));
    }
    flags.extend(own);
    let mut measure = Command::new(programs::measuring(setup, "door")?);
    measure.arg(command);
    run(measure, "the program door", flags)
}

/// Runs `chiasm` under the load of `door` and `stream`, without peers and rows.
pub(crate) fn train(setup: &Setup, chiasm: &Path) -> Result<(), Error> {
    let sides = Sides::default();
    for (command, rounds) in [("run", 2), ("streams", 1)] {
        let flags =
            vec![("--chiasm", chiasm.to_owned()), ("--engines", sides.engines.to_string().into())];
        run_door(setup, command, rounds, &sides, flags)?;
    }
    Ok(())
}

pub(crate) fn door(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let mut flags = frontends(setup, sides)?;
    if sides.has_peers() {
        let env = vllm_overlay::ensure_version(setup, &vllm_env::ensure(setup)?, door_peers::VLLM)?;
        flags.push(("--vllm-serve", env.vllm()));
        flags.push(("--engine-variables", engine_variables().into()));
    }
    run_door(setup, "run", rounds, sides, flags)
}

pub(crate) fn stream(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    run_door(setup, "streams", rounds, sides, frontends(setup, sides)?)
}

/// Returns the flags for the frontends to measure.
fn frontends(setup: &Setup, sides: &Sides) -> Result<Flags, Error> {
    if let Some(path) = sides.baseline.as_ref().filter(|path| !path.is_file()) {
        return Err(Error::MissingFile { path: path.clone() });
    }
    let mut flags = vec![("--engines", sides.engines.to_string().into())];
    flags.extend(sides.baseline.clone().map(|path| ("--baseline", path)));
    if sides.has_peers() {
        flags.extend([
            ("--vllm-rs", door_peers::ensure(setup)?.vllm_rs()),
            ("--vllm", door_peers::VLLM.into()),
            // Without libturbojpeg vllm-rs would use a slower JPEG decoder.
            ("--libraries", door_peers::turbojpeg(setup)?),
        ]);
        flags.extend(dynamo(setup)?);
    }
    Ok(flags)
}

/// Returns the flags for Dynamo.
fn dynamo(setup: &Setup) -> Result<Flags, Error> {
    let python = door_peers::ensure(setup)?.python();
    Ok(vec![("--python", python), ("--dynamo", door_peers::DYNAMO.into())])
}

pub(crate) fn machines(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let mut flags = dynamo(setup)?;
    flags.push(("--etcd", etcd::ensure(setup)?));
    run_door(setup, "machines", rounds, sides, flags)
}

pub(crate) fn roles(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    run_door(setup, "roles", rounds, sides, dynamo(setup)?)
}

pub(crate) fn upstream(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let conversations = CONVERSATIONS[usize::from(rounds == SHORT_ROUNDS)];
    let [smg, envoy] = door_peers::routers(setup)?;
    let mut flags = dynamo(setup)?;
    flags.push(("--conversations", conversations.to_string().into()));
    for (flag, (program, version)) in
        [("--smg", smg), ("--envoy", envoy), ("--nginx", nginx::ensure(setup)?)]
    {
        // The value is `PROGRAM,VERSION`.
        let mut value = program.into_os_string();
        value.push(format!(",{version}"));
        flags.push((flag, value.into()));
    }
    run_door(setup, "routers", rounds, sides, flags)
}

pub(crate) fn serve(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let base = vllm_env::ensure(setup)?;
    let env = vllm_overlay::ensure_version(setup, &base, door_peers::VLLM)?;
    let flags = vec![
        ("--replay", programs::example(setup, sides.profile, "chiasm", "replay")?),
        ("--vllm", env.vllm()),
        ("--python", env.python()),
        ("--vllm-rs", door_peers::ensure(setup)?.vllm_rs()),
        ("--version", door_peers::VLLM.into()),
        ("--plugin", plugin::ensure(setup, &base)?),
        ("--model", models::ensure(setup, &base)?.join(TINY_MODEL)),
        ("--engine-variables", engine_variables().into()),
    ];
    run_door(setup, "serve", rounds, sides, flags)
}

/// Returns the environment variables of engines as `NAME=VALUE`, separated by commas.
pub(crate) fn engine_variables() -> String {
    vllm_env::ENGINE_VARIABLES.map(|(name, value)| format!("{name}={value}")).join(",")
}
