//! vLLM engines that this process launches and ends.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use chiasm_backend::{Activity, ConnectError};
use chiasm_types::WorkerId;
use futures_util::future::{BoxFuture, FutureExt, ready};

use super::host::{EngineHost, RunningEngine};
use crate::launch::{EngineProcess, KvEventEndpoints, LaunchSpec};
use crate::{EngineEndpoints, SocketDir};

/// How long an engine that is asked to end may take before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(15);

/// Lines of a dead engine's output that are told with its end.
const LAST_LINES: usize = 8;

/// Launches the engines of one worker.
#[derive(Clone, Debug)]
pub struct LaunchHost {
    /// The program `vllm`.
    pub vllm: PathBuf,
    /// The model's directory.
    pub model: PathBuf,
    /// Flags of the user, for vLLM.
    pub extra_args: Vec<String>,
    /// The GPUs that the engine may see; `None` for whatever this process sees.
    pub gpus: Option<Vec<u32>>,
    /// Capacity of its receiver cache in GiB.
    pub receiver_cache_gb: f64,
    /// The loopback port where it says hello; 0 for a free one at each start.
    pub handshake_port: u16,
}

impl LaunchHost {
    fn spec(&self, name: &str, handshake: &str) -> LaunchSpec {
        LaunchSpec {
            receiver_cache_gb: self.receiver_cache_gb,
            extra_args: self.extra_args.clone(),
            gpus: self.gpus.clone(),
            ..LaunchSpec::new(name, &self.vllm, &self.model, handshake)
        }
    }

    /// Refuses flags that are Chiasm's to set and a program that is not there, before anything is started.
    pub fn check(&self) -> Result<(), ConnectError> {
        if !is_program(&self.vllm) {
            let vllm = self.vllm.display();
            return Err(ConnectError::new(format!(
                "there is no program {vllm}; give it with --vllm PATH, or use --sim N"
            )));
        }
        self.spec("", "tcp://127.0.0.1:1").arguments().map(drop).map_err(ConnectError::new)
    }
}

/// Whether a program is there: at its path, or for a bare name in a folder of the PATH.
fn is_program(program: &Path) -> bool {
    if program.components().count() > 1 {
        return program.is_file();
    }
    env::var_os("PATH").is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
}

impl EngineHost for LaunchHost {
    fn endpoints(&self, sockets: &SocketDir) -> EngineEndpoints {
        EngineEndpoints::local(&format!("tcp://127.0.0.1:{}", self.handshake_port), sockets)
    }

    fn start<'a>(
        &'a self,
        worker: WorkerId,
        endpoints: &'a EngineEndpoints,
        sockets: &'a SocketDir,
    ) -> BoxFuture<'a, Result<Box<dyn RunningEngine>, ConnectError>> {
        let spec = LaunchSpec {
            kv_events: Some(KvEventEndpoints::ipc(sockets)),
            ..self.spec(&worker.to_string(), &endpoints.handshake)
        };
        let launched = spec.launch().map_err(ConnectError::new).map(|process| {
            tracing::info!(%worker, process_group = process.pid(), "engine process started");
            Box::new(Launched(process)) as Box<dyn RunningEngine>
        });
        ready(launched).boxed()
    }

    fn describe(&self) -> String {
        format!("starting {} for {}", self.vllm.display(), self.model.display())
    }
}

struct Launched(EngineProcess);

impl RunningEngine for Launched {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            let report = self.0.exited().await;
            let first = report.last_lines.len().saturating_sub(LAST_LINES);
            let last_lines: String = report.last_lines[first..].iter().map(|line| format!("\n    {line}")).collect();
            format!("its process ended ({report}); its last words:{last_lines}")
        }
        .boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        self.0.activity().boxed()
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.0.terminate(STOP_GRACE).map(drop).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_by_path_and_by_name() {
        assert!(is_program(Path::new("/bin/sh")) && is_program(Path::new("sh")));
        assert!(!is_program(Path::new("/bin/no-such-program")) && !is_program(Path::new("no-such-program")));
    }
}
