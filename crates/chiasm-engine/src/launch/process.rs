//! A running engine and its descendants.

use std::fmt;
use std::io::{Seek, SeekFrom};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use chiasm_backend::Activity;
use rustix::process::Pid;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::lines::{self, LastLines};
use super::process_group::ProcessGroup;
use super::watchdog::{self, Watchdog};
use super::{Keep, LaunchSpec};
use crate::error::{DeathCause, EngineError};
use crate::state::{Launched, ProcessId};

/// The time for the rest of a group to end by itself after its first process. Part of the second
/// within which a death must be detected.
const CLEANUP_TIMEOUT: Duration = Duration::from_millis(300);

/// The time for a killed group to end.
const KILL_TIMEOUT: Duration = Duration::from_millis(300);

/// The time to read the last lines.
const LAST_LINES_TIMEOUT: Duration = Duration::from_millis(100);

/// The grace period of an engine that another process launched.
const TERMINATE_GRACE: Duration = Duration::from_secs(15);

/// The interval at which a process that is not a child of this one is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The report of an engine's exit.
#[derive(Clone, Debug)]
pub struct ExitReport {
    /// The exit code or signal; `None` if unknown, as for a process that another one started.
    pub status: Option<ExitStatus>,
    /// The last lines of output.
    pub last_lines: Vec<String>,
    /// Advice on the error, if it is known.
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

/// A headless engine that this process has started, or has taken over from an earlier one.
///
/// Dropping it kills its whole process group at once; only Python's resource tracker gets a moment
/// to remove the engine's shared memory. Before another engine uses its GPU,
/// [`terminate`](Self::terminate) it or wait for [`exited`](Self::exited).
#[derive(Debug)]
pub struct EngineProcess {
    name: String,
    group: ProcessGroup,
    exit: watch::Receiver<Option<ExitReport>>,
    log: LastLines,
    /// The processes for a later frontend to take over; `None` if the engine ends with this
    /// process.
    survivors: Option<Launched>,
    /// `true` if the engine runs on when this is dropped.
    is_detached: bool,
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
        // In a group, engines must see each other's GPUs to exchange memory with them.
        if let (Some(gpus), None) = (&spec.gpus, spec.place) {
            command.env("CUDA_VISIBLE_DEVICES", gpus.join(","));
        }
        let failed = |source| EngineError::Spawn { program: spec.vllm.clone(), source };
        if let Some(keep) = &spec.keep {
            let output = || lines::open_output(&keep.output).map_err(failed);
            command.stdout(output()?).stderr(output()?);
        }
        let mut child = command.spawn().map_err(failed)?;
        // A child that has just been started has a process id.
        let Some((number, pid)) =
            child.id().and_then(|number| Some((number, Pid::from_raw(number.try_into().ok()?)?)))
        else {
            return Err(failed(std::io::ErrorKind::NotFound.into()));
        };
        let group = ProcessGroup(pid);

