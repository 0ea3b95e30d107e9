//! What is known under names that are not the content itself: URLs and clients' uuids.

use std::time::{Duration, Instant};

use chiasm_types::Modality;
use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::freshness::Freshness;
use crate::{ContentHash, MediaError};

/// The digest that stands for a URL: URLs may be long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct UrlKey([u8; 32]);

impl UrlKey {
    /// The key of a whole URL. Case and parameters matter; what follows `#` does not, as it is
    /// never sent.
    pub(crate) fn of(url: &url::Url) -> Self {
        let sent = &url[..url::Position::AfterQuery];
        Self(blake3::hash(sent.as_bytes()).into())
    }
}

/// The content of a URL, and how long that stays valid.
type UrlContent = (ContentHash, Freshness);

/// A failure of a URL, and its expiry.
type UrlFailure = (MediaError, Instant);

/// The contents and the failures of URLs. A failure does not remove the content: the network may
/// have failed, or one modality, as when a picture is asked for as a video.
pub(crate) struct Urls {
    /// `None` remembers nothing.
    caches: Option<UrlCaches>,
    failures_last: Duration,
}

struct UrlCaches {
    contents: Cache<UrlKey, UrlContent, Weight>,
    failures: Cache<(UrlKey, Modality), UrlFailure>,
}

/// Long URLs and tags count as several short ones.
#[derive(Clone)]
struct Weight;

/// Bytes of URL and tags that count as one name.
const NAME_BYTES: usize = 256;

impl Weighter<UrlKey, UrlContent> for Weight {
    fn weight(&self, _: &UrlKey, (_, freshness): &UrlContent) -> u64 {
        1 + (freshness.bytes() / NAME_BYTES) as u64
    }
}

impl Urls {
    /// Remembers at most `count` URLs, and as many failures. Failures expire after `failures_last`.
    pub(crate) fn new(count: usize, failures_last: Duration) -> Self {
        let options = OptionsBuilder::new()
            .weight_capacity(count as u64)
            .estimated_items_capacity(count.min(1 << 16))
            .build();
        let caches = |options| UrlCaches {
            contents: Cache::with_options(options, Weight, Default::default(), Default::default()),
            failures: Cache::new(count),
        };
        Self { caches: options.ok().filter(|_| count > 0).map(caches), failures_last }
    }

    /// Returns the last known content of the URL.
    pub(crate) fn content(&self, key: &UrlKey) -> Option<UrlContent> {
        self.caches.as_ref()?.contents.get(key)
    }

    /// Returns the failure of the URL for a modality, unless it has expired.
    pub(crate) fn failure(&self, key: &(UrlKey, Modality), now: Instant) -> Option<MediaError> {
        let (error, until) = self.caches.as_ref()?.failures.get(key)?;
        (now < until).then_some(error)
    }

    /// Remembers the content of the URL, if it may be stored.
    pub(crate) fn learn(&self, key: UrlKey, content: ContentHash, freshness: Freshness) {
        let Some(caches) = &self.caches else { return };
        if freshness.may_be_stored() {
            caches.contents.insert(key, (content, freshness));
        } else {
            caches.contents.remove(&key);
        }
    }

    /// Remembers that the URL failed for a modality.
    pub(crate) fn failed(&self, key: (UrlKey, Modality), error: MediaError, now: Instant) {
        if let Some(caches) = &self.caches {
            caches.failures.insert(key, (error, now + self.failures_last));
        }
    }
}

/// The name that a client gave an item, together with who the client is: nobody else's name is the
/// same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MediaName([u8; 32]);

impl MediaName {
    /// Most bytes of a client's name for an item.
    pub const MAX_BYTES: usize = 256;

    /// `owner`: what tells clients apart, such as credentials and a cache salt, none of which is
    /// kept.
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
            // With lengths, so that parts can't flow into each other; none is not the same as
            // empty.
            hasher.update(&part.map_or(0, |part| part.len() as u64 + 1).to_le_bytes());
            hasher.update(part.unwrap_or_default());
        }
        Ok(Self(hasher.finalize().into()))
    }
}

/// What clients' names stand for.
pub(crate) struct Names {
    contents: Cache<MediaName, ContentHash>,
}

impl Names {
    /// Remembers at most `count` names. Each takes about a hundred bytes.
    pub(crate) fn new(count: usize) -> Self {
        Self { contents: Cache::new(count) }
    }

    pub(crate) fn get(&self, name: &MediaName) -> Option<ContentHash> {
        self.contents.get(name)
    }

    /// The name stands for this content from now on, whatever it stood for before.
    pub(crate) fn give(&self, name: MediaName, content: ContentHash) {
        self.contents.insert(name, content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_of_one_owner() {
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
    fn names_have_a_length() {
        assert!(MediaName::new([], "").is_err());
        assert!(MediaName::new([], &"x".repeat(256)).is_ok());
        assert!(MediaName::new([], &"x".repeat(257)).is_err());
    }

    #[test]
    fn a_fragment_is_no_part_of_a_url_and_everything_else_is() {
        let key = |url: &str| UrlKey::of(&url::Url::parse(url).unwrap());
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
