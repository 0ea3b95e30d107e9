//! Errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

/// An error while fetching a model from the hub. The messages say what to do.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// A model id that is not of the form `owner/name`.
    #[error("'{id}' is not the id of a model on the hub, such as Qwen/Qwen2.5-VL-7B-Instruct")]
    InvalidId {
        /// The id as given.
        id: String,
    },
    /// A revision that can't be a branch, tag or commit.
    #[error("'{revision}' is not a valid revision: give a branch, a tag or a commit")]
    InvalidRevision {
        /// The revision as given.
        revision: String,
    },
    /// An environment variable with an unusable value.
    #[error("{name} {problem}")]
    Setting {
        /// The variable.
        name: &'static str,
        /// The problem, as the end of a sentence that begins with the variable.
        problem: String,
    },
    /// The hub has no such model, or the model is private.
    #[error(
        "{endpoint} has no model {repo}, or the model is private: check the name; {}",
        token_advice(*with_token)
    )]
    NoSuchModel {
        /// The hub's host.
        endpoint: String,
        /// The model's id.
        repo: String,
        /// `true` if a token was sent.
        with_token: bool,
    },
    /// The model has no such revision.
    #[error(
        "{repo} has no revision '{revision}' at {endpoint}: \
         give one of its branches, tags or commits"
    )]
    NoSuchRevision {
        /// The hub's host.
        endpoint: String,
        /// The model's id.
        repo: String,
        /// The revision as given.
        revision: String,
    },
    /// The model exists, but this user has no access.
    #[error(
        "{endpoint} denied access to {repo} (status {status}): \
         accept the model's terms on its page; {}",
        token_advice(*with_token)
    )]
    Denied {
        /// The hub's host.
        endpoint: String,
        /// The model's id.
        repo: String,
        /// The response's status.
        status: u16,
        /// `true` if a token was sent.
        with_token: bool,
    },
    /// Downloads are disabled and the model is not in the cache.
    #[error(
        "{repo} at revision '{revision}' is not in {cache} and HF_HUB_OFFLINE is set: \
         download it once without HF_HUB_OFFLINE, or give a model directory"
    )]
    NotCached {
        /// The model's id.
        repo: String,
        /// The revision as given.
        revision: String,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// Downloads are disabled and a file of the model is not in the cache.
    #[error(
        "{repo} at revision '{revision}' is incomplete in {cache}: {missing} is missing \
         and HF_HUB_OFFLINE is set; download it once without HF_HUB_OFFLINE"
    )]
    Incomplete {
        /// The model's id.
        repo: String,
        /// The revision as given.
        revision: String,
        /// The folder of the cache.
        cache: PathBuf,
        /// The path of a missing file.
        missing: String,
    },
    /// The connection failed, timed out or ended early.
    #[error(
        "can't reach {host}: {reason}; check the network and HF_ENDPOINT, \
         or set HF_HUB_OFFLINE=1 to use the cached model"
    )]
    Unreachable {
        /// The server's host and port.
        host: String,
        /// The cause.
        reason: String,
    },
    /// An error status without a variant of its own.
    #[error("{host} responded with status {status} for {resource}")]
    Status {
        /// The server's host and port.
        host: String,
        /// The response's status.
        status: u16,
        /// The requested resource.
        resource: String,
    },
    /// An invalid or hostile response.
    #[error("invalid response of {host} for {resource}: {problem}")]
    Refused {
        /// The server's host and port.
        host: String,
        /// The requested resource.
        resource: String,
        /// The reason for the refusal.
        problem: String,
    },
    /// A downloaded file does not match the hub's description of it.
    #[error(
        "{file} was downloaded with the wrong {property}: {got} instead of {expected}; \
         it was removed, try again"
    )]
    Corrupt {
        /// The file's path in the model.
        file: String,
        /// The property that differs: `size` or `hash`.
        property: &'static str,
        /// The value that the hub announced.
        expected: String,
        /// The value of the downloaded file.
        got: String,
    },
    /// The disk has too little space for the download.
    #[error(
        "the download needs {} GB in {}, but only {} GB are free: \
         free some space or set HF_HUB_CACHE",
        gigabytes(*needed),
        cache.display(),
        gigabytes(*free)
    )]
    NoSpace {
        /// The number of bytes to download.
        needed: u64,
        /// The number of free bytes.
        free: u64,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// Another process holds a file's lock without making progress.
    #[error(
        "another process has locked {} for {minutes} minutes without downloading anything: \
         end that process",
        path.display()
    )]
    Locked {
        /// The lock file.
        path: PathBuf,
        /// The time without progress, in minutes.
        minutes: u64,
    },
    /// A file of the cache, or of the settings, can't be read or written.
    #[error("{}: {source}{}", path.display(), folder_advice(source))]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Returns advice for an error that another cache folder would avoid.
fn folder_advice(error: &io::Error) -> &'static str {
    use io::ErrorKind::{NotFound, PermissionDenied, ReadOnlyFilesystem};
    match error.kind() {
        NotFound | PermissionDenied | ReadOnlyFilesystem => {
            "; set HF_HOME or HF_HUB_CACHE to another folder for the cache"
        }
        _ => "",
    }
}

impl HubError {
    pub(crate) fn file(path: &Path, source: io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }

    /// Returns `true` if the same request may succeed later.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 416 | 429 | 500..),
            _ => false,
        }
    }

    /// Returns `true` if the cached snapshot may be served instead: the hub is unreachable, or this
    /// user has no access any more.
    pub(crate) fn allows_cached_snapshot(&self) -> bool {
        self.is_transient() || matches!(self, Self::NoSuchModel { .. } | Self::Denied { .. })
    }
}

fn token_advice(with_token: bool) -> &'static str {
    if with_token {
        "the token from HF_TOKEN or the token file has no access"
    } else {
        "no token was found: set HF_TOKEN to a token with access"
    }
}

fn gigabytes(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / 1e9)
}