        let log = LastLines::default();
        let mut readers = JoinSet::new();
        if let Some(keep) = &spec.keep {
            let output = lines::open_output(&keep.output).map_err(failed)?;
            readers.spawn(lines::follow_file(spec.name.clone(), output, log.clone()));
        }
        if let Some(stdout) = child.stdout.take() {
            readers.spawn(lines::follow_stream(spec.name.clone(), stdout, log.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.spawn(lines::follow_stream(spec.name.clone(), stderr, log.clone()));
        }
        let watchdog =
            Watchdog::spawn(number, spec.keep.as_ref().map_or(Duration::ZERO, |keep| keep.time));
        let survivors = spec.keep.as_ref().and_then(|_| {
            let watchdog = watchdog.as_ref().and_then(Watchdog::process);
            Some(Launched { process: ProcessId::from_pid(number)?, watchdog })
        });
        let ended = async move { child.wait().await.ok() };
        let exit = supervise(ended, group, watchdog, readers, log.clone());
        Ok(Self { name: spec.name.clone(), group, exit, log, survivors, is_detached: false })
    }

    /// Takes over an engine that an earlier process launched and detached. Returns `None` if it no
    /// longer runs. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`EngineError::Spawn`]: the engine's output can't be read.
    pub fn take_over(
        name: &str,
        launched: Launched,
        keep: &Keep,
    ) -> Result<Option<Self>, EngineError> {
        let Launched { process, watchdog: former } = launched;
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
        let Some(group) = pid.filter(|_| process.is_alive()).map(ProcessGroup) else {
            return Ok(None);
        };
        let open_at_end = || {
            let mut output = lines::open_output(&keep.output)?;
            output.seek(SeekFrom::End(0)).map(|_| output)
        };
        let output = open_at_end()
            .map_err(|source| EngineError::Spawn { program: keep.output.clone(), source })?;
        let log = LastLines::default();
        let mut readers = JoinSet::new();
        readers.spawn(lines::follow_file(name.to_owned(), output, log.clone()));
        // The new watchdog starts before the former one ends, so that the engine always has one.
        let watchdog = Watchdog::spawn(process.pid, keep.time);
        former.into_iter().for_each(watchdog::dismiss);
        let survivors =
            Some(Launched { process, watchdog: watchdog.as_ref().and_then(Watchdog::process) });
        let ended = async move {
            while process.is_alive() {
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            None
        };
        let exit = supervise(ended, group, watchdog, readers, log.clone());
        let name = name.to_owned();
        Ok(Some(Self { name, group, exit, log, survivors, is_detached: false }))
    }

    /// Returns the last lines of the engine's output, which are updated as it runs.
    pub fn log(&self) -> LastLines {
        self.log.clone()
    }

    /// Returns the processes for a later frontend to take over; `None` if the engine ends with this
    /// process.
    pub fn surviving_processes(&self) -> Option<Launched> {
        self.survivors
    }

    /// Lets the engine run on. After this process has ended, the watchdog ends the engine after
    /// [`Keep::time`], unless it is taken over.
    pub fn detach(mut self) {
        self.is_detached = true;
    }

    /// Returns the process id, which is also that of the group.
    pub fn pid(&self) -> u32 {
        self.group.0.as_raw_nonzero().get().unsigned_abs()
    }

    /// Waits until the first process has ended and the rest of its group has been killed.
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

    /// Returns the activity of the group's processes; `None` if the system does not report it.
    pub async fn activity(&self) -> Option<Activity> {
        let group = self.group;
        tokio::task::spawn_blocking(move || group.activity()).await.ok().flatten()
    }

    /// Returns the exit report if the engine has ended.
    pub fn try_exited(&self) -> Option<ExitReport> {
        self.exit.borrow().clone()
    }

    /// Sends SIGTERM to the group, and kills it after `grace`.
    ///
    /// vLLM then kills its EngineCore and all running requests, unless it was started with
    /// `--shutdown-timeout`. It takes about 5 s, so a `grace` below 15 s may leave shared memory
    /// behind.
    pub async fn terminate(self, grace: Duration) -> ExitReport {
        self.unless_ended(ProcessGroup::terminate);
        if let Ok(report) = tokio::time::timeout(grace, self.exited()).await {
            return report;
        }
        tracing::warn!(engine = self.name, ?grace, "engine did not end in time and is killed");
        self.unless_ended(ProcessGroup::kill_except_tracker);
        self.exited().await
    }

    /// Kills the group and waits for its end. Unlike after [`terminate`](Self::terminate), the
    /// engine finishes nothing.
    pub async fn kill(self) -> ExitReport {
        self.unless_ended(ProcessGroup::kill_except_tracker);
        self.exited().await
    }

    fn unless_ended(&self, signal: impl FnOnce(ProcessGroup)) {
        // Once the group has ended, the system may reuse its id.
        if self.try_exited().is_none() {
            signal(self.group);
        }
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        if !self.is_detached {
            self.unless_ended(ProcessGroup::kill_except_tracker);
        }
    }
}

/// Ends an engine that another process launched and detached: sends SIGTERM, and kills it after
/// 15 s. Its output is not logged.
pub async fn terminate(launched: Launched) {
    let pid = i32::try_from(launched.process.pid).ok().and_then(Pid::from_raw);
    let Some(group) = pid.filter(|_| launched.process.is_alive()).map(ProcessGroup) else { return };
    group.terminate();
    if !group.wait_until_empty(TERMINATE_GRACE).await {
        group.kill_except_tracker();
        kill_rest(group).await;
    }
    launched.watchdog.into_iter().for_each(watchdog::dismiss);
}

/// Spawns a task that waits for the end of the first process, kills the rest of its group, and
/// reports the exit.
fn supervise(
    ended: impl Future<Output = Option<ExitStatus>> + Send + 'static,
    group: ProcessGroup,
    watchdog: Option<Watchdog>,
    readers: JoinSet<()>,
    log: LastLines,
) -> watch::Receiver<Option<ExitReport>> {
    let (sender, exit) = watch::channel(None);
    tokio::spawn(async move {
        let status = ended.await;
        kill_rest(group).await;
        if let Some(watchdog) = watchdog {
            watchdog.dismiss().await;
        }
        let _ = tokio::time::timeout(LAST_LINES_TIMEOUT, readers.join_all()).await;
        sender.send_replace(Some(ExitReport {
            status,
            last_lines: log.get(),
            advice: log.advice(),
        }));
    });
    exit
}

/// Waits for the rest of a group to end after its first process, and kills it after a timeout.
async fn kill_rest(group: ProcessGroup) {
    if group.wait_until_empty(CLEANUP_TIMEOUT).await {
        return;
    }
    group.kill_except_tracker();
    if !group.wait_until_empty(CLEANUP_TIMEOUT).await {
        group.kill();
        group.wait_until_empty(KILL_TIMEOUT).await;
    }
}
