//! What is known under names that are not the content itself: URLs and clients' uuids.

use std::time::{Duration, Instant};

use quick_cache::sync::Cache;
use quick_cache::{OptionsBuilder, Weighter};

use crate::freshness::Freshness;
use crate::{ContentHash, MediaError};

/// The digest that stands for a URL: URLs may be long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct UrlKey([u8; 32]);

impl UrlKey {
    /// The key of a whole URL. Case and parameters matter; what follows `#` does not, as it is never sent.
    pub(crate) fn of(url: &url::Url) -> Self {
        let sent = &url[..url::Position::AfterQuery];
        Self(blake3::hash(sent.as_bytes()).into())
    }
}

/// What is known of a URL.
#[derive(Clone, Debug)]
pub(crate) enum Known {
    /// What it led to, and for how long that holds.
    Content(ContentHash, Freshness),
    /// It failed, a moment ago.
    Failed { error: MediaError, until: Instant },
}

/// What URLs led to.
pub(crate) struct Urls {
    /// `None` remembers nothing.
    known: Option<Cache<UrlKey, Known, Weight>>,
    failures_last: Duration,
}

/// Long URLs and tags count as several short ones.
#[derive(Clone)]
struct Weight;

/// Bytes of URL and tags that count as one name.
const NAME_BYTES: usize = 256;

impl Weighter<UrlKey, Known> for Weight {
    fn weight(&self, _: &UrlKey, known: &Known) -> u64 {
        match known {
            Known::Content(_, freshness) => 1 + (freshness.bytes() / NAME_BYTES) as u64,
            Known::Failed { .. } => 1,
        }
    }
}

impl Urls {
    /// Remembers at most `count` URLs. Failures are believed for `failures_last`.
    pub(crate) fn new(count: usize, failures_last: Duration) -> Self {
        let options =
            OptionsBuilder::new().weight_capacity(count as u64).estimated_items_capacity(count.min(1 << 16)).build();
        let cache = |options| Cache::with_options(options, Weight, Default::default(), Default::default());
        Self { known: options.ok().filter(|_| count > 0).map(cache), failures_last }
    }

    pub(crate) fn get(&self, key: &UrlKey) -> Option<Known> {
        self.known.as_ref()?.get(key)
    }

    pub(crate) fn learn(&self, key: UrlKey, content: ContentHash, freshness: Freshness) {
        match freshness.may_be_stored() {
            true => self.set(key, Known::Content(content, freshness)),
            false => self.forget(&key),
        }
    }

    /// The URL leads to nothing now. What it led to before does not count any more.
    pub(crate) fn failed(&self, key: UrlKey, error: &MediaError, now: Instant) {
        self.set(key, Known::Failed { error: error.clone(), until: now + self.failures_last });
    }

    fn set(&self, key: UrlKey, known: Known) {
        if let Some(cache) = &self.known {
            cache.insert(key, known);
        }
    }

    fn forget(&self, key: &UrlKey) {
        if let Some(cache) = &self.known {
            cache.remove(key);
        }
    }
}

/// The name that a client gave an item, together with who the client is: nobody else's name is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MediaName([u8; 32]);

impl MediaName {
    /// Most bytes of a client's name for an item.
    pub const MAX_BYTES: usize = 256;

    /// `owner`: what tells clients apart, such as credentials and a cache salt, none of which is kept.
    ///
    /// # Errors
    /// [`MediaError::InvalidUuid`] for an empty name, and for one of more than [`Self::MAX_BYTES`].
    pub fn new<'a>(owner: impl IntoIterator<Item = Option<&'a [u8]>>, uuid: &'a str) -> Result<Self, MediaError> {
        if uuid.is_empty() || uuid.len() > Self::MAX_BYTES {
            return Err(MediaError::InvalidUuid { limit: Self::MAX_BYTES });
        }
        let mut hasher = blake3::Hasher::new_derive_key("chiasm 2026-11 name of a media item");
        for part in owner.into_iter().chain([Some(uuid.as_bytes())]) {
            // With lengths, so that parts can't flow into each other; none is not the same as empty.
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
        let name =
            |owner: [Option<&str>; 2], uuid| MediaName::new(owner.map(|part| part.map(str::as_bytes)), uuid).unwrap();
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
        for other in ["http://a/B?c", "http://a/b?C", "http://a/b", "https://a/b?c", "http://a:81/b?c", "http://a/b?c="]
        {
            assert_ne!(key("http://a/b?c"), key(other), "{other}");
        }
    }
}
