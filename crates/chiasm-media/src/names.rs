//! Caches from names of content to content hashes: URLs and clients' uuids.

use std::time::{Duration, Instant};

use chiasm_types::Modality;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::freshness::Freshness;
use crate::{ContentHash, MediaError};

/// The digest of a URL. Keys have a fixed size, while URLs may be long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct UrlKey([u8; 32]);

impl UrlKey {
    /// Returns the key of a URL. Case and query matter. The fragment after `#` does not, because it
    /// is never sent.
    pub(crate) fn for_url(url: &url::Url) -> Self {
        let sent = &url[..url::Position::AfterQuery];
        Self(blake3::hash(sent.as_bytes()).into())
    }
}

/// The content of a URL and its freshness.
type UrlContent = (ContentHash, Freshness);

/// A failure of a URL and its expiry.
type UrlFailure = (MediaError, Instant);

/// The cache of contents and failures of URLs.
///
/// A failure does not remove the content. Only the network may have failed, or only one modality,
/// as when a picture is requested as a video.
pub(crate) struct UrlCache {
    /// `None` if nothing is cached.
    caches: Option<Caches>,
    failure_ttl: Duration,
}

struct Caches {
    contents: Cache<UrlKey, UrlContent, Weight>,
    failures: Cache<(UrlKey, Modality), UrlFailure>,
}

/// Weighs an entry in units of [`NAME_BYTES`]: a long URL or tag counts as several short ones.
#[derive(Clone)]
struct Weight;

/// The bytes of URL and tags that count as one name.
const NAME_BYTES: usize = 256;

impl Weighter<UrlKey, UrlContent> for Weight {
    fn weight(&self, _: &UrlKey, (_, freshness): &UrlContent) -> u64 {
        1 + (freshness.bytes() / NAME_BYTES) as u64
    }
}

impl UrlCache {
    /// Creates a cache of at most `count` URLs and `count` failures. A failure expires after
    /// `failure_ttl`; a `count` of 0 disables the cache.
    pub(crate) fn new(count: usize, failure_ttl: Duration) -> Self {
        let options = OptionsBuilder::new()
            .weight_capacity(count as u64)
            .estimated_items_capacity(count.min(1 << 16))
            .build();
        let caches = |options| Caches {
            contents: Cache::with_options(options, Weight, Default::default(), Default::default()),
            failures: Cache::new(count),
        };
        Self { caches: options.ok().filter(|_| count > 0).map(caches), failure_ttl }
    }

    /// Returns the last known content of a URL.
    pub(crate) fn content(&self, key: &UrlKey) -> Option<UrlContent> {
        self.caches.as_ref()?.contents.get(key)
    }

    /// Returns the failure of a URL for a modality, unless it has expired.
    pub(crate) fn failure(&self, key: &(UrlKey, Modality), now: Instant) -> Option<MediaError> {
        let (error, expiry) = self.caches.as_ref()?.failures.get(key)?;
        (now < expiry).then_some(error)
    }

    /// Stores the content of a URL if its freshness allows that, and otherwise removes it.
    pub(crate) fn set_content(&self, key: UrlKey, content: ContentHash, freshness: Freshness) {
        let Some(caches) = &self.caches else { return };
        if freshness.may_be_stored() {
            caches.contents.insert(key, (content, freshness));
        } else {
            caches.contents.remove(&key);
        }
    }

    /// Stores the failure of a URL for a modality.
    pub(crate) fn set_failure(&self, key: (UrlKey, Modality), error: MediaError, now: Instant) {
        if let Some(caches) = &self.caches {
            caches.failures.insert(key, (error, now + self.failure_ttl));
        }
    }
}

/// A client's name for an item, bound to that client: the same uuid of another client is another
/// name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MediaName([u8; 32]);

impl MediaName {
    /// The maximum length of a client's uuid in bytes.
    pub const MAX_BYTES: usize = 256;

    /// Hashes a client's uuid for an item together with the client's identity.
    ///
    /// The parts of `owner` distinguish clients, such as credentials and a cache salt. Only their
    /// hash is kept.
    ///
    /// # Errors
    /// [`MediaError::InvalidUuid`] for an empty name, and for one of more than [`Self::MAX_BYTES`].
    pub fn new<'a>(
        owner: impl IntoIterator<Item = Option<&'a [u8]>>,
        uuid: &'a str,
    ) -> Result<Self, MediaError> {
        if uuid.is_empty() || uuid.len() > Self::MAX_BYTES {
            return Err(MediaError::InvalidUuid { limit: Self::MAX_BYTES });
        }
        let mut hasher = blake3::Hasher::new_derive_key("chiasm 2026-11 name of a media item");
        for part in owner.into_iter().chain([Some(uuid.as_bytes())]) {
            // Lengths keep the parts apart. A missing part differs from an empty one.
            hasher.update(&part.map_or(0, |part| part.len() as u64 + 1).to_le_bytes());
            hasher.update(part.unwrap_or_default());
        }
        Ok(Self(hasher.finalize().into()))
    }
}

/// The cache from clients' names to content hashes.
pub(crate) struct NameCache {
    contents: Cache<MediaName, ContentHash>,
}

impl NameCache {
    /// Creates a cache of at most `count` names. Each takes about a hundred bytes.
    pub(crate) fn new(count: usize) -> Self {
        Self { contents: Cache::new(count) }
    }

    /// Returns the content that a name refers to.
    pub(crate) fn get(&self, name: &MediaName) -> Option<ContentHash> {
        self.contents.get(name)
    }

    /// Binds a name to `content`, in place of any earlier content.
    pub(crate) fn insert(&self, name: MediaName, content: ContentHash) {
        self.contents.insert(name, content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_uuids_of_other_owners_differ() {
        let name = |owner: [Option<&str>; 2], uuid| {
            MediaName::new(owner.map(|part| part.map(str::as_bytes)), uuid).unwrap()
        };
        let names = [
            name([None, None], "u"),
            name([Some(""), None], "u"),
            name([None, Some("")], "u"),
            name([Some("a"), None], "u"),
            name([Some("a"), Some("b")], "u"),
            name([Some("ab"), Some("")], "u"),
            name([Some("a"), Some("")], "bu"),
            name([None, None], "v"),
        ];
        for (index, name) in names.iter().enumerate() {
            assert_eq!(names.iter().position(|other| other == name), Some(index));
        }
        assert_eq!(name([Some("a"), None], "u"), name([Some("a"), None], "u"));
    }

    #[test]
    fn uuid_length_is_1_to_256_bytes() {
        assert!(MediaName::new([], "").is_err());
        assert!(MediaName::new([], &"x".repeat(256)).is_ok());
        assert!(MediaName::new([], &"x".repeat(257)).is_err());
    }

    #[test]
    fn url_key_ignores_only_the_fragment() {
        let key = |url: &str| UrlKey::for_url(&url::Url::parse(url).unwrap());
        assert_eq!(key("http://a/b?c#d"), key("http://a/b?c#e"));
        assert_eq!(key("http://a/b?c#d"), key("HTTP://A/b?c"));
        for other in [
            "http://a/B?c",
            "http://a/b?C",
            "http://a/b",
            "https://a/b?c",
            "http://a:81/b?c",
            "http://a/b?c=",
        ] {
            assert_ne!(key("http://a/b?c"), key(other), "{other}");
        }
    }
}
