//! etcd's messages (`rpc.proto`, `kv.proto` of 3.4) in the JSON of its gateway: int64 are strings,
//! bytes base64, and what is zero or empty is left out.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer};

use crate::few;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    /// How often the store was changed.
    #[serde(deserialize_with = "int64")]
    pub(super) revision: i64,
}

/// `RangeResponse`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct RangeAnswer {
    pub(super) header: Header,
    #[serde(deserialize_with = "few::list")]
    pub(super) kvs: Vec<KeyValue>,
    /// Of all keys in the range, whatever the limit.
    #[serde(deserialize_with = "int64")]
    pub(super) count: i64,
}

/// `mvccpb.KeyValue`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    pub(super) key: Vec<u8>,
    #[serde(deserialize_with = "bytes")]
    pub(super) value: Vec<u8>,
    #[serde(deserialize_with = "int64")]
    pub(super) mod_revision: i64,
    #[serde(deserialize_with = "int64")]
    pub(super) lease: i64,
}

/// One message of a stream.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<StreamError>,
}

/// How a stream failed.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct StreamError {
    pub(super) http_code: u16,
    pub(super) message: String,
}

/// `WatchResponse`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct WatchAnswer {
    #[serde(deserialize_with = "few::list")]
    pub(super) events: Vec<Event>,
    pub(super) canceled: bool,
    /// Changes before this revision are gone; set where that is why the watch was canceled.
    #[serde(deserialize_with = "int64")]
    pub(super) compact_revision: i64,
    pub(super) cancel_reason: String,
}

/// `mvccpb.Event`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Event {
    pub(super) r#type: EventType,
    pub(super) kv: KeyValue,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum EventType {
    /// Left out, as it is zero.
    #[default]
    Put,
    Delete,
}

/// `LeaseKeepAliveResponse`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct KeepAliveAnswer {
    /// Seconds that are left; zero if there is no such lease.
    #[serde(rename = "TTL", deserialize_with = "int64")]
    pub(super) ttl: i64,
}

/// An answer that says nothing that is needed.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Done {}

pub(super) fn encode(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

fn int64<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Int64<'a> {
        Number(i64),
        #[serde(borrow)]
        Text(std::borrow::Cow<'a, str>),
    }
    match Int64::deserialize(deserializer)? {
        Int64::Number(number) => Ok(number),
        Int64::Text(text) => text.parse().map_err(serde::de::Error::custom),
    }
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
    STANDARD.decode(text.as_bytes()).map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_etcd_3_4_says_is_understood() {
        // Recorded from etcd 3.4.23.
        let range = r#"{"header":{"cluster_id":"7801232528081817440","member_id":"13458989633860879742","revision":"2","raft_term":"2"},"kvs":[{"key":"YS8x","create_revision":"2","mod_revision":"2","version":"1","value":"eA==","lease":"1234567890123"}],"count":"1"}"#;
        let range: RangeAnswer = serde_json::from_str(range).unwrap();
        assert_eq!((range.header.revision, range.count), (2, 1));
        let [kv] = &range.kvs[..] else { panic!() };
        assert_eq!(
            (&kv.key[..], &kv.value[..], kv.lease, kv.mod_revision),
            (&b"a/1"[..], &b"x"[..], 1_234_567_890_123, 2)
        );

        let events = r#"{"result":{"header":{"revision":"3"},"events":[{"kv":{"key":"YS8x","mod_revision":"2","value":"eA=="}},{"type":"DELETE","kv":{"key":"YS8x","mod_revision":"3"}}]}}"#;
        let answer = serde_json::from_str::<Streamed<WatchAnswer>>(events).unwrap().result.unwrap();
        let types: Vec<EventType> = answer.events.iter().map(|event| event.r#type).collect();
        assert_eq!(types, [EventType::Put, EventType::Delete]);

        let compacted =
            r#"{"result":{"header":{"raft_term":"2"},"canceled":true,"compact_revision":"2"}}"#;
        let answer =
            serde_json::from_str::<Streamed<WatchAnswer>>(compacted).unwrap().result.unwrap();
        assert!(answer.canceled && answer.compact_revision == 2);

        let alive = r#"{"result":{"header":{"revision":"2"},"ID":"1234567890123","TTL":"5"}}"#;
        assert_eq!(
            serde_json::from_str::<Streamed<KeepAliveAnswer>>(alive).unwrap().result.unwrap().ttl,
            5
        );
        let expired = r#"{"result":{"header":{"revision":"2"},"ID":"77"}}"#;
        assert_eq!(
            serde_json::from_str::<Streamed<KeepAliveAnswer>>(expired).unwrap().result.unwrap().ttl,
            0
        );
    }

    #[test]
    fn malformed_answers_are_refused() {
        for text in [
            r#"{"count":"x"}"#,
            r#"{"count":"99999999999999999999"}"#,
            r#"{"count":1.5}"#,
            r#"{"kvs":[{"key":"*"}]}"#,
            r#"{"kvs":[{"key":1}]}"#,
            r#"{"kvs":{}}"#,
            r#"{"header":[]"#,
            "",
            "null",
            "<html>",
        ] {
            assert!(serde_json::from_str::<RangeAnswer>(text).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<WatchAnswer>(r#"{"events":[{"type":"RENAME"}]}"#).is_err());
    }

    proptest::proptest! {
        #[test]
        fn bytes_and_numbers_come_back(key: Vec<u8>, number: i64) {
            let text = serde_json::json!({"key": encode(&key), "lease": number.to_string(), "mod_revision": number}).to_string();
            let kv: KeyValue = serde_json::from_str(&text).unwrap();
            proptest::prop_assert_eq!((kv.key, kv.lease, kv.mod_revision), (key, number, number));
        }
    }
}
