//! Facts about this machine, gathered without judging them. Each step has a deadline.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use chiasm_pipeline::model::{NativeImages, ServedModel};
use tokio::process::Command;

use super::deadline::{CommandError, FILE_SYSTEM_TIMEOUT, run_command, with_deadline};
use super::environment::{self, Environment, UnknownEnvironment};
use crate::cli::DoctorArgs;
use crate::{open_files, vllm_command};

/// The deadline for `nvidia-smi`. Drivers take seconds to wake up.
const GPU_TIMEOUT: Duration = Duration::from_secs(20);
/// The deadline for reading the model. A large tokenizer on a network disk takes seconds.
const MODEL_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval over which the two clocks are compared.
const CLOCK_INTERVAL: Duration = Duration::from_millis(50);

/// The facts that the checks judge.
#[derive(Debug)]
pub(super) struct Facts {
    /// The facts about engines; `None` if no engine will run here.
    pub(super) engine_facts: Option<EngineFacts>,
    /// The limit of open files after raising it; `None` means unlimited.
    pub(super) open_files: Option<u64>,
    /// The address to listen on.
    pub(super) address: SocketAddr,
    /// The error of binding the address.
    pub(super) bind_error: Option<String>,
    pub(super) clock: Clock,
    pub(super) model: Option<ModelFact>,
}

/// The facts that only matter to engines.
#[derive(Debug)]
pub(super) struct EngineFacts {
    /// The number of engines that will run here.
    pub(super) engines: NonZeroU32,
    /// The maximum shared memory per engine, in bytes.
    pub(super) arena_bytes: u64,
    /// The free bytes of `/dev/shm`.
    pub(super) free_shm: Result<u64, UnknownShm>,
    /// The program that will be started.
    pub(super) vllm: PathBuf,
    /// The program's Python environment.
    pub(super) environment: Result<Environment, UnknownEnvironment>,
    /// The value of vLLM's variable `VLLM_PLUGINS`, which restricts the plugins that it loads.
    pub(super) vllm_plugins: Option<String>,
    /// A description per GPU.
    pub(super) gpus: Result<Vec<String>, CommandError>,
}

/// The reason why the free shared memory is unknown.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnknownShm {
    #[error("it does not answer")]
    Hangs,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The state of the clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clock {
    /// The time of day, since 1970.
    pub(super) now: Duration,
    /// The deviation of the time of day from the monotonic clock over [`CLOCK_INTERVAL`].
    pub(super) jump: Duration,
}

/// The argument MODEL, and what it refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelFact {
    pub(super) name: String,
    pub(super) found: FoundModel,
}

/// The kind of thing that MODEL refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FoundModel {
    /// A directory that `serve` can load. `native_images` is set if Chiasm processes its images.
    Readable { native_images: bool },
    /// A directory that can't be loaded; the error as text.
    Unreadable(String),
    /// Not a path here, but a valid id of a model on the hub.
    HubId,
    /// Neither a path nor an id.
    Invalid,
    /// Unknown, as the file system did not answer.
    Hangs,
}

impl Facts {
    /// Gathers the facts that matter with these flags.
    pub(super) async fn gather(args: &DoctorArgs) -> Self {
        let address = SocketAddr::new(args.host, args.port);
        let engines = u32::try_from(args.engines.total()).unwrap_or(u32::MAX);
        let engine_facts = match NonZeroU32::new(engines) {
            Some(engines) => Some(EngineFacts::gather(args, engines).await),
            None => None,
        };
        Self {
            engine_facts,
            open_files: open_files::raise_limit(),
            address,
            bind_error: TcpListener::bind(address).err().map(|error| error.to_string()),
            clock: clock(),
            model: args.model.clone().map(model),
        }
    }
}

impl EngineFacts {
    async fn gather(args: &DoctorArgs, engines: NonZeroU32) -> Self {
        let vllm = vllm_command::locate(&args.vllm);
        let (environment, gpus) = tokio::join!(environment::inspect(&vllm), gpus());
        let shm = with_deadline(FILE_SYSTEM_TIMEOUT, chiasm_transfer::free_shm_bytes);
        Self {
            engines,
            arena_bytes: (args.mm_arena_gb * (1_u64 << 30) as f64) as u64,
            free_shm: shm.ok_or(UnknownShm::Hangs).and_then(|shm| Ok(shm?)),
            vllm,
            environment,
            vllm_plugins: std::env::var("VLLM_PLUGINS").ok(),
            gpus,
        }
    }
}

async fn gpus() -> Result<Vec<String>, CommandError> {
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=name,memory.total", "--format=csv,noheader"]);
    let output = run_command(command, GPU_TIMEOUT).await?;
    Ok(output.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect())
}

fn clock() -> Clock {
    let wall_start = SystemTime::now();
    let monotonic_start = Instant::now();
    std::thread::sleep(CLOCK_INTERVAL);
    let elapsed = monotonic_start.elapsed();
    let jump = match wall_start.elapsed() {
        Ok(wall_elapsed) => wall_elapsed.abs_diff(elapsed),
        // The time of day went back.
        Err(error) => error.duration() + elapsed,
    };
    Clock { now: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(), jump }
}

fn model(path: PathBuf) -> ModelFact {
    let name = path.display().to_string();
    let found = with_deadline(MODEL_TIMEOUT, move || {
        if path.exists() {
            let loaded = ServedModel::load_with(&path, "model", None, NativeImages::WhereSupported);
            return match loaded {
                Ok(model) => FoundModel::Readable { native_images: model.vision.is_some() },
                Err(error) => FoundModel::Unreadable(error.to_string()),
            };
        }
        let is_id = path.to_str().is_some_and(|id| id.parse::<chiasm_hub::RepoId>().is_ok());
        if is_id { FoundModel::HubId } else { FoundModel::Invalid }
    });
    ModelFact { name, found: found.unwrap_or(FoundModel::Hangs) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_is_directory_or_hub_id_or_invalid() {
        let found = |path: &str| model(path.into()).found;
        assert_eq!(found("Qwen/Qwen2.5-VL-7B-Instruct"), FoundModel::HubId);
        assert_eq!(found("/no/such/folder"), FoundModel::Invalid);
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(found(empty.path().to_str().unwrap()), FoundModel::Unreadable(_)));
    }
}
