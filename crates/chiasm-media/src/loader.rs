//! The loader, through which all media enters the process.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_types::Modality;
use reqwest::Url;
use tokio::sync::oneshot;

use crate::contents::ContentCache;
use crate::counts::{Counters, MediaCounts};
use crate::executor::{BlockingThreads, CpuExecutor};
use crate::fetch::{FetchOutcome, FetchThreads, Fetcher};
use crate::flight::{Role, SingleFlight};
use crate::freshness::Freshness;
use crate::local_file::LocalFiles;
use crate::names::{MediaName, NameCache, UrlCache, UrlKey};
use crate::{
    ByteBudget, Clock, ContentHash, EncodedMedia, Fault, MediaConfig, MediaError, MediaLimits,
    data_uri,
};

/// The maximum size, in bytes or characters of base64, of a file that is processed on the calling
/// thread. Decoding, hashing and parsing it take a hundred microseconds; handing it to another
/// thread takes some tens.
const MAX_INLINE_BYTES: usize = 512 << 10;

/// The time of one core for decoding base64 and hashing, in nanoseconds per byte. Most of it is
/// spent on fresh memory.
const NANOS_PER_BYTE: u64 = 1;

/// A reference to a media item in a request.
#[derive(Clone, PartialEq, Eq)]
pub struct MediaPart {
    /// The source of the item's bytes. Without a source, `name` must be cached.
    pub source: Option<MediaInput>,
    /// The client's name for the item.
    pub name: Option<MediaName>,
    /// The modality declared by the request.
    pub modality: Modality,
}

/// The source of an item's bytes.
///
/// Inline data may be a slice of the request body. It is decoded from there, and then the slice is
/// dropped.
#[derive(Clone, PartialEq, Eq)]
pub enum MediaInput {
    /// The text of a `data:`, `http:`, `https:` or `file:` URL.
    Url(Bytes),
    /// The bytes in standard base64 with padding, without a prefix.
    Base64(Bytes),
}

impl MediaInput {
    /// Returns the text of the URL, or the base64 text.
    pub fn text(&self) -> &[u8] {
        let (Self::Url(text) | Self::Base64(text)) = self;
        text
    }
}

/// Omits URLs and contents, which may hold secrets or whole files.
impl std::fmt::Debug for MediaInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Self::Url(_) => "Url",
            Self::Base64(_) => "Base64",
        };
        f.debug_struct(name).field("bytes", &self.text().len()).finish()
    }
}

impl MediaPart {
    /// Creates a part for an image file on this machine, which must lie below the allowed local
    /// media path.
    ///
    /// # Errors
    /// [`MediaError::LocalFileNotFound`] if the file does not exist.
    pub fn file(path: &Path) -> Result<Self, MediaError> {
        let path = path.canonicalize().map_err(|_| MediaError::LocalFileNotFound)?;
        let url = Url::from_file_path(path).map_err(|()| MediaError::LocalFileNotFound)?;
        Ok(String::from(url).into())
    }
}

/// Creates a part for an image at a URL.
impl<S: Into<String>> From<S> for MediaPart {
    fn from(url: S) -> Self {
        Self {
            source: Some(MediaInput::Url(Bytes::from(url.into()))),
            name: None,
            modality: Modality::Image,
        }
    }
}

impl std::fmt::Debug for MediaPart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MediaPart").field("source", &self.source).field("name", &self.name).finish()
    }
}

/// Loads the media items of requests, within the limits of its [`MediaConfig`].
///
/// Nothing else in Chiasm opens files or connections for media. Clones share connections, caches
/// and limits.
#[derive(Clone)]
pub struct MediaLoader {
    inner: Arc<Inner>,
    executor: Arc<dyn CpuExecutor>,
}

