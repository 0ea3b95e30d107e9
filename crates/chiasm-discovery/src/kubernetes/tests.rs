//! Following a service of a fake API server.

use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::time::Instant;
use url::Url;

use super::{KubernetesUpstream, Port, Service};
use crate::fake::{Answering, Fake, exactly, once, until};
use crate::{Access, ClusterAccess, DiscoveryError, Following, Named, Source, upstream};

const SERVICE: &str = "kubernetes://models/agents:grpc";

fn cluster(fake: &Fake) -> ClusterAccess {
    let server = Url::parse(&format!("http://{}/", fake.address())).unwrap();
    ClusterAccess { server, token: None, authority: None }
}

fn follow(fake: &Fake) -> (Following, watch::Receiver<Named>) {
    let access = Access { cluster: Some(cluster(fake)), ..Access::default() };
    let following = SERVICE.parse::<Source>().unwrap().follow(&access).unwrap();
    let named = following.named();
    (following, named)
}

fn slice(name: &str, version: &str, addresses: &[&str]) -> Value {
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"addresses": [address], "conditions": {"ready": true}}))
        .collect();
    json!({"metadata": {"name": name, "resourceVersion": version}, "addressType": "IPv4", "endpoints": endpoints,
        "ports": [{"name": "grpc", "port": 7000, "protocol": "TCP"}, {"name": "metrics", "port": 9000, "protocol": "TCP"}]})
}

fn list(version: &str, items: &[Value]) -> Value {
    json!({"kind": "EndpointSliceList", "metadata": {"resourceVersion": version}, "items": items})
}

fn event(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

fn gone() -> Value {
    json!({"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old resource version", "code": 410})
}

/// Answers the list, then begins to answer the watch, which has to be from the list's version on.
async fn list_and_watch(fake: &Fake, version: &str, items: &[Value]) -> Answering {
    let asked = fake.asked().await;
    assert!(!asked.line.contains("watch="), "{}", asked.line);
    asked.answer(&list(version, items)).await;
    watch_from(fake, version).await
}

async fn watch_from(fake: &Fake, version: &str) -> Answering {
    let asked = fake.asked().await;
    assert!(
        asked.line.contains("watch=true")
            && asked.line.contains(&format!("resourceVersion={version}&")),
        "{}",
        asked.line
    );
    asked.begin().await
}

#[test]
fn urls_name_a_service_and_perhaps_a_port() {
    for (url, expected) in [
        ("kubernetes://ns/svc", Some(None)),
        ("kubernetes://ns/svc:grpc", Some(Some(Port::Name("grpc".to_owned())))),
        ("kubernetes://ns/svc:7000", Some(Some(Port::Number(7000)))),
        ("kubernetes://ns/svc:", None),
        ("kubernetes://ns/svc:0", None),
        ("kubernetes://ns/svc:70000", None),
        ("kubernetes://ns/svc:a/b", None),
        ("kubernetes://ns/", None),
        ("kubernetes:///svc", None),
        ("kubernetes://ns", None),
        ("kubernetes://ns/svc/more", None),
        ("kubernetes://Ns/svc", None),
        ("kubernetes://ns/-svc", None),
        ("kubernetes://n%2fs/svc", None),
        ("kubernetes://ns/svc?x=y", None),
        ("k8s://ns/svc", None),
    ] {
        let service = url.parse::<Service>();
        assert!(matches!(service, Ok(_) | Err(DiscoveryError::KubernetesUrl { .. })));
        assert_eq!(service.as_ref().ok().map(|service| service.port.clone()), expected, "{url}");
        if let Ok(service) = service {
            assert_eq!(service.to_string(), url);
        }
    }
}

#[tokio::test]
async fn slices_are_listed_and_then_watched() {
    let fake = Fake::new().await;
    let (following, mut named) = follow(&fake);
    assert_eq!(*named.borrow(), Named::default());
    let asked = fake.asked().await;
    assert_eq!(
        asked.line,
        "GET /apis/discovery.k8s.io/v1/namespaces/models/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dagents"
    );
    assert!(!asked.head.contains("authorization"), "{}", asked.head);
    // The second is malformed, which is nothing to the others.
    let broken = json!({"metadata": {"name": "x"}, "addressType": 4});
    asked
        .answer(&list("10", &[slice("a", "9", &["10.0.0.1", "10.0.0.2"]), broken, json!([])]))
        .await;
    until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;

    let asked = fake.asked().await;
    assert!(
        asked
            .line
            .ends_with("&watch=true&allowWatchBookmarks=true&resourceVersion=10&timeoutSeconds=20"),
        "{}",
        asked.line
    );
    let mut watch = asked.begin().await;
    watch.line(&event("ADDED", slice("b", "11", &["10.0.0.3"]))).await;
    until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"])).await;
    watch.line(&event("MODIFIED", slice("a", "12", &["10.0.0.2"]))).await;
    until(&mut named, exactly(&["10.0.0.2:7000", "10.0.0.3:7000"])).await;
    watch.line(&event("SOMETHING-NEW", json!({"metadata": {}}))).await;
    watch.line(&event("SOMETHING-NEW", json!("of another form"))).await;
    watch.line(&event("ADDED", slice("", "12", &["10.0.0.7"]))).await;
    watch.line(&event("DELETED", slice("b", "13", &["10.0.0.3"]))).await;
    until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    watch.line(&event("DELETED", slice("a", "14", &[]))).await;
    until(&mut named, exactly(&[])).await;

    drop(following);
    watch.closed().await;
    assert!(named.changed().await.is_err());
}

#[tokio::test]
async fn a_watch_that_ends_is_begun_again_from_the_last_bookmark() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    watch
        .line(&event(
            "BOOKMARK",
            json!({"kind": "EndpointSlice", "metadata": {"resourceVersion": "20"}}),
        ))
        .await;
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    named.mark_unchanged();
    watch.end().await;
    let mut watch = watch_from(&fake, "20").await;
    assert!(!named.has_changed().unwrap(), "nothing was lost");
    watch.line(&event("MODIFIED", slice("a", "21", &["10.0.0.2"]))).await;
    until(&mut named, exactly(&["10.0.0.2:7000"])).await;
}

