//! What a server calls images, as far as its events have shown it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chiasm_types::MmHash;

/// Images whose names are kept: a name and what it names are 200 bytes or so.
const MOST: usize = 8192;
/// For so long a name counts after it was last seen. An image at a URL may change, and a guess may
/// be wrong.
const KEPT: Duration = Duration::from_secs(3600);

/// Names of images, at most one of each.
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

    /// Whether the item is known by another name, or another item by this one.
    pub(super) fn contradict(&self, name: &str, item: &MmHash, now: Instant) -> bool {
        let is_kept = |named: &&Named| now.saturating_duration_since(named.seen) < KEPT;
        match self.by_name.get(name).filter(is_kept) {
            Some(named) => named.item != *item,
            None => self
                .by_item
                .get(item)
                .is_some_and(|other| self.by_name.get(other).filter(is_kept).is_some()),
        }
    }

    /// Takes note that the server calls the item so.
    pub(super) fn learn(&mut self, name: &str, item: MmHash, now: Instant) {
        if let Some(named) = self.by_name.get_mut(name).filter(|named| named.item == item) {
            named.seen = now;
            return;
        }
        self.forget(name, &item);
        if self.by_name.len() >= MOST {
            let oldest = self.by_name.iter().min_by_key(|(_, named)| named.seen);
            if let Some((name, item)) = oldest.map(|(name, named)| (name.clone(), named.item)) {
                self.forget(&name, &item);
            }
        }
        self.by_item.insert(item, name.to_owned());
        self.by_name.insert(name.to_owned(), Named { item, seen: now });
    }

    /// Forgets what is known of this name and of this item.
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
    fn a_name_is_of_one_item_and_an_item_has_one_name() {
        let (mut names, now) = (Names::default(), Instant::now());
        assert!(!names.contradict("a", &item(1), now));
        names.learn("a", item(1), now);
        let contradicted = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
            .map(|(name, at)| names.contradict(name, &item(at), now));
        assert_eq!(contradicted, [false, true, true, false]);
        // Another name takes the place of the first, on both sides.
        names.learn("b", item(1), now);
        let contradicted = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
            .map(|(name, at)| names.contradict(name, &item(at), now));
        assert_eq!(contradicted, [true, false, false, true]);
        names.forget("x", &item(1));
        assert!(
            !names.contradict("b", &item(2), now)
                && names.by_name.is_empty()
                && names.by_item.is_empty()
        );
    }

    #[test]
    fn what_was_not_seen_for_long_does_not_count() {
        let (mut names, now) = (Names::default(), Instant::now());
        names.learn("a", item(1), now);
        names.learn("b", item(2), now);
        names.learn("b", item(2), now + KEPT / 2);
        let later = now + KEPT;
        assert!(!names.contradict("a", &item(3), later) && !names.contradict("c", &item(1), later));
        assert!(names.contradict("b", &item(3), later) && names.contradict("c", &item(2), later));
    }

    #[test]
    fn the_oldest_makes_room() {
        let (mut names, now) = (Names::default(), Instant::now());
        for at in 0..=MOST {
            names.learn(&at.to_string(), item(at), now + Duration::from_millis(at as u64));
        }
        assert_eq!((names.by_name.len(), names.by_item.len()), (MOST, MOST));
        assert!(!names.contradict("x", &item(0), now) && names.contradict("x", &item(1), now));
    }
}
