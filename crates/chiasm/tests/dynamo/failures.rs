//! Workers that die, restart and shut down, and a silent etcd, under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use tokio::task::JoinSet;

use super::mocker::Mocker;
use super::{NAMESPACE, TIMEOUT, chat_body, frontend, wait_known_blocks, workers};
use crate::support::etcd::Etcd;
use crate::support::{Server, wait_for};

/// Clients that send requests until they are stopped.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    clients: JoinSet<()>,
}

impl Load {
    fn start(server: &Server) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let answered = Arc::<AtomicUsize>::default();
        let mut clients = JoinSet::new();
        for client in 0..8 {
            let stop = stop.clone();
            let answered = answered.clone();
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
                    let answer = request
                        .try_clone()
                        .expect("a request")
                        .body(chat_body(&text, 8).to_string())
                        .send()
                        .await;
                    let answer = answer.expect("an answer");
                    let status = answer.status();
                    let text = answer.text().await.expect("a body");
                    assert_eq!(status, 200, "{text}");
                    answered.fetch_add(1, Relaxed);
                }
            });
        }
        Self { stop, answered, clients }
    }

    /// Waits until 200 more requests are answered.
    async fn wait_for_answers(&self) {
        let before = self.answered.load(Relaxed);
        wait_for("answers", TIMEOUT, async || self.answered.load(Relaxed) >= before + 200).await;
    }

    /// Stops the clients and returns the number of answers.
    ///
    /// # Panics
    /// If a request failed.
    async fn stop(mut self) -> usize {
        self.stop.store(true, Relaxed);
        while let Some(client) = self.clients.join_next().await {
            client.expect("no failed request");
        }
        self.answered.load(Relaxed)
    }
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn worker_deaths_with_silent_etcd_lose_no_request() {
    let etcd = Etcd::start().await;
    let _survivor = Mocker::start(&etcd, NAMESPACE);
    let mut victim = Mocker::start(&etcd, NAMESPACE);
    let server = frontend(&etcd, &[]);
    server.wait_ready(2, TIMEOUT).await;
    let load = Load::start(&server);
    load.wait_for_answers().await;

    // A killed worker stays in etcd until its lease expires, but gets no requests.
    victim.kill();
    wait_for("one worker less", TIMEOUT, async || server.ready_workers().await == 1).await;
    load.wait_for_answers().await;
    wait_for("the removal of the worker", TIMEOUT, async || workers(&server).await.len() == 1)
        .await;

    // A restarted worker counts as a new one, with unknown caches.
    let restarted = Mocker::start(&etcd, NAMESPACE);
    server.wait_ready(2, TIMEOUT).await;
    load.wait_for_answers().await;
    wait_known_blocks(&server).await;

    // Silent for less than a lease: workers of Dynamo exit when their lease expires.
    etcd.signal("STOP");
    load.wait_for_answers().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    load.wait_for_answers().await;
    etcd.signal("CONT");
    assert_eq!(server.ready_workers().await, 2);

    restarted.signal("TERM");
    wait_for("one worker less", TIMEOUT, async || server.ready_workers().await == 1).await;
    load.wait_for_answers().await;
    let answered = load.stop().await;
    eprintln!("{answered} requests were answered");
    wait_known_blocks(&server).await;
}
