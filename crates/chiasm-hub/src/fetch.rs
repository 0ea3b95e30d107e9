//! Fetching of a model: from its id to a folder with its files.

use std::path::PathBuf;

use futures_util::{StreamExt, TryStreamExt, stream};

use crate::blob::{MissingFile, check_blob_names, describe, download};
use crate::cache::ModelCache;
use crate::client::HubClient;
use crate::listing::{Entry, Listing, WantedFiles, is_needed, is_weights};
use crate::repo::Commit;
use crate::{HubError, HubSettings, Progress, RepoId, Revision};

/// The maximum number of files that are described at the same time.
const MAX_CONCURRENT_REQUESTS: usize = 8;
/// The maximum number of files that are downloaded at the same time.
const MAX_CONCURRENT_DOWNLOADS: usize = 4;

/// A request for a model's files.
#[derive(Clone, Debug)]
pub struct HubRequest {
    /// The model.
    pub repo: RepoId,
    /// The revision of all files.
    pub revision: Revision,
    /// The files to fetch.
    pub wanted: WantedFiles,
    /// The location of the hub and the cache.
    pub settings: HubSettings,
}

/// A commit of a model in the cache, with all requested files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The absolute path of the folder. It may contain more files than requested.
    pub dir: PathBuf,
    /// The commit: 40 hexadecimal digits.
    pub commit: String,
    /// The paths of all files of the commit, including files that were not fetched. If the cache
    /// has no listing, only the paths of files that are there.
    pub files: Vec<String>,
}

/// Fetches a model: finds it in the cache and downloads missing files.
///
/// A complete commit needs no request; a branch or tag needs one, for its commit. If the hub is
/// unreachable or refuses this user, a complete snapshot in the cache is returned with a warning.
///
/// Dropping the future stops the download. A later call resumes it. Requires a tokio runtime.
///
/// # Errors
/// [`HubError`] if the model can't be fetched; its message says what to do.
pub async fn fetch(request: &HubRequest, progress: &Progress) -> Result<Snapshot, HubError> {
    let cache = ModelCache::new(&request.settings.cache, &request.repo);
    if request.settings.offline {
        return cached(request, &cache);
    }
    if let Some(commit) = request.revision.commit().filter(|commit| cache.listing(commit).is_some())
    {
        let (missing, files) = cache.missing(&commit, request.wanted);
        if missing.is_empty() {
            return snapshot(&cache, &commit, files);
        }
    }
    let client = HubClient::new(&request.settings, &request.repo, &request.revision)?;
    match client.listing().await {
        Ok((commit, listing)) => {
            download_missing(request, &client, &cache, &commit, &listing, progress).await
        }
        Err(error) if error.allows_cached_snapshot() => match cached(request, &cache) {
            Ok(snapshot) => {
                tracing::warn!(
                    %error,
                    commit = snapshot.commit,
                    "the hub can't be used: serving the cached snapshot"
                );
                Ok(snapshot)
            }
            Err(_) => Err(error),
        },
        Err(error) => Err(error),
    }
}

/// Returns the snapshot in the cache, unless a file is missing that the model needs.
///
/// vLLM and `transformers` only download files that they know, so their snapshots often lack a few
/// files.
fn cached(request: &HubRequest, cache: &ModelCache) -> Result<Snapshot, HubError> {
    let repo = request.repo.to_string();
    let revision = request.revision.to_string();
    let folder = request.settings.cache.clone();
    let commit =
        cache.known_commit(&request.revision).filter(|commit| cache.snapshot(commit).is_dir());
    let Some(commit) = commit else {
        return Err(HubError::NotCached { repo, revision, cache: folder });
    };
    let (missing, files) = cache.missing(&commit, request.wanted);
    if let Some(missing) = missing.iter().find(|path| is_needed(path)).cloned() {
        return Err(HubError::Incomplete { repo, revision, cache: folder, missing });
    }
    if !missing.is_empty() {
        tracing::warn!(repo, ?missing, "some files of the model are not in the cache");
    }
    snapshot(cache, &commit, files)
}

fn snapshot(cache: &ModelCache, commit: &Commit, files: Vec<String>) -> Result<Snapshot, HubError> {
    let dir = cache.snapshot(commit);
    let dir = std::path::absolute(&dir).map_err(|error| HubError::file(&dir, error))?;
    Ok(Snapshot { dir, commit: commit.as_str().to_owned(), files })
}

/// Downloads the missing files of a commit.
async fn download_missing(
    request: &HubRequest,
    client: &HubClient,
    cache: &ModelCache,
    commit: &Commit,
    listing: &Listing,
    progress: &Progress,
) -> Result<Snapshot, HubError> {
    let wanted = listing.wanted(request.wanted);
    if request.wanted.weights.is_some() && !wanted.iter().any(|(path, _)| is_weights(path)) {
        tracing::warn!(
            repo = %request.repo,
            "the model has neither .safetensors nor .bin files: vLLM may not be able to load it"
        );
    }
    let missing: Vec<_> =
        wanted.into_iter().filter(|(path, entry)| !cache.has_file(commit, path, entry)).collect();
    if !missing.is_empty() {
        cache.create_folders()?;
        cache.store_listing(commit, listing)?;
        download_all(client, cache, commit, missing, progress).await?;
    }
    // If no file is missing, the cache may be read-only. The reference is stored last, so that it
    // only points to a complete commit.
    let stored =
        [cache.store_listing(commit, listing), cache.store_reference(&request.revision, commit)];
    for result in stored {
        if let Err(error) = result {
            tracing::debug!(%error, "can't store the hub's description of the model in the cache");
        }
    }
    snapshot(cache, commit, listing.paths())
}

async fn download_all(
    client: &HubClient,
    cache: &ModelCache,
    commit: &Commit,
    missing: Vec<(&str, &Entry)>,
    progress: &Progress,
) -> Result<(), HubError> {
    let requests = missing.into_iter().map(|(path, entry)| describe(client, commit, path, entry));
    let mut missing: Vec<MissingFile> =
        stream::iter(requests).buffer_unordered(MAX_CONCURRENT_REQUESTS).try_collect().await?;
    check_blob_names(client, &missing)?;
    // Small files first, so that their errors are reported before gigabytes were downloaded.
    missing.sort_by_key(|file| file.size);
    for file in missing.extract_if(.., |file| file.is_downloaded(cache)) {
        cache.link(commit, &file.path, &file.blob)?;
    }
    let bytes =
        missing.iter().try_fold(0_u64, |sum, file| sum.checked_add(file.size)).unwrap_or(u64::MAX);
    let leftover_bytes: u64 = missing.iter().map(|file| file.leftover_bytes(cache)).sum();
    check_free_space(cache, bytes.saturating_sub(leftover_bytes))?;
    progress.add_total(bytes);
    let downloads = missing.iter().map(|file| download(client, cache, commit, file, progress));
    stream::iter(downloads).buffer_unordered(MAX_CONCURRENT_DOWNLOADS).try_collect().await
}

/// Checks that the disk has `needed` free bytes.
fn check_free_space(cache: &ModelCache, needed: u64) -> Result<(), HubError> {
    let disk = rustix::fs::statvfs(cache.folder())
        .map_err(|error| HubError::file(cache.folder(), error.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed > free {
        return Err(HubError::NoSpace { needed, free, cache: cache.folder().to_owned() });
    }
    Ok(())
}
