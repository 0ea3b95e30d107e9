//! Tests of following a service of a scripted API server.

use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::time::Instant;
use url::Url;

use super::{KubernetesWatcher, Port, Service};
use crate::fake::{FakeServer, FakeStream, exactly, stale, wait_until};
use crate::{
    Access, ClusterAccess, DiscoveryError, NamedAgents, Source, SourceFollower, publisher,
};

const SERVICE: &str = "kubernetes://models/agents:grpc";

fn cluster(fake: &FakeServer) -> ClusterAccess {
    let server = Url::parse(&format!("http://{}/", fake.address())).unwrap();
    ClusterAccess { server, token: None, authority: None }
}

fn follow(fake: &FakeServer) -> (SourceFollower, watch::Receiver<NamedAgents>) {
    let access = Access { cluster: Some(cluster(fake)), ..Access::default() };
    let follower = SERVICE.parse::<Source>().unwrap().follow(&access).unwrap();
    let named = follower.subscribe();
    (follower, named)
}

fn slice(name: &str, version: &str, addresses: &[&str]) -> Value {
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|address| json!({"addresses": [address], "conditions": {"ready": true}}))
        .collect();
    json!({
        "metadata": {"name": name, "resourceVersion": version},
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [
            {"name": "grpc", "port": 7000, "protocol": "TCP"},
            {"name": "metrics", "port": 9000, "protocol": "TCP"},
        ],
    })
}

fn list(version: &str, items: &[Value]) -> Value {
    json!({"kind": "EndpointSliceList", "metadata": {"resourceVersion": version}, "items": items})
}

fn event(kind: &str, object: Value) -> Value {
    json!({"type": kind, "object": object})
}

fn gone() -> Value {
    json!({
        "kind": "Status",
        "status": "Failure",
        "reason": "Expired",
        "message": "too old resource version",
        "code": 410,
    })
}

/// Answers the list and begins the watch, which must start at the list's version.
async fn list_and_watch(fake: &FakeServer, version: &str, items: &[Value]) -> FakeStream {
    let request = fake.next_request().await;
    assert!(!request.line.contains("watch="), "{}", request.line);
    request.respond(&list(version, items)).await;
    watch_from(fake, version).await
}

async fn watch_from(fake: &FakeServer, version: &str) -> FakeStream {
    let request = fake.next_request().await;
    assert!(
        request.line.contains("watch=true")
            && request.line.contains(&format!("resourceVersion={version}&")),
        "{}",
        request.line
    );
    request.begin_stream().await
}

#[test]
fn url_has_service_with_optional_port() {
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
async fn slices_are_listed_before_watch() {
    let fake = FakeServer::new().await;
    let (follower, mut named) = follow(&fake);
    assert_eq!(*named.borrow(), NamedAgents::default());
    let request = fake.next_request().await;
    assert_eq!(
        request.line,
        "GET /apis/discovery.k8s.io/v1/namespaces/models/endpointslices\
         ?labelSelector=kubernetes.io%2Fservice-name%3Dagents"
    );
    assert!(!request.head.contains("authorization"), "{}", request.head);
    // Malformed slices do not affect the others.
    let broken = json!({"metadata": {"name": "x"}, "addressType": 4});
    request
        .respond(&list("10", &[slice("a", "9", &["10.0.0.1", "10.0.0.2"]), broken, json!([])]))
        .await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;

    let request = fake.next_request().await;
    assert!(
        request
            .line
            .ends_with("&watch=true&allowWatchBookmarks=true&resourceVersion=10&timeoutSeconds=20"),
        "{}",
        request.line
    );
    let mut watch = request.begin_stream().await;
    watch.line(&event("ADDED", slice("b", "11", &["10.0.0.3"]))).await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"])).await;
    watch.line(&event("MODIFIED", slice("a", "12", &["10.0.0.2"]))).await;
    wait_until(&mut named, exactly(&["10.0.0.2:7000", "10.0.0.3:7000"])).await;
    watch.line(&event("SOMETHING-NEW", json!({"metadata": {}}))).await;
    watch.line(&event("SOMETHING-NEW", json!("of another form"))).await;
    watch.line(&event("ADDED", slice("", "12", &["10.0.0.7"]))).await;
    watch.line(&event("DELETED", slice("b", "13", &["10.0.0.3"]))).await;
    wait_until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    watch.line(&event("DELETED", slice("a", "14", &[]))).await;
    wait_until(&mut named, exactly(&[])).await;

    drop(follower);
    watch.closed().await;
    assert!(named.changed().await.is_err());
}

#[tokio::test]
async fn ended_watch_resumes_at_last_bookmark() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    watch
        .line(&event(
            "BOOKMARK",
            json!({"kind": "EndpointSlice", "metadata": {"resourceVersion": "20"}}),
        ))
        .await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    named.mark_unchanged();
    watch.end().await;
    let mut watch = watch_from(&fake, "20").await;
    assert!(!named.has_changed().unwrap(), "nothing was lost");
    watch.line(&event("MODIFIED", slice("a", "21", &["10.0.0.2"]))).await;
    wait_until(&mut named, exactly(&["10.0.0.2:7000"])).await;
}

#[tokio::test]
async fn expired_version_causes_new_list() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    // First the stream reports that the version has expired. Agents stay named until the new list,
    // which lacks one of them.
    let mut watch = list_and_watch(
        &fake,
        "10",
        &[slice("a", "9", &["10.0.0.1"]), slice("b", "9", &["10.0.0.2"])],
    )
    .await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    watch.line(&event("ERROR", gone())).await;
    fake.next_request().await.respond(&list("30", &[slice("b", "9", &["10.0.0.2"])])).await;
    wait_until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    named.mark_unchanged();
    // Then the status of a watch reports it.
    fake.next_request().await.respond_with(410, &gone().to_string()).await;
    let mut watch = list_and_watch(&fake, "40", &[slice("b", "9", &["10.0.0.2"])]).await;
    assert!(!named.has_changed().unwrap(), "a server that answers is current");
    // Any other error counts as an outage.
    watch.line(&event("ERROR", json!({"code": 500, "message": "etcd is gone"}))).await;
    wait_until(&mut named, stale(&["10.0.0.2:7000"])).await;
}

