//! Models of the Hugging Face hub: found in the local cache, or downloaded into it.
//!
//! The cache has the layout of Python's `huggingface_hub`, so that vLLM and Chiasm download a model
//! only once; `cache` documents the layout. docs/decisions/0008-own-hub-client.md explains why this
//! crate does not use `hf-hub`.
//!
//! | module | contents |
//! |---|---|
//! | [`repo`] | names of models and revisions |
//! | [`settings`] | the hub, the cache and the token, read from the environment |
//! | [`fetch`](fetch()) | downloads a model's missing files and returns their folder |
//! | `listing` | the files of a commit, and the selection of those to download |
//! | `safe_path` | checks that a path stays below its folder |
//! | `cache` | folders and files of the cache |
//! | `client` | requests to the hub: redirects, statuses, timeouts and size limits |
//! | `blob` | the download of one file, resumed and verified |
//! | `partial` | a partly downloaded file and its hash |
//! | `lock` | a lock that lets one process download a file while others wait |
//! | [`Progress`] | the byte counts of a download |
//!
//! Responses of the hub are not trusted. Paths that lead out of the cache, bodies longer than
//! announced, and redirects to other schemes are refused. A file only enters a snapshot once its
//! size and hash match what the hub announced.
#![forbid(unsafe_code)]

mod blob;
mod cache;
mod client;
mod error;
mod fetch;
mod listing;
mod lock;
mod partial;
mod progress;
pub mod repo;
mod safe_path;
pub mod settings;

pub use error::HubError;
pub use fetch::{HubRequest, Snapshot, fetch};
pub use listing::{WantedFiles, Weights};
pub use progress::Progress;
pub use repo::{RepoId, Revision};
pub use settings::HubSettings;
