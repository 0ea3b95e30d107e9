//! The keys below a prefix that somebody else has given a meaning, with their values.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::following::Below;
use super::keys::LONGEST_KEY;
use super::message::{Event, EventType, KeyValue};
use crate::MOST_ADDRESSES;
use crate::picture::Picture;
use crate::skipped::Skipped;

/// The most bytes of a value that is kept.
const LONGEST_VALUE: usize = 1 << 20;
/// The most bytes of all keys and values that are kept.
const MOST_BYTES: usize = 64 << 20;
/// So many bytes have to be free before values that were left out are listed again: a list for each
/// that goes would be too many.
const ROOM_AGAIN: usize = 4 * LONGEST_VALUE;

/// All that is below a prefix now, as far as it was told, and whether the servers answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values {
    /// The values by their whole keys: at most [`MOST_ADDRESSES`](crate::MOST_ADDRESSES), each of a
    /// MiB at most, and 64 MiB of all with their keys. What is beyond that is left out with a
    /// warning, and so are keys that are no text.
    pub by_key: BTreeMap<String, Arc<[u8]>>,
    /// Whether a server answers. Otherwise the values are the last that one told.
    pub is_current: bool,
}

impl Picture for Values {
    const WHAT: &'static str = "keys";
    const IS_TOLD: bool = false;

    fn set_current(&mut self, is_current: bool) -> bool {
        std::mem::replace(&mut self.is_current, is_current)
    }

    fn count(&self) -> usize {
        self.by_key.len()
    }

    fn differences(&self, other: &Self) -> usize {
        let new =
            self.by_key.iter().filter(|&(key, value)| other.by_key.get(key) != Some(value)).count();
        new + other.by_key.keys().filter(|key| !self.by_key.contains_key(*key)).count()
    }
}

/// Values by their keys; none for what is not kept, which is counted all the same.
#[derive(Debug, Default)]
pub(super) struct KeptValues {
    by_key: BTreeMap<Vec<u8>, Option<Arc<[u8]>>>,
    /// So many bytes have the keys and values that are kept.
    bytes: usize,
    /// Whether there was no room for all.
    has_left_out: bool,
    skipped: Skipped,
    /// Whether it was said that there are too many.
    is_told: bool,
}

impl Below for KeptValues {
    type Picture = Values;

    fn replace(&mut self, listed: Vec<KeyValue>) {
        (self.by_key, self.bytes, self.has_left_out) = (BTreeMap::new(), 0, false);
        listed.into_iter().for_each(|kv| self.put(kv));
    }

    fn apply(&mut self, event: Event) {
        match event.r#type {
            EventType::Put => self.put(event.kv),
            EventType::Delete => self.remove(&event.kv.key),
        }
    }

    fn len(&self) -> usize {
        self.by_key.len()
    }

    fn picture(&self) -> Values {
        let named = |(key, value): (&Vec<u8>, &Option<Arc<[u8]>>)| {
            Some((String::from_utf8(key.clone()).ok()?, value.clone()?))
        };
        Values { by_key: self.by_key.iter().filter_map(named).collect(), is_current: true }
    }

    fn has_room_again(&self) -> bool {
        self.has_left_out && self.bytes + ROOM_AGAIN <= MOST_BYTES
    }

    fn skipped(&mut self) -> &mut Skipped {
        &mut self.skipped
    }
}

impl KeptValues {
    fn put(&mut self, kv: KeyValue) {
        if kv.key.len() > LONGEST_KEY {
            self.skipped
                .add(String::from_utf8_lossy(&kv.key[..LONGEST_KEY]), "the key is too long");
            return;
        }
        if self.by_key.len() >= MOST_ADDRESSES && !self.by_key.contains_key(&kv.key) {
            // It is listed again once there are fewer: their number is compared with the server's.
            return self.tell();
        }
        let is_short = kv.value.len() <= LONGEST_VALUE;
        if !is_short {
            self.skipped.add(String::from_utf8_lossy(&kv.key), "the value is too long");
        }
        self.remove(&kv.key);
        let bytes = kv.key.len() + kv.value.len();
        let has_room = self.bytes + bytes <= MOST_BYTES;
        if is_short && !has_room {
            self.has_left_out = true;
            self.tell();
        }
        let is_kept = is_short && has_room;
        if is_kept {
            self.bytes += bytes;
        }
        self.by_key.insert(kv.key, is_kept.then(|| kv.value.into()));
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(Some(value)) = self.by_key.remove(key) {
            self.bytes -= key.len() + value.len();
        }
    }

