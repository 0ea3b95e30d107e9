//! The servers, each with one simulated engine that never waits.

use std::env;
use std::error::Error;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use peers::flags::Flags;
use peers::row::OURS;

use crate::ours;
use crate::program::{Program, free_address};
use crate::side::{self, Side, Versioned, command, engine_arguments};
use crate::vllm_rs;
use crate::vllm_serve::{self, VllmServe};
use crate::workload::Pace;

/// The additional flags of all engines: room for all requests at once, and their prompts. The
/// release is that of all frontends.
const ENGINE_FLAGS: [&str; 6] =
    ["--sim-max-num-seqs", "1024", "--sim-max-model-len", "32768", "--sim-blocks", "65536"];
/// The seconds in which a clip must be decoded. All clips wait for the same cores.
const TIMEOUT_S: &str = "1800";
/// Our flags for hundreds of videos at once. By default 256 wait, for a minute at most.
const OUR_FLAGS: [&str; 4] = ["--processor-queue", "1024", "--processor-timeout", TIMEOUT_S];
/// The variable of `vllm-rs` with the time that a decoder may take. By default it is 30 s.
const DECODER_TIMEOUT: &str = "SMG_VIDEO_PROCESS_TIMEOUT_SECS";
/// A log that nobody reads.
const NO_LOG: &str = "/dev/null";

/// The inputs of all servers.
pub(super) struct Inputs {
    side: side::Inputs,
    vllm: VllmServe,
    vllm_rs: Versioned,
    /// The folders of ffmpeg's programs and libraries, for `vllm-rs`; empty if it is installed.
    programs: OsString,
    libraries: OsString,
}

impl Inputs {
    pub(super) fn new(flags: &Flags, scratch: PathBuf) -> Result<Self, Box<dyn Error>> {
        let chiasm = flags.path("--chiasm")?;
        let model = flags.path("--model")?;
        let vllm = VllmServe::from_flags(flags)?.ok_or("--vllm-serve is missing")?;
        let optional = |name| flags.find(name).unwrap_or_default().into();
        Ok(Self {
            side: side::Inputs { chiasm, model, scratch, call: String::new() },
            vllm_rs: (flags.path("--vllm-rs")?, vllm.version.clone()),
            vllm,
            programs: optional("--ffmpeg"),
            libraries: optional("--libraries"),
        })
    }

    /// Returns the additional flags of an engine.
    fn engine_flags(&self) -> Vec<String> {
        let version = ["--sim-vllm-version", &self.vllm.version];
        ENGINE_FLAGS.into_iter().chain(version).map(str::to_owned).collect()
    }

    /// Starts an engine. Returns it with the address of its handshake.
    fn engine(&self, name: &str) -> Result<(Program, String), Box<dyn Error>> {
        let Self { side, .. } = self;
        let name = format!("{name} engine");
        let engine = command(&side.chiasm);
        ours::engine(side, Pace::Unbounded, &name, engine, Path::new(NO_LOG), &self.engine_flags())
    }
}

/// Starts our server.
pub(super) fn chiasm(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    let Inputs { side, vllm, .. } = inputs;
    let (engine, handshake) = inputs.engine(OURS)?;
    let address = free_address()?;
    let mut frontend = ours::frontend(side, &side.chiasm, address);
    frontend.args(ours::attach_flags(&[handshake])?).args(OUR_FLAGS);
    // By default one core stays free for native work.
    let cores = available_parallelism()?;
    frontend.args(["--processors", &cores.to_string()]);
    frontend.arg("--vllm").arg(&vllm.program);
    frontend.envs(vllm.variables.iter().map(|(name, value)| (name, value)));
    let frontend = Program::start(OURS, &mut frontend, &side.scratch)?;
    let url = String::new();
    Ok(Side {
        engines: vec![engine],
        reports_engines: true,
        ..Side::new(OURS, address, url, frontend)
    })
}

/// Starts vLLM's server in Python.
pub(super) fn vllm_serve(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    let Inputs { side, vllm, .. } = inputs;
    let name = vllm.name();
    let (engine, handshake) = inputs.engine(&name)?;
    let address = free_address()?;
    let mut frontend = vllm_serve::frontend(side, vllm, address, &handshake)?;
    let frontend = Program::start(&name, &mut frontend, &side.scratch)?;
    let url = String::new();
    Ok(Side { engines: vec![engine], ..Side::new(&name, address, url, frontend) })
}

/// Starts vLLM's server in Rust, which starts its engine. It decodes videos with ffmpeg.
pub(super) fn vllm_rs(inputs: &Inputs) -> Result<Side, Box<dyn Error>> {
    let Inputs { side, vllm_rs: (program, version), .. } = inputs;
    let name = format!("vllm-rs {version}");
    let address = free_address()?;
    let mut engine = engine_arguments(side, Pace::Unbounded, Path::new(NO_LOG));
    engine.extend(inputs.engine_flags());
    let mut frontend = vllm_rs::frontend(side, program, address, engine)?;
    frontend.env(DECODER_TIMEOUT, TIMEOUT_S);
    if !inputs.programs.is_empty() {
        let mut path = inputs.programs.clone();
        path.push(":");
        path.push(env::var_os("PATH").unwrap_or_default());
        frontend.env("PATH", path).env("LD_LIBRARY_PATH", &inputs.libraries);
    }
    let frontend = Program::start(&name, &mut frontend, &side.scratch)?;
    Ok(Side::new(&name, address, String::new(), frontend))
}
