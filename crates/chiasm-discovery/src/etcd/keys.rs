//! The keys below the prefix, and which agents they name.

use std::collections::{BTreeMap, BTreeSet};

use super::candidate::Candidate;
use super::following::Below;
use super::message::{Event, EventType, KeyValue};
use crate::skipped::Skipped;
use crate::{MOST_ADDRESSES, Named};

/// The most bytes of a key that is kept.
pub(super) const LONGEST_KEY: usize = 1024;

/// The keys that are there, as far as this process was told.
#[derive(Debug, Default)]
pub(super) struct Keys {
    by_key: BTreeMap<Vec<u8>, Value>,
    skipped: Skipped,
    /// Whether it was said that there are too many.
    is_told: bool,
}

#[derive(Debug)]
struct Value {
    revision: i64,
    /// None for a value that names no agent.
    address: Option<String>,
}

impl Below for Keys {
    type Picture = Named;

    fn replace(&mut self, listed: Vec<KeyValue>) {
        let known = std::mem::take(&mut self.by_key);
        for kv in listed {
            // What was malformed when it was last seen was complained of then.
            let is_told = known
                .get(&kv.key)
                .is_some_and(|value| value.revision == kv.mod_revision && value.address.is_none());
            self.put(kv, is_told);
        }
    }

    fn apply(&mut self, event: Event) {
        match event.r#type {
            EventType::Put => self.put(event.kv, false),
            EventType::Delete => {
                self.by_key.remove(&event.kv.key);
            }
        }
    }

    fn len(&self) -> usize {
        self.by_key.len()
    }

    fn picture(&self) -> Named {
        Named { addresses: self.addresses(), is_current: true }
    }

    fn skipped(&mut self) -> &mut Skipped {
        &mut self.skipped
    }
}

impl Keys {
    fn put(&mut self, kv: KeyValue, is_told: bool) {
        let key = String::from_utf8_lossy(&kv.key[..kv.key.len().min(LONGEST_KEY)]);
        if kv.key.len() > LONGEST_KEY {
            self.skipped.add(key, "the key is too long");
            return;
        }
        if self.by_key.len() >= MOST_ADDRESSES && !self.by_key.contains_key(&kv.key) {
            if !std::mem::replace(&mut self.is_told, true) {
                tracing::warn!(
                    most = MOST_ADDRESSES,
                    "too many agents are named; the others are ignored"
                );
            }
            return;
        }
        let address = match Candidate::parse(&kv.value) {
            Ok(candidate) => Some(candidate.address().to_owned()),
            Err(_) if is_told => None,
            Err(problem) => {
                self.skipped.add(key, problem);
                None
            }
        };
        self.by_key.insert(kv.key, Value { revision: kv.mod_revision, address });
    }

    /// Several keys may name one agent.
    fn addresses(&self) -> BTreeSet<String> {
        self.by_key.values().filter_map(|value| value.address.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::message::WatchAnswer;

    fn kv(key: &str, value: &str) -> KeyValue {
        KeyValue { key: key.into(), value: value.into(), mod_revision: 1, lease: 0 }
    }

    fn addresses(keys: &Keys) -> Vec<String> {
        keys.addresses().into_iter().collect()
    }

    #[test]
    fn keys_name_agents_until_they_are_gone() {
        let mut keys = Keys::default();
        keys.replace(vec![
            kv("p/1", r#"{"address":"a:1"}"#),
            kv("p/2", r#"{"address":"a:1"}"#),
            kv("p/3", "nonsense"),
            kv(&"k".repeat(LONGEST_KEY + 1), r#"{"address":"long:1"}"#),
        ]);
        assert_eq!((addresses(&keys), keys.len()), (vec!["a:1".to_owned()], 3));
        assert_eq!(keys.skipped.count(), 2, "nonsense and the long one");
        keys.apply(Event { r#type: EventType::Delete, kv: kv("p/1", "") });
        assert_eq!(addresses(&keys), ["a:1"], "another key names it still");
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/2", r#"{"address":"b:1"}"#) });
        keys.apply(Event { r#type: EventType::Delete, kv: kv("p/unknown", "") });
        assert_eq!(addresses(&keys), ["b:1"]);
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/2", "{}") });
        assert!(addresses(&keys).is_empty(), "a value that became malformed names nobody");
        keys.replace(vec![kv("p/4", r#"{"address":"c:1"}"#)]);
        assert_eq!((addresses(&keys), keys.len()), (vec!["c:1".to_owned()], 1));
    }

    #[test]
    fn only_so_many_are_kept() {
        let mut keys = Keys::default();
        let named = |n: usize| kv(&format!("p/{n}"), &format!(r#"{{"address":"a{n}:1"}}"#));
        keys.replace((0..MOST_ADDRESSES + 10).map(named).collect());
        assert_eq!(keys.len(), MOST_ADDRESSES);
        keys.apply(Event { r#type: EventType::Put, kv: named(MOST_ADDRESSES + 11) });
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/7", r#"{"address":"other:1"}"#) });
        assert_eq!(keys.len(), MOST_ADDRESSES);
        assert!(keys.addresses().contains("other:1"), "known keys still change");
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_said_is_applied_or_refused(at: usize, with in "[\\PC\\x00-\\x7f]{0,4}", length in 0_usize..9) {
            let line = r#"{"events":[{"kv":{"key":"cC8x","value":"eyJhZGRyZXNzIjoiYToxIn0=","mod_revision":"7"}},{"type":"DELETE","kv":{"key":"cC8y"}}]}"#;
            let mut keys = Keys::default();
            let mut apply = |line: &[u8]| {
                let answer = serde_json::from_slice::<WatchAnswer>(line).ok()?;
                answer.events.into_iter().for_each(|event| keys.apply(event));
                Some(keys.addresses().into_iter().collect::<Vec<_>>())
            };
            proptest::prop_assert_eq!(apply(line.as_bytes()).unwrap(), ["a:1"]);
            let mut damaged = line.as_bytes().to_vec();
            let at = at % damaged.len();
            let end = (at + length).min(damaged.len());
            damaged.splice(at..end, with.bytes());
            let _ = apply(&damaged);
            proptest::prop_assert!(keys.len() <= 2);
        }
    }
}
