//! A running engine and everything that it has started.

use std::fmt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use chiasm_backend::Activity;
use rustix::process::Pid;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::LaunchSpec;
use super::group::Group;
use super::lines::{self, LastLines};
use super::watchdog::Watchdog;
use crate::error::{DeathCause, EngineError};

/// How long what the first process leaves behind may take to tidy up. Part of the second within which a death has to be known.
const TIDY: Duration = Duration::from_millis(300);

/// How long a killed group may take to vanish.
const VANISH: Duration = Duration::from_millis(300);

/// How long the last lines may take to be read.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// How an engine's process ended.
#[derive(Clone, Debug)]
pub struct ExitReport {
    /// Its exit code or signal; `None` when the system does not tell.
    pub status: Option<ExitStatus>,
    /// The last lines that it printed.
    pub last_lines: Vec<String>,
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.status {
            Some(status) => status.fmt(f),
            None => f.write_str("unknown status"),
        }
    }
}

impl From<ExitReport> for DeathCause {
    fn from(report: ExitReport) -> Self {
        Self::Exited(report.to_string())
    }
}

/// A headless engine that this process has started.
///
/// Dropping it kills its whole process group at once; only Python's resource tracker gets a moment to remove the
/// engine's shared memory. Before another engine takes its GPU, [`terminate`](Self::terminate) it or wait for
/// [`exited`](Self::exited).
#[derive(Debug)]
pub struct EngineProcess {
    name: String,
    group: Group,
    exit: watch::Receiver<Option<ExitReport>>,
}

impl EngineProcess {
    pub(super) fn start(spec: &LaunchSpec) -> Result<Self, EngineError> {
        let mut command = Command::new(&spec.vllm);
        command
            .args(spec.arguments()?)
            .envs(spec.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some(gpus) = &spec.gpus {
            let list: Vec<_> = gpus.iter().map(u32::to_string).collect();
            command.env("CUDA_VISIBLE_DEVICES", list.join(","));
        }
        let failed = |source| EngineError::Spawn { program: spec.vllm.clone(), source };
        let mut child = command.spawn().map_err(failed)?;
        let pid = child.id().and_then(|pid| Some((pid, Pid::from_raw(pid.try_into().ok()?)?)));
        // A child that has just been started has a process id.
        let Some((number, group)) = pid.map(|(number, pid)| (number, Group(pid))) else {
            return Err(failed(std::io::ErrorKind::NotFound.into()));
        };

        let last = LastLines::default();
        let mut readers = JoinSet::new();
        if let Some(stdout) = child.stdout.take() {
            readers.spawn(lines::pass_on(spec.name.clone(), stdout, last.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.spawn(lines::pass_on(spec.name.clone(), stderr, last.clone()));
        }
        let (sender, exit) = watch::channel(None);
        let watchdog = Watchdog::over(number);
        tokio::spawn(async move {
            let status = until_gone(child, group).await;
            if let Some(watchdog) = watchdog {
                watchdog.dismiss().await;
            }
            let _ = tokio::time::timeout(LAST_WORDS, readers.join_all()).await;
            sender.send_replace(Some(ExitReport { status, last_lines: last.get() }));
        });
        Ok(Self { name: spec.name.clone(), group, exit })
    }

    /// Its process id, which is also that of its group.
    pub fn pid(&self) -> u32 {
        self.group.0.as_raw_nonzero().get().unsigned_abs()
    }

    /// Returns once its first process has ended and the rest of its group has been killed.
    pub async fn exited(&self) -> ExitReport {
        let mut exit = self.exit.clone();
        let report = exit.wait_for(Option::is_some).await;
        // The sender ends without a report only with the runtime itself.
        report.ok().and_then(|report| report.clone()).unwrap_or(ExitReport { status: None, last_lines: Vec::new() })
    }

    /// What the processes of its group do; `None` where the system does not tell.
    pub async fn activity(&self) -> Option<Activity> {
        let group = self.group;
        tokio::task::spawn_blocking(move || group.activity()).await.ok().flatten()
    }

    /// How it ended, if it has.
    pub fn try_exited(&self) -> Option<ExitReport> {
        self.exit.borrow().clone()
    }

    /// Asks the group to end (SIGTERM), and kills it after `grace`.
    ///
    /// vLLM kills its EngineCore then, running requests and all, unless it was started with `--shutdown-timeout`; it
    /// takes about 5 s, so a `grace` below 15 s may leave shared memory behind.
    pub async fn terminate(self, grace: Duration) -> ExitReport {
        self.unless_gone(Group::terminate);
        if let Ok(report) = tokio::time::timeout(grace, self.exited()).await {
            return report;
        }
        tracing::warn!(engine = self.name, ?grace, "engine did not end in time and is killed");
        self.unless_gone(Group::kill_but_janitor);
        self.exited().await
    }

    fn unless_gone(&self, act: impl FnOnce(Group)) {
        // Once it has ended its number may belong to others.
        if self.try_exited().is_none() {
            act(self.group);
        }
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        self.unless_gone(Group::kill_but_janitor);
    }
}

/// Reaps the child and ends what it has left behind.
async fn until_gone(mut child: Child, group: Group) -> Option<ExitStatus> {
    let status = child.wait().await.ok();
    if group.vanishes(TIDY).await {
        return status;
    }
    group.kill_but_janitor();
    if !group.vanishes(TIDY).await {
        group.kill();
        group.vanishes(VANISH).await;
    }
    status
}
