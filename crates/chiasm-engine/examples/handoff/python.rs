//! Child processes that run Python. They end when their handles are dropped, and with this process.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::Failure;

/// The timeout for starting a script. Importing vLLM takes half a minute of CPU time, and two
/// processes do it at the same time.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(240);

/// The paths for running scripts.
pub(crate) struct Scripts {
    /// The interpreter.
    pub(crate) python: PathBuf,
    /// The folder of the scripts.
    pub(crate) folder: PathBuf,
    /// The folder of the package `chiasm_vllm`.
    pub(crate) plugin: PathBuf,
}

/// A running script.
pub(crate) struct Script {
    name: &'static str,
    child: Child,
    /// The script's standard input. Closing it ends the script.
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Scripts {
    pub(crate) fn start(&self, name: &'static str, arguments: &[&str]) -> Result<Script, Failure> {
        let mut command = Command::new(&self.python);
        // -s: without packages of the user. -B: without __pycache__.
        command.args(["-s", "-B"]).arg(self.folder.join(name)).args(arguments);
        command
            .env("PYTHONPATH", &self.plugin)
            .env("VLLM_LOGGING_LEVEL", "WARNING")
            .env("OMP_NUM_THREADS", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command
            .spawn()
            .map_err(|error| format!("could not start {}: {error}", self.python.display()))?;
        let (requests, answers) =
            child.stdin.take().zip(child.stdout.take()).ok_or("a pipe is missing")?;
        Ok(Script { name, child, requests, answers: BufReader::new(answers).lines() })
    }
}

impl Script {
    /// Reads the next answer, a line of JSON.
    pub(crate) async fn answer(&mut self, limit: Duration) -> Result<Value, Failure> {
        let name = self.name;
        match timeout(limit, self.answers.next_line()).await {
            Err(_) => Err(format!("{name} has not answered for {limit:?}").into()),
            Ok(Ok(Some(line))) => Ok(serde_json::from_str(&line)?),
            Ok(Ok(None)) => Err(format!("{name} has ended, see its output above").into()),
            Ok(Err(error)) => Err(format!("reading from {name} failed: {error}").into()),
        }
    }

    /// Sends a request and reads its answer.
    pub(crate) async fn request(
        &mut self,
        request: &Value,
        limit: Duration,
    ) -> Result<Value, Failure> {
        let line = format!("{request}\n");
        let written = self.requests.write_all(line.as_bytes()).await;
        written.map_err(|error| format!("{} has ended: {error}", self.name))?;
        self.answer(limit).await
    }

    pub(crate) async fn exited(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait().await
    }
}
