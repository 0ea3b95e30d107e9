//! What Dynamo says of a worker's KV cache: changes as they are published, and all of it on
//! request.
//!
//! A message over ZMQ has four frames: the topic, the publisher and a sequence number (both u64,
//! big-endian), and an envelope, which is `1`, a length (u32, big-endian) and a msgpack map whose
//! `payload` is a list of events in msgpack. Checked against workers of Dynamo 1.6.1.

use serde::{Deserialize, Serialize};

/// The topic of messages about the KV cache.
pub(crate) const TOPIC: &[u8] = b"kv-events";
/// The form of an envelope that is known.
const FORM: u8 = 1;
/// Bytes of an envelope before its map.
const BEFORE: usize = 5;

/// A message that is not understood, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message about its KV cache can't be read: {0}")]
pub(crate) struct Unreadable(String);

/// Events that were published together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Published {
    /// Unix time in seconds.
    pub(crate) timestamp: f64,
    pub(crate) events: Vec<WorkerEvent>,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    published_at: u64,
    #[serde(borrow, with = "bytes_or_numbers")]
    payload: std::borrow::Cow<'a, [u8]>,
}

/// `RouterEvent` of Dynamo: an event of one worker.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct WorkerEvent {
    pub(crate) worker_id: u64,
    /// `device` for what the engine computes with.
    #[serde(default)]
    pub(crate) storage_tier: Option<String>,
    pub(crate) event: Event,
}

/// `KvCacheEvent` of Dynamo.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Event {
    /// Rises by one with each event of a worker.
    pub(crate) event_id: u64,
    pub(crate) data: Change,
    #[serde(default)]
    pub(crate) dp_rank: u32,
}

/// What became of blocks, which hashes name.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Change {
    Stored { parent_hash: Option<u64>, blocks: Vec<StoredBlock> },
    Removed { block_hashes: Vec<u64> },
    Cleared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct StoredBlock {
    pub(crate) block_hash: u64,
}

/// The question for what a worker holds: all of it, or what has changed from an event on.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Query {
    pub(crate) worker_id: u64,
    pub(crate) dp_rank: u32,
    /// The first event that is asked for; all of the cache if there is none, or it is not kept any
    /// more.
    pub(crate) start_event_id: Option<u64>,
    pub(crate) end_event_id: Option<u64>,
    pub(crate) supports_tree_dump_failed: bool,
}

/// What a worker answers it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) enum Told {
    /// All that it holds, after the event of this number.
    TreeDump { events: Vec<WorkerEvent>, last_event_id: u64 },
    /// The events from the first that was asked for on.
    Events { events: Vec<WorkerEvent> },
    /// There are none yet.
    TooNew { newest_available: u64 },
    /// It can't tell.
    TreeDumpFailed(serde::de::IgnoredAny),
}

impl Published {
    /// Reads the last frame of a message.
    pub(crate) fn decode(envelope: &[u8]) -> Result<Self, Unreadable> {
        let words = |error: rmp_serde::decode::Error| Unreadable(error.to_string());
        let wrong = |what: &str| Unreadable(what.to_owned());
        let (before, map) =
            envelope.split_at_checked(BEFORE).ok_or_else(|| wrong("it is too short"))?;
        let [form, length @ ..] = before else { return Err(wrong("it is too short")) };
        if *form != FORM {
            return Err(wrong("it is of another form"));
        }
        let length = length.iter().fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
        let map = map.get(..length).ok_or_else(|| wrong("it breaks off"))?;
        let Envelope { published_at, payload } = rmp_serde::from_slice(map).map_err(words)?;
        let events = rmp_serde::from_slice(&payload).map_err(words)?;
        Ok(Self { timestamp: published_at as f64 / 1000.0, events })
    }
}

/// Bytes, which some write as a list of numbers.
mod bytes_or_numbers {
    use std::borrow::Cow;
    use std::fmt;

    use serde::de::{Deserializer, Error, SeqAccess, Visitor};

    /// Numbers for which room is made before they have come.
    const MOST_AHEAD: usize = 1 << 16;

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Cow<'de, [u8]>, D::Error> {
        deserializer.deserialize_any(Bytes)
    }

    struct Bytes;

    impl<'de> Visitor<'de> for Bytes {
        type Value = Cow<'de, [u8]>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_borrowed_bytes<E: Error>(self, bytes: &'de [u8]) -> Result<Self::Value, E> {
            Ok(Cow::Borrowed(bytes))
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Self::Value, E> {
            Ok(Cow::Owned(bytes.to_vec()))
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Self::Value, A::Error> {
            let mut bytes = Vec::with_capacity(numbers.size_hint().unwrap_or(0).min(MOST_AHEAD));
            while let Some(byte) = numbers.next_element()? {
                bytes.push(byte);
            }
            Ok(Cow::Owned(bytes))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The envelopes that a mocker of Dynamo 1.6.1 published for a prompt of 160 tokens after
    /// others, in a cache of 40 blocks, and its answers when it was asked.
    pub(crate) const ENVELOPES: &str = include_str!("../tests/recorded/envelopes.json");

    pub(crate) fn envelopes() -> Vec<Vec<u8>> {
        use base64::Engine;
        let texts: Vec<String> = serde_json::from_str(ENVELOPES).unwrap();
        texts
            .iter()
            .map(|text| base64::engine::general_purpose::STANDARD.decode(text).unwrap())
            .collect()
    }

    #[test]
    fn what_a_mocker_publishes_is_understood() {
        let mut last = 0;
        let mut kinds = [0; 2];
        for envelope in envelopes() {
            let published = Published::decode(&envelope).unwrap();
            assert!(published.timestamp > 1.7e9 && published.timestamp < 1e10);
            for WorkerEvent { event, storage_tier, .. } in published.events {
                assert_eq!(
                    (event.event_id, event.dp_rank, storage_tier.as_deref()),
                    (last + 1, 0, Some("device"))
                );
                last = event.event_id;
                match event.data {
                    Change::Stored { blocks, .. } => kinds[0] += blocks.len(),
                    Change::Removed { block_hashes } => kinds[1] += block_hashes.len(),
                    Change::Cleared => panic!("it cleared nothing"),
                }
            }
        }
        assert!(kinds[0] > kinds[1] && kinds[1] > 0, "{kinds:?}");
    }

    #[test]
    fn a_cleared_cache_is_a_word() {
        let cleared = rmp_serde::to_vec_named(
            &serde_json::json!({"event_id": 7, "data": "cleared", "dp_rank": 1}),
        )
        .unwrap();
        let event: Event = rmp_serde::from_slice(&cleared).unwrap();
        assert_eq!(event, Event { event_id: 7, data: Change::Cleared, dp_rank: 1 });
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_published_is_read_or_refused(which: usize, at: usize, with: Vec<u8>, length in 0_usize..9) {
            let envelopes = envelopes();
            let mut damaged = envelopes[which % envelopes.len()].clone();
            let at = at % damaged.len();
            let end = (at + length).min(damaged.len());
            damaged.splice(at..end, with);
            let _ = Published::decode(&damaged);
        }
    }
}
