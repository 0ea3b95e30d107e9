//! One way in for media, whatever names it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_types::Modality;
use reqwest::Url;
use tokio::sync::oneshot;

use crate::contents::Contents;
use crate::counts::{Counters, MediaCounts};
use crate::fetch::{Answer, FetchThreads, Fetcher};
use crate::flight::{Boarded, Flights};
use crate::freshness::Freshness;
use crate::local_file::LocalFiles;
use crate::names::{MediaName, Names, UrlKey, Urls};
use crate::workers::{BlockingThreads, Workers};
use crate::{
    ByteBudget, Clock, ContentHash, EncodedMedia, Fault, MediaConfig, MediaError, MediaLimits,
    data_uri,
};

/// Files of up to this many bytes, or characters of base64, are decoded, hashed and looked at in
/// place: that takes a hundred microseconds, and handing them to another thread some tens.
const IN_PLACE: usize = 512 << 10;
/// What decoding base64 and hashing take of one core, most of it for memory that is fresh.
const NANOS_PER_BYTE: u64 = 1;

/// A part of a request that stands for a media item.
#[derive(Clone, PartialEq, Eq)]
pub struct MediaPart {
    /// Where its bytes are. Without that, the name must be known.
    pub source: Option<MediaInput>,
    /// What the client calls the item.
    pub name: Option<MediaName>,
    /// What kind of thing it is said to be.
    pub modality: Modality,
}

/// Where the bytes of an item are. What holds them itself may be a slice of what it came in: it is
/// decoded from there and let go.
#[derive(Clone, PartialEq, Eq)]
pub enum MediaInput {
    /// The text of a `data:`, `http:`, `https:` or `file:` URL.
    Url(Bytes),
    /// The bytes in standard base64 with padding, and nothing before it.
    Base64(Bytes),
}

impl MediaInput {
    /// Its text, without saying what that is.
    pub fn text(&self) -> &[u8] {
        let (Self::Url(text) | Self::Base64(text)) = self;
        text
    }
}

/// Shows neither URLs nor contents: they may hold secrets, and whole files.
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
    /// An image in a file of this machine, which must lie below the allowed local media path.
    ///
    /// # Errors
    /// [`MediaError::LocalFileNotFound`] when there is no such file.
    pub fn file(path: &Path) -> Result<Self, MediaError> {
        let path = path.canonicalize().map_err(|_| MediaError::LocalFileNotFound)?;
        let url = Url::from_file_path(path).map_err(|()| MediaError::LocalFileNotFound)?;
        Ok(String::from(url).into())
    }
}

/// An image at a URL.
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

/// Turns parts of requests into media items, within the limits of its [`MediaConfig`]. Nothing else
/// in Chiasm opens files or connections for media. Clones share connections, caches and limits.
#[derive(Clone)]
pub struct MediaDoor {
    inner: Arc<Inner>,
    workers: Arc<dyn Workers>,
}

struct Inner {
    config: MediaConfig,
    budget: ByteBudget,
    clock: Clock,
    fetcher: Fetcher,
    fetch_threads: FetchThreads,
    local_files: Option<LocalFiles>,
    contents: Contents,
    urls: Urls,
    names: Names,
    downloads: Flights<(UrlKey, Modality), Result<EncodedMedia, MediaError>>,
    counters: Counters,
}

impl MediaDoor {
    /// The limits of one media item.
    pub fn limits(&self) -> &MediaLimits {
        &self.inner.config.limits
    }

    /// The item of this content, if it was seen and is still kept.
    pub fn kept(&self, content: &ContentHash) -> Option<EncodedMedia> {
        self.inner.contents.get(content)
    }

    /// Looks at a file that somebody else has opened, within the limits for its modality, and keeps
    /// it as one that was opened here. Hashes all of it: not for async threads if it is large.
    ///
    /// # Errors
    /// Those of [`EncodedMedia::of`].
    pub fn keep(&self, bytes: Bytes, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        Ok(self.inner.contents.keep(EncodedMedia::of(bytes, modality, &self.inner.config.limits)?))
    }

