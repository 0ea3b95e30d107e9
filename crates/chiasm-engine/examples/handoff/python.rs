//! Child processes that run Python. They end with their handles, and when this process does.

use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::Failure;

/// Importing vLLM takes half a minute of a core's time, and two processes do it at once.
pub(crate) const START: Duration = Duration::from_secs(240);

/// Paths of what a script needs to run.
pub(crate) struct Scripts {
    /// The interpreter.
    pub(crate) python: PathBuf,
    /// The folder of the scripts.
    pub(crate) folder: PathBuf,
    /// The folder that has the package `chiasm_vllm`.
    pub(crate) plugin: PathBuf,
}

/// A script that runs.
pub(crate) struct Script {
    name: &'static str,
    child: Child,
    /// Closing it ends the script.
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Scripts {
    pub(crate) fn start(&self, name: &'static str, arguments: &[&str]) -> Result<Script, Failure> {
        let mut command = Command::new(&self.python);
        // -s: packages of the user are not those of the environment. -B: leaves no __pycache__.
        command.args(["-s", "-B"]).arg(self.folder.join(name)).args(arguments);
        command
            .env("PYTHONPATH", &self.plugin)
            .env("VLLM_LOGGING_LEVEL", "WARNING")
            .env("OMP_NUM_THREADS", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command
            .spawn()
            .map_err(|error| format!("could not start {}: {error}", self.python.display()))?;
        let (orders, answers) =
            child.stdin.take().zip(child.stdout.take()).ok_or("a pipe is missing")?;
        Ok(Script { name, child, orders, answers: BufReader::new(answers).lines() })
    }
}

impl Script {
    /// Its next line.
    pub(crate) async fn answer(&mut self, patience: Duration) -> Result<Value, Failure> {
        let name = self.name;
        match timeout(patience, self.answers.next_line()).await {
            Err(_) => Err(format!("{name} has not answered for {patience:?}").into()),
            Ok(Ok(Some(line))) => Ok(serde_json::from_str(&line)?),
            Ok(Ok(None)) => Err(format!("{name} has ended: it says above why").into()),
            Ok(Err(error)) => Err(format!("reading from {name} failed: {error}").into()),
        }
    }

    pub(crate) async fn ask(
        &mut self,
        order: &Value,
        patience: Duration,
    ) -> Result<Value, Failure> {
        let line = format!("{order}\n");
        let written = self.orders.write_all(line.as_bytes()).await;
        written.map_err(|error| format!("{} has ended: {error}", self.name))?;
        self.answer(patience).await
    }

    pub(crate) async fn exited(&mut self) -> std::io::Result<ExitStatus> {
        self.child.wait().await
    }
}
