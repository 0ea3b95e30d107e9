//! Models of the Hugging Face hub: found in the local cache, or downloaded into it.
//!
//! The cache is that of `huggingface_hub` in Python (`cache` tells its layout), so that vLLM and
//! Chiasm download a model once. The record of the trial of `hf-hub` in docs/decisions says why
//! this is code of ours.
//!
//! | module | is |
//! |---|---|
//! | [`repo`] | names of models and revisions |
//! | [`settings`] | where hub and cache are, as the environment says |
//! | [`fetch`](fetch()) | from a model's id to a folder with its files |
//! | `listing` | the files of a commit, and which are wanted |
//! | `safe_path` | paths that lead nowhere but below a folder |
//! | `cache` | folders and files of the cache |
//! | `client` | requests to the hub: redirects, statuses, limits of time and bytes |
//! | `blob` | one file's download: resumed, verified |
//! | `partial` | what of a file is there so far, and its hash |
//! | `lock` | one process downloads a file, the others wait |
//! | [`Progress`] | how far a download is |
//!
//! Nothing that a hub answers is trusted: names that would lead out of the cache, bodies longer
//! than announced and redirects to other schemes are refused, and no file is in a snapshot before
//! its size and its hash are what the hub says.
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
pub use listing::{Wanted, Weights};
pub use progress::Progress;
pub use repo::{RepoId, Revision};
pub use settings::HubSettings;
