//! Discovery of agents through etcd or a long list.

use std::time::{Duration, Instant};

use super::cluster::Cluster;
use super::failures::count_answered;
use super::{TIMEOUT, workers};
use crate::support::etcd::Etcd;
use crate::support::{Server, wait_for};

/// The frontend's limit on simultaneous connection attempts to agents without a worker.
const MAX_CONNECTING: usize = 256;

/// Returns the number of workers whose agent is no longer named.
async fn unnamed_workers(server: &Server) -> usize {
    workers(server).await.iter().filter(|worker| worker["named"] == false).count()
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn etcd_outage_leaves_agents_in_service() {
    let mut etcd = Etcd::start().await;
    let cluster = Cluster::new();
    let url = etcd.url();
    let flags = ["--sim", "1", "--announce", &url];
    let mut first = cluster.agent(1, &flags);
    let server = cluster.serve_with_flags(&["--discovery", &url]);
    server.wait_ready(1, TIMEOUT).await;
    let second = cluster.agent(2, &flags);
    server.wait_ready(2, TIMEOUT).await;

    // Requests don't depend on etcd.
    etcd.signal("STOP");
    assert_eq!(count_answered(&server, 20).await, 20);
    etcd.signal("CONT");
    etcd.kill();
    server.wait_for_log("agents can't be discovered");
    assert_eq!((count_answered(&server, 20).await, server.ready_workers().await), (20, 2));
    etcd.restart_empty().await;
    server.wait_for_log("agents are discovered again");
    wait_for("agents that are named again", TIMEOUT, async || unnamed_workers(&server).await == 0)
        .await;
    assert_eq!((count_answered(&server, 20).await, server.ready_workers().await), (20, 2));

    // An agent that shuts down deregisters. A killed agent stays named until its lease expires.
    second.signal("TERM");
    server.wait_for_log("an agent is gone");
    wait_for("one worker less", TIMEOUT, async || server.ready_workers().await == 1).await;
    first.kill();
    wait_for("the end of its lease", TIMEOUT, async || {
        server.count_logged("an agent is gone") == 2
    })
    .await;
    let _third = cluster.agent(3, &flags);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(count_answered(&server, 20).await, 20);
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn unnamed_agent_is_used_while_it_answers() {
    let etcd = Etcd::start().await;
    let cluster = Cluster::new();
    let agent = cluster.agent(1, &["--sim", "1"]);
    etcd.put("one", &agent.address).await;
    // A second name of the same agent is not a second agent.
    etcd.put("two", &agent.address.replace("127.0.0.1", "localhost")).await;
    let server = cluster.serve_with_flags(&["--discovery", &etcd.url()]);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(unnamed_workers(&server).await, 0);
    etcd.delete("one").await;
    etcd.delete("two").await;
    wait_for("one unnamed worker", TIMEOUT, async || unnamed_workers(&server).await == 1).await;
    assert_eq!(server.metric("chiasm_workers_unnamed").await, 1.0);
    assert_eq!((count_answered(&server, 20).await, server.ready_workers().await), (20, 1));
    drop(agent);
    server.wait_for_log("an agent is gone");
    wait_for("no worker", TIMEOUT, async || workers(&server).await.is_empty()).await;
}

#[tokio::test]
async fn attempts_to_reach_named_agents_are_bounded() {
    // A listener on all loopback addresses that accepts connections and stays silent.
    let silent = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    silent.set_nonblocking(true).unwrap();
    let silent = tokio::net::TcpListener::from_std(silent).unwrap();
    let cluster = Cluster::new();
    let agent = cluster.agent(1, &["--sim", "1"]);
    let silent_addresses =
        (0..2 * MAX_CONNECTING).map(|n| format!("127.1.{}.{}:{port}", n / 250, 1 + n % 250));
    let named: Vec<String> =
        std::iter::once(agent.address.clone()).chain(silent_addresses).collect();
    let started = Instant::now();
    let server = cluster.serve_with_flags(&["--agents", &named.join(",")]);
    let mut connections = Vec::new();
    while connections.len() < MAX_CONNECTING - 1 {
        connections.push(silent.accept().await.unwrap());
    }
    // Attempts time out after a second. Until then, only the real agent's place can be reused.
    let more = async {
        loop {
            connections.push(silent.accept().await.unwrap());
        }
    };
    assert!(tokio::time::timeout(Duration::from_millis(200), more).await.is_err());
    let rounds = 1 + started.elapsed().as_secs() as usize;
    let count = connections.len();
    assert!(count <= rounds * MAX_CONNECTING, "{count} in {rounds} rounds");
    // Timed-out attempts make room for the real agent, wherever it is in the list.
    server.wait_ready(1, TIMEOUT).await;
}
