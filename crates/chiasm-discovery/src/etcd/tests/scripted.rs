//! Following and registering before a server that says what a test wants.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::etcd::message::encode;
use crate::fake::{Answering, Asked, Fake, exactly, once, until};
use crate::{Access, Candidate, Following, Named, Registration, Source, Tls};

fn follow(fake: &Fake) -> (Following, watch::Receiver<Named>) {
    let source: Source = format!("etcd://{}/p", fake.address()).parse().unwrap();
    let following = source.follow(&Access::default()).unwrap();
    let named = following.named();
    (following, named)
}

fn kv(key: &str, value: &str) -> Value {
    json!({"key": encode(key.as_bytes()), "value": encode(value.as_bytes()), "mod_revision": "1"})
}

fn list(revision: i64, kvs: &[Value]) -> Value {
    json!({"header": {"revision": revision.to_string()}, "kvs": kvs, "count": kvs.len().to_string()})
}

fn events(events: &[Value]) -> Value {
    json!({"result": {"header": {"revision": "99"}, "events": events}})
}

/// The next request, which has to be this call.
async fn called(fake: &Fake, path: &str) -> (Asked, Value) {
    let asked = fake.asked().await;
    assert_eq!(asked.line, format!("POST /v3/{path}"), "{}", asked.body);
    let body = serde_json::from_str(&asked.body).unwrap();
    (asked, body)
}

async fn list_and_watch(fake: &Fake, revision: i64, kvs: &[Value]) -> Answering {
    let (asked, body) = called(fake, "kv/range").await;
    assert_eq!(body, json!({"key": encode(b"p/"), "range_end": encode(b"p0"), "limit": "10001"}));
    asked.answer(&list(revision, kvs)).await;
    let (asked, body) = called(fake, "watch").await;
    assert_eq!(body["create_request"]["start_revision"], (revision + 1).to_string());
    let mut watch = asked.begin().await;
    watch.line(&json!({"result": {"header": {}, "created": true}})).await;
    watch
}

