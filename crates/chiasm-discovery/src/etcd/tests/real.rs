//! Following and registering before a real etcd, which the variable `CHIASM_TEST_ETCD` names.

use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::time::{Instant, timeout};

use super::server::{EtcdServer, TTL, until_registered};
use crate::etcd::api::{EtcdClient, LeaseId};
use crate::etcd::message::EventType;
use crate::failure::Failure;
use crate::fake::{PATIENCE, exactly, once, until};
use crate::http::CALL_WITHIN;
use crate::{Access, Candidate, Registration, Source, Tls};

/// How soon a silent server has to be noticed.
const NOTICED_WITHIN: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn an_agent_is_named_from_its_registration_to_its_end() {
    let server = EtcdServer::start().await;
    let early = server.register("10.0.0.1:7000");
    until_registered(&early, true).await;
    let following = server.follow();
    let mut named = following.named();
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let late = server.register("[FD00::2]:7000");
    until(&mut named, exactly(&["10.0.0.1:7000", "[fd00::2]:7000"])).await;

    let client = server.client().await;
    let listed = client.list("test/").await.unwrap();
    assert_eq!(listed.kvs[0].key, b"test/10.0.0.1:7000");
    assert_eq!(
        str::from_utf8(&listed.kvs[0].value).unwrap(),
        r#"{"address":"10.0.0.1:7000","model":"tiny"}"#
    );

    // Longer than the lease: it is kept alive.
    let since = Instant::now();
    while since.elapsed() < 2 * TTL {
        assert_eq!(client.count("test/").await.unwrap().1, 2);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let since = Instant::now();
    early.end().await;
    until(&mut named, exactly(&["[fd00::2]:7000"])).await;
    drop(late);
    until(&mut named, exactly(&[])).await;
    assert!(since.elapsed() < TTL, "leases are revoked, and don't just run out");
}

/// An agent on a machine of its own: a runtime that is dropped with its tasks has no more time to
/// revoke anything than a process that is killed.
fn machine_with(server: &EtcdServer) -> (Runtime, Registration) {
    let machine = Runtime::new().unwrap();
    let entered = machine.enter();
    let registration = server.register("10.0.0.1:7000");
    drop(entered);
    (machine, registration)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn an_agent_that_is_killed_vanishes_when_its_lease_is_over() {
    let server = EtcdServer::start().await;
    let following = server.follow();
    let mut named = following.named();
    let (machine, _registration) = machine_with(&server);
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let killed = Instant::now();
    machine.shutdown_background();
    until(&mut named, exactly(&[])).await;
    assert!(
        killed.elapsed() > TTL / 3,
        "the lease runs out, and is not revoked: {:?}",
        killed.elapsed()
    );
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn an_agent_that_is_started_again_is_named_all_the_time() {
    let server = EtcdServer::start().await;
    let following = server.follow();
    let mut named = following.named();
    let (machine, _registration) = machine_with(&server);
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    machine.shutdown_background();
    let again = server.register("10.0.0.1:7000");
    until_registered(&again, true).await;
    named.mark_unchanged();
    // The lease of its first life ends in this time, and must not take the key along.
    let changed = timeout(2 * TTL, named.changed()).await;
    assert!(changed.is_err(), "{:?}", named.borrow());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn with_tls_both_sides_show_a_certificate() {
    let server = EtcdServer::start_with_tls().await;
    let registration = server.register("10.0.0.1:7000");
    let following = server.follow();
    until(&mut following.named(), exactly(&["10.0.0.1:7000"])).await;
    until_registered(&registration, true).await;
    // Mozilla does not know its authority, and it wants to know who asks.
    let with_authority = Tls { identity: None, ..server.tls() };
    for tls in [Tls::default(), with_authority] {
        let client = EtcdClient::new(&server.etcd(), 0, &tls, CALL_WITHIN).await.unwrap();
        let refused = client.list("test/").await.unwrap_err();
        assert!(matches!(refused, Failure::Unreachable(_)), "{refused}");
    }
    registration.end().await;
    until(&mut following.named(), exactly(&[])).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn a_frozen_etcd_takes_nobody_away() {
    let server = EtcdServer::start().await;
    let registration = server.register("10.0.0.1:7000");
    let following = server.follow();
    let mut named = following.named();
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    until_registered(&registration, true).await;

    server.signal("-STOP");
    let since = Instant::now();
    until(&mut named, once(&["10.0.0.1:7000"])).await;
    assert!(since.elapsed() < NOTICED_WITHIN, "{:?}", since.elapsed());
    until_registered(&registration, false).await;
    // By now the lease is over, which etcd finds out when it goes on.
    assert!(since.elapsed() > TTL);
    server.signal("-CONT");
    until_registered(&registration, true).await;
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;

    // It stays so.
    named.mark_unchanged();
    let changed = timeout(2 * TTL, named.changed()).await;
    assert!(changed.is_err(), "{:?}", named.borrow());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn agents_register_again_with_an_etcd_that_was_restarted_empty() {
    let mut server = EtcdServer::start().await;
    let registrations = [server.register("10.0.0.1:7000"), server.register("10.0.0.2:7000")];
    let following = server.follow();
    let mut named = following.named();
    until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    server.kill();
    until(&mut named, once(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    server.restart_empty().await;
    until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000"])).await;
    for registration in &registrations {
        until_registered(registration, true).await;
    }
    assert_eq!(server.client().await.count("test/").await.unwrap().1, 2);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn a_key_that_somebody_deleted_is_put_again() {
    let server = EtcdServer::start().await;
    let registration = server.register("10.0.0.1:7000");
    let following = server.follow();
    let mut named = following.named();
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    let client = server.client().await;
    // Taken over by another lease, which then ends: as good as deleted.
    let (key, other) = ("test/10.0.0.1:7000", LeaseId::random());
    client.grant(other, 60).await.unwrap();
    client.put(key, br#"{"address":"10.0.0.1:7000"}"#, other).await.unwrap();
    let taken = client.lease_of(key).await.unwrap();
    client.revoke(other).await.unwrap();
    let put_again = async {
        while matches!(client.lease_of(key).await.unwrap(), lease if lease.is_none() || lease == taken)
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, put_again).await.expect("it is never put again");
    until(&mut named, exactly(&["10.0.0.1:7000"])).await;
    drop(registration);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn nothing_is_lost_between_a_list_and_its_watch_unless_it_was_compacted() {
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
            Ok(answer) => assert!(answer.events.is_empty()),
            Err(failure) => break failure,
        }
    };
    assert!(matches!(failure, Failure::Outdated(_)), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn what_changed_and_was_compacted_while_the_watch_was_down_is_listed() {
    let mut server = EtcdServer::start().await;
    let (first, lease) = (server.client().await, LeaseId::random());
    first.grant(lease, 60).await.unwrap();
    for n in 1..=3 {
        let value = format!(r#"{{"address":"10.0.0.{n}:7000"}}"#);
        first.put(&format!("test/{n}"), value.as_bytes(), lease).await.unwrap();
    }
    let following = server.follow();
    let mut named = following.named();
    until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"])).await;
    server.kill();
    until(&mut named, once(&["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"])).await;
    server.restart().await;
    let client = server.client().await;
    client.put("test/2", br#"{"address":"10.0.0.9:7000"}"#, lease).await.unwrap();
    client.put("test/3", b"nonsense", lease).await.unwrap();
    client.compact(client.count("test/").await.unwrap().0).await.unwrap();
    until(&mut named, exactly(&["10.0.0.1:7000", "10.0.0.9:7000"])).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs etcd"]
async fn servers_are_tried_in_turn() {
    let server = EtcdServer::start().await;
    // Nobody listens at the first one, and nobody answers at the second.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url =
        format!("etcd://127.0.0.1:1,{},{}/test", silent.local_addr().unwrap(), server.address());
    let agent = Candidate::new("10.0.0.1:7000", None).unwrap();
    let registration =
        Registration::start(url.parse().unwrap(), Tls::default(), &agent, TTL).unwrap();
    let following = url.parse::<Source>().unwrap().follow(&Access::default()).unwrap();
    until(&mut following.named(), exactly(&["10.0.0.1:7000"])).await;
    until_registered(&registration, true).await;
    registration.end().await;
    until(&mut following.named(), exactly(&[])).await;
}
