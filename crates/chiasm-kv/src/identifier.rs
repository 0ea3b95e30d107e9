//! What an engine calls a media item → what we call it.

use chiasm_types::MmHash;

/// Keeps the hashes of foreign identifiers apart from content hashes.
const FOREIGN: &str = "chiasm 2026 media identifier of another frontend";

/// The identity behind an `identifier` of an event.
///
/// Our own requests carry the mm_hash as 64 lower-case hex digits. Others who use the same engine
/// may send anything: that is hashed into an identity of its own, which no content hash equals.
pub(crate) fn media_identity(identifier: &str) -> MmHash {
    match identifier.parse::<MmHash>() {
        // The engine compares strings, so upper-case digits name another item.
        Ok(hash) if !identifier.bytes().any(|byte| byte.is_ascii_uppercase()) => hash,
        _ => MmHash::new(blake3::derive_key(FOREIGN, identifier.as_bytes())),
    }
}

/// The last identifier and whom it names: an item has many blocks.
#[derive(Default)]
pub(crate) struct LastItem(Option<(String, MmHash)>);

impl LastItem {
    /// What [`media_identity`] says of the identifier; the last one is not looked at twice.
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
    fn the_last_item_is_only_taken_for_itself() {
        let mut last = LastItem::default();
        for identifier in ["a", "a", "b", "a", ""] {
            assert_eq!(last.identity(identifier), media_identity(identifier));
        }
    }

    #[test]
    fn our_own_identifier_is_the_hash_it_spells() {
        let hash = MmHash::new([0xab; 32]);
        assert_eq!(media_identity(&hash.to_string()), hash);
    }

    #[test]
    fn foreign_identifiers_are_distinct_from_each_other_and_from_ours() {
        let hex = "ab".repeat(32);
        let identities = [hex.as_str(), &hex.to_uppercase(), &hex[1..], "", "img-1", "img-2"]
            .map(media_identity);
        for (i, one) in identities.iter().enumerate() {
            assert!(!identities[..i].contains(one), "{i} has the identity of another");
        }
    }
}
