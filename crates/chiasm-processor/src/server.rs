//! The fork server: the process that has vLLM's imports and the model's processor.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::time::Duration;

use serde_json::json;
use tokio::process::{Child as Process, Command};
use tokio::time::timeout;

use crate::child::Child;
use crate::connection::Connection;
use crate::message::{FirstWords, Greeting};
use crate::output::{self, LastLines};
use crate::{ProcessorError, ProcessorOptions, Sandbox, python};

/// Time for a fork, on a machine that is busy. It takes some tens of milliseconds.
const FORK_PATIENCE: Duration = Duration::from_secs(30);

/// How long what a process printed last may take to be read.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A running fork server. Dropping it kills it, and its children go with it.
pub(crate) struct Server {
    connection: Connection,
    /// Killed on drop.
    _process: Process,
}

impl Server {
    /// Starts one and waits until it knows what its model's processor is.
    pub(crate) async fn start(options: &ProcessorOptions) -> Result<(Self, Greeting), ProcessorError> {
        let gone = |error: std::io::Error| ProcessorError::Gone(error.to_string());
        // Read once: children have the modules of the server.
        let sources = python::unpack().map_err(gone)?;
        let (mut connection, theirs) = Connection::pair().map_err(gone)?;
        let limits = &options.limits;
        let mut command = Command::new(&options.python);
        command
            // Without files of compiled modules.
            .args(["-B", "-m", python::PACKAGE, "--sandbox", options.sandbox.name()])
            .args(["--address-space", &options.address_space.to_string()])
            .args(["--video-seconds", &limits.video_duration.as_secs_f64().to_string()])
            .args(["--video-pixels", &limits.video_pixels.to_string()])
            .args(["--audio-seconds", &limits.audio_duration.as_secs_f64().to_string(), "--", "--model"])
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
        let mut process = command
            .spawn()
            .map_err(|error| ProcessorError::NoPython { command: options.python.clone(), reason: error.to_string() })?;
        // It holds the other end of the connection, whose closing tells of the server's end.
        drop(command);
        let last = LastLines::default();
        let stdout = process.stdout.take().map(|output| tokio::spawn(output::follow(output, last.clone())));
        let stderr = process.stderr.take().map(|output| tokio::spawn(output::follow(output, last.clone())));
        match timeout(options.startup_timeout, connection.receive::<FirstWords>()).await {
            Ok(Ok(FirstWords::Greeting(greeting))) => Ok((Self { connection, _process: process }, *greeting)),
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

    /// Another child.
    pub(crate) async fn fork(&mut self) -> Result<Child, ProcessorError> {
        let gone = |error: std::io::Error| ProcessorError::Gone(error.to_string());
        let (ours, theirs) = Connection::pair().map_err(gone)?;
        self.connection.send(&json!({"fork": true}), Some(theirs.as_fd())).await.map_err(gone)?;
        // Else its end would not be noticed.
        drop(theirs);
        Child::greeted(ours, FORK_PATIENCE).await
    }
}

impl Sandbox {
    /// The name on command lines.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Auto => "auto",
            Self::Require => "require",
        }
    }
}
