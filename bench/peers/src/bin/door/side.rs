//! Sides: a frontend that is measured, engines that are not, and an address.

use std::cell::RefCell;
use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::client::{Connection, get, ready_engines};
use crate::program::{CpuTime, Program};
use crate::splits::Splits;
use crate::workload::{Case, ENGINE_STREAMS, MODEL, Output, Pace, Workload};

/// The timeout of a side's first answer. Python imports many modules.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// The time between two attempts, which is the resolution of the time until the first answer.
const POLL: Duration = Duration::from_millis(10);
/// The size of an engine's receiver cache. It holds the repeated image. With 40 distinct images it
/// is full, as in an engine that has run for a while.
pub(crate) const RECEIVER_CACHE_GB: &str = "0.25";

/// The inputs of all sides.
pub(crate) struct Inputs {
    /// Our binary: a frontend, and the simulated engine of all sides that have vLLM's wire.
    pub(crate) chiasm: PathBuf,
    pub(crate) model: PathBuf,
    /// The folder of this run: logs, scripts and stores.
    pub(crate) scratch: PathBuf,
    /// The text of long answers.
    pub(crate) call: String,
}

/// A program of another project, and its version.
pub(crate) type Versioned = (PathBuf, String);

/// The prompt tokens that a side counts as the other sides do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counts {
    All,
    /// All but those of images.
    Text,
    Nothing,
}

pub(crate) struct Side {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    /// The URL of the repeated picture for this side.
    pub(crate) url: String,
    pub(crate) counts: Counts,
    pub(crate) frontend: Program,
    /// The number of processes that the frontend starts: its engine.
    pub(crate) children: usize,
    /// `true` if the processes that the frontend starts are a part of it and not engines.
    pub(crate) has_workers: bool,
    /// The agents between frontend and engines. Their CPU time counts as the frontend's.
    pub(crate) agents: Vec<Program>,
    /// The engines that the frontend has not started. They end after the frontend.
    pub(crate) engines: Vec<Program>,
    pub(crate) splits: Splits,
    /// `true` if the side reports the number of ready engines.
    pub(crate) reports_engines: bool,
    /// `true` if the side streams nothing but text.
    pub(crate) streams_text_only: bool,
    /// `true` if the side takes part in bursts only.
    pub(crate) bursts_only: bool,
    /// The file of the times of an engine's outputs: [`nanoseconds`](crate::client::nanoseconds) of
    /// eight bytes each.
    pub(crate) step_log: Option<PathBuf>,
}

