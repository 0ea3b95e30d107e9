//! Tests of following and registering with a scripted server.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::etcd::message::encode;
use crate::fake::{FakeRequest, FakeServer, FakeStream, exactly, stale, wait_until};
use crate::{Access, Candidate, NamedAgents, Registration, Source, SourceFollower, Tls};

fn follow(fake: &FakeServer) -> (SourceFollower, watch::Receiver<NamedAgents>) {
    let source: Source = format!("etcd://{}/p", fake.address()).parse().unwrap();
    let follower = source.follow(&Access::default()).unwrap();
    let named = follower.subscribe();
    (follower, named)
}

fn kv(key: &str, value: &str) -> Value {
    json!({"key": encode(key.as_bytes()), "value": encode(value.as_bytes()), "mod_revision": "1"})
}

fn list(revision: i64, kvs: &[Value]) -> Value {
    let count = kvs.len().to_string();
    json!({"header": {"revision": revision.to_string()}, "kvs": kvs, "count": count})
}

fn events(events: &[Value]) -> Value {
    json!({"result": {"header": {"revision": "99"}, "events": events}})
}

/// Waits for the next request, which must be this call, and returns it with its body.
async fn expect_call(fake: &FakeServer, path: &str) -> (FakeRequest, Value) {
    let request = fake.next_request().await;
    assert_eq!(request.line, format!("POST /v3/{path}"), "{}", request.body);
    let body = serde_json::from_str(&request.body).unwrap();
    (request, body)
}

/// Answers the list and begins the watch, which must start after the list's revision.
async fn list_and_watch(fake: &FakeServer, revision: i64, kvs: &[Value]) -> FakeStream {
    let (request, body) = expect_call(fake, "kv/range").await;
    assert_eq!(body, json!({"key": encode(b"p/"), "range_end": encode(b"p0"), "limit": "10001"}));
    request.respond(&list(revision, kvs)).await;
    let (request, body) = expect_call(fake, "watch").await;
    assert_eq!(body["create_request"]["start_revision"], (revision + 1).to_string());
    let mut watch = request.begin_stream().await;
    watch.line(&json!({"result": {"header": {}, "created": true}})).await;
    watch
}

