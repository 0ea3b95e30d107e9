//! Keys below a prefix whose values have a meaning outside of this crate.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::following::KeySet;
use super::keys::{MAX_KEY_BYTES, stored_key};
use super::message::{Event, EventType, KeyValue};
use crate::MAX_ADDRESSES;
use crate::skipped::Skipped;
use crate::snapshot::Snapshot;

/// The maximum size of a value.
const MAX_VALUE_BYTES: usize = 1 << 20;
/// The maximum size of all keys and values together.
const MAX_TOTAL_BYTES: usize = 64 << 20;
/// The number of free bytes from which values that did not fit are listed again. A new list for
/// each deleted key would be too many.
const RELIST_FREE_BYTES: usize = 4 * MAX_VALUE_BYTES;

/// All values below a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Values {
    /// The values by their whole keys: at most [`MAX_ADDRESSES`](crate::MAX_ADDRESSES) of up to
    /// 1 MiB each, and 64 MiB in total with their keys. Values beyond these limits, and keys
    /// that are not UTF-8, are left out with a warning.
    pub by_key: BTreeMap<String, Arc<[u8]>>,
    /// `true` if a server answers. Otherwise the values are those of the last answer.
    pub is_current: bool,
}

impl Snapshot for Values {
    const KIND: &'static str = "keys";
    const LOGS_CHANGES: bool = false;

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

/// The values below a prefix, according to the list and the watch.
#[derive(Debug, Default)]
pub(super) struct StoredValues {
    /// The values by their keys; `None` for a value that exceeds a limit. All keys count for the
    /// comparison with the server's number.
    by_key: BTreeMap<Vec<u8>, Option<Arc<[u8]>>>,
    /// The size of the stored values and their keys.
    bytes: usize,
    /// `true` if values were left out because of the total size.
    has_excess: bool,
    skipped: Skipped,
    /// `true` once it was logged that there are too many keys or bytes.
    excess_is_logged: bool,
}

impl KeySet for StoredValues {
    type Snapshot = Values;

    fn replace(&mut self, listed: Vec<KeyValue>) {
        self.by_key = BTreeMap::new();
        self.bytes = 0;
        self.has_excess = false;
        listed.into_iter().for_each(|kv| self.put(kv));
    }

    fn apply(&mut self, event: Event) {
        match event.r#type {
            EventType::Put => self.put(event.kv),
            EventType::Delete => self.remove(&stored_key(event.kv.key)),
        }
    }

    fn len(&self) -> usize {
        self.by_key.len()
    }

    fn snapshot(&self) -> Values {
        let entry = |(key, value): (&Vec<u8>, &Option<Arc<[u8]>>)| {
            Some((String::from_utf8(key.clone()).ok()?, value.clone()?))
        };
        Values { by_key: self.by_key.iter().filter_map(entry).collect(), is_current: true }
    }

    fn has_room_again(&self) -> bool {
        self.has_excess && self.bytes + RELIST_FREE_BYTES <= MAX_TOTAL_BYTES
    }

    fn skipped(&mut self) -> &mut Skipped {
        &mut self.skipped
    }
}

impl StoredValues {
    fn put(&mut self, kv: KeyValue) {
        let key = stored_key(kv.key);
        if self.by_key.len() >= MAX_ADDRESSES && !self.by_key.contains_key(&key) {
            // Once there are fewer keys, the comparison with the server's number causes a new list.
            return self.log_excess();
        }
        let problem = if key.len() > MAX_KEY_BYTES {
            Some("the key is too long")
        } else if kv.value.len() > MAX_VALUE_BYTES {
            Some("the value is too long")
        } else {
            None
        };
        if let Some(problem) = problem {
            self.skipped.add(String::from_utf8_lossy(&key), problem);
        }
        let is_short = problem.is_none();
        self.remove(&key);
        let bytes = key.len() + kv.value.len();
        let has_room = self.bytes + bytes <= MAX_TOTAL_BYTES;
        if is_short && !has_room {
            self.has_excess = true;
            self.log_excess();
        }
        let is_stored = is_short && has_room;
        if is_stored {
            self.bytes += bytes;
        }
        self.by_key.insert(key, is_stored.then(|| kv.value.into()));
    }

    fn remove(&mut self, key: &[u8]) {
        if let Some(Some(value)) = self.by_key.remove(key) {
            self.bytes -= key.len() + value.len();
        }
    }

    fn log_excess(&mut self) {
        if !std::mem::replace(&mut self.excess_is_logged, true) {
            tracing::warn!(
                limit = MAX_ADDRESSES,
                limit_bytes = MAX_TOTAL_BYTES,
                "a prefix has too many keys or bytes; the others are ignored"
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

    fn values(keys: &StoredValues) -> Vec<(String, Vec<u8>)> {
        keys.snapshot().by_key.into_iter().map(|(key, value)| (key, value.to_vec())).collect()
    }

    #[test]
    fn snapshot_has_latest_values() {
        let mut keys = StoredValues::default();
        keys.replace(vec![
            kv("p/1", b"a"),
            kv("p/2", b"b"),
            kv("p/3", &vec![0; MAX_VALUE_BYTES + 1]),
        ]);
        assert_eq!(keys.len(), 3);
        assert_eq!(
            values(&keys),
            [("p/1".to_owned(), b"a".to_vec()), ("p/2".to_owned(), b"b".to_vec())]
        );
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/1", b"c") });
        keys.apply(Event { r#type: EventType::Delete, kv: kv("p/2", b"") });
        keys.apply(Event {
            r#type: EventType::Put,
            kv: KeyValue { key: vec![0xff], ..kv("", b"x") },
        });
        assert_eq!(values(&keys), [("p/1".to_owned(), b"c".to_vec())]);
        keys.replace(vec![kv("p/4", b"d")]);
        assert_eq!(values(&keys), [("p/4".to_owned(), b"d".to_vec())]);
    }

    #[test]
    fn number_of_values_is_bounded() {
        let mut keys = StoredValues::default();
        keys.replace((0..MAX_ADDRESSES + 10).map(|n| kv(&format!("p/{n}"), b"x")).collect());
        assert_eq!(keys.len(), MAX_ADDRESSES);
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/7", b"y") });
        assert_eq!(keys.snapshot().by_key["p/7"][..], b"y"[..]);
    }

    #[test]
    fn total_size_is_bounded_until_deletions_make_room() {
        let mut keys = StoredValues::default();
        let large = vec![0; MAX_VALUE_BYTES - 3];
        keys.replace((0..70).map(|n| kv(&format!("{n:03}"), &large)).collect());
        assert_eq!((keys.len(), values(&keys).len()), (70, 64));
        let put = |keys: &mut StoredValues, key| {
            keys.apply(Event { r#type: EventType::Put, kv: kv(key, &large) })
        };
        // A stored value is not counted twice.
        put(&mut keys, "000");
        put(&mut keys, "069");
        assert_eq!(values(&keys).len(), 64);
        keys.apply(Event { r#type: EventType::Delete, kv: kv("001", b"") });
        put(&mut keys, "069");
        assert!(keys.snapshot().by_key.contains_key("069") && values(&keys).len() == 64);
        // Values that were left out are listed again once there is room for several.
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