    /// Checks the configuration once. `budget` counts encoded media in memory, cached ones too: it
    /// should have room for more than [`MediaConfig::cache_bytes`].
    ///
    /// # Errors
    /// [`MediaError::LocalFileNotFound`] when the allowed local media path is no directory.
    pub fn new(config: MediaConfig, budget: ByteBudget) -> Result<Self, MediaError> {
        Self::with_clock(config, budget, Clock::default())
    }

    /// Makes a door whose memory ages by another clock, so that tests need not wait.
    ///
    /// # Errors
    /// Those of [`Self::new`].
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
            contents: Contents::new(config.cache_bytes, budget.clone()),
            urls: Urls::new(config.max_known_names, config.failures_last),
            names: Names::new(config.max_known_names),
            downloads: Flights::default(),
            counters: Counters::default(),
            budget,
            clock,
            config,
        };
        Ok(Self { inner: Arc::new(inner), workers: Arc::new(BlockingThreads) })
    }

    /// The same door, whose work on files of more than half a megabyte is done by these threads
    /// instead of the async runtime's for blocking work.
    #[must_use]
    pub fn with_workers(self, workers: Arc<dyn Workers>) -> Self {
        Self { workers, ..self }
    }

    /// What counts encoded media in memory, cached or not. Whoever else holds bytes of requests
    /// counts them here too.
    pub fn budget(&self) -> &ByteBudget {
        &self.inner.budget
    }

    /// What has happened so far.
    pub fn counts(&self) -> MediaCounts {
        MediaCounts { cached_bytes: self.inner.contents.bytes(), ..self.inner.counters.snapshot() }
    }

    /// Gets the bytes of a media item and reads its header.
    ///
    /// A URL is fetched as often as HTTP's rules for caches ask for, and once for all who want it
    /// at the same time. A name that comes with a URL stands for what that leads to from then on.
    ///
    /// # Errors
    /// All of [`MediaError`]; see [`MediaError::fault`] for whose fault each is. Dropping the
    /// future ends the fetch unless somebody else waits for it too.
    pub async fn open(&self, part: impl Into<MediaPart>) -> Result<EncodedMedia, MediaError> {
        let MediaPart { source, name, modality } = part.into();
        let limits = &self.inner.config.limits;
        let opened = match source {
            None => return self.inner.named(name)?.taken_for(&modality, limits),
            Some(MediaInput::Url(url)) => self.open_url(url, &modality).await,
            Some(MediaInput::Base64(data)) => self.open_base64(data, &modality).await,
        };
        let item = opened?.taken_for(&modality, limits)?;
        if let Some(name) = name {
            self.inner.names.give(name, item.content);
        }
        Ok(item)
    }

    /// The item may be one that was opened as another modality's.
    async fn open_url(&self, url: Bytes, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let inner = &self.inner;
        if data_uri::content(&url).is_some() {
            inner.counters.data.inc();
            let modality = modality.clone();
            return self.on_bytes(url.len(), move |inner| inner.open_data(&url, &modality)).await;
        }
        let parsed = str::from_utf8(&url).ok().and_then(|url| Url::parse(url).ok());
        let url = parsed.ok_or(MediaError::InvalidUrl { reason: "it cannot be parsed" })?;
        match url.scheme() {
            "http" | "https" => {
                let from = Some(Arc::from(url.as_str()));
                self.open_http(url, modality).await.map(|item| EncodedMedia { url: from, ..item })
            }
            "file" => {
                inner.counters.files.inc();
                let (inner, modality) = (inner.clone(), modality.clone());
                // Disks and networks below them may be slow, so this is not for the workers.
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
        let (length, modality) = (data.len(), modality.clone());
        let open = move |inner: &Inner| {
            let max_bytes = inner.config.limits.max_bytes(&modality);
            inner.item(data_uri::decode_base64(&data, max_bytes, &inner.budget)?, &modality)
        };
        self.on_bytes(length, open).await
    }

    async fn open_http(&self, url: Url, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let inner = &self.inner;
        // Also for what is cached.
        inner.fetcher.check(&url)?;
        let key = UrlKey::of(&url);
        let now = inner.clock.now();
        let mut known = None;
        if let Some((content, freshness)) = inner.urls.content(&key)
            && let Some(item) = inner.contents.get(&content)
        {
            if freshness.is_fresh(now) {
                inner.counters.fresh.inc();
                return Ok(item);
            }
            known = Some((item, freshness));
        }
        let flight = (key, modality.clone());
        if let Some(error) = inner.urls.failure(&flight, now) {
            inner.counters.failed_again.inc();
            return Err(error);
        }
        let download = {
            let (door, modality) = (self.clone(), modality.clone());
            move || async move { door.download(url, key, known, &modality).await }
        };
        let (boarded, outcome) = inner.downloads.join(flight, download).await;
        if boarded == Boarded::Later {
            inner.counters.shared.inc();
        }
        outcome
    }

    /// Fetches a URL, or learns that what is known of it still holds.
    async fn download(
        self,
        url: Url,
        key: UrlKey,
        known: Option<(EncodedMedia, Freshness)>,
        modality: &Modality,
    ) -> Result<EncodedMedia, MediaError> {
        let inner = &self.inner;
        let known = known.filter(|(_, freshness)| freshness.can_revalidate());
        let max_bytes = inner.config.limits.max_bytes(modality);
        let fetch = {
            let (inner, known) =
                (inner.clone(), known.as_ref().map(|(_, freshness)| freshness.clone()));
            async move { inner.fetcher.get(url, known.as_ref(), max_bytes).await }
        };
        let fetched = match inner.fetch_threads.run(fetch).await {
            Ok(Answer::New(fetched)) => Ok(fetched),
            Ok(Answer::NotModified(newer)) => match known {
                Some((item, freshness)) => {
                    inner.counters.revalidated.inc();
                    inner.urls.learn(key, item.content, freshness.refreshed(newer));
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
                let open = move |inner: &Inner| inner.item(fetched.bytes, &modality);
                let opened = self.on_bytes(fetched_bytes, open).await;
                opened.map(|item| (item, fetched.freshness))
            }
            Err(error) => Err(error),
        };
        match opened {
            Ok((item, freshness)) => {
                inner.urls.learn(key, item.content, freshness);
                Ok(item)
            }
            Err(error) => {
                match error.fault() {
                    // Ours, and over in a moment.
                    Fault::Busy | Fault::Internal => {}
                    _ => {
                        inner.urls.failed((key, modality.clone()), error.clone(), inner.clock.now())
                    }
                }
                Err(error)
            }
        }
    }

    /// Does work on so many bytes, in place if they are few.
    async fn on_bytes<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&Inner) -> Result<T, MediaError> + Send + 'static,
    ) -> Result<T, MediaError> {
        if bytes <= IN_PLACE {
            return work(&self.inner);
        }
        let inner = self.inner.clone();
        let (done, outcome) = oneshot::channel();
        let time = Duration::from_nanos(bytes as u64 * NANOS_PER_BYTE);
        self.workers.run(time, Box::new(move || drop(done.send(work(&inner))))).await;
        outcome.await.unwrap_or(Err(MediaError::Internal))
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
        self.item(
            frames.unwrap_or_else(|| data_uri::decode(content, max_bytes, &self.budget))?,
            modality,
        )
    }

    fn open_file(&self, url: &Url, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        let files = self.local_files.as_ref().ok_or(MediaError::LocalFilesDisabled)?;
        self.item(files.read(url, self.config.limits.max_bytes(modality), &self.budget)?, modality)
    }

    /// What a client's name stands for.
    fn named(&self, name: Option<MediaName>) -> Result<EncodedMedia, MediaError> {
        let name = name.ok_or(MediaError::InvalidUrl { reason: "there is none" })?;
        let known = self.names.get(&name).and_then(|content| self.contents.get(&content));
        match &known {
            Some(_) => self.counters.named.inc(),
            None => self.counters.unknown_names.inc(),
        }
        known.ok_or(MediaError::UnknownUuid)
    }

    /// Identity and header of a file.
    fn item(&self, bytes: Bytes, modality: &Modality) -> Result<EncodedMedia, MediaError> {
        EncodedMedia::of(bytes, modality, &self.config.limits).map(|item| self.contents.keep(item))
    }
}

impl std::fmt::Debug for MediaDoor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MediaDoor").field("config", &self.inner.config).finish_non_exhaustive()
    }
}