#[tokio::test]
async fn prefix_is_listed_before_watch() {
    let fake = FakeServer::new().await;
    let (follower, mut named) = follow(&fake);
    let mut watch =
        list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#), kv("p/2", "nonsense")]).await;
    wait_until(&mut named, exactly(&["a:1"])).await;
    let delete = json!({"type": "DELETE", "kv": {"key": encode(b"p/1")}});
    watch.line(&events(&[json!({"kv": kv("p/3", r#"{"address":"b:1"}"#)}), delete])).await;
    wait_until(&mut named, exactly(&["b:1"])).await;
    drop(follower);
    watch.closed().await;
}

#[tokio::test]
async fn compaction_causes_new_list() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    wait_until(&mut named, exactly(&["a:1"])).await;
    named.mark_unchanged();
    watch.line(&json!({"result": {"header": {}, "canceled": true, "compact_revision": "9"}})).await;
    let _watch = list_and_watch(&fake, 12, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    assert!(!named.has_changed().unwrap(), "a server that answers is current");
}

#[tokio::test]
async fn failed_watch_keeps_named_agents() {
    for line in [
        "nonsense\n",
        "{}\n",
        "{\"result\":{\"canceled\":true,\"cancel_reason\":\"etcdserver: permission denied\"}}\n",
        "{\"error\":{\"grpc_code\":14,\"http_code\":503,\"message\":\"etcdserver: no leader\"}}\n",
        "{\"result\":{\"events\":[{\"kv\":{\"key\":\"*\"}}]}}\n",
        "{\"result\":",
    ] {
        let fake = FakeServer::new().await;
        let (_follower, mut named) = follow(&fake);
        let mut watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
        wait_until(&mut named, exactly(&["a:1"])).await;
        watch.piece(line).await;
        watch.end().await;
        wait_until(&mut named, stale(&["a:1"])).await;
    }
}

#[tokio::test]
async fn pending_change_is_published_after_watch_ends() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, 7, &[]).await;
    // The changes after the first one are pending when the connection is cut.
    let line = |n| {
        events(&[json!({"kv": kv(&format!("p/{n}"), &format!(r#"{{"address":"a:{n}"}}"#))})])
            .to_string()
    };
    let lines: Vec<String> = (1..=9).map(|n| line(n) + "\n").collect();
    watch.piece(&lines.concat()).await;
    drop(watch);
    let all: Vec<String> = (1..=9).map(|n| format!("a:{n}")).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    wait_until(&mut named, stale(&all)).await;
}

#[tokio::test]
async fn endless_line_ends_watch() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    wait_until(&mut named, exactly(&["a:1"])).await;
    let piece = "x".repeat(1 << 20);
    for _ in 0..5 {
        watch.piece(&piece).await;
    }
    wait_until(&mut named, stale(&["a:1"])).await;
}

#[tokio::test]
async fn invalid_or_too_long_list_is_refused() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    for body in ["x".repeat((16 << 20) + 1), "null".to_owned(), "[]]".to_owned()] {
        let (request, _) = expect_call(&fake, "kv/range").await;
        request.respond_with(200, &body).await;
    }
    let (request, _) = expect_call(&fake, "kv/range").await;
    request
        .respond_with(
            503,
            r#"{"error":"etcdserver: no leader","message":"etcdserver: no leader","code":14}"#,
        )
        .await;
    assert_eq!(*named.borrow(), NamedAgents::default());
    let _watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    wait_until(&mut named, exactly(&["a:1"])).await;
}

#[tokio::test]
async fn silent_watch_is_detected_by_count() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    let _dead = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    wait_until(&mut named, exactly(&["a:1"])).await;
    for _ in 0..2 {
        let (request, body) = expect_call(&fake, "kv/range").await;
        assert_eq!(body["count_only"], true);
        request.respond(&json!({"header": {"revision": "8"}, "count": "2"})).await;
    }
    let two = [kv("p/1", r#"{"address":"a:1"}"#), kv("p/2", r#"{"address":"b:1"}"#)];
    let _watch = list_and_watch(&fake, 8, &two).await;
    wait_until(&mut named, exactly(&["a:1", "b:1"])).await;
    // A lower revision means that the store is another one.
    let (request, _) = expect_call(&fake, "kv/range").await;
    request.respond(&json!({"header": {"revision": "3"}, "count": "2"})).await;
    let _watch = list_and_watch(&fake, 3, &[]).await;
    wait_until(&mut named, exactly(&[])).await;
}

#[tokio::test]
async fn lease_with_unanswered_grant_is_revoked() {
    let fake = FakeServer::new().await;
    let agent = Candidate::new("a:1", None).unwrap();
    let etcd = format!("etcd://{}/p", fake.address()).parse().unwrap();
    let registration =
        Registration::start(etcd, Tls::default(), &agent, Duration::from_secs(60)).unwrap();
    let (_unanswered, granted) = expect_call(&fake, "lease/grant").await;
    assert_eq!(granted["TTL"], "60");
    let end = tokio::spawn(registration.end());
    let (request, revoked) = expect_call(&fake, "lease/revoke").await;
    assert_eq!(revoked["ID"], granted["ID"]);
    request.respond(&json!({})).await;
    end.await.unwrap();
}

#[tokio::test]
async fn expired_lease_is_replaced_but_foreign_key_is_left() {
    let fake = FakeServer::new().await;
    let agent = Candidate::new("a:1", None).unwrap();
    let etcd = format!("etcd://{}/p", fake.address()).parse().unwrap();
    let registration =
        Registration::start(etcd, Tls::default(), &agent, Duration::from_secs(1)).unwrap();
    let (request, first) = expect_call(&fake, "lease/grant").await;
    request.respond(&json!({"ID": first["ID"], "TTL": "1"})).await;
    let (request, put) = expect_call(&fake, "kv/put").await;
    assert_eq!((&put["lease"], &put["key"]), (&first["ID"], &json!(encode(b"p/a:1"))));
    // A failed put is repeated.
    request.respond_with(503, "").await;
    let (request, _) = expect_call(&fake, "lease/keepalive").await;
    request.respond(&json!({"result": {"ID": first["ID"], "TTL": "1"}})).await;
    let (request, _) = expect_call(&fake, "kv/put").await;
    request.respond(&json!({})).await;
    registration.is_registered().wait_for(|&is| is).await.unwrap();

    let (request, _) = expect_call(&fake, "lease/keepalive").await;
    request.respond(&json!({"result": {"ID": first["ID"], "TTL": "1"}})).await;
    let (request, _) = expect_call(&fake, "kv/range").await;
    request
        .respond(
            &json!({"header": {}, "kvs": [{"key": encode(b"p/a:1"), "lease": "77"}], "count": "1"}),
        )
        .await;
    let (request, _) = expect_call(&fake, "lease/keepalive").await;
    request.respond(&json!({"result": {"ID": first["ID"]}})).await;
    let (request, second) = expect_call(&fake, "lease/grant").await;
    assert_ne!(second["ID"], first["ID"]);
    request.respond(&json!({})).await;
    let (request, put) = expect_call(&fake, "kv/put").await;
    assert_eq!(put["lease"], second["ID"]);
    request.respond(&json!({})).await;
    drop(registration);
    let (request, revoked) = expect_call(&fake, "lease/revoke").await;
    assert_eq!(revoked["ID"], second["ID"]);
    request.respond(&json!({})).await;
}
