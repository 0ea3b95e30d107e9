//! The errors of developer commands. Each text says what to do.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use crate::structure::StructureError;

/// The reason why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("there is no command `{name}`, see `cargo xtask help`")]
    UnknownCommand { name: String },

    #[error("`{command}` does not take `{flag}`, see `cargo xtask help`")]
    UnknownFlag { command: String, flag: String },

    #[error("there is no step `{name}`; there are {known}")]
    UnknownStep { name: String, known: String },

    #[error("vLLM differs from its manifest; the report is in the output above")]
    Drifted,

    #[error("there is no bench `{name}`, see `cargo xtask help`")]
    UnknownBench { name: String },

    #[error(
        "`--rounds` takes a number of at least {min}, not `{found}`: fewer rounds prove nothing"
    )]
    Rounds { found: String, min: u32 },

    #[error("`--engines` takes a number of at least 1, not `{found}`")]
    Engines { found: String },

    #[error("`--vllm` takes one of {known}, not `{name}`")]
    UnknownVersion { name: String, known: String },

    #[error("`--sglang` takes one of {known}, not `{name}`")]
    UnknownSglang { name: String, known: String },

    #[error("`vllm-drift` takes a full release number such as 0.33.0, not `{found}`")]
    Release { found: String },

    #[error(
        "python/vllm_drift/manifests has no manifest of vLLM {version} or an older version; \
         write one with --write"
    )]
    NoManifest { version: String },

    #[error("`{flag}` takes a number")]
    Number { flag: &'static str },

    #[error("`--baseline` takes the path of a `chiasm` of another commit")]
    NoBaseline,

    #[error("neither XDG_CACHE_HOME nor HOME is an absolute path; set one for the cache")]
    NoCacheDir,

    #[error("{path} is missing, is this a full checkout?", path = .path.display())]
    MissingFile { path: PathBuf },

    #[error("could not {action} {path}: {source}", path = .path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    #[error("could not start {program}: {source}")]
    Spawn { program: String, source: io::Error },

    #[error("{what} failed with {status}{log}")]
    Failed {
        what: String,
        status: ExitStatus,
        /// The end of the log or of the standard error, with a separator in front; may be empty.
        log: String,
    },

    #[error("{what} printed something unexpected: {printed:?}")]
    Unreadable { what: String, printed: String },

    #[error("the bench `{bench}` did not measure: {rows}; nothing was written")]
    MissingRows { bench: &'static str, rows: String },

    #[error("the template of a page names `{name}`, which has no value")]
    NoValue { name: String },

    #[error("the template of a page does not name the value `{name}`")]
    UnusedValue { name: String },

    #[error("{what} is not the JSON that was expected: {source}")]
    Json { what: String, source: serde_json::Error },

    #[error(
        "vLLM for CPU is available for Linux on x86_64 and aarch64, not for {os} on {arch}; \
         `cargo xtask test --no-vllm` runs the steps that do not need it"
    )]
    Platform { os: &'static str, arch: &'static str },

    #[error(
        "found no Python 3.11 to 3.14 with the modules venv and ensurepip; install one \
         (Debian: python3.11 and python3.11-venv); tried {tried}"
    )]
    NoPython { tried: String },

    #[error(
        "{path} has {free_gb:.1} GB free, but the vLLM environment needs {need_gb:.0} GB; \
         free some space or point XDG_CACHE_HOME at a larger disk",
        path = .path.display()
    )]
    DiskFull { path: PathBuf, free_gb: f64, need_gb: f64 },

    #[error(
        "the new environment reports vLLM {found:?} instead of {wanted}; \
         remove {path} and try again",
        path = .path.display()
    )]
    WrongVersion { found: String, wanted: String, path: PathBuf },

    #[error(
        "the new environment reports SGLang {found:?} instead of {wanted}; \
         remove {path} and try again",
        path = .path.display()
    )]
    WrongSglang { found: String, wanted: &'static str, path: PathBuf },

    #[error(
        "{path} has {bytes} bytes, more than {max_bytes}: look for misplaced contents",
        path = .path.display()
    )]
    TooLarge { path: PathBuf, bytes: u64, max_bytes: u64 },

    #[error("`--target` takes {known}, not `{found}`")]
    Target { found: String, known: String },

    #[error("`--profile` takes `dist` or `release`, not `{found}`")]
    Profile { found: String },

    #[error(transparent)]
    Structure(#[from] StructureError),

    #[error("the code exceeds limits in xtask/src/structure/limits.rs: {problems}")]
    StructureLimits {
        /// The exceeded limits, each with the measured number.
        problems: String,
    },

    #[error("stopped because another step failed first")]
    Cancelled,

    #[error("a thread of xtask panicked")]
    Panicked,
}

impl Error {
    /// Returns a function for `map_err` on file operations. `action` completes "could not … PATH".
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
