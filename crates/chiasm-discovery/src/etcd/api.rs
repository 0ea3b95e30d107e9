//! The calls to one server of etcd.

use std::time::Duration;

use bytes::Bytes;
use reqwest::{Client, RequestBuilder};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::Etcd;
use super::message::{Done, KeepAliveAnswer, KeyValue, RangeAnswer, Streamed, WatchAnswer, encode};
use crate::failure::Failure;
use crate::http::{self, LineStream};
use crate::{Tls, few};

/// A lease of this process. Its number is drawn here and not by etcd, so that a lease whose grant
/// got no answer can be revoked too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeaseId(i64);

impl LeaseId {
    pub(super) fn random() -> Self {
        Self(rand::random_range(1..=i64::MAX))
    }

    /// Whether a message means this one.
    pub(super) fn is(self, number: i64) -> bool {
        self.0 == number
    }
}

/// Connections to one server.
#[derive(Debug)]
pub(super) struct EtcdClient {
    http: Client,
    base: String,
    within: Duration,
}

/// Each `events` of a watch.
#[derive(Debug)]
pub(super) struct Watch(LineStream);

impl EtcdClient {
    /// Of the server whose turn it is; each call may take as long as `within`.
    pub(super) async fn new(
        etcd: &Etcd,
        turn: usize,
        tls: &Tls,
        within: Duration,
    ) -> Result<Self, Failure> {
        let scheme = if etcd.is_tls { "https" } else { "http" };
        let endpoint =
            etcd.endpoints.get(turn % etcd.endpoints.len().max(1)).map_or("", String::as_str);
        Ok(Self {
            http: http::new_client(tls).await?,
            base: format!("{scheme}://{endpoint}/v3/"),
            within,
        })
    }

    /// What is below the prefix, at one revision.
    pub(super) async fn list(&self, prefix: &str) -> Result<RangeAnswer, Failure> {
        let mut range = range_of(prefix);
        // One more shows that there are too many.
        range["limit"] = json!(few::MOST.to_string());
        self.call("kv/range", &range).await
    }

    /// How many keys are below the prefix, at which revision. As any read it needs a majority of
    /// the servers to answer.
    pub(super) async fn count(&self, prefix: &str) -> Result<(i64, i64), Failure> {
        let mut range = range_of(prefix);
        range["count_only"] = json!(true);
        let answer: RangeAnswer = self.call("kv/range", &range).await?;
        Ok((answer.header.revision, answer.count))
    }

    /// The lease of a key; 0 for one without, none if there is no such key.
    pub(super) async fn lease_of(&self, key: &str) -> Result<Option<i64>, Failure> {
        let answer: RangeAnswer = self
            .call("kv/range", &json!({"key": encode(key.as_bytes()), "keys_only": true}))
            .await?;
        Ok(answer.kvs.first().map(|KeyValue { lease, .. }| *lease))
    }

    /// What changes below the prefix from a revision on.
    pub(super) async fn watch(&self, prefix: &str, revision: i64) -> Result<Watch, Failure> {
        let mut range = range_of(prefix);
        range["start_revision"] = json!(revision.to_string());
        let request = self.request("watch", &json!({"create_request": range}));
        Ok(Watch(http::stream(request, self.within).await?))
    }

    /// Makes a lease that lasts for `ttl` seconds.
    pub(super) async fn grant(&self, lease: LeaseId, ttl: u64) -> Result<(), Failure> {
        let request = json!({"ID": lease.0.to_string(), "TTL": ttl.to_string()});
        self.call("lease/grant", &request).await.map(|Done {}| ())
    }

    /// Puts a key that vanishes with the lease.
    pub(super) async fn put(&self, key: &str, value: &[u8], lease: LeaseId) -> Result<(), Failure> {
        let request = json!({"key": encode(key.as_bytes()), "value": encode(value), "lease": lease.0.to_string()});
        self.call("kv/put", &request).await.map(|Done {}| ())
    }

    /// Starts a lease's time over. False if there is no such lease.
    pub(super) async fn keep_alive(&self, lease: LeaseId) -> Result<bool, Failure> {
        let request = json!({"ID": lease.0.to_string()});
        let answer: Streamed<KeepAliveAnswer> = self.call("lease/keepalive", &request).await?;
        Ok(result_of(answer)?.ttl > 0)
    }

    /// Ends a lease, and its keys with it.
    pub(super) async fn revoke(&self, lease: LeaseId) -> Result<(), Failure> {
        self.call("lease/revoke", &json!({"ID": lease.0.to_string()})).await.map(|Done {}| ())
    }

    async fn call<A: DeserializeOwned>(&self, path: &str, body: &Value) -> Result<A, Failure> {
        let answer = http::answer(self.request(path, body), self.within).await?;
        Ok(serde_json::from_slice(&answer)?)
    }

    fn request(&self, path: &str, body: &Value) -> RequestBuilder {
        self.http.post(format!("{}{path}", self.base)).body(body.to_string())
    }

    /// Forgets what is not needed but by tests.
    #[cfg(test)]
    pub(super) async fn compact(&self, revision: i64) -> Result<(), Failure> {
        self.call("kv/compaction", &json!({"revision": revision.to_string()}))
            .await
            .map(|Done {}| ())
    }
}

impl Watch {
    /// The next changes; there may be none in a message. No message is lost when the future is
    /// dropped.
    pub(super) async fn next(&mut self) -> Result<WatchAnswer, Failure> {
        let line: Bytes = self.0.next().await?.ok_or(Failure::Ended)?;
        let answer = result_of(serde_json::from_slice::<Streamed<WatchAnswer>>(&line)?)?;
        match answer {
            WatchAnswer { compact_revision, .. } if compact_revision > 0 => Err(Failure::Outdated(
                format!("those before revision {compact_revision} were compacted"),
            )),
            WatchAnswer { canceled: true, cancel_reason, .. } if cancel_reason.is_empty() => {
                Err(Failure::Ended)
            }
            WatchAnswer { canceled: true, cancel_reason, .. } => {
                Err(Failure::Malformed(cancel_reason))
            }
            answer => Ok(answer),
        }
    }
}

fn result_of<T>(streamed: Streamed<T>) -> Result<T, Failure> {
    match streamed {
        Streamed { error: Some(error), .. } => {
            Err(Failure::Refused { status: error.http_code, message: error.message })
        }
        Streamed { result: Some(result), .. } => Ok(result),
        Streamed { result: None, .. } => {
            Err(Failure::Malformed("it has neither a result nor an error".to_owned()))
        }
    }
}

fn range_of(prefix: &str) -> Value {
    json!({"key": encode(prefix.as_bytes()), "range_end": encode(&range_end(prefix.as_bytes()))})
}

/// The first key after all those that begin with `prefix` (`clientv3.GetPrefixRangeEnd`); 0 is
/// etcd's word for no end.
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
    fn the_end_of_a_prefix_is_after_all_that_begins_with_it() {
        assert_eq!(range_end(b"a/"), b"a0");
        assert_eq!(range_end(b"a\xff\xff"), b"b");
        assert_eq!(range_end(b"\xff"), [0]);
        assert_eq!(range_end(b""), [0]);
    }
}
