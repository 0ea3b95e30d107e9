//! Tests of following and registering with a real etcd, whose path is in `CHIASM_TEST_ETCD`.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::time::{Instant, timeout};

use super::server::{EtcdServer, TTL, wait_until_registered};
use crate::etcd::api::{EtcdClient, LeaseId};
use crate::etcd::message::EventType;
use crate::failure::Failure;
use crate::fake::{TEST_TIMEOUT, exactly, stale, wait_until};
use crate::http::CALL_TIMEOUT;
use crate::{Access, Candidate, Registration, Source, Tls};

/// The maximum time until a silent server is detected.
const DETECTION_LIMIT: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn agent_is_named_while_registered() {
    let server = EtcdServer::start().await;
    let early = server.register("10.0.0.1:7000");
    wait_until_registered(&early, true).await;
    let follower = server.follow();
    let mut named = follower.subscribe();
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let late = server.register("[FD00::2]:7000");
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "[fd00::2]:7000"])).await;

    let client = server.client().await;
    let listed = client.list("test/").await.unwrap();
    assert_eq!(listed.kvs[0].key, b"test/10.0.0.1:7000");
    assert_eq!(
        str::from_utf8(&listed.kvs[0].value).unwrap(),
        r#"{"address":"10.0.0.1:7000","model":"tiny"}"#
    );

    // Longer than the lease, which is kept alive.
    let since = Instant::now();
    while since.elapsed() < 2 * TTL {
        assert_eq!(client.count("test/").await.unwrap().count, 2);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let since = Instant::now();
    early.end().await;
    wait_until(&mut named, exactly(&["[fd00::2]:7000"])).await;
    drop(late);
    wait_until(&mut named, exactly(&[])).await;
    assert!(since.elapsed() < TTL, "leases are revoked before they expire");
}