struct Inner {
    config: MediaConfig,
    budget: ByteBudget,
    clock: Clock,
    fetcher: Fetcher,
    fetch_threads: FetchThreads,
    local_files: Option<LocalFiles>,
    contents: ContentCache,
    urls: UrlCache,
    names: NameCache,
    downloads: SingleFlight<(UrlKey, Modality), Result<EncodedMedia, MediaError>>,
    counters: Counters,
}

impl MediaLoader {
    /// Creates a loader.
    ///
    /// The encoded media in memory is charged to `budget`, also when cached. Its limit should
    /// therefore exceed [`MediaConfig::cache_bytes`].
    ///
    /// # Errors
    /// [`MediaError::LocalFileNotFound`] if the allowed local media path is not a directory.
    pub fn new(config: MediaConfig, budget: ByteBudget) -> Result<Self, MediaError> {
        Self::with_clock(config, budget, Clock::default())
    }

    /// Creates a loader whose caches use `clock`, so that tests need not wait.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn with_clock(
        config: MediaConfig,
        budget: ByteBudget,
        clock: Clock,
    ) -> Result<Self, MediaError> {
        let inner = Inner {
            fetch_threads: FetchThreads::default(),
            fetcher: Fetcher::new(&config, budget.clone(), clock.clone())?,
            local_files: config
                .allowed_local_media_path
                .as_deref()
                .map(LocalFiles::new)
                .transpose()?,
            contents: ContentCache::new(config.cache_bytes, budget.clone()),
            urls: UrlCache::new(config.max_known_names, config.failure_ttl),
            names: NameCache::new(config.max_known_names),
            downloads: SingleFlight::default(),
            counters: Counters::default(),
            budget,
            clock,
            config,
        };
        Ok(Self { inner: Arc::new(inner), executor: Arc::new(BlockingThreads) })
    }

    /// Processes files of more than half a MiB on `executor`, instead of the async runtime's pool
    /// of blocking threads.
    #[must_use]
    pub fn with_executor(self, executor: Arc<dyn CpuExecutor>) -> Self {
        Self { executor, ..self }
    }

    /// Returns the size limits of one media item.
    pub fn limits(&self) -> &MediaLimits {
        &self.inner.config.limits
    }

    /// Returns the item with this content, if it is cached.
    pub fn cached(&self, content: &ContentHash) -> Option<EncodedMedia> {
        self.inner.contents.get(content)
    }

    /// Parses a file that was not loaded from a URL, within the limits of its modality, and caches
    /// it.
    ///
    /// Hashes the whole file: must not run on async threads if the file is large.
    ///
    /// # Errors
    /// The errors of [`EncodedMedia::new`].
    pub fn insert(&self, bytes: Bytes, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        self.inner.parse(bytes, modality)
    }

    /// Returns the budget for encoded media in memory, cached or not. Other holders of request
    /// bytes charge the same budget.
    pub fn budget(&self) -> &ByteBudget {
        &self.inner.budget
    }

    /// Returns a snapshot of the counters.
    pub fn counts(&self) -> MediaCounts {
        MediaCounts { cached_bytes: self.inner.contents.bytes(), ..self.inner.counters.snapshot() }
    }

    /// Loads the bytes of a media item and reads its header.
    ///
    /// A URL is fetched as often as HTTP caching requires, and once for all concurrent callers. A
    /// name that comes with a URL refers to the content of that URL from then on.
    ///
    /// Dropping the future cancels the fetch, unless another caller waits for it too.
    ///
    /// # Errors
    /// Any [`MediaError`]; [`MediaError::fault`] classifies them.
    pub async fn open(&self, part: impl Into<MediaPart>) -> Result<EncodedMedia, MediaError> {
        let MediaPart { source, name, modality } = part.into();
        let limits = &self.inner.config.limits;
        let opened = match source {
            None => return self.inner.resolve_name(name)?.into_modality(&modality, limits),
            Some(MediaInput::Url(url)) => self.open_url(url, &modality).await,
            Some(MediaInput::Base64(data)) => self.open_base64(data, &modality).await,
        };
        let item = opened?.into_modality(&modality, limits)?;
        if let Some(name) = name {
            self.inner.names.insert(name, item.content);
        }
        Ok(item)
    }

    /// Opens a URL. A cached item may have another modality.
    async fn open_url(&self, url: Bytes, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let inner = &self.inner;
        if data_uri::content(&url).is_some() {
            inner.counters.data.inc();
            let modality = modality.clone();
            return self.process(url.len(), move |inner| inner.open_data(&url, &modality)).await;
        }
        let parsed = str::from_utf8(&url).ok().and_then(|url| Url::parse(url).ok());
        let url = parsed.ok_or(MediaError::InvalidUrl { reason: "it cannot be parsed" })?;
        match url.scheme() {
            "http" | "https" => {
                let requested: Arc<str> = Arc::from(url.as_str());
                let opened = self.open_http(url, modality).await;
                opened
                    .inspect_err(|error| log_forbidden(&requested, error))
                    .map(|item| EncodedMedia { url: Some(requested), ..item })
            }
            "file" => {
                inner.counters.files.inc();
                let inner = inner.clone();
                let modality = modality.clone();
                // Local and network disks may be slow, so this must not block the executor.
                let opened =
                    tokio::task::spawn_blocking(move || inner.open_file(&url, &modality)).await;
                opened.unwrap_or(Err(MediaError::Internal))
            }
            _ => Err(MediaError::UnsupportedScheme),
        }
    }

    async fn open_base64(
        &self,
        data: Bytes,
        modality: &Modality,
    ) -> Result<EncodedMedia, MediaError> {
        self.inner.counters.data.inc();
        let length = data.len();
        let modality = modality.clone();
        let open = move |inner: &Inner| {
            let max_bytes = inner.config.limits.max_bytes(&modality);
            inner.parse(data_uri::decode_base64(&data, max_bytes, &inner.budget)?, &modality)
        };
        self.process(length, open).await
    }

    async fn open_http(&self, url: Url, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let inner = &self.inner;
        // The policy also applies to cached URLs.
        inner.fetcher.check(&url)?;
        let key = UrlKey::for_url(&url);
        let now = inner.clock.now();
        let mut cached = None;
        if let Some((content, freshness)) = inner.urls.content(&key)
            && let Some(item) = inner.contents.get(&content)
        {
            if freshness.is_fresh(now) {
                inner.counters.fresh.inc();
                return Ok(item);
            }
            cached = Some((item, freshness));
        }
        let flight = (key, modality.clone());
        if let Some(error) = inner.urls.failure(&flight, now) {
            inner.counters.failed_again.inc();
            return Err(error);
        }
        let download = {
            let loader = self.clone();
            let modality = modality.clone();
            move || async move { loader.download(url, key, cached, &modality).await }
        };
        let (role, outcome) = inner.downloads.join(flight, download).await;
        if role == Role::Follower {
            inner.counters.shared.inc();
        }
        outcome
    }

    /// Fetches a URL, or revalidates its stale cached item.
    async fn download(
        self,
        url: Url,
        key: UrlKey,
        cached: Option<(EncodedMedia, Freshness)>,
        modality: &Modality,
    ) -> Result<EncodedMedia, MediaError> {
        let inner = &self.inner;
        let cached = cached.filter(|(_, freshness)| freshness.can_revalidate());
        let max_bytes = inner.config.limits.max_bytes(modality);
        let fetch = {
            let inner = inner.clone();
            let freshness = cached.as_ref().map(|(_, freshness)| freshness.clone());
            async move { inner.fetcher.get(url, freshness.as_ref(), max_bytes).await }
        };
        let fetched = match inner.fetch_threads.run(fetch).await {
            Ok(FetchOutcome::Fetched(fetched)) => Ok(fetched),
            Ok(FetchOutcome::NotModified(newer)) => match cached {
                Some((item, freshness)) => {
                    inner.counters.revalidated.inc();
                    inner.urls.set_content(key, item.content, freshness.refreshed(newer));
                    return Ok(item);
                }
                None => Err(MediaError::OriginFailed),
            },
            Err(error) => Err(error),
        };
        let opened = match fetched {
            Ok(fetched) => {
                inner.counters.fetched.inc();
                let fetched_bytes = fetched.bytes.len();
                inner.counters.fetched_bytes.add(fetched_bytes as u64);
                let modality = modality.clone();
                let open = move |inner: &Inner| inner.parse(fetched.bytes, &modality);
                let opened = self.process(fetched_bytes, open).await;
                opened.map(|item| (item, fetched.freshness))
            }
            Err(error) => Err(error),
        };
        match opened {
            Ok((item, freshness)) => {
                inner.urls.set_content(key, item.content, freshness);
                Ok(item)
            }
            Err(error) => {
                // Faults of this process are transient and say nothing about the URL.
                if !matches!(error.fault(), Fault::Busy | Fault::Internal) {
                    let key = (key, modality.clone());
                    inner.urls.set_failure(key, error.clone(), inner.clock.now());
                }
                Err(error)
            }
        }
    }

    /// Runs work on `bytes` bytes of data: on this thread for a small item, else on the executor.
    async fn process<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Inner) -> Result<T, MediaError> + Send + 'static,
    ) -> Result<T, MediaError> {
        if bytes <= MAX_INLINE_BYTES {
            return work(&self.inner);
        }
        let inner = self.inner.clone();
        let (done, outcome) = oneshot::channel();
        let time = Duration::from_nanos(bytes as u64 * NANOS_PER_BYTE);
        self.executor.run(time, Box::new(move || drop(done.send(work(&inner))))).await;
        outcome.await.unwrap_or(Err(MediaError::Internal))
    }
}

