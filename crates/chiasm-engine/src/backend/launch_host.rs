//! A host that launches vLLM engines as child processes.

use std::env;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use chiasm_backend::{Activity, ConnectError};
use chiasm_types::{Role, WorkerId};
use futures_util::future::{BoxFuture, FutureExt, ready};

use super::embedding_store::EmbeddingStore;
use super::host::{EngineHost, RecordName, RunningEngine};
use super::kv_connector::{KvConnector, NET_DEVICES_VARIABLE};
use crate::launch::{
    EngineProcess, GroupPlace, Keep, KvEventEndpoints, LastLines, LaunchSpec, free_ports,
};
use crate::state::Launched;
use crate::{EngineEndpoints, SocketDir};

/// The grace period of an engine that is stopped, after which it is killed.
const STOP_GRACE: Duration = Duration::from_secs(15);

/// The output file, in the folder of sockets, of an engine that outlives this process.
const OUTPUT_FILE: &str = "output";

/// The number of last lines that are reported with an engine's end.
const MAX_REPORTED_LINES: usize = 8;

/// A host that launches the engines of one worker.
#[derive(Clone, Debug)]
pub struct LaunchHost {
    /// The program `vllm`.
    pub vllm: PathBuf,
    /// The model's directory.
    pub model: PathBuf,
    /// The user's flags for vLLM.
    pub extra_args: Vec<String>,
    /// The visible GPUs, as numbers or UUIDs; `None` for those of this process.
    pub gpus: Option<Vec<String>>,
    /// The capacity of the receiver cache in GiB.
    pub receiver_cache_gb: f64,
    /// The loopback port for the handshake; 0 for a free port at each start.
    pub handshake_port: u16,
    /// The role, which decides the stages of requests that the engine computes.
    pub role: Role,
    /// The connector through which engines with a role exchange keys and values.
    pub kv_connector: KvConnector,
    /// The store through which engines of this machine exchange embeddings, if any.
    pub embeddings: Option<Arc<EmbeddingStore>>,
    /// This machine's address on a private network, from which engines of other machines get keys
    /// and values; `None` for a loopback address.
    pub side_channel: Option<IpAddr>,
    /// The engine's place in a group of engines; `None` for an engine on its own.
    pub place: Option<GroupPlace>,
    /// The time that an engine outlives this process and waits to be taken over; `None` for engines
    /// that end with it.
    pub keep: Option<Duration>,
}

impl LaunchHost {
    /// Returns the common name of all engines that the same command launches. The handshake port is
    /// not part of it.
    fn command_name(&self) -> String {
        let Self { vllm, model, extra_args, gpus, receiver_cache_gb, .. } = self;
        // Without an address the name is that of older versions of Chiasm, whose engines can then
        // be taken over.
        let address = self.side_channel.map(|address| format!(" {address}")).unwrap_or_default();
        let kv_transfer = self.kv_connector.config(self.role);
        let model = model.canonicalize().unwrap_or_else(|_| model.clone());
        let command = format!(
            "{vllm:?} {model:?} {extra_args:?} {gpus:?} {receiver_cache_gb} \
             {kv_transfer:?}{address}"
        );
        let digest = blake3::hash(command.as_bytes()).to_hex();
        let model = model.file_name().unwrap_or_default().to_string_lossy();
        format!("{model}-{}", &digest[..8])
    }

    fn keep(&self, sockets: &SocketDir) -> Option<Keep> {
        Some(Keep { time: self.keep?, output: sockets.path().join(OUTPUT_FILE) })
    }

    fn spec(&self, name: &str, handshake: &str) -> LaunchSpec {
        LaunchSpec {
            receiver_cache_gb: self.receiver_cache_gb,
            kv_transfer: self.kv_connector.config(self.role),
            ec_transfer: self.embeddings.as_ref().map(|store| store.config(self.role)),
            extra_args: self.extra_args.clone(),
            gpus: self.gpus.clone(),
            place: self.place,
            ..LaunchSpec::new(name, &self.vllm, &self.model, handshake)
        }
    }

    /// Checks the host before it starts an engine.
    ///
    /// # Errors
    /// The program is missing, or a flag of the user is Chiasm's to set.
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

/// Returns `true` if a program exists: at its path or, for a bare name, in a folder of `PATH`.
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
            kv_events: Some(match self.place {
                None => KvEventEndpoints::ipc(sockets),
                Some(_) => KvEventEndpoints::ipc_in_group(sockets),
            }),
            keep: self.keep(sockets),
            ..self.spec(&worker.to_string(), &endpoints.handshake)
        };
        let devices_are_set = env::var_os(NET_DEVICES_VARIABLE).is_some();
        let with_env = || {
            if spec.kv_transfer.is_none() {
                return Ok(spec);
            }
            let [port] = free_ports::<1>()?;
            let env = self.kv_connector.env(self.side_channel, port, devices_are_set);
            Ok(LaunchSpec { env, ..spec })
        };
        let launched =
            with_env().and_then(|spec| spec.launch()).map_err(ConnectError::new).map(|process| {
                tracing::info!(%worker, process_group = process.pid(), "engine process started");
                Box::new(LaunchedEngine(process)) as Box<dyn RunningEngine>
            });
        ready(launched).boxed()
    }

    fn record_name(&self) -> Option<RecordName> {
        self.keep.map(|_| RecordName::Numbered(self.command_name()))
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
            tracing::info!(
                %worker,
                process_group = process.pid(),
                "taking over the engine process of an earlier frontend"
            );
            Box::new(LaunchedEngine(process)) as Box<dyn RunningEngine>
        }))
    }

    fn describe(&self) -> String {
        format!("starting {} for {}", self.vllm.display(), self.model.display())
    }
}

struct LaunchedEngine(EngineProcess);

impl RunningEngine for LaunchedEngine {
    fn exited(&mut self) -> BoxFuture<'_, String> {
        async {
            let report = self.0.exited().await;
            let first = report.last_lines.len().saturating_sub(MAX_REPORTED_LINES);
            let last_lines: String = match &report.last_lines[first..] {
                [] => " none".to_owned(),
                lines => lines.iter().map(|line| format!("\n    {line}")).collect(),
            };
            let advice = report
                .advice
                .map_or_else(String::new, |advice| format!("\n  what helps: {advice}"));
            format!("its process ended ({report})\n  its last lines:{last_lines}{advice}")
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

    fn kill(self: Box<Self>) -> BoxFuture<'static, ()> {
        self.0.kill().map(drop).boxed()
    }

    fn surviving_processes(&self) -> Option<Launched> {
        self.0.surviving_processes()
    }

    fn detach(self: Box<Self>) -> BoxFuture<'static, ()> {
        if self.0.surviving_processes().is_none() {
            return self.stop();
        }
        self.0.detach();
        ready(()).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_name_depends_on_command_only() {
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
            place: None,
            keep: Some(Duration::from_secs(1)),
        };
        let name = |host: LaunchHost| match host.record_name() {
            Some(RecordName::Numbered(name)) => name,
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
        assert_eq!(LaunchHost { keep: None, ..host("/models/a", 0, &[]) }.record_name(), None);
    }

    #[test]
    fn program_is_found_by_path_or_name() {
        assert!(is_program(Path::new("/bin/sh")) && is_program(Path::new("sh")));
        assert!(
            !is_program(Path::new("/bin/no-such-program"))
                && !is_program(Path::new("no-such-program"))
        );
    }
}