#[tokio::test]
async fn a_version_that_is_gone_is_answered_by_a_new_list() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    // In the stream.
    let mut watch = list_and_watch(
        &fake,
        "10",
        &[slice("a", "9", &["10.0.0.1"]), slice("b", "9", &["10.0.0.2"])],
    )
    .await;
    until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    watch.line(&event("ERROR", gone())).await;
    // As a status. What was named is still named while that is found out, and slices that are not
    // listed again are gone.
    fake.asked().await.answer(&list("30", &[slice("b", "9", &["10.0.0.2"])])).await;
    until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    named.mark_unchanged();
    fake.asked().await.answer_with(410, &gone().to_string()).await;
    let mut watch = list_and_watch(&fake, "40", &[slice("b", "9", &["10.0.0.2"])]).await;
    assert!(!named.has_changed().unwrap(), "a server that answers is current");
    // Any other error is a server that does not answer.
    watch.line(&event("ERROR", json!({"code": 500, "message": "etcd is gone"}))).await;
    until(&mut named, once(&["10.0.0.2:7000"])).await;
}

#[tokio::test]
async fn a_cut_connection_leaves_what_was_named_until_there_is_a_new_list() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    let line = event("MODIFIED", slice("a", "11", &["10.0.0.9"])).to_string();
    watch.piece(&line[..line.len() - 9]).await;
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    drop(watch);
    until(&mut named, once(&["10.0.0.1:7000"])).await;
    // An end in good order within a line is none.
    let mut watch = list_and_watch(&fake, "12", &[slice("a", "11", &["10.0.0.9"])]).await;
    until(&mut named, exactly(&["10.0.0.9:7000"])).await;
    watch.piece(&line[..line.len() - 9]).await;
    watch.end().await;
    until(&mut named, once(&["10.0.0.9:7000"])).await;
    // Nonsense neither.
    let mut watch = list_and_watch(&fake, "13", &[slice("a", "11", &["10.0.0.9"])]).await;
    until(&mut named, exactly(&["10.0.0.9:7000"])).await;
    watch.piece("<html>\n").await;
    until(&mut named, once(&["10.0.0.9:7000"])).await;
}

