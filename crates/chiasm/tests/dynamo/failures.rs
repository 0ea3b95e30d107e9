//! Workers that die, come back and say goodbye, and an etcd that is silent, while requests come.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::task::JoinSet;

use super::mocker::Mocker;
use super::{NAMESPACE, SOON, ask, frontend, known_exactly, workers};
use crate::support::etcd::Etcd;
use crate::support::{Server, wait_for};

/// Clients that ask one after the other until they are told to stop.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: JoinSet<()>,
}

impl Load {
    fn start(server: &Server) -> Self {
        let (stop, answered) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let mut clients = JoinSet::new();
        for client in 0..8 {
            let (stop, answered) = (stop.clone(), answered.clone());
            let request = server.client.post(format!("{}/v1/chat/completions", server.url));
            let request = request.header("content-type", "application/json");
            clients.spawn(async move {
                let mut number = 0;
                while !stop.load(Relaxed) {
                    number += 1;
                    let text = format!(
                        "Client {client} asks the same five things over and over: thing {}",
                        number % 5
                    );
                    let sent = request
                        .try_clone()
                        .expect("a request")
                        .body(ask(&text, 8).to_string())
                        .send()
                        .await;
                    let answer = sent.expect("an answer");
                    let (status, text) = (answer.status(), answer.text().await.expect("a body"));
                    assert_eq!(status, 200, "{text}");
                    answered.fetch_add(1, Relaxed);
                }
            });
        }
        Self { stop, answered, clients }
    }

    /// Waits until many more requests were answered.
    async fn goes_on(&self) {
        let before = self.answered.load(Relaxed);
        wait_for("answers", SOON, async || self.answered.load(Relaxed) >= before + 200).await;
    }

    /// Ends it. Panics if any request failed.
    async fn end(mut self) -> usize {
        self.stop.store(true, Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.expect("no request failed");
        }
        self.answered.load(Relaxed)
    }
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn no_request_is_lost_when_workers_die_or_leave_and_etcd_is_silent() {
    let etcd = Etcd::start().await;
    let (_stays, mut dies) = (Mocker::start(&etcd, NAMESPACE), Mocker::start(&etcd, NAMESPACE));
    let server = frontend(&etcd, &[]);
    server.wait_ready(2, SOON).await;
    let load = Load::start(&server);
    load.goes_on().await;

    // Killed: its name stays for as long as its lease, and nobody is sent there.
    dies.kill();
    wait_for("one worker less", SOON, async || server.ready_workers().await == 1).await;
    load.goes_on().await;
    wait_for("one name less", SOON, async || workers(&server).await.len() == 1).await;

    // Started again it is another worker, of which nothing is known but what it says.
    let leaves = Mocker::start(&etcd, NAMESPACE);
    server.wait_ready(2, SOON).await;
    load.goes_on().await;
    known_exactly(&server).await;

    // Shorter than a lease: otherwise workers of Dynamo end themselves.
    etcd.signal("STOP");
    load.goes_on().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    load.goes_on().await;
    etcd.signal("CONT");
    assert_eq!(server.ready_workers().await, 2);

    leaves.signal("TERM");
    wait_for("one worker less", SOON, async || server.ready_workers().await == 1).await;
    load.goes_on().await;
    let answered = load.end().await;
    eprintln!("{answered} requests were answered");
    known_exactly(&server).await;
}
