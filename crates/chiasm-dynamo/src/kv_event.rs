//! Dynamo's messages about a worker's KV cache: published changes, and the answer to a query.
//! `following` reads them.
//!
//! A message over ZMQ has four frames: the topic, the publisher and a sequence number (both u64,
//! big-endian), and an envelope. The envelope is `1`, a length (u32, big-endian) and a msgpack map
//! whose `payload` is a list of events in msgpack. Checked against workers of Dynamo 1.6.1.

use serde::{Deserialize, Serialize};

/// The topic of messages about the KV cache.
pub(crate) const TOPIC: &[u8] = b"kv-events";
/// The known version of an envelope.
const ENVELOPE_VERSION: u8 = 1;
/// The number of bytes of an envelope before its map.
const ENVELOPE_PREFIX_BYTES: usize = 5;

/// The reason why a message is malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed message: {0}")]
pub(crate) struct UnreadableMessage(String);

/// Events that were published together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PublishedEvents {
    /// The time of publication, as Unix time in seconds.
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
    /// The tier of the blocks; `device` is the tier that the engine computes with.
    #[serde(default)]
    pub(crate) storage_tier: Option<String>,
    pub(crate) event: Event,
}

/// `KvCacheEvent` of Dynamo.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Event {
    /// The event's id, which rises by one with each event of a worker.
    pub(crate) event_id: u64,
    pub(crate) data: Change,
    #[serde(default)]
    pub(crate) dp_rank: u32,
}

/// A change of the cache. Blocks are identified by their hashes.
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

/// A query for a worker's whole cache, or for the changes from an event on.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Query {
    pub(crate) worker_id: u64,
    pub(crate) dp_rank: u32,
    /// The first requested event. The worker reports its whole cache if this is `None` or the event
    /// is no longer kept.
    pub(crate) start_event_id: Option<u64>,
    pub(crate) end_event_id: Option<u64>,
    pub(crate) supports_tree_dump_failed: bool,
}

/// The answer to a [`Query`].
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) enum QueryAnswer {
    /// The whole cache, after the event with this id.
    TreeDump { events: Vec<WorkerEvent>, last_event_id: u64 },
    /// The events from the first requested one on.
    Events { events: Vec<WorkerEvent> },
    /// The first requested event has not happened yet.
    TooNew { newest_available: u64 },
    /// The worker can't report its cache.
    TreeDumpFailed(serde::de::IgnoredAny),
}

impl PublishedEvents {
    /// Decodes the last frame of a message.
    pub(crate) fn decode(envelope: &[u8]) -> Result<Self, UnreadableMessage> {
        let malformed = |error: rmp_serde::decode::Error| UnreadableMessage(error.to_string());
        let invalid = |what: &str| UnreadableMessage(what.to_owned());
        let (prefix, map) =
            envelope.split_at_checked(ENVELOPE_PREFIX_BYTES).ok_or_else(|| invalid("too short"))?;
        let [version, length @ ..] = prefix else { return Err(invalid("too short")) };
        if *version != ENVELOPE_VERSION {
            return Err(invalid("unknown version"));
        }
        let length = length.iter().fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
        let map = map.get(..length).ok_or_else(|| invalid("incomplete"))?;
        let Envelope { published_at, payload } = rmp_serde::from_slice(map).map_err(malformed)?;
        let events = rmp_serde::from_slice(&payload).map_err(malformed)?;
        Ok(Self { timestamp: published_at as f64 / 1000.0, events })
    }
}

/// Deserializes bytes, which some workers write as a list of numbers.
mod bytes_or_numbers {
    use std::borrow::Cow;
    use std::fmt;

    use serde::de::{Deserializer, Error, SeqAccess, Visitor};

    /// The maximum capacity that is reserved before the numbers are read.
    const MAX_INITIAL_CAPACITY: usize = 1 << 16;

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
            let capacity = numbers.size_hint().unwrap_or(0).min(MAX_INITIAL_CAPACITY);
            let mut bytes = Vec::with_capacity(capacity);
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
    /// others, in a cache of 40 blocks, and its answers to queries.
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
    fn envelopes_of_a_mocker_are_decoded() {
        let mut last = 0;
        let mut stored = 0;
        let mut removed = 0;
        for envelope in envelopes() {
            let published = PublishedEvents::decode(&envelope).unwrap();
            assert!(published.timestamp > 1.7e9 && published.timestamp < 1e10);
            for WorkerEvent { event, storage_tier, .. } in published.events {
                assert_eq!(
                    (event.event_id, event.dp_rank, storage_tier.as_deref()),
                    (last + 1, 0, Some("device"))
                );
                last = event.event_id;
                match event.data {
                    Change::Stored { blocks, .. } => stored += blocks.len(),
                    Change::Removed { block_hashes } => removed += block_hashes.len(),
                    Change::Cleared => panic!("no cache was cleared"),
                }
            }
        }
        assert!(stored > removed && removed > 0, "{stored} {removed}");
    }

    #[test]
    fn cleared_cache_is_decoded() {
        let cleared = rmp_serde::to_vec_named(
            &serde_json::json!({"event_id": 7, "data": "cleared", "dp_rank": 1}),
        )
        .unwrap();
        let event: Event = rmp_serde::from_slice(&cleared).unwrap();
        assert_eq!(event, Event { event_id: 7, data: Change::Cleared, dp_rank: 1 });
    }

    proptest::proptest! {
        #[test]
        fn damaged_envelope_is_decoded_or_refused(
            which: usize,
            at: usize,
            with: Vec<u8>,
            length in 0_usize..9,
        ) {
            let envelopes = envelopes();
            let mut damaged = envelopes[which % envelopes.len()].clone();
            let at = at % damaged.len();
            let end = (at + length).min(damaged.len());
            damaged.splice(at..end, with);
            let _ = PublishedEvents::decode(&damaged);
        }
    }
}
