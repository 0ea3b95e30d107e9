//! The folders and files of the cache, in the layout of `huggingface_hub` (`file_download.py`):
//!
//! | path in the cache | contents |
//! |---|---|
//! | `models--owner--name/refs/main` | the commit of a branch or tag, as text |
//! | `models--owner--name/trees/COMMIT.json` | the files of a commit |
//! | `models--owner--name/blobs/ETAG` | a file's bytes; `ETAG.incomplete` while it is downloaded |
//! | `models--owner--name/snapshots/COMMIT/config.json` | a relative link to a blob |
//! | `.locks/models--owner--name/ETAG.lock` | the lock of the process that downloads the blob |

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::listing::{Entry, Listing, MAX_FILES, WantedFiles};
use crate::repo::{Commit, RepoId, Revision};
use crate::{HubError, Weights};

/// The maximum size of a list of a commit's files, in the cache or in the hub's response.
pub(crate) const MAX_LISTING_BYTES: u64 = 32 << 20;
/// The maximum nesting depth of folders in a snapshot.
const MAX_DEPTH: usize = 8;

/// The cache of one model.
#[derive(Clone, Debug)]
pub(crate) struct ModelCache {
    folder: PathBuf,
    locks: PathBuf,
}

impl ModelCache {
    pub(crate) fn new(cache: &Path, repo: &RepoId) -> Self {
        let name = repo.folder();
        Self { locks: cache.join(".locks").join(&name), folder: cache.join(name) }
    }

