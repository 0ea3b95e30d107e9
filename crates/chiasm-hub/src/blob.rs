//! The download of one file, which is resumed after a failure and verified at the end.

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
use crate::client::{
    HubClient, HubResponse, MAX_ATTEMPTS, connection_error, content_length, etag, host_with_port,
    timeout_error,
};
use crate::listing::Entry;
use crate::lock::lock;
use crate::partial::{ExpectedHash, Partial};
use crate::repo::{Commit, is_hex};
use crate::{HubError, Progress};

/// The maximum waiting time per [`STALL_MIN_BYTES`] received.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
const STALL_MIN_BYTES: u64 = 64 << 10;
/// The progress beyond any earlier attempt that resets the count of failed attempts.
const MIN_ADVANCE_BYTES: u64 = 1 << 20;
/// The capacity of the queue of chunks to write.
const WRITE_QUEUE_CHUNKS: usize = 32;
/// The maximum length of an ETag.
const MAX_ETAG_BYTES: usize = 128;

/// A file of a commit that is not in its snapshot yet.
#[derive(Debug)]
pub(crate) struct MissingFile {
    pub(crate) path: String,
    /// The blob's name: the file's hash, or its ETag if the hub sends no hash.
    ///
    /// The hub's own ETags are hashes. A mirror may derive ETags from time and size, so two files
    /// can have the same one.
    pub(crate) blob: String,
    /// The file's size in bytes.
    pub(crate) size: u64,
    expected: ExpectedHash,
    url: Url,
}

impl MissingFile {
    /// Returns `true` if the blob is already there, for example from another commit.
    pub(crate) fn is_downloaded(&self, cache: &ModelCache) -> bool {
        fs::metadata(cache.blob(&self.blob))
            .is_ok_and(|blob| blob.is_file() && blob.len() == self.size)
    }

    /// Returns the number of bytes that an earlier download left.
    pub(crate) fn leftover_bytes(&self, cache: &ModelCache) -> u64 {
        let leftover = fs::metadata(cache.blob(&format!("{}.incomplete", self.blob)))
            .map_or(0, |file| file.len());
        if leftover > self.size { 0 } else { leftover }
    }
}

/// Requests the size and the hash of a file. `entry` is the file's entry in the listing.
pub(crate) async fn describe(
    client: &HubClient,
    commit: &Commit,
    path: &str,
    entry: &Entry,
) -> Result<MissingFile, HubError> {
    let url = client.file_url(commit, path);
    let HubResponse { response, url: source, headers } = client
        .retry(async || {
            let answer = client.send(Method::HEAD, url.clone(), 0, path).await?;
            if !answer.response.status().is_redirection() {
                client.check(&answer.response, &answer.url, path)?;
            }
            Ok(answer)
        })
        .await?;
    let refused = |problem: String| client.refused(&source, path, problem);
    if let Some(other) = headers.commit.filter(|other| other != commit.as_str()) {
        return Err(refused(format!("its commit is {other:.40}, not {}", commit.as_str())));
    }
    let own_size = || content_length(response.headers()).filter(|_| response.status().is_success());
    let header_size = headers.size.or_else(own_size);
    let size =
        entry.size.or(header_size).ok_or_else(|| refused("its size is unknown".to_owned()))?;
    if let Some(other) = header_size.filter(|other| *other != size) {
        return Err(refused(format!("its size is {other} bytes, but {size} were announced")));
    }
    let linked_etag = headers.etag;
    let is_linked = linked_etag.is_some();
    let etag = linked_etag
        .or_else(|| etag(response.headers()))
        .as_deref()
        .and_then(blob_name)
        .ok_or_else(|| refused("it has no ETag that is safe as a file name".to_owned()))?;
    let linked_sha256 = is_linked.then(|| etag.clone()).filter(|etag| is_hex(etag, 64));
    let expected = match (&entry.sha256, linked_sha256, &entry.blob_id) {
        (Some(sha256), ..) => ExpectedHash::Sha256(sha256.clone()),
        (None, Some(sha256), _) => ExpectedHash::Sha256(sha256),
        (None, None, Some(sha1)) => ExpectedHash::GitSha1(sha1.clone()),
        (None, None, None) => ExpectedHash::Unknown,
    };
    let blob = match &expected {
        ExpectedHash::Sha256(hash) | ExpectedHash::GitSha1(hash) => hash.clone(),
        ExpectedHash::Unknown => etag,
    };
    Ok(MissingFile { path: path.to_owned(), blob, size, expected, url })
}

