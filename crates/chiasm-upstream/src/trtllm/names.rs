//! A server's names of images, as far as its events have revealed them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chiasm_types::MmHash;

/// The maximum number of known names. A name and its image take about 200 bytes.
const MAX_NAMES: usize = 8192;
/// The time for which a name is valid after it was last seen. An image at a URL may change, and a
/// guess may be wrong.
const NAME_TTL: Duration = Duration::from_secs(3600);

/// The names of images, one name for each image.
#[derive(Default)]
pub(super) struct Names {
    by_name: HashMap<String, Named>,
    by_item: HashMap<MmHash, String>,
}

struct Named {
    item: MmHash,
    seen: Instant,
}

impl Names {
    pub(super) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Returns `true` if the item is known by another name, or the name belongs to another item.
    pub(super) fn contradicts(&self, name: &str, item: &MmHash, now: Instant) -> bool {
        let is_valid = |named: &&Named| now.saturating_duration_since(named.seen) < NAME_TTL;
        match self.by_name.get(name).filter(is_valid) {
            Some(named) => named.item != *item,
            None => self
                .by_item
                .get(item)
                .is_some_and(|other| self.by_name.get(other).filter(is_valid).is_some()),
        }
    }

    /// Records `name` as the server's name of `item`.
    pub(super) fn learn(&mut self, name: &str, item: MmHash, now: Instant) {
        if let Some(named) = self.by_name.get_mut(name).filter(|named| named.item == item) {
            named.seen = now;
            return;
        }
        self.forget(name, &item);
        if self.by_name.len() >= MAX_NAMES {
            let oldest = self.by_name.iter().min_by_key(|(_, named)| named.seen);
            if let Some((name, item)) = oldest.map(|(name, named)| (name.clone(), named.item)) {
                self.forget(&name, &item);
            }
        }
        self.by_item.insert(item, name.to_owned());
        self.by_name.insert(name.to_owned(), Named { item, seen: now });
    }

    /// Forgets this name, and the name of this item.
    pub(super) fn forget(&mut self, name: &str, item: &MmHash) {
        if let Some(named) = self.by_name.remove(name) {
            self.by_item.remove(&named.item);
        }
        if let Some(name) = self.by_item.remove(item) {
            self.by_name.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(number: usize) -> MmHash {
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&number.to_le_bytes());
        MmHash::new(digest)
    }

    #[test]
    fn names_map_to_items_one_to_one() {
        let mut names = Names::default();
        let now = Instant::now();
        assert!(!names.contradicts("a", &item(1), now));
        names.learn("a", item(1), now);
        let contradicted = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
            .map(|(name, at)| names.contradicts(name, &item(at), now));
        assert_eq!(contradicted, [false, true, true, false]);
        // Another name replaces the first one, in both directions.
        names.learn("b", item(1), now);
        let contradicted = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
            .map(|(name, at)| names.contradicts(name, &item(at), now));
        assert_eq!(contradicted, [true, false, false, true]);
        names.forget("x", &item(1));
        assert!(
            !names.contradicts("b", &item(2), now)
                && names.by_name.is_empty()
                && names.by_item.is_empty()
        );
    }

    #[test]
    fn names_expire_after_their_ttl() {
        let mut names = Names::default();
        let now = Instant::now();
        names.learn("a", item(1), now);
        names.learn("b", item(2), now);
        names.learn("b", item(2), now + NAME_TTL / 2);
        let later = now + NAME_TTL;
        assert!(
            !names.contradicts("a", &item(3), later) && !names.contradicts("c", &item(1), later)
        );
        assert!(names.contradicts("b", &item(3), later) && names.contradicts("c", &item(2), later));
    }

    #[test]
    fn oldest_name_is_evicted() {
        let mut names = Names::default();
        let now = Instant::now();
        for at in 0..=MAX_NAMES {
            names.learn(&at.to_string(), item(at), now + Duration::from_millis(at as u64));
        }
        assert_eq!((names.by_name.len(), names.by_item.len()), (MAX_NAMES, MAX_NAMES));
        assert!(!names.contradicts("x", &item(0), now) && names.contradicts("x", &item(1), now));
    }
}