    fn tell(&mut self) {
        if !std::mem::replace(&mut self.is_told, true) {
            let (most, most_bytes) = (MOST_ADDRESSES, MOST_BYTES);
            tracing::warn!(
                most,
                most_bytes,
                "too many keys are below a prefix, or too much; the others are ignored"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(key: &str, value: &[u8]) -> KeyValue {
        KeyValue { key: key.into(), value: value.into(), mod_revision: 1, lease: 0 }
    }

    fn told(keys: &KeptValues) -> Vec<(String, Vec<u8>)> {
        keys.picture().by_key.into_iter().map(|(key, value)| (key, value.to_vec())).collect()
    }

    #[test]
    fn values_are_those_that_were_put_last() {
        let mut keys = KeptValues::default();
        keys.replace(vec![
            kv("p/1", b"a"),
            kv("p/2", b"b"),
            kv("p/3", &vec![0; LONGEST_VALUE + 1]),
        ]);
        assert_eq!(keys.len(), 3);
        assert_eq!(
            told(&keys),
            [("p/1".to_owned(), b"a".to_vec()), ("p/2".to_owned(), b"b".to_vec())]
        );
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/1", b"c") });
        keys.apply(Event { r#type: EventType::Delete, kv: kv("p/2", b"") });
        keys.apply(Event {
            r#type: EventType::Put,
            kv: KeyValue { key: vec![0xff], ..kv("", b"x") },
        });
        assert_eq!(told(&keys), [("p/1".to_owned(), b"c".to_vec())]);
        keys.replace(vec![kv("p/4", b"d")]);
        assert_eq!(told(&keys), [("p/4".to_owned(), b"d".to_vec())]);
    }

    #[test]
    fn only_so_many_are_kept() {
        let mut keys = KeptValues::default();
        keys.replace((0..MOST_ADDRESSES + 10).map(|n| kv(&format!("p/{n}"), b"x")).collect());
        assert_eq!(keys.len(), MOST_ADDRESSES);
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/7", b"y") });
        assert_eq!(keys.picture().by_key["p/7"][..], b"y"[..]);
    }

    #[test]
    fn all_together_have_a_limit_which_what_goes_makes_room_below() {
        let mut keys = KeptValues::default();
        let large = vec![0; LONGEST_VALUE - 3];
        keys.replace((0..70).map(|n| kv(&format!("{n:03}"), &large)).collect());
        assert_eq!((keys.len(), told(&keys).len()), (70, 64));
        let put = |keys: &mut KeptValues, key| {
            keys.apply(Event { r#type: EventType::Put, kv: kv(key, &large) })
        };
        // What is kept already is not counted twice.
        put(&mut keys, "000");
        put(&mut keys, "069");
        assert_eq!(told(&keys).len(), 64);
        keys.apply(Event { r#type: EventType::Delete, kv: kv("001", b"") });
        put(&mut keys, "069");
        assert!(keys.picture().by_key.contains_key("069") && told(&keys).len() == 64);
        // What was left out is listed again, once there is room for several.
        let mut delete = |n: u32| {
            keys.apply(Event { r#type: EventType::Delete, kv: kv(&format!("{n:03}"), b"") })
        };
        (2..5).for_each(&mut delete);
        assert!(!keys.has_room_again());
        keys.apply(Event { r#type: EventType::Delete, kv: kv("005", b"") });
        assert!(keys.has_room_again());
        keys.replace(vec![]);
        assert!(!keys.has_room_again());
    }
}