/// Checks that files of different sizes have different blobs.
pub(crate) fn check_blob_names(
    client: &HubClient,
    missing: &[MissingFile],
) -> Result<(), HubError> {
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

/// Returns an ETag without quotes and weakness prefix if it is safe as a file name.
fn blob_name(etag: &str) -> Option<String> {
    let etag = etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"');
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_name = !etag.is_empty()
        && etag.len() <= MAX_ETAG_BYTES
        && etag.bytes().all(is_plain)
        && !etag.starts_with('.');
    (is_name && !etag.ends_with(".incomplete")).then(|| etag.to_owned())
}

/// Downloads a file and links it into the snapshot.
pub(crate) async fn download(
    client: &HubClient,
    cache: &ModelCache,
    commit: &Commit,
    missing: &MissingFile,
    progress: &Progress,
) -> Result<(), HubError> {
    let blob = cache.blob(&missing.blob);
    let lock = lock(&cache.lock(&missing.blob), &blob).await?;
    // The blob may have been downloaded while this task waited for the lock: by another process, or
    // for another file with the same bytes.
    if missing.is_downloaded(cache) {
        progress.add(missing.size);
    } else {
        let open = {
            let blob = blob.clone();
            let size = missing.size;
            let expected = missing.expected.clone();
            move || Partial::open(&blob, size, expected, lock)
        };
        let partial = blocking(&blob, open).await?;
        complete(client, missing, partial, &blob, progress).await?;
    }
    cache.link(commit, &missing.path, &missing.blob)
}

/// Downloads the rest of a file, verifies the file and publishes it as the blob.
async fn complete(
    client: &HubClient,
    missing: &MissingFile,
    mut partial: Partial,
    blob: &Path,
    progress: &Progress,
) -> Result<(), HubError> {
    let mut is_new = partial.length() == 0;
    progress.add(partial.length());
    loop {
        partial = download_rest(client, missing, partial, blob, progress).await?;
        let path = blob.to_owned();
        let name = missing.path.clone();
        let restarted = blocking(blob, move || match partial.verify(&name) {
            Ok(()) => partial.publish(&path).map(|()| None),
            Err(error) if is_new => partial.remove().and(Err(error)),
            // The bytes of the earlier download may be the wrong ones.
            Err(_) => partial.restart().map(|()| Some(partial)),
        });
        let Some(emptied) = restarted.await? else { return Ok(()) };
        tracing::warn!(
            file = missing.path,
            "the rest of an earlier download does not match the hub's file: downloading it again"
        );
        progress.subtract(missing.size);
        partial = emptied;
        is_new = true;
    }
}

/// Retries until the file has all its bytes. Fails after [`MAX_ATTEMPTS`] attempts that together
/// bring less than [`MIN_ADVANCE_BYTES`].
async fn download_rest(
    client: &HubClient,
    missing: &MissingFile,
    mut partial: Partial,
    blob: &Path,
    progress: &Progress,
) -> Result<Partial, HubError> {
    let mut attempts = 1;
    let mut furthest = partial.length();
    while partial.length() < missing.size {
        let (after, result) = attempt(client, missing, partial, blob, progress).await?;
        partial = after;
        match result {
            Ok(()) => {}
            Err(error) if error.is_transient() => {
                if partial.length() >= furthest + MIN_ADVANCE_BYTES {
                    attempts = 1;
                    furthest = partial.length();
                } else if attempts == MAX_ATTEMPTS {
                    return Err(error);
                }
                client.pause_before_retry(&error, attempts).await;
                attempts += 1;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(partial)
}

/// Sends one request for the rest of a file and writes the response. Returns the file and the
/// result of the request. Errors of the disk are returned as such.
async fn attempt(
    client: &HubClient,
    missing: &MissingFile,
    mut partial: Partial,
    blob: &Path,
    progress: &Progress,
) -> Result<(Partial, Result<(), HubError>), HubError> {
    let body = request_from(client, missing, partial.length()).await;
    let restarts = match &body {
        Ok(body) => body.start == 0,
        // After a response with another range, only a download from the beginning can succeed.
        Err(error) => {
            matches!(error, HubError::Status { status: 416, .. } | HubError::Refused { .. })
        }
    };
    if restarts && partial.length() > 0 {
        progress.subtract(partial.length());
        partial = blocking(blob, move || partial.restart().map(|()| partial)).await?;
    }
    let body = match body {
        Ok(body) => body,
        Err(error) => return Ok((partial, Err(error))),
    };
    let (sender, receiver) = mpsc::channel(WRITE_QUEUE_CHUNKS);
    let writer = tokio::task::spawn_blocking(move || partial.append(receiver));
    let received = receive(client, missing, body, sender, progress).await;
    partial = flatten_join(blob, writer.await)?;
    if matches!(received, Err(HubError::Refused { .. })) {
        // The bytes of a refused body are not the file's.
        partial = blocking(blob, move || partial.restart().map(|()| partial)).await?;
    }
    Ok((partial, received))
}

/// A response with a file's bytes.
struct FileBody {
    response: Response,
    /// The URL that sent the response.
    url: Url,
    /// The position of the body's first byte in the file.
    start: u64,
}

/// Requests the bytes of a file from position `from` on. The body begins there or at 0.
async fn request_from(
    client: &HubClient,
    missing: &MissingFile,
    from: u64,
) -> Result<FileBody, HubError> {
    let HubResponse { response, url, .. } =
        client.send(Method::GET, missing.url.clone(), from, &missing.path).await?;
    client.check(&response, &url, &missing.path)?;
    let start = match response.status() {
        StatusCode::OK => 0,
        StatusCode::PARTIAL_CONTENT if from > 0 => from,
        status => {
            let problem = format!("unexpected status {}", status.as_u16());
            return Err(client.refused(&url, &missing.path, problem));
        }
    };
    if start > 0 {
        let range = response
            .headers()
            .get(CONTENT_RANGE)
            .and_then(|range| range.to_str().ok())
            .unwrap_or_default();
        let size = missing.size;
        let last = size - 1;
        // A server may not know the total size.
        let valid = [format!("bytes {start}-{last}/{size}"), format!("bytes {start}-{last}/*")];
        if !valid.iter().any(|valid| valid == range) {
            let problem = format!(
                "bytes {start} to {last} of {size} were requested, but its range is {range:.60?}"
            );
            return Err(client.refused(&url, &missing.path, problem));
        }
    }
    match content_length(response.headers()) {
        Some(length) if start.checked_add(length) != Some(missing.size) => {
            let problem =
                format!("its body has {length} bytes, but {} were announced", missing.size - start);
            Err(client.refused(&url, &missing.path, problem))
        }
        _ => Ok(FileBody { response, url, start }),
    }
}

/// Receives a body of the announced length and sends its chunks to the writer.
async fn receive(
    client: &HubClient,
    missing: &MissingFile,
    body: FileBody,
    writer: mpsc::Sender<Bytes>,
    progress: &Progress,
) -> Result<(), HubError> {
    let FileBody { mut response, url, start } = body;
    let mut length = start;
    let mut stall_start = start;
    let mut waited = Duration::ZERO;
    loop {
        let wait_start = Instant::now();
        let chunk = timeout(STALL_TIMEOUT.saturating_sub(waited), response.chunk())
            .await
            .map_err(|_| timeout_error(&url))?;
        waited += wait_start.elapsed();
        let Some(chunk) = chunk.map_err(|error| connection_error(&url, &error))? else { break };
        length += chunk.len() as u64;
        if length > missing.size {
            let problem =
                format!("its body has more bytes than the {} that were announced", missing.size);
            return Err(client.refused(&url, &missing.path, problem));
        }
        progress.add(chunk.len() as u64);
        if writer.send(chunk).await.is_err() {
            // The writer returns the error.
            return Ok(());
        }
        if length - stall_start >= STALL_MIN_BYTES {
            stall_start = length;
            waited = Duration::ZERO;
        }
    }
    if length == missing.size {
        return Ok(());
    }
    let reason = format!("{} ended after {length} of {} bytes", missing.path, missing.size);
    Err(HubError::Unreachable { host: host_with_port(&url), reason })
}

/// Runs a blocking operation on tokio's blocking threads.
async fn blocking<T: Send + 'static>(
    blob: &Path,
    operation: impl FnOnce() -> Result<T, HubError> + Send + 'static,
) -> Result<T, HubError> {
    flatten_join(blob, tokio::task::spawn_blocking(operation).await)
}

/// Turns a panic of a blocking operation into an error.
fn flatten_join<T>(
    blob: &Path,
    result: Result<Result<T, HubError>, tokio::task::JoinError>,
) -> Result<T, HubError> {
    result.unwrap_or_else(|error| Err(HubError::file(blob, std::io::Error::other(error))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_etags_are_not_blob_names() {
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
