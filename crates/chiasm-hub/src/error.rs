//! What can go wrong between a model's id and its files.

use std::io;
use std::path::{Path, PathBuf};

/// Why a model of the hub can't be had. The texts say what to do.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// Not of the form `owner/name`.
    #[error(
        "'{id}' is no id of a model on the hub: it has to look like Qwen/Qwen2.5-VL-7B-Instruct"
    )]
    InvalidId {
        /// What was given.
        id: String,
    },
    /// Not a branch, tag or commit.
    #[error("'{revision}' can't be a revision: name a branch, a tag or a commit")]
    InvalidRevision {
        /// What was given.
        revision: String,
    },
    /// A variable of the environment that can't be used.
    #[error("{name} {problem}")]
    Setting {
        /// The variable.
        name: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The hub has no such model, or does not show it to everybody.
    #[error("{endpoint} has no model {repo}, or it is private: check the name; {}", token_advice(*with_token))]
    NoSuchModel {
        /// The hub's host.
        endpoint: String,
        /// The model's id.
        repo: String,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The model has no such revision.
    #[error(
        "{repo} has no revision '{revision}' at {endpoint}: name a branch, a tag or a commit of it"
    )]
    NoSuchRevision {
        /// The hub's host.
        endpoint: String,
        /// The model's id.
        repo: String,
        /// The revision as given.
        revision: String,
    },
    /// The model exists, but not for this user.
    #[error(
        "{endpoint} does not let you have {repo} (status {status}): accept its terms on its page there, and {}",
        token_advice(*with_token)
    )]
    Denied {
        /// The hub's host.
        endpoint: String,
        /// The model's id.
        repo: String,
        /// Its status.
        status: u16,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// Nothing may be downloaded and nothing is there.
    #[error(
        "{repo} at revision '{revision}' is not in {cache} and HF_HUB_OFFLINE is set: download it once without, or name a directory"
    )]
    NotCached {
        /// The model's id.
        repo: String,
        /// The revision as given.
        revision: String,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// Nothing may be downloaded and some of it is missing.
    #[error(
        "{repo} at revision '{revision}' is not complete in {cache}, {missing} is missing, and HF_HUB_OFFLINE is set: \
         download it once without"
    )]
    Incomplete {
        /// The model's id.
        repo: String,
        /// The revision as given.
        revision: String,
        /// The folder of the cache.
        cache: PathBuf,
        /// A file that is missing.
        missing: String,
    },
    /// No connection, or it ended.
    #[error(
        "can't reach {host}: {reason}; check the network and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to use what is in the cache"
    )]
    Unreachable {
        /// The host that was asked.
        host: String,
        /// What happened.
        reason: String,
    },
    /// A status that tells of no particular problem.
    #[error("{host} answers with status {status} for {what}")]
    Status {
        /// The host that was asked.
        host: String,
        /// Its status.
        status: u16,
        /// What it was asked for.
        what: String,
    },
    /// An answer that no hub should give.
    #[error("refused what {host} answers for {what}: {problem}")]
    Refused {
        /// The host that was asked.
        host: String,
        /// What it was asked for.
        what: String,
        /// What is wrong.
        problem: String,
    },
    /// Other bytes than those that the hub has announced.
    #[error(
        "{file} came with the wrong {what}: {got} instead of {expected}; it was removed, try again"
    )]
    Corrupt {
        /// The file's path in the model.
        file: String,
        /// `size` or `hash`.
        what: &'static str,
        /// What the hub says.
        expected: String,
        /// What came.
        got: String,
    },
    /// The disk is too small for what is missing.
    #[error(
        "{} GB are to be downloaded into {}, where only {} GB are free: make room or set HF_HUB_CACHE",
        gigabytes(*needed),
        cache.display(),
        gigabytes(*free)
    )]
    NoSpace {
        /// Bytes that are missing.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// Another process seems stuck with the file.
    #[error("another process has locked {} for {minutes} minutes without downloading anything: end it", path.display())]
    Locked {
        /// The file.
        path: PathBuf,
        /// For how long.
        minutes: u64,
    },
    /// The cache can't be read or written.
    #[error("{}: {source}{}", path.display(), folder_advice(source))]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Advice for a cache folder that is of no use.
fn folder_advice(error: &io::Error) -> &'static str {
    use io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
    match error.kind() {
        NotFound | PermissionDenied | ReadOnlyFilesystem => {
            "; HF_HOME or HF_HUB_CACHE names another folder for the cache"
        }
        _ => "",
    }
}

impl HubError {
    pub(crate) fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }

    /// Whether the same request may succeed a little later.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 416 | 429 | 500..),
            _ => false,
        }
    }

    /// Whether what is in the cache may be served instead: the hub can't be asked, or does not know
    /// this user any more.
    pub(crate) fn leaves_the_cache(&self) -> bool {
        self.is_passing() || matches!(self, Self::NoSuchModel { .. } | Self::Denied { .. })
    }
}

fn token_advice(with_token: bool) -> &'static str {
    if with_token {
        "the token of HF_TOKEN or of the token file was sent and has no access"
    } else {
        "set HF_TOKEN to a token that has access, none was found"
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e9)
}