#[tokio::test]
async fn cut_connection_keeps_named_agents_until_new_list() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    let line = event("MODIFIED", slice("a", "11", &["10.0.0.9"])).to_string();
    watch.piece(&line[..line.len() - 9]).await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    drop(watch);
    wait_until(&mut named, stale(&["10.0.0.1:7000"])).await;
    // The regular end of a body within a line counts as a failure.
    let mut watch = list_and_watch(&fake, "12", &[slice("a", "11", &["10.0.0.9"])]).await;
    wait_until(&mut named, exactly(&["10.0.0.9:7000"])).await;
    watch.piece(&line[..line.len() - 9]).await;
    watch.end().await;
    wait_until(&mut named, stale(&["10.0.0.9:7000"])).await;
    // An invalid line counts as a failure.
    let mut watch = list_and_watch(&fake, "13", &[slice("a", "11", &["10.0.0.9"])]).await;
    wait_until(&mut named, exactly(&["10.0.0.9:7000"])).await;
    watch.piece("<html>\n").await;
    wait_until(&mut named, stale(&["10.0.0.9:7000"])).await;
}

#[tokio::test]
async fn invalid_list_keeps_named_agents() {
    for (status, body) in [
        (403, r#"{"kind":"Status","message":"endpointslices is forbidden","code":403}"#),
        (200, "<html>"),
        (200, r#"{"metadata":{},"items":[]}"#),
        (200, "[]"),
        (302, ""),
    ] {
        let fake = FakeServer::new().await;
        let (_follower, mut named) = follow(&fake);
        drop(list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await);
        wait_until(&mut named, stale(&["10.0.0.1:7000"])).await;
        fake.next_request().await.respond_with(status, body).await;
        // The next request comes after the answer was processed.
        let request = fake.next_request().await;
        assert!(stale(&["10.0.0.1:7000"])(&named.borrow()), "{status} {body}");
        request.respond(&list("11", &[slice("a", "9", &["10.0.0.2"])])).await;
        wait_until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    }
}

#[tokio::test]
async fn token_is_read_for_each_request() {
    let fake = FakeServer::new().await;
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("token");
    let cluster = ClusterAccess { token: Some(path.clone()), ..cluster(&fake) };
    let access = Access { cluster: Some(cluster), ..Access::default() };
    std::fs::write(&path, "first\n").unwrap();
    let follower = SERVICE.parse::<Source>().unwrap().follow(&access).unwrap();
    let request = fake.next_request().await;
    assert!(request.head.contains("\r\nauthorization: bearer first\r\n"), "{}", request.head);
    std::fs::write(&path, "second").unwrap();
    request.respond(&list("10", &[])).await;
    let request = fake.next_request().await;
    assert!(request.head.contains("\r\nauthorization: bearer second\r\n"), "{}", request.head);
    // Without a token, no request is sent.
    std::fs::remove_file(&path).unwrap();
    request.respond_with(500, "").await;
    wait_until(&mut follower.subscribe(), stale(&[])).await;
    std::fs::write(&path, "third").unwrap();
    let request = fake.next_request().await;
    assert!(request.head.contains("\r\nauthorization: bearer third\r\n"), "{}", request.head);
}

#[tokio::test]
async fn silent_server_is_detected() {
    let fake = FakeServer::new().await;
    let watcher = KubernetesWatcher::new(SERVICE.parse().unwrap(), cluster(&fake)).unwrap();
    let second = Duration::from_secs(1);
    let follower = publisher::follow(watcher.with_times(second, second));
    let mut named = follower.subscribe();
    let watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let since = Instant::now();
    wait_until(&mut named, stale(&["10.0.0.1:7000"])).await;
    assert!(since.elapsed() > second, "the watch may be silent for its whole duration");
    watch.closed().await;
    // An unanswered list times out and is requested again.
    let silent = fake.next_request().await;
    let _watch = list_and_watch(&fake, "20", &[slice("a", "9", &["10.0.0.2"])]).await;
    wait_until(&mut named, exactly(&["10.0.0.2:7000"])).await;
    drop(silent);
}

#[tokio::test]
async fn pending_change_is_published_after_watch_ends() {
    let fake = FakeServer::new().await;
    let (_follower, mut named) = follow(&fake);
    let mut watch = list_and_watch(&fake, "10", &[]).await;
    // The changes after the first one are pending when the connection is cut.
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
    wait_until(&mut named, stale(&all)).await;
}

#[tokio::test]
async fn overlong_watch_resumes_without_list() {
    let fake = FakeServer::new().await;
    let watcher = KubernetesWatcher::new(SERVICE.parse().unwrap(), cluster(&fake)).unwrap();
    let second = Duration::from_secs(1);
    let follower = publisher::follow(watcher.with_times(second, second));
    let mut named = follower.subscribe();
    let mut watch = list_and_watch(&fake, "10", &[slice("a", "9", &["10.0.0.1"])]).await;
    watch.line(&event("BOOKMARK", json!({"metadata": {"resourceVersion": "20"}}))).await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    named.mark_unchanged();
    let _next = watch_from(&fake, "20").await;
    assert!(!named.has_changed().unwrap(), "a server that answers is current");
    watch.closed().await;
}
