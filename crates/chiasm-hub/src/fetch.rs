//! From a model's id to a folder with its files.

use std::path::PathBuf;

use futures_util::{StreamExt, TryStreamExt, stream};

use crate::blob::{Missing, check_names, describe, download};
use crate::cache::ModelCache;
use crate::client::HubClient;
use crate::listing::{Entry, Listing, Wanted, is_needed, is_weights};
use crate::repo::Commit;
use crate::{HubError, HubSettings, Progress, RepoId, Revision};

/// Files that the hub is asked about at once.
const QUESTIONS: usize = 8;
/// Files that are downloaded at once.
const DOWNLOADS: usize = 4;

/// Which model is wanted, how much of it and from where.
#[derive(Clone, Debug)]
pub struct HubRequest {
    /// The model.
    pub repo: RepoId,
    /// Its revision, one for all files.
    pub revision: Revision,
    /// Which files.
    pub wanted: Wanted,
    /// Where hub and cache are.
    pub settings: HubSettings,
}

/// A commit of a model in the cache, with all files that were wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder, absolute. It may have more files than were wanted.
    pub dir: PathBuf,
    /// The commit, 40 hexadecimal digits.
    pub commit: String,
    /// The paths of all files of the commit, also of those that are not here; only of those here
    /// where no more is known.
    pub files: Vec<String>,
}

/// Finds a model in the cache, or downloads what is missing there.
///
/// A commit that is complete is served without any request, a branch or tag with one, for its
/// commit. If the hub can't be asked, or refuses this user, what is in the cache is served if it is
/// complete, with a warning.
///
/// Dropping the future ends the download; what came so far is left for the next one. It has to run
/// in a tokio runtime.
///
/// # Errors
/// [`HubError`] says what to do.
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
            online(request, &client, &cache, &commit, &listing, progress).await
        }
        Err(error) if error.leaves_the_cache() => match cached(request, &cache) {
            Ok(snapshot) => {
                tracing::warn!(%error, commit = snapshot.commit, "serving what is in the cache");
                Ok(snapshot)
            }
            Err(_) => Err(error),
        },
        Err(error) => Err(error),
    }
}

/// What is in the cache, if nothing is missing that a model can't be served rightly without. vLLM
/// and `transformers` download only what they know of, so that a few files are often missing of
/// what they have put there.
fn cached(request: &HubRequest, cache: &ModelCache) -> Result<Snapshot, HubError> {
    let (repo, revision) = (request.repo.to_string(), request.revision.to_string());
    let folder = request.settings.cache.clone();
    let commit = cache.commit(&request.revision).filter(|commit| cache.snapshot(commit).is_dir());
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

/// Downloads what is missing of a commit.
async fn online(
    request: &HubRequest,
    client: &HubClient,
    cache: &ModelCache,
    commit: &Commit,
    listing: &Listing,
    progress: &Progress,
) -> Result<Snapshot, HubError> {
    let wanted = listing.wanted(request.wanted);
    if request.wanted.weights.is_some() && !wanted.iter().any(|(path, _)| is_weights(path)) {
        tracing::warn!(repo = %request.repo, "the model has neither .safetensors nor .bin files: vLLM may not be able to load it");
    }
    let missing: Vec<_> =
        wanted.into_iter().filter(|(path, entry)| !cache.has(commit, path, entry)).collect();
    if !missing.is_empty() {
        cache.make()?;
        cache.keep_listing(commit, listing)?;
        download_all(client, cache, commit, missing, progress).await?;
    }
    // The cache may be read-only where nothing is missing. A revision is known to be this commit
    // when all of that is here.
    for kept in [cache.keep_listing(commit, listing), cache.remember(&request.revision, commit)] {
        if let Err(error) = kept {
            tracing::debug!(%error, "what the hub says is not written down");
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
    let questions = missing.into_iter().map(|(path, entry)| describe(client, commit, path, entry));
    let mut missing: Vec<Missing> =
        stream::iter(questions).buffer_unordered(QUESTIONS).try_collect().await?;
    check_names(client, &missing)?;
    // Small ones first: what they are refused for is told before gigabytes have come.
    missing.sort_by_key(|file| file.size);
    for file in missing.extract_if(.., |file| file.is_downloaded(cache)) {
        cache.link(commit, &file.path, &file.blob)?;
    }
    let bytes =
        missing.iter().try_fold(0_u64, |sum, file| sum.checked_add(file.size)).unwrap_or(u64::MAX);
    let left_over: u64 = missing.iter().map(|file| file.left_over(cache)).sum();
    check_room(cache, bytes.saturating_sub(left_over))?;
    progress.expect(bytes);
    let downloads = missing.iter().map(|file| download(client, cache, commit, file, progress));
    stream::iter(downloads).buffer_unordered(DOWNLOADS).try_collect().await
}

/// Makes sure that the disk has room for so many bytes.
fn check_room(cache: &ModelCache, needed: u64) -> Result<(), HubError> {
    let disk = rustix::fs::statvfs(cache.folder())
        .map_err(|error| HubError::file(cache.folder(), error.into()))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if needed > free {
        return Err(HubError::NoSpace { needed, free, cache: cache.folder().to_owned() });
    }
    Ok(())
}
