//! The keys below a prefix that name agents.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::candidate::Candidate;
use super::following::KeySet;
use super::message::{Event, EventType, KeyValue};
use crate::skipped::Skipped;
use crate::{MAX_ADDRESSES, NamedAgents};

/// The maximum length of a key.
pub(super) const MAX_KEY_BYTES: usize = 1024;

/// Returns the key under which an entry is stored. A key longer than [`MAX_KEY_BYTES`] is cut and
/// ends with its hash. So even unusable keys count for the comparison with the server's number,
/// within bounded memory.
pub(super) fn stored_key(mut key: Vec<u8>) -> Vec<u8> {
    if key.len() > MAX_KEY_BYTES {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        key.truncate(MAX_KEY_BYTES);
        key.extend(hasher.finish().to_be_bytes());
    }
    key
}

/// The keys that name agents, according to the list and the watch.
#[derive(Debug, Default)]
pub(super) struct AgentKeys {
    by_key: BTreeMap<Vec<u8>, Value>,
    skipped: Skipped,
    /// `true` once it was logged that there are too many agents.
    excess_is_logged: bool,
}

#[derive(Debug)]
struct Value {
    revision: i64,
    /// The agent's address. `None` for a malformed value.
    address: Option<String>,
}

impl KeySet for AgentKeys {
    type Snapshot = NamedAgents;

    fn replace(&mut self, listed: Vec<KeyValue>) {
        let known = std::mem::take(&mut self.by_key);
        for kv in listed {
            // A malformed value was logged when it was first seen.
            let is_logged = known
                .get(&stored_key(kv.key.clone()))
                .is_some_and(|value| value.revision == kv.mod_revision && value.address.is_none());
            self.put(kv, is_logged);
        }
    }

    fn apply(&mut self, event: Event) {
        match event.r#type {
            EventType::Put => self.put(event.kv, false),
            EventType::Delete => {
                self.by_key.remove(&stored_key(event.kv.key));
            }
        }
    }

    fn len(&self) -> usize {
        self.by_key.len()
    }

    fn snapshot(&self) -> NamedAgents {
        NamedAgents { addresses: self.addresses(), is_current: true }
    }

    fn skipped(&mut self) -> &mut Skipped {
        &mut self.skipped
    }
}

impl AgentKeys {
    /// Adds or changes a key. `is_logged` means that the value is malformed and was logged before.
    fn put(&mut self, kv: KeyValue, is_logged: bool) {
        let key = String::from_utf8_lossy(&kv.key[..kv.key.len().min(MAX_KEY_BYTES)]);
        let is_too_long = kv.key.len() > MAX_KEY_BYTES;
        let stored_key = stored_key(kv.key.clone());
        if self.by_key.len() >= MAX_ADDRESSES && !self.by_key.contains_key(&stored_key) {
            if !std::mem::replace(&mut self.excess_is_logged, true) {
                tracing::warn!(
                    limit = MAX_ADDRESSES,
                    "too many agents are named; the others are ignored"
                );
            }
            return;
        }
        let address = match Candidate::parse(&kv.value) {
            _ if is_logged && is_too_long => None,
            _ if is_too_long => {
                self.skipped.add(key, "the key is too long");
                None
            }
            Ok(candidate) => Some(candidate.address().to_owned()),
            Err(_) if is_logged => None,
            Err(problem) => {
                self.skipped.add(key, problem);
                None
            }
        };
        self.by_key.insert(stored_key, Value { revision: kv.mod_revision, address });
    }

    /// Returns the agents' addresses. Several keys may name the same agent.
    fn addresses(&self) -> BTreeSet<String> {
        self.by_key.values().filter_map(|value| value.address.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcd::message::WatchResponse;

    /// A message of a watch with a put and a deletion.
    const LINE: &str = r#"{"events":[
        {"kv":{"key":"cC8x","value":"eyJhZGRyZXNzIjoiYToxIn0=","mod_revision":"7"}},
        {"type":"DELETE","kv":{"key":"cC8y"}}
    ]}"#;

    fn kv(key: &str, value: &str) -> KeyValue {
        KeyValue { key: key.into(), value: value.into(), mod_revision: 1, lease: 0 }
    }

    fn addresses(keys: &AgentKeys) -> Vec<String> {
        keys.addresses().into_iter().collect()
    }

    #[test]
    fn keys_name_agents_until_deleted() {
        let mut keys = AgentKeys::default();
        keys.replace(vec![
            kv("p/1", r#"{"address":"a:1"}"#),
            kv("p/2", r#"{"address":"a:1"}"#),
            kv("p/3", "nonsense"),
            kv(&"k".repeat(MAX_KEY_BYTES + 1), r#"{"address":"long:1"}"#),
        ]);
        assert_eq!((addresses(&keys), keys.len()), (vec!["a:1".to_owned()], 4));
        assert_eq!(keys.skipped.count(), 2, "the malformed value and the long key");
        let long_key = kv(&"k".repeat(MAX_KEY_BYTES + 1), "");
        keys.apply(Event { r#type: EventType::Delete, kv: long_key });
        assert_eq!(keys.len(), 3, "as the server counts");
        keys.apply(Event { r#type: EventType::Delete, kv: kv("p/1", "") });
        assert_eq!(addresses(&keys), ["a:1"], "another key still names the agent");
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/2", r#"{"address":"b:1"}"#) });
        keys.apply(Event { r#type: EventType::Delete, kv: kv("p/unknown", "") });
        assert_eq!(addresses(&keys), ["b:1"]);
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/2", "{}") });
        assert!(addresses(&keys).is_empty(), "the value became malformed");
        keys.replace(vec![kv("p/4", r#"{"address":"c:1"}"#)]);
        assert_eq!((addresses(&keys), keys.len()), (vec!["c:1".to_owned()], 1));
    }

    #[test]
    fn number_of_keys_is_bounded() {
        let mut keys = AgentKeys::default();
        let named = |n: usize| kv(&format!("p/{n}"), &format!(r#"{{"address":"a{n}:1"}}"#));
        keys.replace((0..MAX_ADDRESSES + 10).map(named).collect());
        assert_eq!(keys.len(), MAX_ADDRESSES);
        keys.apply(Event { r#type: EventType::Put, kv: named(MAX_ADDRESSES + 11) });
        keys.apply(Event { r#type: EventType::Put, kv: kv("p/7", r#"{"address":"other:1"}"#) });
        assert_eq!(keys.len(), MAX_ADDRESSES);
        assert!(keys.addresses().contains("other:1"), "known keys still change");
    }

    proptest::proptest! {
        #[test]
        fn damaged_message_is_applied_or_refused(
            at: usize, with in "[\\PC\\x00-\\x7f]{0,4}", length in 0_usize..9
        ) {
            let mut keys = AgentKeys::default();
            let mut apply = |line: &[u8]| {
                let response = serde_json::from_slice::<WatchResponse>(line).ok()?;
                response.events.into_iter().for_each(|event| keys.apply(event));
                Some(keys.addresses().into_iter().collect::<Vec<_>>())
            };
            proptest::prop_assert_eq!(apply(LINE.as_bytes()).unwrap(), ["a:1"]);
            let mut damaged = LINE.as_bytes().to_vec();
            let at = at % damaged.len();
            let end = (at + length).min(damaged.len());
            damaged.splice(at..end, with.bytes());
            let _ = apply(&damaged);
            proptest::prop_assert!(keys.len() <= 2);
        }
    }
}
