//! What all sides have in common: a frontend that is measured, an engine that is not, and an
//! address.

use std::cell::RefCell;
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::client::Connection;
use crate::program::{CpuTime, Program};
use crate::splits::Splits;
use crate::workload::{Case, MOST_STREAMS, Pace, Rate, Told, Workload};

/// How long a side may take to serve its first request. Python imports much.
const START: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(100);

/// What the sides are started with.
pub(crate) struct Inputs {
    /// Our binary: a frontend, and the simulated engine of all sides that have vLLM's wire.
    pub(crate) chiasm: PathBuf,
    /// Engines before which `chiasm` and its baseline stand when these wait for nothing.
    pub(crate) engines: usize,
    /// The binary of another commit: a frontend to compare ours with.
    pub(crate) baseline: Option<PathBuf>,
    pub(crate) peers: Option<Peers>,
    pub(crate) model: PathBuf,
    /// A folder for this run alone: logs, scripts and the store of Dynamo.
    pub(crate) scratch: PathBuf,
    /// What engines answer where answers are long.
    pub(crate) call: String,
}

impl Inputs {
    /// The folder of what outlives our processes.
    pub(crate) fn state(&self) -> PathBuf {
        self.scratch.join("state")
    }
}

/// Other projects' frontends.
pub(crate) struct Peers {
    /// The program `vllm-rs`, taken out of a wheel of vLLM, and the wheel's version.
    pub(crate) vllm_rs: (PathBuf, String),
    /// The folder of libturbojpeg, if the loader does not look there anyway. `vllm-rs` decodes with
    /// it if it finds it.
    pub(crate) libraries: Option<PathBuf>,
    /// A Python that has Dynamo, and Dynamo's version.
    pub(crate) dynamo: (PathBuf, String),
}

/// The tokens of a prompt that a side counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counts {
    All,
    /// Not those of images.
    Text,
    Nothing,
}

pub(crate) struct Side {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    /// The URL at which this side finds the repeated picture.
    pub(crate) url: String,
    /// The prompt tokens that it counts.
    pub(crate) counts: Counts,
    pub(crate) frontend: Program,
    /// Processes that the frontend itself starts: its engine.
    pub(crate) children: usize,
    /// Whether the processes that the frontend starts are part of it, and no engines.
    pub(crate) has_workers: bool,
    /// Agents between it and its engines: their CPU time counts as the frontend's does.
    pub(crate) agents: Vec<Program>,
    /// Its engines, if the frontend has not started them. Ended after the frontend.
    pub(crate) engines: Vec<Program>,
    /// Whether its prompts are computed by other engines than its answers.
    pub(crate) splits: Splits,
    /// Whether it tells how many of them are ready.
    pub(crate) tells_engines: bool,
    /// It can tell nothing of a long answer but its text.
    pub(crate) tells_text_alone: bool,
    /// Where its engine writes down when it has said something:
    /// [`nanoseconds`](crate::client::nanoseconds), eight bytes each.
    pub(crate) steps: Option<PathBuf>,
}

impl Side {
    /// Creates a side without engines, whose frontend starts nothing, counts all tokens and splits
    /// no prompts.
    pub(crate) fn new(name: &str, address: SocketAddr, url: String, frontend: Program) -> Self {
        Self {
            name: name.to_owned(),
            address,
            url,
            counts: Counts::All,
            frontend,
            children: 0,
            has_workers: false,
            agents: Vec::new(),
            engines: Vec::new(),
            splits: Splits::Never,
            tells_engines: false,
            tells_text_alone: false,
            steps: None,
        }
    }

    /// Whether the prompt tokens of a case mean what they mean elsewhere.
    pub(crate) fn counts_alike(&self, case: Case) -> bool {
        match self.counts {
            Counts::All => true,
            Counts::Text => !case.has_image(),
            Counts::Nothing => false,
        }
    }

    /// When its engine said something, from the earliest.
    pub(crate) fn steps(&self) -> Result<Vec<u64>, Box<dyn Error>> {
        self.steps.as_deref().map_or(Ok(Vec::new()), moments)
    }

    /// Whether it takes part in a case.
    pub(crate) fn takes(&self, case: Case) -> bool {
        !(self.tells_text_alone && matches!(case, Case::Long(Told::Call | Told::Logprobs, _)))
    }

