//! Agents that frontends find in etcd.

use std::time::{Duration, Instant};

use super::cluster::Cluster;
use super::failures::answered;
use super::{SOON, workers};
use crate::support::etcd::Etcd;
use crate::support::{Server, wait_for};

/// Agents that are asked at once of those without a worker.
const MOST_ASKED: usize = 256;

async fn unnamed(server: &Server) -> usize {
    workers(server).await.iter().filter(|worker| worker["named"] == false).count()
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn agents_in_etcd_come_and_go_and_are_served_while_etcd_is_away() {
    let mut etcd = Etcd::start().await;
    let (cluster, url) = (Cluster::new(), etcd.url());
    let announced = ["--sim", "1", "--announce", &url];
    let mut first = cluster.agent(1, &announced);
    let server = cluster.serve_with(&["--discovery", &url]);
    server.wait_ready(1, SOON).await;
    let second = cluster.agent(2, &announced);
    server.wait_ready(2, SOON).await;

    // Nothing of this concerns requests.
    etcd.signal("STOP");
    assert_eq!(answered(&server, 20).await, 20);
    etcd.signal("CONT");
    etcd.kill();
    server.logged("agents can't be discovered");
    assert_eq!((answered(&server, 20).await, server.ready_workers().await), (20, 2));
    etcd.restart_empty().await;
    server.logged("agents are discovered again");
    wait_for("agents that are named again", SOON, async || unnamed(&server).await == 0).await;
    assert_eq!((answered(&server, 20).await, server.ready_workers().await), (20, 2));

    // One that goes down says so; one that is killed is named until its lease has ended.
    second.signal("TERM");
    server.logged("an agent is gone");
    wait_for("one worker less", SOON, async || server.ready_workers().await == 1).await;
    first.kill();
    wait_for("the end of its lease", SOON, async || server.lines_logged("an agent is gone") == 2)
        .await;
    let _third = cluster.agent(3, &announced);
    server.wait_ready(1, SOON).await;
    assert_eq!(answered(&server, 20).await, 20);
}

#[tokio::test]
#[ignore = "needs etcd"]
async fn an_agent_that_etcd_does_not_name_any_more_goes_on_while_it_answers() {
    let etcd = Etcd::start().await;
    let cluster = Cluster::new();
    let agent = cluster.agent(1, &["--sim", "1"]);
    etcd.put("one", &agent.address).await;
    // The same agent by another name is not another one.
    etcd.put("two", &agent.address.replace("127.0.0.1", "localhost")).await;
    let server = cluster.serve_with(&["--discovery", &etcd.url()]);
    server.wait_ready(1, SOON).await;
    assert_eq!(unnamed(&server).await, 0);
    etcd.delete("one").await;
    etcd.delete("two").await;
    wait_for("it is named no more", SOON, async || unnamed(&server).await == 1).await;
    assert_eq!(server.metric("chiasm_workers_unnamed").await, 1.0);
    assert_eq!((answered(&server, 20).await, server.ready_workers().await), (20, 1));
    drop(agent);
    server.logged("an agent is gone");
    wait_for("no worker", SOON, async || workers(&server).await.is_empty()).await;
}

#[tokio::test]
async fn however_many_are_named_few_strangers_are_asked_at_once() {
    // One that accepts whoever comes at any loopback address, and says nothing.
    let silent = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    silent.set_nonblocking(true).unwrap();
    let silent = tokio::net::TcpListener::from_std(silent).unwrap();
    let cluster = Cluster::new();
    let honest = cluster.agent(1, &["--sim", "1"]);
    let strangers =
        (0..2 * MOST_ASKED).map(|n| format!("127.1.{}.{}:{port}", n / 250, 1 + n % 250));
    let named: Vec<String> = std::iter::once(honest.address.clone()).chain(strangers).collect();
    let began = Instant::now();
    let server = cluster.serve_with(&["--agents", &named.join(",")]);
    let mut asked = Vec::new();
    while asked.len() < MOST_ASKED - 1 {
        asked.push(silent.accept().await.unwrap());
    }
    // Until one has been silent for a second, only the place of the honest one is left for another.
    let more = async {
        loop {
            asked.push(silent.accept().await.unwrap());
        }
    };
    assert!(tokio::time::timeout(Duration::from_millis(200), more).await.is_err());
    let turns = 1 + began.elapsed().as_secs() as usize;
    assert!(asked.len() <= turns * MOST_ASKED, "{} in {turns} turns", asked.len());
    // Those that are given up leave their turn to the honest one, wherever it stands.
    server.wait_ready(1, SOON).await;
}
