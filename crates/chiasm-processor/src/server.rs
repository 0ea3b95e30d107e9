//! The fork server: the process that has vLLM's imports and the model's processor.

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
use crate::message::{FirstWords, Greeting};
use crate::output::{self, LastLines};
use crate::{ItemLimits, ProcessorError, ProcessorOptions, python};

/// Time for a fork, on a machine that is busy. It takes some tens of milliseconds.
const FORK_PATIENCE: Duration = Duration::from_secs(30);

/// Forks in a row without an answer after which another server is started. One may be due to a busy
/// machine.
const MAX_UNANSWERED: u32 = 2;

/// The time in which the end of a server may be noticed after that of its children. The end of one
/// child alone is reported that much later.
const END_PATIENCE: Duration = Duration::from_millis(50);

/// How long what a process printed last may take to be read.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A running fork server, shared with its children. Dropping the last reference kills the process,
/// and what is left of its own children with it.
pub(crate) struct Server {
    connection: Mutex<Connection>,
    /// The same connection, to notice the end of the process: nothing else comes from there any
    /// more.
    end: Connection,
    /// The number of forks in a row that were not answered in time.
    unanswered: AtomicU32,
    /// Notified at [`MAX_UNANSWERED`] forks.
    hangs: Notify,
    /// Killed on drop.
    _process: Process,
}

impl Server {
    /// Starts one and waits until it knows what its model's processor is.
    pub(crate) async fn start(
        options: &ProcessorOptions,
    ) -> Result<(Self, Greeting), ProcessorError> {
        let gone = |error: io::Error| ProcessorError::Gone(error.to_string());
        // Read once: children have the modules of the server.
        let sources = python::unpack().map_err(gone)?;
        let (mut connection, theirs) = Connection::pair().map_err(gone)?;
        let ItemLimits { video_duration, video_pixels, audio_duration } = &options.limits;
        let mut command = Command::new(&options.python);
        command
            // Without files of compiled modules.
            .args(["-B", "-m", python::PACKAGE, "--sandbox", options.sandbox.name()])
            .args(["--address-space", &options.address_space.to_string()])
            .args(["--video-seconds", &video_duration.as_secs_f64().to_string()])
            .args(["--video-pixels", &video_pixels.to_string()])
            .args(["--audio-seconds", &audio_duration.as_secs_f64().to_string(), "--", "--model"])
            .arg(&options.model)
            .args(&options.vllm_flags)
            .env_clear()
            .envs(python::environment(sources.path()))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C at a terminal is for the frontend, whose requests in flight may still need it.
            .process_group(0)
            .kill_on_drop(true);
        let mut process = command.spawn().map_err(|error| ProcessorError::NoPython {
            command: options.python.clone(),
            reason: error.to_string(),
        })?;
        // It holds the other end of the connection, whose closing tells of the server's end.
        drop(command);
        let last = LastLines::default();
        let stdout =
            process.stdout.take().map(|output| tokio::spawn(output::follow(output, last.clone())));
        let stderr =
            process.stderr.take().map(|output| tokio::spawn(output::follow(output, last.clone())));
        match timeout(options.startup_timeout, connection.receive::<FirstWords>()).await {
            Ok(Ok(FirstWords::Greeting(greeting))) => {
                let server = Self {
                    end: connection.duplicate().map_err(gone)?,
                    connection: Mutex::new(connection),
                    unanswered: AtomicU32::new(0),
                    hangs: Notify::new(),
                    _process: process,
                };
                Ok((server, *greeting))
            }
            Ok(Ok(FirstWords::Failed { failed })) => Err(ProcessorError::NotServed(failed)),
            Ok(Err(_)) => {
                for reader in [stdout, stderr].into_iter().flatten() {
                    let _ = timeout(LAST_WORDS, reader).await;
                }
                let text = last.text();
                let reason = text.lines().last().unwrap_or("it ended without a word").to_owned();
                Err(match text.contains("No module named") {
                    true => ProcessorError::NotServed(reason),
                    false => ProcessorError::Gone(reason),
                })
            }
            Err(_) => {
                let seconds = options.startup_timeout.as_secs();
                Err(ProcessorError::Gone(format!("it was not ready within {seconds} s")))
            }
        }
    }

    /// Forks another child. A fork that fails costs this call only.
    pub(crate) async fn fork(self: &Arc<Self>) -> Result<Child, ProcessorError> {
        let server = self.clone();
        // In a task: a fork that is not answered counts also if its caller gives up before.
        let forking = tokio::spawn(async move { server.forked_in_time().await });
        forking.await.unwrap_or_else(|error| Err(ProcessorError::Gone(error.to_string())))
    }

    async fn forked_in_time(self: &Arc<Self>) -> Result<Child, ProcessorError> {
        match timeout(FORK_PATIENCE, self.forked()).await {
            Ok(outcome) => {
                if outcome.is_ok() {
                    self.unanswered.store(0, Ordering::Relaxed);
                }
                outcome
            }
            Err(_) => {
                if self.unanswered.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_UNANSWERED {
                    self.hangs.notify_one();
                }
                Err(ProcessorError::Gone("a child does not begin".to_owned()))
            }
        }
    }

    async fn forked(self: &Arc<Self>) -> Result<Child, ProcessorError> {
        let gone = |error: io::Error| ProcessorError::Gone(error.to_string());
        let (ours, theirs) = Connection::pair().map_err(gone)?;
        let mut connection = self.connection.lock().await;
        connection.send(&json!({"fork": true}), Some(theirs.as_fd())).await.map_err(gone)?;
        drop(connection);
        // Else its end would not be noticed.
        drop(theirs);
        Child::greeted(self.clone(), ours).await
    }

    /// Returns `true` if the process has ended, or forks no children any more.
    pub(crate) fn is_lost(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) >= MAX_UNANSWERED || self.end.is_over_now()
    }

    /// Returns `true` if the process has ended, or ends within [`END_PATIENCE`]: its children die a
    /// moment before it does.
    pub(crate) async fn is_ending(&self) -> bool {
        timeout(END_PATIENCE, self.end.is_over()).await.is_ok()
    }

    /// Waits until the server is lost, and returns the reason. Its children finish their items.
    pub(crate) async fn lost(&self) -> &'static str {
        tokio::select! {
            () = self.end.is_over() => "it has ended",
            () = self.hangs.notified() => "it forks no children any more",
        }
    }
}
