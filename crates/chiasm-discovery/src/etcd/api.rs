//! The API of one etcd server.

use std::time::Duration;

use bytes::Bytes;
use reqwest::{Client, RequestBuilder};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::Etcd;
use super::message::{
    EmptyResponse, KeepAliveResponse, KeyValue, RangeResponse, StreamMessage, WatchResponse, encode,
};
use crate::failure::Failure;
use crate::http::{self, LineStream};
use crate::{Tls, bounded_list};

/// The id of a lease. It is chosen here and not by etcd, so that a lease can be revoked even if the
/// answer to its grant was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaseId(i64);

impl LeaseId {
    pub(super) fn random() -> Self {
        Self(rand::random_range(1..=i64::MAX))
    }

    /// Returns `true` if `number` is this id.
    pub(super) fn matches(self, number: i64) -> bool {
        self.0 == number
    }
}

/// A client of one server.
#[derive(Debug)]
pub(super) struct EtcdClient {
    http: Client,
    base: String,
    call_timeout: Duration,
}

/// The number of keys below a prefix at one revision.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyCount {
    pub(super) revision: i64,
    pub(super) count: i64,
}

/// A stream of changes below a prefix.
#[derive(Debug)]
pub(super) struct Watch(LineStream);

impl EtcdClient {
    /// Creates a client of the server `server_index`, modulo the number of servers.
    pub(super) async fn new(
        etcd: &Etcd,
        server_index: usize,
        tls: &Tls,
        call_timeout: Duration,
    ) -> Result<Self, Failure> {
        let scheme = if etcd.is_tls { "https" } else { "http" };
        let index = server_index % etcd.endpoints.len().max(1);
        let endpoint = etcd.endpoints.get(index).map_or("", String::as_str);
        Ok(Self {
            http: http::build_client(tls).await?,
            base: format!("{scheme}://{endpoint}/v3/"),
            call_timeout,
        })
    }

    /// Lists the keys below a prefix, with their values, at one revision.
    pub(super) async fn list(&self, prefix: &str) -> Result<RangeResponse, Failure> {
        let mut range = prefix_range(prefix);
        // One key more than allowed shows that there are too many.
        range["limit"] = json!(bounded_list::MAX_LIST_LEN.to_string());
        self.call("kv/range", &range).await
    }

    /// Counts the keys below a prefix. Like any read, this requires a majority of the servers.
    pub(super) async fn count(&self, prefix: &str) -> Result<KeyCount, Failure> {
        let mut range = prefix_range(prefix);
        range["count_only"] = json!(true);
        let response: RangeResponse = self.call("kv/range", &range).await?;
        Ok(KeyCount { revision: response.header.revision, count: response.count })
    }

    /// Returns the lease of a key: 0 if the key has no lease, `None` if there is no such key.
    pub(super) async fn key_lease(&self, key: &str) -> Result<Option<i64>, Failure> {
        let response: RangeResponse = self
            .call("kv/range", &json!({"key": encode(key.as_bytes()), "keys_only": true}))
            .await?;
        Ok(response.kvs.first().map(|KeyValue { lease, .. }| *lease))
    }

    /// Watches the changes below a prefix, beginning with those of `revision`.
    pub(super) async fn watch(&self, prefix: &str, revision: i64) -> Result<Watch, Failure> {
        let mut range = prefix_range(prefix);
        range["start_revision"] = json!(revision.to_string());
        let request = self.request("watch", &json!({"create_request": range}));
        Ok(Watch(http::open_stream(request, self.call_timeout).await?))
    }

    /// Grants a lease that lasts for `ttl` seconds.
    pub(super) async fn grant(&self, lease: LeaseId, ttl: u64) -> Result<(), Failure> {
        let request = json!({"ID": lease.0.to_string(), "TTL": ttl.to_string()});
        self.call("lease/grant", &request).await.map(|EmptyResponse {}| ())
    }

    /// Puts a key, which etcd deletes when the lease ends.
    pub(super) async fn put(&self, key: &str, value: &[u8], lease: LeaseId) -> Result<(), Failure> {
        let request = json!({
            "key": encode(key.as_bytes()),
            "value": encode(value),
            "lease": lease.0.to_string(),
        });
        self.call("kv/put", &request).await.map(|EmptyResponse {}| ())
    }

    /// Renews a lease. Returns `false` if there is no such lease.
    pub(super) async fn keep_alive(&self, lease: LeaseId) -> Result<bool, Failure> {
        let request = json!({"ID": lease.0.to_string()});
        let message: StreamMessage<KeepAliveResponse> =
            self.call("lease/keepalive", &request).await?;
        Ok(into_result(message)?.ttl > 0)
    }

    /// Revokes a lease, which deletes its keys.
    pub(super) async fn revoke(&self, lease: LeaseId) -> Result<(), Failure> {
        self.call("lease/revoke", &json!({"ID": lease.0.to_string()}))
            .await
            .map(|EmptyResponse {}| ())
    }

    async fn call<A: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<A, Failure> {
        let response = http::call(self.request(path, body), self.call_timeout).await?;
        Ok(serde_json::from_slice(&response)?)
    }

    fn request(&self, path: &str, body: &Value) -> RequestBuilder {
        self.http.post(format!("{}{path}", self.base)).body(body.to_string())
    }

    /// Discards the changes before a revision.
    #[cfg(test)]
    pub(super) async fn compact(&self, revision: i64) -> Result<(), Failure> {
        self.call("kv/compaction", &json!({"revision": revision.to_string()}))
            .await
            .map(|EmptyResponse {}| ())
    }
}

impl Watch {
    /// Returns the next message, which may contain no changes. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<WatchResponse, Failure> {
        let line: Bytes = self.0.next().await?.ok_or(Failure::Ended)?;
        let message: StreamMessage<WatchResponse> = serde_json::from_slice(&line)?;
        match into_result(message)? {
            WatchResponse { compact_revision, .. } if compact_revision > 0 => {
                Err(Failure::Outdated(format!(
                    "those before revision {compact_revision} were compacted"
                )))
            }
            WatchResponse { canceled: true, cancel_reason, .. } if cancel_reason.is_empty() => {
                Err(Failure::Ended)
            }
            WatchResponse { canceled: true, cancel_reason, .. } => {
                Err(Failure::Malformed(cancel_reason))
            }
            response => Ok(response),
        }
    }
}

/// Turns a message of a stream into its result or its error.
fn into_result<T>(message: StreamMessage<T>) -> Result<T, Failure> {
    match message {
        StreamMessage { error: Some(error), .. } => {
            Err(Failure::Refused { status: error.http_code, message: error.message })
        }
        StreamMessage { result: Some(result), .. } => Ok(result),
        StreamMessage { result: None, .. } => {
            Err(Failure::Malformed("a message has neither a result nor an error".to_owned()))
        }
    }
}

/// Returns the range of all keys below a prefix.
fn prefix_range(prefix: &str) -> Value {
    json!({"key": encode(prefix.as_bytes()), "range_end": encode(&range_end(prefix.as_bytes()))})
}

/// Returns the first key after all those that begin with `prefix` (`clientv3.GetPrefixRangeEnd`).
/// A zero byte means no end.
fn range_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn range_end_follows_all_keys_with_prefix() {
        assert_eq!(range_end(b"a/"), b"a0");
        assert_eq!(range_end(b"a\xff\xff"), b"b");
        assert_eq!(range_end(b"\xff"), [0]);
        assert_eq!(range_end(b""), [0]);
    }
}
