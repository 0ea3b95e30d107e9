//! The fork server: the process with vLLM's imports and the model's processor.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::process::{Child as Process, Command};
use tokio::sync::{Mutex, Notify};
use tokio::time::timeout;

use crate::child::Child;
use crate::connection::Connection;
use crate::greeting::{Greeting, StartupMessage};
use crate::output::{self, OutputTail};
use crate::{ItemLimits, ProcessorError, ProcessorOptions, python};

/// The time limit of a fork. A fork takes some tens of milliseconds, more on a busy machine.
const FORK_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of consecutive unanswered forks after which the server is replaced. A single
/// unanswered fork may be due to a busy machine.
const MAX_UNANSWERED_FORKS: u32 = 2;

/// The maximum delay between the deaths of a server's children and the detection of its own exit.
/// The death of a single child is reported with this delay.
const EXIT_DETECTION_TIME: Duration = Duration::from_millis(50);

/// The time limit for reading the remaining output of a process that ended.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(200);

/// A running fork server, shared with its children. Dropping the last reference kills the process
/// and its remaining children.
pub(crate) struct Server {
    connection: Mutex<Connection>,
    /// A duplicate of `connection` that detects the exit of the process. After the greeting,
    /// nothing else is received on it.
    exit: Connection,
    /// The number of consecutive forks that were not answered in time.
    unanswered_forks: AtomicU32,
    /// Notified after [`MAX_UNANSWERED_FORKS`].
    hung: Notify,
    /// Killed on drop.
    _process: Process,
}

impl Server {
    /// Starts a fork server and waits for its greeting.
    pub(crate) async fn start(
        options: &ProcessorOptions,
    ) -> Result<(Self, Greeting), ProcessorError> {
        let unavailable = |error: io::Error| ProcessorError::Unavailable(error.to_string());
        // Needed only during the start: children inherit the server's loaded modules.
        let sources = python::unpack_sources().map_err(unavailable)?;
        let (mut connection, remote) = Connection::pair().map_err(unavailable)?;
        let ItemLimits { video_duration, video_pixels, audio_duration } = &options.limits;
        let mut command = Command::new(&options.python);
        command
            // -B: write no compiled modules.
            .args(["-B", "-m", python::PACKAGE, "--sandbox", options.sandbox.name()])
            .args(["--address-space", &options.address_space.to_string()])
            .args(["--video-seconds", &video_duration.as_secs_f64().to_string()])
            .args(["--video-pixels", &video_pixels.to_string()])
            .args(["--audio-seconds", &audio_duration.as_secs_f64().to_string(), "--", "--model"])
            .arg(&options.model)
            .args(&options.vllm_flags)
            .env_clear()
            .envs(python::environment(sources.path()))
            .stdin(Stdio::from(OwnedFd::from(remote)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C at a terminal must reach the frontend only: its requests in flight may still
            // need the processor.
            .process_group(0)
            .kill_on_drop(true);
        let mut process = command.spawn().map_err(|error| ProcessorError::NoPython {
            command: options.python.clone(),
            reason: error.to_string(),
        })?;
        // `command` holds the server's end of the connection. It must be closed here, or the exit
        // of the server would not close the connection.
        drop(command);
        let tail = OutputTail::default();
        let stdout = process.stdout.take();
        let stderr = process.stderr.take();
        let stdout = stdout.map(|output| tokio::spawn(output::read_lines(output, tail.clone())));
        let stderr = stderr.map(|output| tokio::spawn(output::read_lines(output, tail.clone())));
        match timeout(options.startup_timeout, connection.receive::<StartupMessage>()).await {
            Ok(Ok(StartupMessage::Greeting(greeting))) => {
                let server = Self {
                    exit: connection.duplicate().map_err(unavailable)?,
                    connection: Mutex::new(connection),
                    unanswered_forks: AtomicU32::new(0),
                    hung: Notify::new(),
                    _process: process,
                };
                Ok((server, *greeting))
            }
            Ok(Ok(StartupMessage::Failed { failed })) => Err(ProcessorError::Unsupported(failed)),
            Ok(Err(_)) => {
                for reader in [stdout, stderr].into_iter().flatten() {
                    let _ = timeout(OUTPUT_TIMEOUT, reader).await;
                }
                let text = tail.text();
                let reason = text.lines().last().unwrap_or("it ended without output").to_owned();
                if text.contains("No module named") {
                    Err(ProcessorError::Unsupported(reason))
                } else {
                    Err(ProcessorError::Unavailable(reason))
                }
            }
            Err(_) => {
                let seconds = options.startup_timeout.as_secs();
                Err(ProcessorError::Unavailable(format!("it was not ready within {seconds} s")))
            }
        }
    }

    /// Forks another child. A failed fork affects only this call.
    pub(crate) async fn fork(self: &Arc<Self>) -> Result<Child, ProcessorError> {
        let server = self.clone();
        // In a task, so that an unanswered fork is counted even if its caller gives up earlier.
        let fork = tokio::spawn(async move { server.fork_with_timeout().await });
        fork.await.unwrap_or_else(|error| Err(ProcessorError::Unavailable(error.to_string())))
    }

    /// Forks a child within [`FORK_TIMEOUT`], and counts consecutive timeouts.
    async fn fork_with_timeout(self: &Arc<Self>) -> Result<Child, ProcessorError> {
        match timeout(FORK_TIMEOUT, self.request_fork()).await {
            Ok(outcome) => {
                if outcome.is_ok() {
                    self.unanswered_forks.store(0, Ordering::Relaxed);
                }
                outcome
            }
            Err(_) => {
                let unanswered = self.unanswered_forks.fetch_add(1, Ordering::Relaxed) + 1;
                if unanswered >= MAX_UNANSWERED_FORKS {
                    self.hung.notify_one();
                }
                Err(ProcessorError::Unavailable("a forked child did not start in time".to_owned()))
            }
        }
    }

    async fn request_fork(self: &Arc<Self>) -> Result<Child, ProcessorError> {
        let unavailable = |error: io::Error| ProcessorError::Unavailable(error.to_string());
        let (local, remote) = Connection::pair().map_err(unavailable)?;
        let mut connection = self.connection.lock().await;
        let sent = connection.send(&json!({"fork": true}), Some(remote.as_fd())).await;
        sent.map_err(unavailable)?;
        drop(connection);
        // An open copy of the child's end would hide the exit of the child.
        drop(remote);
        Child::after_fork(self.clone(), local).await
    }

    /// Returns `true` if the process has ended or no longer answers fork requests.
    pub(crate) fn is_lost(&self) -> bool {
        self.unanswered_forks.load(Ordering::Relaxed) >= MAX_UNANSWERED_FORKS
            || self.exit.is_finished()
    }

    /// Waits up to [`EXIT_DETECTION_TIME`] and returns `true` if the process has ended by then. The
    /// deaths of a server's children are noticed a moment before its own exit.
    pub(crate) async fn has_ended(&self) -> bool {
        timeout(EXIT_DETECTION_TIME, self.exit.wait_finished()).await.is_ok()
    }

    /// Waits until the server is lost, and returns the reason. Its children finish their items.
    pub(crate) async fn wait_lost(&self) -> &'static str {
        tokio::select! {
            () = self.exit.wait_finished() => "the process has ended",
            () = self.hung.notified() => "the process no longer answers fork requests",
        }
    }
}
