//! The identity of a media item, derived from the identifier in an engine's event.

use chiasm_types::MmHash;

/// The BLAKE3 context for identifiers of other frontends. Separates their identities from content
/// hashes.
const FOREIGN_CONTEXT: &str = "chiasm 2026 media identifier of another frontend";

/// Returns the identity of the media item that an event names by `identifier`.
///
/// Our own requests carry the mm_hash as 64 lower-case hex digits. Other clients of the same engine
/// may send any string. Such a string is hashed into an identity that no content hash equals.
pub(crate) fn media_identity(identifier: &str) -> MmHash {
    match identifier.parse::<MmHash>() {
        // The engine compares strings, so upper-case digits name another item.
        Ok(hash) if !identifier.bytes().any(|byte| byte.is_ascii_uppercase()) => hash,
        _ => MmHash::new(blake3::derive_key(FOREIGN_CONTEXT, identifier.as_bytes())),
    }
}

/// A cache of the last identifier and its identity, because an item spans many blocks.
#[derive(Default)]
pub(crate) struct LastItem(Option<(String, MmHash)>);

impl LastItem {
    /// Returns [`media_identity`] of `identifier`, from the cache if the last call had the same
    /// one.
    pub(crate) fn identity(&mut self, identifier: &str) -> MmHash {
        let known = self.0.take().filter(|(known, _)| known == identifier);
        self.0
            .insert(known.unwrap_or_else(|| (identifier.to_owned(), media_identity(identifier))))
            .1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_item_cache_returns_uncached_identity() {
        let mut last = LastItem::default();
        for identifier in ["a", "a", "b", "a", ""] {
            assert_eq!(last.identity(identifier), media_identity(identifier));
        }
    }

    #[test]
    fn own_identifier_parses_to_its_hash() {
        let hash = MmHash::new([0xab; 32]);
        assert_eq!(media_identity(&hash.to_string()), hash);
    }

    #[test]
    fn foreign_identifiers_have_distinct_identities() {
        let hex = "ab".repeat(32);
        let identities = [hex.as_str(), &hex.to_uppercase(), &hex[1..], "", "img-1", "img-2"]
            .map(media_identity);
        for (i, one) in identities.iter().enumerate() {
            assert!(!identities[..i].contains(one), "{i} has the identity of another");
        }
    }
}