/// Logs the host of a URL that the policy refuses: errors are for clients and don't have it. After
/// a redirect, it is still the host that the client named.
fn log_forbidden(url: &str, error: &MediaError) {
    if error.fault() == Fault::Forbidden {
        let url = Url::parse(url).ok();
        let host = url.as_ref().and_then(Url::host_str).unwrap_or_default();
        tracing::info!(host = %format_args!("{host:.100}"), %error, "a media URL is refused");
    }
}

impl Inner {
    fn open_data(&self, url: &[u8], modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let content = data_uri::content(url).ok_or(MediaError::UnsupportedScheme)?;
        let max_bytes = self.config.limits.max_bytes(modality);
        let frames = match modality {
            Modality::Video => data_uri::frames(content, max_bytes, &self.budget),
            _ => None,
        };
        self.parse(
            frames.unwrap_or_else(|| data_uri::decode(content, max_bytes, &self.budget))?,
            modality,
        )
    }

    fn open_file(&self, url: &Url, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let files = self.local_files.as_ref().ok_or(MediaError::LocalFilesDisabled)?;
        self.parse(files.read(url, self.config.limits.max_bytes(modality), &self.budget)?, modality)
    }

    /// Returns the item that a client's name refers to.
    fn resolve_name(&self, name: Option<MediaName>) -> Result<EncodedMedia, MediaError> {
        let name = name.ok_or(MediaError::InvalidUrl { reason: "it is missing" })?;
        let item = self.names.get(&name).and_then(|content| self.contents.get(&content));
        match &item {
            Some(_) => self.counters.named.inc(),
            None => self.counters.unknown_names.inc(),
        }
        item.ok_or(MediaError::UnknownUuid)
    }

    /// Parses a file and caches it.
    fn parse(&self, bytes: Bytes, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let item = EncodedMedia::new(bytes, modality, &self.config.limits)?;
        Ok(self.contents.insert(item))
    }
}

impl std::fmt::Debug for MediaLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MediaLoader").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