impl Side {
    /// Creates a side without engines, whose frontend starts nothing, counts all tokens and splits
    /// no requests.
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
            reports_engines: false,
            streams_text_only: false,
            bursts_only: false,
            step_log: None,
        }
    }

    /// Returns `true` if the side counts the prompt tokens of a case as the other sides do.
    pub(crate) fn counts_alike(&self, case: Case) -> bool {
        match self.counts {
            Counts::All => true,
            Counts::Text => !case.has_image(),
            Counts::Nothing => false,
        }
    }

    /// Returns the times of the engine's outputs, in ascending order.
    pub(crate) fn steps(&self) -> Result<Vec<u64>, Box<dyn Error>> {
        self.step_log.as_deref().map_or(Ok(Vec::new()), read_log)
    }

    /// Returns `true` if the side takes part in a case.
    pub(crate) fn supports(&self, case: Case) -> bool {
        match case {
            _ if self.bursts_only && !case.is_burst() => false,
            Case::Long(Output::Call | Output::Logprobs, _) => !self.streams_text_only,
            // Only frontends that process images count their tokens.
            Case::Burst(_) => self.counts == Counts::All,
            _ => true,
        }
    }

    /// Waits until the side answers a text, split between engines if the side splits requests.
    pub(crate) async fn wait(
        &mut self,
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        self.wait_for(async |side| side.try_once(workload).await).await?;
        let children = self.frontend.children()?.len();
        if children != self.children && !self.has_workers {
            let name = &self.name;
            return Err(format!("{name} runs {children} processes, not {}", self.children).into());
        }
        Ok(())
    }

    /// Waits until the side reports that it is ready.
    pub(crate) async fn wait_until_ready(&mut self) -> Result<(), Box<dyn Error>> {
        self.wait_for(async |side| {
            if side.reports_engines {
                return side.check_engines().await;
            }
            let health = get(side.address, "/health").await?;
            if health.status.is_success() { Ok(()) } else { Err("it is not healthy".into()) }
        })
        .await
    }

    /// Repeats an attempt until it succeeds.
    async fn wait_for(
        &mut self,
        attempt: impl AsyncFn(&Self) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        eprintln!("waiting for {}", self.name);
        let start = Instant::now();
        while let Err(error) = attempt(self).await {
            self.frontend.check()?;
            for program in self.agents.iter_mut().chain(&mut self.engines) {
                program.check()?;
            }
            if start.elapsed() > START_TIMEOUT {
                return Err(self.frontend.failed(&format!("is not ready: {error}")));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    async fn check_engines(&self) -> Result<(), Box<dyn Error>> {
        if ready_engines(self.address).await? < self.engines.len() {
            return Err("not all engines are ready".into());
        }
        Ok(())
    }

    /// Returns the CPU time so far of the frontend, of processes that are a part of it, and of
    /// agents.
    pub(crate) fn cpu(&self) -> Result<CpuTime, Box<dyn Error>> {
        let workers = if self.has_workers { self.frontend.children()? } else { Vec::new() };
        let programs = [&self.frontend].into_iter().chain(&self.agents);
        CpuTime::read(programs.map(Program::id).chain(workers))
    }

    /// Returns the CPU time so far of all engines.
    pub(crate) fn engines_cpu(&self) -> Result<CpuTime, Box<dyn Error>> {
        let started = if self.has_workers { Vec::new() } else { self.frontend.children()? };
        CpuTime::read(self.engines.iter().map(Program::id).chain(started))
    }

    async fn try_once(&self, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
        let models = get(self.address, "/v1/models").await?;
        if !models.status.is_success() || !models.text.contains(&format!("{MODEL:?}")) {
            return Err("it does not serve the model".into());
        }
        if self.reports_engines {
            self.check_engines().await?;
        }
        let split_before = self.splits.count().await?;
        let body = workload.borrow_mut().next(Case::Text, &self.url);
        let (_, response) = Connection::open(self.address).await?.chat(body).await?;
        let is_split = match self.splits {
            Splits::Never => return Ok(()),
            Splits::ByHeader => response.headers.contains_key(crate::splits::PREFILL_WORKER),
            Splits::ByCounter(_) => self.splits.count().await? > split_before,
        };
        if is_split { Ok(()) } else { Err("requests are not split".into()) }
    }
}

/// Reads the times that an engine has written, in ascending order.
pub(crate) fn read_log(path: &Path) -> Result<Vec<u64>, Box<dyn Error>> {
    let bytes = std::fs::read(path)?;
    let times = bytes.chunks_exact(8).filter_map(|time| time.try_into().ok());
    Ok(times.map(u64::from_le_bytes).collect())
}

/// Returns the arguments of a simulated engine. With [`Pace::Unbounded`] it is so fast that only
/// frontends are measured; otherwise its steps take time and prompts take none.
pub(crate) fn engine_arguments(inputs: &Inputs, pace: Pace, step_log: &Path) -> Vec<String> {
    let model = inputs.model.display().to_string();
    let mut arguments = vec!["sim-engine", "--model", &model];
    arguments.extend(["--receiver-cache-gb", RECEIVER_CACHE_GB]);
    let rate = pace.steps_per_second().map(|rate| rate.to_string());
    match &rate {
        None => arguments.extend(["--sim-speedup", "1000000"]),
        Some(rate) => {
            arguments.extend(["--sim-decode-rate", rate, "--sim-prefill-rate", "1000000000"]);
        }
    }
    let step_log = step_log.display().to_string();
    let streams = ENGINE_STREAMS.to_string();
    if pace.has_long_answers() {
        // All streams together have 20,000 blocks at most.
        arguments.extend(["--sim-max-num-seqs", &streams, "--sim-blocks", "32768"]);
        arguments.extend(["--sim-answer", &inputs.call, "--sim-step-log", &step_log]);
    }
    arguments.into_iter().map(str::to_owned).collect()
}

/// Returns a command without environment variables that affect frontends or engines.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let prefixes = ["CHIASM_", "VLLM_", "DYN_", "PYTHON", "OMP_", "TOKIO_", "RUST_"];
        if name.to_str().is_some_and(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
        {
            command.env_remove(name);
        }
    }
    for name in ["http_proxy", "https_proxy", "all_proxy", "no_proxy"] {
        command.env_remove(name).env_remove(name.to_uppercase());
    }
    command.env("HF_HUB_OFFLINE", "1");
    command
}
