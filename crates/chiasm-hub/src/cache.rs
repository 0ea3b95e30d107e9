//! Folders and files of the cache, as `huggingface_hub` lays them out (`file_download.py`):
//!
//! | below the cache | is |
//! |---|---|
//! | `models--owner--name/refs/main` | the commit of a branch or tag, as text |
//! | `models--owner--name/trees/COMMIT.json` | the files of a commit |
//! | `models--owner--name/blobs/ETAG` | a file's bytes; `ETAG.incomplete` while it is downloaded |
//! | `models--owner--name/snapshots/COMMIT/config.json` | a relative link to a blob |
//! | `.locks/models--owner--name/ETAG.lock` | held by who downloads the blob |

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::listing::{Entry, Listing, MAX_FILES, Wanted};
use crate::repo::{Commit, RepoId, Revision};
use crate::{HubError, Weights};

/// Bytes of a file that lists a commit's files, at most; also of the hub's answer that does.
pub(crate) const MAX_LISTING: u64 = 32 << 20;
/// Folders in each other in a snapshot, at most.
const MAX_DEPTH: usize = 8;

/// The part of the cache that belongs to one model.
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

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.folder.join("snapshots").join(commit.as_str())
    }

    /// The file with the bytes of an etag, which has to be the safe name of one.
    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    pub(crate) fn lock(&self, etag: &str) -> PathBuf {
        self.locks.join(format!("{etag}.lock"))
    }

    /// Makes the folders that a download needs.
    pub(crate) fn make(&self) -> Result<(), HubError> {
        let folders = [self.folder.join("blobs"), self.locks.clone()];
        folders.iter().try_for_each(|folder| {
            fs::create_dir_all(folder).map_err(|error| HubError::file(folder, error))
        })
    }

    /// The commit that a revision was last known to be.
    pub(crate) fn commit(&self, revision: &Revision) -> Option<Commit> {
        let of_ref =
            || Commit::read(str::from_utf8(&read(&self.reference(revision), 64)?).ok()?.trim());
        revision.commit().or_else(of_ref)
    }

    /// Writes down what commit a revision is.
    pub(crate) fn remember(&self, revision: &Revision, commit: &Commit) -> Result<(), HubError> {
        if revision.commit().is_some() || self.commit(revision).as_ref() == Some(commit) {
            return Ok(());
        }
        replace(&self.reference(revision), commit.as_str().as_bytes())
    }

    fn reference(&self, revision: &Revision) -> PathBuf {
        self.folder.join("refs").join(revision.as_str())
    }

    /// The files of a commit, if they were written down.
    pub(crate) fn listing(&self, commit: &Commit) -> Option<Listing> {
        Listing::of_tree(&read(&self.tree(commit), MAX_LISTING)?)
    }

    /// Writes down the files of a commit, for Python too.
    pub(crate) fn keep_listing(&self, commit: &Commit, listing: &Listing) -> Result<(), HubError> {
        match listing.to_tree() {
            Some(tree) if !self.tree(commit).exists() => replace(&self.tree(commit), &tree),
            _ => Ok(()),
        }
    }

    fn tree(&self, commit: &Commit) -> PathBuf {
        self.folder.join("trees").join(format!("{}.json", commit.as_str()))
    }

    /// Whether a file of a commit is there, with the size that the commit says.
    pub(crate) fn has(&self, commit: &Commit, path: &str, entry: &Entry) -> bool {
        fs::metadata(self.snapshot(commit).join(path))
            .is_ok_and(|file| file.is_file() && entry.size.is_none_or(|size| size == file.len()))
    }

    /// Puts a blob into a snapshot.
    pub(crate) fn link(&self, commit: &Commit, path: &str, etag: &str) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(path);
        let linked = || {
            if let Some(folder) = link.parent() {
                fs::create_dir_all(folder)?;
            }
            // Relative, so that the cache can be moved.
            let target = format!("{}blobs/{etag}", "../".repeat(path.split('/').count() + 1));
            if fs::read_link(&link).is_ok_and(|known| known == Path::new(&target)) {
                // Another process was sooner, and may be reading it.
                return Ok(());
            }
            // What is there has another size or no target.
            match fs::remove_file(&link) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            match symlink(&target, &link) {
                // Another process made it at the same time.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && link.is_file() => {
                    Ok(())
                }
                linked => linked,
            }
        };
        linked().map_err(|error| HubError::file(&link, error))
    }

    /// Says which files are missing of what is wanted, judged by what is on the disk alone, and the
    /// paths of all files as far as they are known.
    pub(crate) fn missing(&self, commit: &Commit, wanted: Wanted) -> (Vec<String>, Vec<String>) {
        if let Some(listing) = self.listing(commit) {
            let missing = listing
                .wanted(wanted)
                .into_iter()
                .filter(|(path, entry)| !self.has(commit, path, entry));
            return (missing.map(|(path, _)| path.to_owned()).collect(), listing.paths());
        }
        // An older huggingface_hub wrote it, which keeps no listing.
        let mut paths = Vec::new();
        walk(&self.snapshot(commit), "", MAX_DEPTH, &mut paths);
        (self.seems_to_miss(commit, &paths, wanted.weights).into_iter().collect(), paths)
    }

    fn seems_to_miss(
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
        let index = read(&self.snapshot(commit).join("model.safetensors.index.json"), MAX_LISTING)
            .unwrap_or_default();
        let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
        let parts = index["weight_map"].as_object().into_iter().flat_map(|map| map.values());
        let is_mistrals =
            |path: &String| path.starts_with("consolidated") && path.ends_with(".safetensors");
        if let Some(part) = parts.filter_map(|part| part.as_str()).find(|part| !has(part))
            && !paths.iter().any(is_mistrals)
        {
            return Some(part.to_owned());
        }
        let is_weights = |path: &String| path.ends_with(".safetensors") || path.ends_with(".bin");
        (!paths.iter().any(is_weights)).then(|| "model.safetensors".to_owned())
    }
}

/// Collects the paths of all files below a folder that are there, links followed.
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

/// Reads a small file. `None` if it is not there, or larger than it may be.
fn read(path: &Path, limit: u64) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(limit + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= limit).then_some(bytes)
}

/// Writes a small file so that others see the whole of it or nothing.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let written = || {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        // It is as readable as files usually are: others may share the cache.
        let mode = fs::Permissions::from_mode(0o644);
        let mut file =
            tempfile::Builder::new().suffix(".tmp").permissions(mode).tempfile_in(folder)?;
        file.write_all(bytes)?;
        file.persist(path)?;
        Ok(())
    };
    written().map_err(|error| HubError::file(path, error))
}