#[tokio::test]
async fn answers_that_are_none_leave_what_was_named() {
    for (status, body) in [
        (403, r#"{"kind":"Status","message":"endpointslices is forbidden","code":403}"#),
        (200, "<html>"),
        (200, r#"{"metadata":{},"items":[]}"#),
        (200, "[]"),
        (302, ""),
    ] {
        let fake = Fake::new().await;
        let (_following, mut named) = follow(&fake);
        drop(list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await);
        until(&mut named, once(&["10.0.0.1:7000"])).await;
        fake.asked().await.answer_with(status, body).await;
        // The next try comes only after the answer was looked at.
        let asked = fake.asked().await;
        assert!(once(&["10.0.0.1:7000"])(&named.borrow()), "{status} {body}");
        asked.answer(&list("11", &[slice("a", "9", &["10.0.0.2"])])).await;
        until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    }
}

#[tokio::test]
async fn the_token_is_read_for_each_request() {
    let fake = Fake::new().await;
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("token");
    let cluster = ClusterAccess { token: Some(path.clone()), ..cluster(&fake) };
    let access = Access { cluster: Some(cluster), ..Access::default() };
    std::fs::write(&path, "first\n").unwrap();
    let following = SERVICE.parse::<Source>().unwrap().follow(&access).unwrap();
    let asked = fake.asked().await;
    assert!(asked.head.contains("\r\nauthorization: bearer first\r\n"), "{}", asked.head);
    std::fs::write(&path, "second").unwrap();
    asked.answer(&list("10", &[])).await;
    let asked = fake.asked().await;
    assert!(asked.head.contains("\r\nauthorization: bearer second\r\n"), "{}", asked.head);
    // Without a token nothing is asked.
    std::fs::remove_file(&path).unwrap();
    asked.answer_with(500, "").await;
    until(&mut following.named(), once(&[])).await;
    std::fs::write(&path, "third").unwrap();
    let asked = fake.asked().await;
    assert!(asked.head.contains("\r\nauthorization: bearer third\r\n"), "{}", asked.head);
}

#[tokio::test]
async fn a_silent_server_is_noticed() {
    let fake = Fake::new().await;
    let upstream = KubernetesUpstream::new(SERVICE.parse().unwrap(), cluster(&fake)).unwrap();
    let second = Duration::from_secs(1);
    let following = upstream::follow(upstream.with_patience(second, second));
    let mut named = following.named();
    let watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let since = Instant::now();
    until(&mut named, once(&["10.0.0.1:7000"])).await;
    assert!(since.elapsed() > second, "its watch may last as long as it was asked to");
    watch.closed().await;
    // A list that is never answered is given up as well, and asked for again.
    let silent = fake.asked().await;
    let _watch = list_and_watch(&fake, "20", &[slice("a", "9", &["10.0.0.2"])]).await;
    until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    drop(silent);
}

#[tokio::test]
async fn a_change_that_waits_to_be_told_outlives_its_watch() {
    let fake = Fake::new().await;
    let (_following, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, "10", &[]).await;
    // After the first the others wait, and the connection is gone before they are told.
    let lines: Vec<String> = (1..=9)
        .map(|n| {
            event("ADDED", slice(&n.to_string(), "11", &[&format!("10.0.0.{n}")])).to_string()
                + "\n"
        })
        .collect();
    watch.piece(&lines.concat()).await;
    drop(watch);
    let all: Vec<String> = (1..=9).map(|n| format!("10.0.0.{n}:7000")).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    until(&mut named, once(&all)).await;
}

#[tokio::test]
async fn a_watch_that_talks_for_longer_than_asked_is_begun_again_without_a_list() {
    let fake = Fake::new().await;
    let upstream = KubernetesUpstream::new(SERVICE.parse().unwrap(), cluster(&fake)).unwrap();
    let second = Duration::from_secs(1);
    let following = upstream::follow(upstream.with_patience(second, second));
    let mut named = following.named();
    let mut watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    watch.line(&event("BOOKMARK", json!({"metadata": {"resourceVersion": "20"}}))).await;
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    named.mark_unchanged();
    let _next = watch_from(&fake, "20").await;
    assert!(!named.has_changed().unwrap(), "a server that answers is current");
    watch.closed().await;
}
