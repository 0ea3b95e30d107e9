//! A running engine and everything that it has started.

use std::fmt;
use std::io::{Seek, SeekFrom};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use chiasm_backend::Activity;
use rustix::process::Pid;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::group::Group;
use super::lines::{self, LastLines};
use super::watchdog::{self, Watchdog};
use super::{Keep, LaunchSpec};
use crate::error::{DeathCause, EngineError};
use crate::state::{Launched, ProcessId};

/// How long what the first process leaves behind may take to tidy up. Part of the second within
/// which a death has to be known.
const TIDY: Duration = Duration::from_millis(300);

/// How long a killed group may take to vanish.
const VANISH: Duration = Duration::from_millis(300);

/// How long the last lines may take to be read.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// How long an engine that another process has launched may take to end.
const END_GRACE: Duration = Duration::from_secs(15);

/// How often a process is looked at that is not a child of this one.
const LOOK: Duration = Duration::from_millis(50);

/// How an engine's process ended.
#[derive(Clone, Debug)]
pub struct ExitReport {
    /// Its exit code or signal; `None` when the system does not tell, as of a process that another
    /// one has started.
    pub status: Option<ExitStatus>,
    /// The last lines that it printed.
    pub last_lines: Vec<String>,
    /// What helps, if it ended with an error that is known.
    pub advice: Option<&'static str>,
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

/// A headless engine that this process has started, or has taken over from one before it.
///
/// Dropping it kills its whole process group at once; only Python's resource tracker gets a moment
/// to remove the engine's shared memory. Before another engine takes its GPU,
/// [`terminate`](Self::terminate) it or wait for [`exited`](Self::exited).
#[derive(Debug)]
pub struct EngineProcess {
    name: String,
    group: Group,
    exit: watch::Receiver<Option<ExitReport>>,
    log: LastLines,
    /// What a later frontend has to know of it, if it may outlive this process.
    outlives: Option<Launched>,
    /// It is to run on when this is dropped.
    left: bool,
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
        if let Some(keep) = &spec.keep {
            let output = || lines::file(&keep.output).map_err(failed);
            command.stdout(output()?).stderr(output()?);
        }
        let mut child = command.spawn().map_err(failed)?;
        let pid = child.id().and_then(|pid| Some((pid, Pid::from_raw(pid.try_into().ok()?)?)));
        // A child that has just been started has a process id.
        let Some((number, group)) = pid.map(|(number, pid)| (number, Group(pid))) else {
            return Err(failed(std::io::ErrorKind::NotFound.into()));
        };

        let last = LastLines::default();
        let mut readers = JoinSet::new();
        if let Some(keep) = &spec.keep {
            let output = lines::file(&keep.output).map_err(failed)?;
            readers.spawn(lines::follow(spec.name.clone(), output, last.clone()));
        }
        if let Some(stdout) = child.stdout.take() {
            readers.spawn(lines::pass_on(spec.name.clone(), stdout, last.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.spawn(lines::pass_on(spec.name.clone(), stderr, last.clone()));
        }
        let watchdog =
            Watchdog::over(number, spec.keep.as_ref().map_or(Duration::ZERO, |keep| keep.time));
        let outlives = spec.keep.as_ref().and_then(|_| {
            let watchdog = watchdog.as_ref().and_then(Watchdog::process);
            Some(Launched { process: ProcessId::of(number)?, watchdog })
        });
        let ended = async move { child.wait().await.ok() };
        let exit = attend(ended, group, watchdog, readers, last.clone());
        Ok(Self { name: spec.name.clone(), group, exit, log: last, outlives, left: false })
    }

    /// Takes over an engine that a process before this one has launched and left. `None` if it does
    /// not run any more. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`EngineError::Spawn`]: its output can't be followed.
    pub fn take_over(
        name: &str,
        launched: Launched,
        keep: &Keep,
    ) -> Result<Option<Self>, EngineError> {
        let Launched { process, watchdog: former } = launched;
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
        let Some(group) = pid.filter(|_| process.is_alive()).map(Group) else { return Ok(None) };
        let new_output = || {
            let mut output = lines::file(&keep.output)?;
            output.seek(SeekFrom::End(0)).map(|_| output)
        };
        let output = new_output()
            .map_err(|source| EngineError::Spawn { program: keep.output.clone(), source })?;
        let last = LastLines::default();
        let mut readers = JoinSet::new();
        readers.spawn(lines::follow(name.to_owned(), output, last.clone()));
        // The new one first, so that the engine is never without.
        let watchdog = Watchdog::over(process.pid, keep.time);
        former.into_iter().for_each(watchdog::dismiss);
        let outlives =
            Some(Launched { process, watchdog: watchdog.as_ref().and_then(Watchdog::process) });
        let ended = async move {
            while process.is_alive() {
                tokio::time::sleep(LOOK).await;
            }
            None
        };
        let exit = attend(ended, group, watchdog, readers, last.clone());
        Ok(Some(Self { name: name.to_owned(), group, exit, log: last, outlives, left: false }))
    }

    /// Returns the last lines that it has printed.
    pub fn log(&self) -> LastLines {
        self.log.clone()
    }

    /// What a later frontend has to know to take it over; `None` if it ends with this process.
    pub fn outlives(&self) -> Option<Launched> {
        self.outlives
    }

    /// Lets it run on. When this process has ended, its watchdog ends it after [`Keep::time`],
    /// unless it is taken over before.
    pub fn leave(mut self) {
        self.left = true;
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
        report.ok().and_then(|report| report.clone()).unwrap_or(ExitReport {
            status: None,
            last_lines: Vec::new(),
            advice: None,
        })
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
    /// vLLM kills its EngineCore then, running requests and all, unless it was started with
    /// `--shutdown-timeout`; it takes about 5 s, so a `grace` below 15 s may leave shared memory
    /// behind.
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
        if !self.left {
            self.unless_gone(Group::kill_but_janitor);
        }
    }
}

/// Ends an engine that another process has launched and left: asks it to, and kills it after 15 s.
/// What it says meanwhile is not passed on.
pub async fn end(launched: Launched) {
    let pid = i32::try_from(launched.process.pid).ok().and_then(Pid::from_raw);
    let Some(group) = pid.filter(|_| launched.process.is_alive()).map(Group) else { return };
    group.terminate();
    if !group.vanishes(END_GRACE).await {
        group.kill_but_janitor();
        end_rest(group).await;
    }
    launched.watchdog.into_iter().for_each(watchdog::dismiss);
}

/// Waits for the end of the first process, ends what it has left behind, and reports.
fn attend(
    ended: impl Future<Output = Option<ExitStatus>> + Send + 'static,
    group: Group,
    watchdog: Option<Watchdog>,
    readers: JoinSet<()>,
    last: LastLines,
) -> watch::Receiver<Option<ExitReport>> {
    let (sender, exit) = watch::channel(None);
    tokio::spawn(async move {
        let status = ended.await;
        end_rest(group).await;
        if let Some(watchdog) = watchdog {
            watchdog.dismiss().await;
        }
        let _ = tokio::time::timeout(LAST_WORDS, readers.join_all()).await;
        sender.send_replace(Some(ExitReport {
            status,
            last_lines: last.get(),
            advice: last.advice(),
        }));
    });
    exit
}

/// Ends what the first process has left behind.
async fn end_rest(group: Group) {
    if group.vanishes(TIDY).await {
        return;
    }
    group.kill_but_janitor();
    if !group.vanishes(TIDY).await {
        group.kill();
        group.vanishes(VANISH).await;
    }
}
