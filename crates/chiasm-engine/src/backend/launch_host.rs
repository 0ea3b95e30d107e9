//! vLLM engines that this process launches and ends.

use std::env;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Activity, ConnectError};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, ready};

use super::embedding_store::EmbeddingStore;
use super::host::{EngineHost, KeptAs, RunningEngine};
use super::kv_connector::{KvConnector, NET_DEVICES};
use crate::launch::{EngineProcess, Keep, KvEventEndpoints, LastLines, LaunchSpec, free_ports};
use crate::state::Launched;
use crate::{EngineEndpoints, SocketDir};

/// How long an engine that is asked to end may take before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(15);

/// The file in a folder of sockets that an engine prints to which outlives this process.
const OUTPUT: &str = "output";

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
    /// Which stages of requests the engine computes.
    pub role: Role,
    /// How it hands keys and values to others, if its role has it do so.
    pub kv_connector: KvConnector,
    /// How it hands embeddings to others, or gets them; `None` if none of its machine does that.
    pub embeddings: Option<Arc<EmbeddingStore>>,
    /// This machine's address on a private network, where engines of other machines find it with a
    /// prompt that it has left; `None` for a loopback address.
    pub side_channel: Option<IpAddr>,
    /// How long an engine outlives this process and waits for another frontend; `None` for engines
    /// that end with it.
    pub keep: Option<Duration>,
}

impl LaunchHost {
    /// A name that engines have which were launched by the same command, wherever they listen.
    fn command_name(&self) -> String {
        let Self { vllm, model, extra_args, gpus, receiver_cache_gb, .. } = self;
        // Without one nothing is added, so that a new Chiasm takes over the engines of an older
        // one.
        let found_at = self.side_channel.map(|address| format!(" {address}")).unwrap_or_default();
        let kv_transfer = self.kv_connector.config(self.role);
        let model = model.canonicalize().unwrap_or_else(|_| model.clone());
        let command = format!(
            "{vllm:?} {model:?} {extra_args:?} {gpus:?} {receiver_cache_gb} {kv_transfer:?}{found_at}"
        );
        let digest = blake3::hash(command.as_bytes()).to_hex();
        let model = model.file_name().unwrap_or_default().to_string_lossy();
        format!("{model}-{}", &digest[..8])
    }

    fn keep(&self, sockets: &SocketDir) -> Option<Keep> {
        Some(Keep { time: self.keep?, output: sockets.path().join(OUTPUT) })
    }

    fn spec(&self, name: &str, handshake: &str) -> LaunchSpec {
        LaunchSpec {
            receiver_cache_gb: self.receiver_cache_gb,
            kv_transfer: self.kv_connector.config(self.role),
            ec_transfer: self.embeddings.as_ref().map(|store| store.config(self.role)),
            extra_args: self.extra_args.clone(),
            gpus: self.gpus.clone(),
            ..LaunchSpec::new(name, &self.vllm, &self.model, handshake)
        }
    }

    /// Refuses flags that are Chiasm's to set and a program that is not there, before anything is
    /// started.
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
    env::var_os("PATH")
        .is_some_and(|path| env::split_paths(&path).any(|folder| folder.join(program).is_file()))
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
            keep: self.keep(sockets),
            ..self.spec(&worker.to_string(), &endpoints.handshake)
        };
        let devices_are_said = env::var_os(NET_DEVICES).is_some();
        let with_ports = || match spec.kv_transfer.is_some() {
            true => Ok(LaunchSpec {
                env: self.kv_connector.env(
                    self.side_channel,
                    free_ports::<1>()?[0],
                    devices_are_said,
                ),
                ..spec
            }),
            false => Ok(spec),
        };
        let launched =
            with_ports().and_then(|spec| spec.launch()).map_err(ConnectError::new).map(|process| {
                tracing::info!(%worker, process_group = process.pid(), "engine process started");
                Box::new(Process(process)) as Box<dyn RunningEngine>
            });
        ready(launched).boxed()
    }

    fn kept_as(&self) -> Option<KeptAs> {
        self.keep.map(|_| KeptAs::AnyOf(self.command_name()))
    }

    fn take_over(
        &self,
        worker: WorkerId,
        launched: Launched,
        sockets: &SocketDir,
    ) -> Result<Option<Box<dyn RunningEngine>>, ConnectError> {
        let Some(keep) = self.keep(sockets) else { return Ok(None) };
        let process = EngineProcess::take_over(&worker.to_string(), launched, &keep)
            .map_err(ConnectError::new)?;
        Ok(process.map(|process| {
            tracing::info!(%worker, process_group = process.pid(), "engine process of a former frontend");
            Box::new(Process(process)) as Box<dyn RunningEngine>
        }))
    }

    fn describe(&self) -> String {
        format!("starting {} for {}", self.vllm.display(), self.model.display())
    }
}

struct Process(EngineProcess);

impl RunningEngine for Process {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            let report = self.0.exited().await;
            let first = report.last_lines.len().saturating_sub(LAST_LINES);
            let last_lines: String = match &report.last_lines[first..] {
                [] => " none".to_owned(),
                lines => lines.iter().map(|line| format!("\n    {line}")).collect(),
            };
            let advice = report
                .advice
                .map_or_else(String::new, |advice| format!("\n  what helps: {advice}"));
            format!("its process ended ({report}); its last words:{last_lines}{advice}")
        }
        .boxed()
    }

    fn activity(&self) -> BoxFuture<'_, Option<Activity>> {
        self.0.activity().boxed()
    }

    fn log(&self) -> Option<LastLines> {
        Some(self.0.log())
    }

    fn stop(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.0.terminate(STOP_GRACE).map(drop).boxed()
    }

    fn outlives(&self) -> Option<Launched> {
        self.0.outlives()
    }

    fn leave(self: Box<Self>) -> BoxFuture<'static, ()> {
        if self.0.outlives().is_none() {
            return self.stop();
        }
        self.0.leave();
        ready(()).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_alike_that_the_same_command_has_launched() {
        let host = |model: &str, port, extra: &[&str]| LaunchHost {
            vllm: "vllm".into(),
            model: model.into(),
            extra_args: extra.iter().map(|&arg| arg.to_owned()).collect(),
            gpus: None,
            receiver_cache_gb: 4.0,
            handshake_port: port,
            role: Role::Aggregated,
            kv_connector: KvConnector::Nixl,
            embeddings: None,
            side_channel: None,
            keep: Some(Duration::from_secs(1)),
        };
        let name = |host: LaunchHost| match host.kept_as() {
            Some(KeptAs::AnyOf(name)) => name,
            other => panic!("{other:?}"),
        };
        let one = name(host("/models/a", 0, &["--dtype", "half"]));
        assert!(one.starts_with("a-"));
        assert_eq!(name(host("/models/a", 7, &["--dtype", "half"])), one);
        assert_ne!(name(host("/models/a", 0, &["--dtype", "float"])), one);
        assert_ne!(name(host("/other/a", 0, &["--dtype", "half"])), one);
        let elsewhere = LaunchHost {
            side_channel: Some([10, 0, 0, 7].into()),
            ..host("/models/a", 0, &["--dtype", "half"])
        };
        assert_ne!(name(elsewhere), one);
        assert_eq!(LaunchHost { keep: None, ..host("/models/a", 0, &[]) }.kept_as(), None);
    }

    #[test]
    fn a_program_is_found_by_path_and_by_name() {
        assert!(is_program(Path::new("/bin/sh")) && is_program(Path::new("sh")));
        assert!(
            !is_program(Path::new("/bin/no-such-program"))
                && !is_program(Path::new("no-such-program"))
        );
    }
}