    /// Waits until a text is answered, by two workers if the side splits requests.
    pub(crate) async fn wait(&mut self, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
        let start = Instant::now();
        loop {
            self.frontend.check()?;
            for program in self.agents.iter_mut().chain(&mut self.engines) {
                program.check()?;
            }
            match self.try_once(workload).await {
                Ok(()) => break,
                Err(error) if start.elapsed() > START => {
                    return Err(self.frontend.failed(&format!("is not ready: {error}")));
                }
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
        match self.frontend.children()?.len() {
            children if children == self.children || self.has_workers => Ok(()),
            children => Err(format!("{} runs {children} processes, whose CPU time would not count", self.name).into()),
        }
    }

    /// CPU time so far of what is measured: the frontend, with processes that are part of it, and
    /// its agents.
    pub(crate) fn cpu(&self) -> Result<CpuTime, Box<dyn Error>> {
        let workers = if self.has_workers { self.frontend.children()? } else { Vec::new() };
        CpuTime::of([&self.frontend].into_iter().chain(&self.agents).map(Program::id).chain(workers))
    }

    /// CPU time of its engines so far: those beside the frontend, or those that it has started.
    pub(crate) fn engines_cpu(&self) -> Result<CpuTime, Box<dyn Error>> {
        let started = if self.has_workers { Vec::new() } else { self.frontend.children()? };
        CpuTime::of(self.engines.iter().map(Program::id).chain(started))
    }

    async fn try_once(&self, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
        let mut connection = Connection::open(self.address).await?;
        if !connection.serves_the_model().await? {
            return Err("it does not know the model".into());
        }
        if self.tells_engines && connection.ready_engines().await? < self.engines.len() as u64 {
            return Err("not all engines are ready".into());
        }
        let counted = self.splits.counted().await?;
        let body = workload.borrow_mut().next(Case::Text, &self.url);
        let is_split = connection.chat(body).await?.is_split;
        if is_split || self.splits.counted().await? > counted || self.splits == Splits::Never {
            return Ok(());
        }
        Err("requests are not split".into())
    }
}

/// The moments that an engine has written down, from the earliest:
/// [`nanoseconds`](crate::client::nanoseconds).
pub(crate) fn moments(path: &Path) -> Result<Vec<u64>, Box<dyn Error>> {
    let bytes = std::fs::read(path)?;
    Ok(bytes.chunks_exact(8).filter_map(|moment| Some(u64::from_le_bytes(moment.try_into().ok()?))).collect())
}

/// The simulated engine that all sides with vLLM's wire have: so fast that frontends are what is
/// measured, or one that takes the time of its steps and none for prompts.
pub(crate) fn engine_arguments(inputs: &Inputs, pace: Pace, step_log: &Path) -> Vec<String> {
    let [model, step_log] = [&inputs.model, step_log].map(|path| path.display().to_string());
    let streams = MOST_STREAMS.to_string();
    let steps = |rate: &'static str| ["--sim-decode-rate", rate, "--sim-prefill-rate", "1000000000"];
    // All streams at once have some 20,000 blocks at most.
    let of_calls = [
        "--sim-max-num-seqs",
        &streams,
        "--sim-blocks",
        "32768",
        "--sim-answer",
        &inputs.call,
        "--sim-step-log",
        &step_log,
    ];
    let pace = match pace {
        Pace::Unbounded => ["--sim-speedup", "1000000"].to_vec(),
        Pace::Steps => steps("100").to_vec(),
        Pace::Calls(Rate::Hundred) => [&steps("100")[..], &of_calls].concat(),
        Pace::Calls(Rate::TwentyFive) => [&steps("25")[..], &of_calls].concat(),
    };
    let arguments = [&["sim-engine", "--model", &model, "--receiver-cache-gb", RECEIVER_CACHE_GB][..], &pace].concat();
    arguments.into_iter().map(str::to_owned).collect()
}

/// Enough for the repeated image, and soon full of distinct ones, as it is in an engine that has
/// run for a while: of 40 here.
pub(crate) const RECEIVER_CACHE_GB: &str = "0.25";

/// A program without what the environment would have it do otherwise.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let ours = ["CHIASM_", "VLLM_", "DYN_", "PYTHON", "TOKIO_", "RUST_"];
        if name.to_str().is_some_and(|name| ours.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(name);
        }
    }
    for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy"] {
        command.env_remove(name).env_remove(name.to_uppercase());
    }
    // Nothing is to be fetched from anywhere.
    command.env("HF_HUB_OFFLINE", "1");
    command
}