/// Registers an agent on its own runtime. Shutting down the runtime is like killing a process: the
/// lease is not revoked.
fn register_on_own_runtime(server: &EtcdServer) -> (Runtime, Registration) {
    let runtime = Runtime::new().unwrap();
    let entered = runtime.enter();
    let registration = server.register("10.0.0.1:7000");
    drop(entered);
    (runtime, registration)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn killed_agent_vanishes_when_lease_expires() {
    let server = EtcdServer::start().await;
    let follower = server.follow();
    let mut named = follower.subscribe();
    let (runtime, _registration) = register_on_own_runtime(&server);
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let killed = Instant::now();
    runtime.shutdown_background();
    wait_until(&mut named, exactly(&[])).await;
    assert!(
        killed.elapsed() > TTL / 3,
        "the lease expires and is not revoked: {:?}",
        killed.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn restarted_agent_stays_named() {
    let server = EtcdServer::start().await;
    let follower = server.follow();
    let mut named = follower.subscribe();
    let (runtime, _registration) = register_on_own_runtime(&server);
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    runtime.shutdown_background();
    let again = server.register("10.0.0.1:7000");
    wait_until_registered(&again, true).await;
    named.mark_unchanged();
    // The lease of the first registration expires meanwhile and must not delete the key.
    let changed = timeout(2 * TTL, named.changed()).await;
    assert!(changed.is_err(), "{:?}", named.borrow());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn mutual_tls_is_required_by_server() {
    let server = EtcdServer::start_with_tls().await;
    let registration = server.register("10.0.0.1:7000");
    let follower = server.follow();
    wait_until(&mut follower.subscribe(), exactly(&["10.0.0.1:7000"])).await;
    wait_until_registered(&registration, true).await;
    // Mozilla does not trust the authority, and the server requires a client certificate.
    let with_authority = Tls { identity: None, ..server.tls() };
    for tls in [Tls::default(), with_authority] {
        let client = EtcdClient::new(&server.etcd(), 0, &tls, CALL_TIMEOUT).await.unwrap();
        let refused = client.list("test/").await.unwrap_err();
        assert!(matches!(refused, Failure::Unreachable(_)), "{refused}");
    }
    registration.end().await;
    wait_until(&mut follower.subscribe(), exactly(&[])).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn frozen_etcd_keeps_named_agents() {
    let server = EtcdServer::start().await;
    let registration = server.register("10.0.0.1:7000");
    let follower = server.follow();
    let mut named = follower.subscribe();
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    wait_until_registered(&registration, true).await;

    server.signal("-STOP");
    let since = Instant::now();
    wait_until(&mut named, stale(&["10.0.0.1:7000"])).await;
    assert!(since.elapsed() < DETECTION_LIMIT, "{:?}", since.elapsed());
    wait_until_registered(&registration, false).await;
    // The lease has expired by now, which etcd notices when it continues.
    assert!(since.elapsed() > TTL);
    server.signal("-CONT");
    wait_until_registered(&registration, true).await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;

    // The agent stays named. The follower may still have to see that the expired lease took the key
    // with it before the agent put the key again.
    for lapses in 0.. {
        assert!(lapses < 2, "{:?}", named.borrow());
        named.mark_unchanged();
        if timeout(2 * TTL, named.changed()).await.is_err() {
            break;
        }
        wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn agents_register_again_after_etcd_lost_data() {
    let mut server = EtcdServer::start().await;
    let registrations = [server.register("10.0.0.1:7000"), server.register("10.0.0.2:7000")];
    let follower = server.follow();
    let mut named = follower.subscribe();
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    server.kill();
    wait_until(&mut named, stale(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    server.restart_empty().await;
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    for registration in &registrations {
        wait_until_registered(registration, true).await;
    }
    assert_eq!(server.client().await.count("test/").await.unwrap().count, 2);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn deleted_key_is_put_again() {
    let server = EtcdServer::start().await;
    let registration = server.register("10.0.0.1:7000");
    let follower = server.follow();
    let mut named = follower.subscribe();
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let client = server.client().await;
    // Another lease takes the key and is revoked, which deletes the key.
    let key = "test/10.0.0.1:7000";
    let other = LeaseId::random();
    client.grant(other, 60).await.unwrap();
    client.put(key, br#"{"address":"10.0.0.1:7000"}"#, other).await.unwrap();
    let taken = client.key_lease(key).await.unwrap();
    client.revoke(other).await.unwrap();
    let put_again = async {
        loop {
            let lease = client.key_lease(key).await.unwrap();
            if lease.is_some() && lease != taken {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(TEST_TIMEOUT, put_again).await.expect("the key is never put again");
    wait_until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    drop(registration);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn watch_after_list_misses_only_compacted_changes() {
    let server = EtcdServer::start().await;
    let client = server.client().await;
    let listed = client.list("test/").await.unwrap().header.revision;
    let lease = LeaseId::random();
    client.grant(lease, 60).await.unwrap();
    client.put("test/1", b"x", lease).await.unwrap();
    client.put("other/1", b"x", lease).await.unwrap();
    client.put("test/2", b"x", lease).await.unwrap();
    let mut watch = client.watch("test/", listed + 1).await.unwrap();
    let mut events = Vec::new();
    while events.len() < 2 {
        events.extend(watch.next().await.unwrap().events);
    }
    let seen: Vec<_> = events.iter().map(|event| (event.r#type, &event.kv.key[..])).collect();
    assert_eq!(seen, [(EventType::Put, &b"test/1"[..]), (EventType::Put, &b"test/2"[..])]);

    client.compact(listed + 2).await.unwrap();
    let mut watch = client.watch("test/", listed + 1).await.unwrap();
    let failure = loop {
        match watch.next().await {
            Ok(response) => assert!(response.events.is_empty()),
            Err(failure) => break failure,
        }
    };
    assert!(matches!(failure, Failure::Outdated(_)), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn compacted_changes_during_outage_are_listed() {
    let mut server = EtcdServer::start().await;
    let first = server.client().await;
    let lease = LeaseId::random();
    first.grant(lease, 60).await.unwrap();
    for n in 1..=3 {
        let value = format!(r#"{{"address":"10.0.0.{n}:7000"}}"#);
        first.put(&format!("test/{n}"), value.as_bytes(), lease).await.unwrap();
    }
    let follower = server.follow();
    let mut named = follower.subscribe();
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"])).await;
    server.kill();
    wait_until(&mut named, stale(&["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"])).await;
    server.restart().await;
    let client = server.client().await;
    client.put("test/2", br#"{"address":"10.0.0.9:7000"}"#, lease).await.unwrap();
    client.put("test/3", b"nonsense", lease).await.unwrap();
    client.compact(client.count("test/").await.unwrap().revision).await.unwrap();
    wait_until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.9:7000"])).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn failed_server_is_followed_by_next() {
    let server = EtcdServer::start().await;
    // The first server refuses connections, and the second never answers.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url =
        format!("etcd://127.0.0.1:1,{},{}/test", silent.local_addr().unwrap(), server.address());
    let agent = Candidate::new("10.0.0.1:7000", None).unwrap();
    let registration =
        Registration::start(url.parse().unwrap(), Tls::default(), &agent, TTL).unwrap();
    let follower = url.parse::<Source>().unwrap().follow(&Access::default()).unwrap();
    wait_until(&mut follower.subscribe(), exactly(&["10.0.0.1:7000"])).await;
    wait_until_registered(&registration, true).await;
    registration.end().await;
    wait_until(&mut follower.subscribe(), exactly(&[])).await;
}
