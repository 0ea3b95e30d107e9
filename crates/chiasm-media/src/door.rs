//! One way in for media of every kind of URL.

use std::sync::Arc;

use bytes::Bytes;
use reqwest::Url;

use crate::fetch::Fetcher;
use crate::local_file::LocalFiles;
use crate::{EncodedImage, MediaConfig, MediaError, data_uri};

/// Headers of up to this many bytes are read in place: that takes less time than handing them to another thread.
const IN_PLACE: usize = 4 << 10;

/// Turns media URLs into images, within the limits of its [`MediaConfig`]. Clones share connections.
#[derive(Clone)]
pub struct MediaDoor {
    inner: Arc<Inner>,
}

struct Inner {
    config: MediaConfig,
    fetcher: Fetcher,
    local_files: Option<LocalFiles>,
}

impl MediaDoor {
    /// Checks the configuration once.
    ///
    /// # Errors
    /// [`MediaError::LocalFileNotFound`] when the allowed local media path is no directory.
    pub fn new(config: MediaConfig) -> Result<Self, MediaError> {
        let fetcher = Fetcher::new(&config)?;
        let local_files = config.allowed_local_media_path.as_deref().map(LocalFiles::new).transpose()?;
        Ok(Self { inner: Arc::new(Inner { config, fetcher, local_files }) })
    }

    /// The limits and permissions.
    pub fn config(&self) -> &MediaConfig {
        &self.inner.config
    }

    /// Gets the bytes behind a `data:`, `http:`, `https:` or `file:` URL and reads the image's header.
    ///
    /// Fetched URLs are not cached: the same URL may give other content the next time.
    ///
    /// # Errors
    /// All of [`MediaError`]; see [`MediaError::fault`] for whose fault each is. Dropping the future ends the fetch.
    pub async fn open(&self, url: &str) -> Result<EncodedImage, MediaError> {
        let limits = self.inner.config.image_limits();
        if let Some(content) = data_uri::content(url) {
            let max_bytes = self.inner.config.max_bytes;
            let image =
                move |content: &str| EncodedImage::from_bytes(data_uri::decode(content, max_bytes)?.into(), limits);
            if content.len() <= IN_PLACE {
                return image(content);
            }
            let content = content.to_owned();
            return blocking(move || image(&content)).await;
        }
        let url = Url::parse(url).map_err(|_| MediaError::InvalidUrl { reason: "it cannot be parsed" })?;
        let bytes = match url.scheme() {
            "http" | "https" => self.inner.fetcher.get(url).await?,
            "file" => {
                let files = self.inner.local_files.clone().ok_or(MediaError::LocalFilesDisabled)?;
                let max_bytes = self.inner.config.max_bytes;
                Bytes::from(blocking(move || files.read(&url, max_bytes)).await?)
            }
            _ => return Err(MediaError::UnsupportedScheme),
        };
        if bytes.len() <= IN_PLACE {
            return EncodedImage::from_bytes(bytes, limits);
        }
        blocking(move || EncodedImage::from_bytes(bytes, limits)).await
    }
}

impl std::fmt::Debug for MediaDoor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MediaDoor").field("config", &self.inner.config).finish_non_exhaustive()
    }
}

/// Runs CPU-heavy or blocking work on a thread made for it.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, MediaError> + Send + 'static,
) -> Result<T, MediaError> {
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(MediaError::Internal))
}