    /// Returns the model's folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder of a commit's snapshot.
    pub(crate) fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.folder.join("snapshots").join(commit.as_str())
    }

    /// Returns the path of a blob. The etag must be safe as a file name.
    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Returns the path of a blob's lock.
    pub(crate) fn lock(&self, etag: &str) -> PathBuf {
        self.locks.join(format!("{etag}.lock"))
    }

    /// Creates the folders that a download needs.
    pub(crate) fn create_folders(&self) -> Result<(), HubError> {
        let folders = [self.folder.join("blobs"), self.locks.clone()];
        folders.iter().try_for_each(|folder| {
            fs::create_dir_all(folder).map_err(|error| HubError::file(folder, error))
        })
    }

    /// Returns the last known commit of a revision.
    pub(crate) fn known_commit(&self, revision: &Revision) -> Option<Commit> {
        let from_reference =
            || Commit::parse(str::from_utf8(&read(&self.reference(revision), 64)?).ok()?.trim());
        revision.commit().or_else(from_reference)
    }

    /// Stores the commit of a revision.
    pub(crate) fn store_reference(
        &self,
        revision: &Revision,
        commit: &Commit,
    ) -> Result<(), HubError> {
        if revision.commit().is_some() || self.known_commit(revision).as_ref() == Some(commit) {
            return Ok(());
        }
        replace(&self.reference(revision), commit.as_str().as_bytes())
    }

    fn reference(&self, revision: &Revision) -> PathBuf {
        self.folder.join("refs").join(revision.as_str())
    }

    /// Returns the stored list of a commit's files.
    pub(crate) fn listing(&self, commit: &Commit) -> Option<Listing> {
        Listing::from_tree(&read(&self.tree(commit), MAX_LISTING_BYTES)?)
    }

    /// Stores the list of a commit's files, in the format of `huggingface_hub`.
    pub(crate) fn store_listing(&self, commit: &Commit, listing: &Listing) -> Result<(), HubError> {
        match listing.to_tree() {
            Some(tree) if !self.tree(commit).exists() => replace(&self.tree(commit), &tree),
            _ => Ok(()),
        }
    }

    fn tree(&self, commit: &Commit) -> PathBuf {
        self.folder.join("trees").join(format!("{}.json", commit.as_str()))
    }

    /// Returns `true` if a file of a commit is in the snapshot and has the size in `entry`.
    pub(crate) fn has_file(&self, commit: &Commit, path: &str, entry: &Entry) -> bool {
        fs::metadata(self.snapshot(commit).join(path))
            .is_ok_and(|file| file.is_file() && entry.size.is_none_or(|size| size == file.len()))
    }

    /// Links a blob into a snapshot.
    pub(crate) fn link(&self, commit: &Commit, path: &str, etag: &str) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(path);
        let linked = || {
            if let Some(folder) = link.parent() {
                fs::create_dir_all(folder)?;
            }
            // Relative, so that the cache can be moved.
            let target = format!("{}blobs/{etag}", "../".repeat(path.split('/').count() + 1));
            if fs::read_link(&link).is_ok_and(|known| known == Path::new(&target)) {
                // Another process created the link and may be reading from it.
                return Ok(());
            }
            // An existing file has another size, or is a dangling link.
            match fs::remove_file(&link) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            match symlink(&target, &link) {
                // Another process created the link at the same time.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && link.is_file() => {
                    Ok(())
                }
                linked => linked,
            }
        };
        linked().map_err(|error| HubError::file(&link, error))
    }

    /// Returns the paths of the wanted files that are missing, and the paths of all known files of
    /// the commit. Only reads the disk.
    pub(crate) fn missing(
        &self,
        commit: &Commit,
        wanted: WantedFiles,
    ) -> (Vec<String>, Vec<String>) {
        if let Some(listing) = self.listing(commit) {
            let missing = listing
                .wanted(wanted)
                .into_iter()
                .filter(|(path, entry)| !self.has_file(commit, path, entry));
            return (missing.map(|(path, _)| path.to_owned()).collect(), listing.paths());
        }
        // Older versions of huggingface_hub store no listing.
        let mut paths = Vec::new();
        walk(&self.snapshot(commit), "", MAX_DEPTH, &mut paths);
        (self.guess_missing(commit, &paths, wanted.weights).into_iter().collect(), paths)
    }

    /// Returns a file that is missing from a snapshot without a listing, judging by the files that
    /// exist and by the index of the weights.
    fn guess_missing(
        &self,
        commit: &Commit,
        paths: &[String],
        weights: Option<Weights>,
    ) -> Option<String> {
        let has = |name: &str| paths.iter().any(|path| path == name);
        if !has("config.json") && !has("params.json") {
            return Some("config.json".to_owned());
        }
        weights?;
        let index =
            read(&self.snapshot(commit).join("model.safetensors.index.json"), MAX_LISTING_BYTES)
                .unwrap_or_default();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
        let parts = index["weight_map"].as_object().into_iter().flat_map(|map| map.values());
        let is_mistral_format =
            |path: &String| path.starts_with("consolidated") && path.ends_with(".safetensors");
        if let Some(part) = parts.filter_map(|part| part.as_str()).find(|part| !has(part))
            && !paths.iter().any(is_mistral_format)
        {
            return Some(part.to_owned());
        }
        let is_weights = |path: &String| path.ends_with(".safetensors") || path.ends_with(".bin");
        (!paths.iter().any(is_weights)).then(|| "model.safetensors".to_owned())
    }
}

/// Collects the paths of all files below a folder, relative to it. Links are followed, and dangling
/// links are skipped.
fn walk(folder: &Path, prefix: &str, depth: usize, paths: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = format!("{prefix}{name}");
        match fs::metadata(entry.path()) {
            Ok(file) if file.is_file() && paths.len() < MAX_FILES => paths.push(path),
            Ok(file) if file.is_dir() && depth > 0 => {
                walk(&entry.path(), &format!("{path}/"), depth - 1, paths)
            }
            _ => {}
        }
    }
}

/// Reads a file of at most `limit` bytes. Returns `None` if it is larger or can't be read.
fn read(path: &Path, limit: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(limit + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= limit).then_some(bytes)
}

/// Replaces a small file atomically.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let written = || {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        // Other users may share the cache. Temporary files are private by default.
        let mode = fs::Permissions::from_mode(0o644);
        let mut file =
            tempfile::Builder::new().suffix(".tmp").permissions(mode).tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.persist(path)?;
        Ok(())
    };
    written().map_err(|error| HubError::file(path, error))
}
