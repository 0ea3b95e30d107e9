//! One file's download: resumed, verified.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::CONTENT_RANGE;
use reqwest::{Method, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use url::Url;

use crate::cache::ModelCache;
use crate::client::{HubClient, TRIES, content_length, etag, host_of, timed_out, unreachable};
use crate::listing::Entry;
use crate::lock::lock;
use crate::partial::{Expected, Partial};
use crate::repo::{Commit, is_hex};
use crate::{HubError, Progress};

/// Waiting for bytes, at most, until there are [`MIN_BYTES`] more.
const STALL: Duration = Duration::from_secs(30);
const MIN_BYTES: u64 = 64 << 10;
/// A try that brings a file this much further than any before is not in vain.
const ADVANCE: u64 = 1 << 20;
/// Parts that wait to be written.
const QUEUE: usize = 32;
/// Longest etag, in bytes.
const MAX_ETAG: usize = 128;

/// A file of a commit that is not in its snapshot yet.
#[derive(Debug)]
pub(crate) struct Missing {
    pub(crate) path: String,
    /// The blob's name: the file's hash, or its ETag if the hub tells no hash. The hub's own ETags
    /// are those hashes. A mirror may make them of time and size, so that two files can have the
    /// same one.
    pub(crate) blob: String,
    /// Bytes.
    pub(crate) size: u64,
    expected: Expected,
    url: Url,
}

impl Missing {
    /// Whether its bytes are there, from another commit.
    pub(crate) fn is_downloaded(&self, cache: &ModelCache) -> bool {
        fs::metadata(cache.blob(&self.blob))
            .is_ok_and(|blob| blob.is_file() && blob.len() == self.size)
    }

    /// Bytes that an earlier try has left.
    pub(crate) fn left_over(&self, cache: &ModelCache) -> u64 {
        let left = fs::metadata(cache.blob(&format!("{}.incomplete", self.blob)))
            .map_or(0, |file| file.len());
        if left > self.size { 0 } else { left }
    }
}

/// Asks the hub what a file is.
pub(crate) async fn describe(
    client: &HubClient,
    commit: &Commit,
    path: &str,
    of: &Entry,
) -> Result<Missing, HubError> {
    let url = client.file_url(commit, path);
    let (response, from, linked) = client
        .again(async || {
            let (response, from, linked) = client.send(Method::HEAD, url.clone(), 0, path).await?;
            if !response.status().is_redirection() {
                client.check(&response, &from, path)?;
            }
            Ok((response, from, linked))
        })
        .await?;
    let refused = |problem: String| client.refused(&from, path, problem);
    if let Some(other) = linked.commit.filter(|other| other != commit.as_str()) {
        return Err(refused(format!("it is of commit {other:.40}, not {}", commit.as_str())));
    }
    let own_size = || content_length(response.headers()).filter(|_| response.status().is_success());
    let told = linked.size.or_else(own_size);
    let size =
        of.size.or(told).ok_or_else(|| refused("it does not say how large it is".to_owned()))?;
    if let Some(told) = told.filter(|told| *told != size) {
        return Err(refused(format!("it has {told} bytes, though {size} were announced")));
    }
    let name = linked.etag.clone().or_else(|| etag(response.headers()));
    let etag = name
        .as_deref()
        .and_then(blob_name)
        .ok_or_else(|| refused("it has no ETag that can name a file".to_owned()))?;
    let linked_sha256 = linked.etag.as_ref().map(|_| etag.clone()).filter(|etag| is_hex(etag, 64));
    let expected = match (&of.sha256, linked_sha256, &of.blob_id) {
        (Some(sha256), ..) => Expected::Sha256(sha256.clone()),
        (None, Some(sha256), _) => Expected::Sha256(sha256),
        (None, None, Some(sha1)) => Expected::GitSha1(sha1.clone()),
        (None, None, None) => Expected::Nothing,
    };
    let blob = match &expected {
        Expected::Sha256(hash) | Expected::GitSha1(hash) => hash.clone(),
        Expected::Nothing => etag,
    };
    Ok(Missing { path: path.to_owned(), blob, size, expected, url })
}

/// Checks that no two files are to become one blob though they have other sizes.
pub(crate) fn check_names(client: &HubClient, missing: &[Missing]) -> Result<(), HubError> {
    let mut sizes = HashMap::new();
    for file in missing {
        if *sizes.entry(file.blob.as_str()).or_insert(file.size) != file.size {
            let problem =
                format!("its ETag, {}, is that of another file of another size", file.blob);
            return Err(client.refused(&file.url, &file.path, problem));
        }
    }
    Ok(())
}

/// An etag without its quotes, if it can be the name of a file.
fn blob_name(etag: &str) -> Option<String> {
    let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_name = !etag.is_empty()
        && etag.len() <= MAX_ETAG
        && etag.bytes().all(is_plain)
        && !etag.starts_with('.');
    (is_name && !etag.ends_with(".incomplete")).then(|| etag.to_owned())
}

/// Downloads a file and puts it into the snapshot.
pub(crate) async fn download(
    client: &HubClient,
    cache: &ModelCache,
    commit: &Commit,
    missing: &Missing,
    progress: &Progress,
) -> Result<(), HubError> {
    let blob = cache.blob(&missing.blob);
    let lock = lock(&cache.lock(&missing.blob), &blob).await?;
    // Another process downloaded it while this one waited, or it came for another file with the
    // same bytes.
    if missing.is_downloaded(cache) {
        progress.add(missing.size);
    } else {
        let open = {
            let (blob, size, expected) = (blob.clone(), missing.size, missing.expected.clone());
            move || Partial::open(&blob, size, expected, lock)
        };
        fill(client, missing, blocking(&blob, open).await?, &blob, progress).await?;
    }
    cache.link(commit, &missing.path, &missing.blob)
}

/// Downloads what is missing of a file and makes it the blob.
async fn fill(
    client: &HubClient,
    missing: &Missing,
    mut partial: Partial,
    blob: &Path,
    progress: &Progress,
) -> Result<(), HubError> {
    let mut is_new = partial.length() == 0;
    progress.add(partial.length());
    loop {
        partial = rest(client, missing, partial, blob, progress).await?;
        let (path, name) = (blob.to_owned(), missing.path.clone());
        let again = blocking(blob, move || match partial.verify(&name) {
            Ok(()) => partial.publish(&path).map(|()| None),
            Err(error) if is_new => partial.remove().and(Err(error)),
            // What an earlier try has left may be to blame.
            Err(_) => partial.begin_again().map(|()| Some(partial)),
        });
        let Some(emptied) = again.await? else { return Ok(()) };
        tracing::warn!(
            file = missing.path,
            "what was left of an earlier download is not what the hub has: it is downloaded anew"
        );
        progress.take_back(missing.size);
        (partial, is_new) = (emptied, true);
    }
}

/// Tries until the file has all its bytes.
async fn rest(
    client: &HubClient,
    missing: &Missing,
    mut partial: Partial,
    blob: &Path,
    progress: &Progress,
) -> Result<Partial, HubError> {
    let (mut tries, mut furthest) = (1, partial.length());
    while partial.length() < missing.size {
        let (after, tried) = try_once(client, missing, partial, blob, progress).await?;
        partial = after;
        match tried {
            Ok(()) => {}
            Err(error) if error.is_passing() => {
                if partial.length() >= furthest + ADVANCE {
                    (tries, furthest) = (1, partial.length());
                } else if tries == TRIES {
                    return Err(error);
                }
                client.pause(&error, tries).await;
                tries += 1;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(partial)
}

/// One request for the rest of a file. The file as it is after it, and how the request went.
async fn try_once(
    client: &HubClient,
    missing: &Missing,
    mut partial: Partial,
    blob: &Path,
    progress: &Progress,
) -> Result<(Partial, Result<(), HubError>), HubError> {
    let asked = ask(client, missing, partial.length()).await;
    let starts_anew = match &asked {
        Ok((_, _, start)) => *start == 0,
        // After another range than was asked for, only a download from the beginning can succeed.
        Err(error) => {
            matches!(error, HubError::Status { status: 416, .. } | HubError::Refused { .. })
        }
    };
    if starts_anew && partial.length() > 0 {
        progress.take_back(partial.length());
        partial = blocking(blob, move || partial.begin_again().map(|()| partial)).await?;
    }
    let (response, url, start) = match asked {
        Ok(answer) => answer,
        Err(error) => return Ok((partial, Err(error))),
    };
    let (sender, receiver) = mpsc::channel(QUEUE);
    let writer = tokio::task::spawn_blocking(move || partial.append(receiver));
    let received = receive(client, missing, response, &url, start, sender, progress).await;
    partial = joined(blob, writer.await)?;
    if matches!(received, Err(HubError::Refused { .. })) {
        // What began a body that is not the file's is no part of the file.
        partial = blocking(blob, move || partial.begin_again().map(|()| partial)).await?;
    }
    Ok((partial, received))
}

/// Asks for what comes from byte `from` on. The answer, the URL that it comes from, and the byte
/// that it begins with, which is `from` or 0.
async fn ask(
    client: &HubClient,
    missing: &Missing,
    from: u64,
) -> Result<(Response, Url, u64), HubError> {
    let (response, url, _) =
        client.send(Method::GET, missing.url.clone(), from, &missing.path).await?;
    client.check(&response, &url, &missing.path)?;
    let start = match response.status() {
        StatusCode::OK => 0,
        StatusCode::PARTIAL_CONTENT if from > 0 => from,
        status => {
            let problem = format!("status {} was not asked for", status.as_u16());
            return Err(client.refused(&url, &missing.path, problem));
        }
    };
    if start > 0 {
        let range = response
            .headers()
            .get(CONTENT_RANGE)
            .and_then(|range| range.to_str().ok())
            .unwrap_or_default();
        let (last, size) = (missing.size - 1, missing.size);
        // A server may not know the size.
        if ![format!("bytes {start}-{last}/{size}"), format!("bytes {start}-{last}/*")]
            .iter()
            .any(|fits| fits == range)
        {
            let problem =
                format!("bytes {start} to {last} of {size} were asked for and {range:.60?} comes");
            return Err(client.refused(&url, &missing.path, problem));
        }
    }
    match content_length(response.headers()) {
        Some(length) if start.checked_add(length) != Some(missing.size) => {
            let problem =
                format!("{length} bytes come where {} were announced", missing.size - start);
            Err(client.refused(&url, &missing.path, problem))
        }
        _ => Ok((response, url, start)),
    }
}

/// Passes a body on to the writer, as far as it was announced.
async fn receive(
    client: &HubClient,
    missing: &Missing,
    mut response: Response,
    url: &Url,
    start: u64,
    writer: mpsc::Sender<Bytes>,
    progress: &Progress,
) -> Result<(), HubError> {
    let (mut length, mut since, mut waited) = (start, start, Duration::ZERO);
    loop {
        let asked = Instant::now();
        let part = timeout(STALL.saturating_sub(waited), response.chunk())
            .await
            .map_err(|_| timed_out(url))?;
        waited += asked.elapsed();
        let Some(part) = part.map_err(|error| unreachable(url, &error))? else { break };
        length += part.len() as u64;
        if length > missing.size {
            let problem = format!("more bytes come than the {} that were announced", missing.size);
            return Err(client.refused(url, &missing.path, problem));
        }
        progress.add(part.len() as u64);
        if writer.send(part).await.is_err() {
            // It tells why itself.
            return Ok(());
        }
        if length - since >= MIN_BYTES {
            (since, waited) = (length, Duration::ZERO);
        }
    }
    if length == missing.size {
        return Ok(());
    }
    let reason = format!("{} ended after {length} of {} bytes", missing.path, missing.size);
    Err(HubError::Unreachable { host: host_of(url), reason })
}

/// Runs what takes time on a thread for that.
async fn blocking<T: Send + 'static>(
    blob: &Path,
    doing: impl FnOnce() -> Result<T, HubError> + Send + 'static,
) -> Result<T, HubError> {
    joined(blob, tokio::task::spawn_blocking(doing).await)
}

fn joined<T>(
    blob: &Path,
    done: Result<Result<T, HubError>, tokio::task::JoinError>,
) -> Result<T, HubError> {
    done.unwrap_or_else(|error| Err(HubError::file(blob, std::io::Error::other(error))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_that_lead_elsewhere_name_no_blob() {
        assert_eq!(blob_name("\"abc-1\"").as_deref(), Some("abc-1"));
        assert_eq!(blob_name("W/\"abc\"").as_deref(), Some("abc"));
        let long = "a".repeat(200);
        for bad in
            ["", "\"\"", "../a", "a/b", "..", ".lock", "a b", "\"a\\b\"", "a.incomplete", &long]
        {
            assert_eq!(blob_name(bad), None, "{bad}");
        }
    }
}
