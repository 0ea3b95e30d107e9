//! What is so on this machine. Nothing here judges, and nothing waits for ever.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use chiasm_pipeline::model::{NativeImages, ServedModel};
use tokio::process::Command;

use super::deadline::{DISK_TIME, NoAnswer, looked, printed};
use super::environment::{self, Environment, UnknownEnvironment};
use crate::cli::DoctorArgs;
use crate::{open_files, vllm_command};

/// Drivers take seconds to wake up.
const GPU_TIME: Duration = Duration::from_secs(20);
/// Reading a large tokenizer from a network takes seconds.
const MODEL_TIME: Duration = Duration::from_secs(30);
/// How long the two clocks are compared.
const CLOCK_TIME: Duration = Duration::from_millis(50);

/// All that is looked at.
#[derive(Debug)]
pub(super) struct Facts {
    /// What engines need; none if no engine is to run here.
    pub(super) of_engines: Option<EngineFacts>,
    /// The most files that a process may have open that asks for many; `None` for any number.
    pub(super) open_files: Option<u64>,
    pub(super) address: SocketAddr,
    /// Why nothing can listen there.
    pub(super) refused: Option<String>,
    pub(super) clock: Clock,
    pub(super) model: Option<ModelFact>,
}

/// What matters to engines alone.
#[derive(Debug)]
pub(super) struct EngineFacts {
    /// Engines that are to run here.
    pub(super) engines: NonZeroU32,
    /// Bytes of shared memory that each may take.
    pub(super) arena_bytes: u64,
    /// Bytes that are free in `/dev/shm`, or why that is not known.
    pub(super) free_shm: Result<u64, UnknownShm>,
    /// The program, as it will be started.
    pub(super) vllm: PathBuf,
    /// What is in its environment, or why that is not known.
    pub(super) environment: Result<Environment, UnknownEnvironment>,
    /// The plugins that vLLM is to load alone, by its variable `VLLM_PLUGINS`.
    pub(super) vllm_plugins: Option<String>,
    /// A line per GPU.
    pub(super) gpus: Result<Vec<String>, NoAnswer>,
}

/// The shared memory can't be looked at.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnknownShm {
    #[error("it does not answer")]
    Hangs,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// What the clocks say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clock {
    /// Time since 1970.
    pub(super) now: Duration,
    /// How far the time of day and the time that passed have come apart while both were looked at.
    pub(super) jump: Duration,
}

/// MODEL as given, and what there is under that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ModelFact {
    pub(super) name: String,
    pub(super) found: FoundModel,
}

/// What MODEL is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FoundModel {
    /// A directory that could be read as `serve` does; whether Chiasm makes its images.
    Readable { native_images: bool },
    /// A directory that could not.
    Unreadable(String),
    /// No path here, but an id that the hub may know.
    OfTheHub,
    /// Neither.
    Nothing,
    /// The file system did not answer.
    Hangs,
}

impl Facts {
    /// Looks at everything that these flags make matter.
    pub(super) async fn gather(args: &DoctorArgs) -> Self {
        let address = SocketAddr::new(args.host, args.port);
        let of_engines =
            match NonZeroU32::new(u32::try_from(args.engines.total()).unwrap_or(u32::MAX)) {
                Some(engines) => Some(EngineFacts::gather(args, engines).await),
                None => None,
            };
        Self {
            of_engines,
            open_files: open_files::raise(),
            address,
            refused: TcpListener::bind(address).err().map(|error| error.to_string()),
            clock: clock(),
            model: args.model.clone().map(model),
        }
    }
}

impl EngineFacts {
    async fn gather(args: &DoctorArgs, engines: NonZeroU32) -> Self {
        let vllm = vllm_command::locate(&args.vllm);
        let (environment, gpus) = tokio::join!(environment::ask(&vllm), gpus());
        let shm = looked(DISK_TIME, chiasm_transfer::free_shm_bytes);
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

async fn gpus() -> Result<Vec<String>, NoAnswer> {
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=name,memory.total", "--format=csv,noheader"]);
    let printed = printed(command, GPU_TIME).await?;
    Ok(printed.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect())
}

fn clock() -> Clock {
    let (wall, steady) = (SystemTime::now(), Instant::now());
    std::thread::sleep(CLOCK_TIME);
    let passed = steady.elapsed();
    let jump = match wall.elapsed() {
        Ok(told) => told.abs_diff(passed),
        // It went back.
        Err(error) => error.duration() + passed,
    };
    Clock { now: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(), jump }
}

fn model(path: PathBuf) -> ModelFact {
    let name = path.display().to_string();
    let found = looked(MODEL_TIME, move || {
        if path.exists() {
            let loaded = ServedModel::load_with(&path, "model", None, NativeImages::WhereSupported);
            return match loaded {
                Ok(model) => FoundModel::Readable { native_images: model.vision.is_some() },
                Err(error) => FoundModel::Unreadable(error.to_string()),
            };
        }
        let is_id = path.to_str().is_some_and(|id| id.parse::<chiasm_hub::RepoId>().is_ok());
        if is_id { FoundModel::OfTheHub } else { FoundModel::Nothing }
    });
    ModelFact { name, found: found.unwrap_or(FoundModel::Hangs) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_a_directory_or_an_id_or_nothing() {
        let found = |path: &str| model(path.into()).found;
        assert_eq!(found("Qwen/Qwen2.5-VL-7B-Instruct"), FoundModel::OfTheHub);
        assert_eq!(found("/no/such/folder"), FoundModel::Nothing);
        let empty = tempfile::tempdir().unwrap();
        assert!(matches!(found(empty.path().to_str().unwrap()), FoundModel::Unreadable(_)));
    }
}