#[tokio::test]
async fn a_prefix_is_listed_and_then_watched() {
    let fake = Fake::new().await;
    let (following, mut named) = follow(&fake);
    let mut watch =
        list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#), kv("p/2", "nonsense")]).await;
    until(&mut named, exactly(&["a:1"])).await;
    let delete = json!({"type": "DELETE", "kv": {"key": encode(b"p/1")}});
    watch.line(&events(&[json!({"kv": kv("p/3", r#"{"address":"b:1"}"#)}), delete])).await;
    until(&mut named, exactly(&["b:1"])).await;
    drop(following);
    watch.closed().await;
}

#[tokio::test]
async fn compacted_changes_are_answered_by_a_new_list() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    until(&mut named, exactly(&["a:1"])).await;
    named.mark_unchanged();
    watch.line(&json!({"result": {"header": {}, "canceled": true, "compact_revision": "9"}})).await;
    let _watch = list_and_watch(&fake, 12, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    assert!(!named.has_changed().unwrap(), "a server that answers is current");
}

#[tokio::test]
async fn failures_of_a_watch_leave_what_was_named() {
    for line in [
        "nonsense\n",
        "{}\n",
        "{\"result\":{\"canceled\":true,\"cancel_reason\":\"etcdserver: permission denied\"}}\n",
        "{\"error\":{\"grpc_code\":14,\"http_code\":503,\"message\":\"etcdserver: no leader\"}}\n",
        "{\"result\":{\"events\":[{\"kv\":{\"key\":\"*\"}}]}}\n",
        "{\"result\":",
    ] {
        let fake = Fake::new().await;
        let (_following, mut named) = follow(&fake);
        let mut watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
        until(&mut named, exactly(&["a:1"])).await;
        watch.piece(line).await;
        watch.end().await;
        until(&mut named, once(&["a:1"])).await;
    }
}

#[tokio::test]
async fn a_change_that_waits_to_be_told_outlives_its_watch() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, 7, &[]).await;
    // After the first the others wait, and the connection is gone before they are told.
    let line = |n| {
        events(&[json!({"kv": kv(&format!("p/{n}"), &format!(r#"{{"address":"a:{n}"}}"#))})])
            .to_string()
    };
    let lines: Vec<String> = (1..=9).map(|n| line(n) + "\n").collect();
    watch.piece(&lines.concat()).await;
    drop(watch);
    let all: Vec<String> = (1..=9).map(|n| format!("a:{n}")).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    until(&mut named, once(&all)).await;
}

#[tokio::test]
async fn a_line_without_end_is_given_up() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    until(&mut named, exactly(&["a:1"])).await;
    let piece = "x".repeat(1 << 20);
    for _ in 0..5 {
        watch.piece(&piece).await;
    }
    until(&mut named, once(&["a:1"])).await;
}

#[tokio::test]
async fn a_list_that_is_too_long_or_none_is_not_taken() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    for body in ["x".repeat((16 << 20) + 1), "null".to_owned(), "[]]".to_owned()] {
        let (asked, _) = called(&fake, "kv/range").await;
        asked.answer_with(200, &body).await;
    }
    let (asked, _) = called(&fake, "kv/range").await;
    asked
        .answer_with(
            503,
            r#"{"error":"etcdserver: no leader","message":"etcdserver: no leader","code":14}"#,
        )
        .await;
    assert_eq!(*named.borrow(), Named::default());
    let _watch = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    until(&mut named, exactly(&["a:1"])).await;
}

#[tokio::test]
async fn a_watch_that_tells_nothing_is_found_out() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    let _dead = list_and_watch(&fake, 7, &[kv("p/1", r#"{"address":"a:1"}"#)]).await;
    until(&mut named, exactly(&["a:1"])).await;
    for _ in 0..2 {
        let (asked, body) = called(&fake, "kv/range").await;
        assert_eq!(body["count_only"], true);
        asked.answer(&json!({"header": {"revision": "8"}, "count": "2"})).await;
    }
    let two = [kv("p/1", r#"{"address":"a:1"}"#), kv("p/2", r#"{"address":"b:1"}"#)];
    let _watch = list_and_watch(&fake, 8, &two).await;
    until(&mut named, exactly(&["a:1", "b:1"])).await;
    // A store that is younger than it was is another one.
    let (asked, _) = called(&fake, "kv/range").await;
    asked.answer(&json!({"header": {"revision": "3"}, "count": "2"})).await;
    let _watch = list_and_watch(&fake, 3, &[]).await;
    until(&mut named, exactly(&[])).await;
}

#[tokio::test]
async fn a_lease_whose_grant_is_never_answered_is_revoked_too() {
    let fake = Fake::new().await;
    let agent = Candidate::new("a:1", None).unwrap();
    let etcd = format!("etcd://{}/p", fake.address()).parse().unwrap();
    let registration =
        Registration::start(etcd, Tls::default(), &agent, Duration::from_secs(60)).unwrap();
    let (_unanswered, granted) = called(&fake, "lease/grant").await;
    assert_eq!(granted["TTL"], "60");
    let end = tokio::spawn(registration.end());
    let (asked, revoked) = called(&fake, "lease/revoke").await;
    assert_eq!(revoked["ID"], granted["ID"]);
    asked.answer(&json!({})).await;
    end.await.unwrap();
}

#[tokio::test]
async fn a_lease_that_ran_out_is_replaced_and_a_key_of_another_lease_is_left() {
    let fake = Fake::new().await;
    let agent = Candidate::new("a:1", None).unwrap();
    let etcd = format!("etcd://{}/p", fake.address()).parse().unwrap();
    let registration =
        Registration::start(etcd, Tls::default(), &agent, Duration::from_secs(1)).unwrap();
    let (asked, first) = called(&fake, "lease/grant").await;
    asked.answer(&json!({"ID": first["ID"], "TTL": "1"})).await;
    let (asked, put) = called(&fake, "kv/put").await;
    assert_eq!((&put["lease"], &put["key"]), (&first["ID"], &json!(encode(b"p/a:1"))));
    // A put that fails is done again, though the key is there from an earlier life.
    asked.answer_with(503, "").await;
    let (asked, _) = called(&fake, "lease/keepalive").await;
    asked.answer(&json!({"result": {"ID": first["ID"], "TTL": "1"}})).await;
    let (asked, _) = called(&fake, "kv/put").await;
    asked.answer(&json!({})).await;
    registration.is_registered().wait_for(|&is| is).await.unwrap();

    let (asked, _) = called(&fake, "lease/keepalive").await;
    asked.answer(&json!({"result": {"ID": first["ID"], "TTL": "1"}})).await;
    let (asked, _) = called(&fake, "kv/range").await;
    asked
        .answer(
            &json!({"header": {}, "kvs": [{"key": encode(b"p/a:1"), "lease": "77"}], "count": "1"}),
        )
        .await;
    let (asked, _) = called(&fake, "lease/keepalive").await;
    asked.answer(&json!({"result": {"ID": first["ID"]}})).await;
    let (asked, second) = called(&fake, "lease/grant").await;
    assert_ne!(second["ID"], first["ID"]);
    asked.answer(&json!({})).await;
    let (asked, put) = called(&fake, "kv/put").await;
    assert_eq!(put["lease"], second["ID"]);
    asked.answer(&json!({})).await;
    drop(registration);
    let (asked, revoked) = called(&fake, "lease/revoke").await;
    assert_eq!(revoked["ID"], second["ID"]);
    asked.answer(&json!({})).await;
}
