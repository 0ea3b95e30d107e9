//! Links between machines that drop packets silently. Agents behind them run in network namespaces.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::time::timeout;

use super::cluster::{Agent, Cluster};
use super::failures::{DETECTION_TIMEOUT, count_answered, first_worker_at};
use super::network::{Direction, Link, Machine};
use super::relay::{DELAY, Relay};
use super::security::Authority;
use super::{BLOCK, TIMEOUT, chat_body, workers};
use crate::support::{Server, wait_for};

/// The certificate name shared by all agents.
const AGENTS_NAME: &str = "agents.chiasm";
/// The margin on a busy machine for detecting silence. Small enough to reveal a longer timeout.
const SLACK: Duration = Duration::from_secs(1);
const BOTH: [Direction; 2] = [Direction::Inbound, Direction::Outbound];

/// A frontend of two agents, one of them remote, and an observing frontend of the remote agent
/// alone. Each frontend has its own link to the remote agent.
///
/// Fields are dropped in declaration order: processes first.
struct TestHarness {
    frontend: Server,
    observer: Server,
    _agents: [Agent; 2],
    /// The frontend's link to the remote agent.
    link: Link,
    _observer_link: Link,
    _machine: Machine,
    _cluster: Cluster,
    _authority: Authority,
    /// The id of the frontend's worker for the remote agent.
    remote: String,
}

impl TestHarness {
    /// Starts all processes. Prints the reason and returns `None` where no network namespace can be
    /// created.
    async fn start() -> Option<Self> {
        let machine = Machine::new();
        let parts = machine
            .and_then(|machine| Ok((Link::create(&machine)?, Link::create(&machine)?, machine)));
        let (link, observer_link, machine) = match parts {
            Ok(parts) => parts,
            Err(why) => {
                // Written directly, so that the test harness does not capture it.
                let message = format!("links between machines can't be tested here: {why}");
                writeln!(std::io::stdout(), "{message}").expect("stdout");
                return None;
            }
        };
        let cluster = Cluster::new();
        let authority = Authority::new();
        let tls_flags = authority.flags(AGENTS_NAME, &authority);
        let slow = ["--sim", "1", "--sim-decode-rate", "20"].into_iter();
        let flags: Vec<&str> = slow.chain(tls_flags.iter().map(String::as_str)).collect();
        let agents = [
            cluster.agent_with_command(machine.chiasm(), "0.0.0.0", "0", &flags),
            cluster.agent(2, &flags),
        ];
        let port = agents[0].port();
        let [remote, observer_remote] =
            [&link, &observer_link].map(|link| format!("{}:{port}", link.address()));
        let mut tls_flags = authority.flags("frontend", &authority);
        tls_flags.extend(["--agent-tls-name".to_owned(), AGENTS_NAME.to_owned()]);
        let tls_flags: Vec<&str> = tls_flags.iter().map(String::as_str).collect();
        let frontend = cluster.serve_at(&format!("{remote},{}", agents[1].address), &tls_flags);
        let observer = cluster.serve_at(&observer_remote, &tls_flags);
        frontend.wait_ready(2, TIMEOUT).await;
        observer.wait_ready(1, TIMEOUT).await;
        let remote = first_worker_at(&frontend, &remote).await;
        Some(Self {
            frontend,
            observer,
            _agents: agents,
            link,
            _observer_link: observer_link,
            _machine: machine,
            _cluster: cluster,
            _authority: authority,
            remote,
        })
    }

    /// Drops packets while requests run, checks that all sides detect it, and restores the link.
    async fn check_loss_with_requests(&self, directions: &[Direction]) {
        let [streamed, moved, held] = ["streamed", "moved", "held"]
            .map(|name| long_prompt(&format!("{name} {directions:?}")));
        self.cache_prompts(&[&streamed, &moved, &held]).await;
        let mut body = chat_body(&streamed, 4000);
        body["stream"] = json!(true);
        let mut stream = self.frontend.open("/v1/chat/completions", &body).await;
        assert_eq!(stream.headers()["x-chiasm-worker"], self.remote.as_str());
        stream.chunk().await.expect("bytes").expect("an event");
        wait_for("a request", TIMEOUT, async || self.running().await == 1).await;

        let retries = async || self.frontend.metric("chiasm_retries_total").await;
        let before = retries().await;
        let lost_at = self.drop_packets(directions);
        let unlisted = async {
            self.wait_unlisted().await;
            lost_at.elapsed()
        };
        let streamed = async {
            let rest = stream.text().await.expect("an end");
            assert!(rest.contains("\"error\""), "{rest}");
            lost_at.elapsed()
        };
        let moved = async {
            // The silent worker still looks best to the frontend, as it has cached the prompt.
            let answer = self.frontend.chat(&chat_body(&moved, 2)).await;
            answer.ok();
            assert_ne!(answer.header("x-chiasm-worker"), self.remote);
            lost_at.elapsed()
        };
        let ended = async {
            wait_for("no request in the engine", TIMEOUT, async || self.running().await == 0).await;
            lost_at.elapsed()
        };
        let all = timeout(TIMEOUT, async { futures_util::join!(unlisted, streamed, moved, ended) });
        let (unlisted, streamed, moved, ended) = all.await.expect("all sides detect the loss");
        for (event, after) in [
            ("worker unlisted", unlisted),
            ("stream ended with an error", streamed),
            ("request without tokens answered", moved),
            ("engine idle", ended),
        ] {
            assert_in_time(&format!("{directions:?} lost, {event}"), after);
        }
        assert!(retries().await > before, "no request was sent to the silent worker");
        assert_eq!(count_answered(&self.frontend, 16).await, 16);
        assert_eq!(self.running().await, 0);
        self.restore(directions, &held).await;
    }

    /// Drops all packets while no request runs, checks that it is detected, and restores the link.
    async fn check_loss_while_idle(&self) {
        let held = long_prompt("held while nothing runs");
        self.cache_prompts(&[&held]).await;
        let lost_at = self.drop_packets(&BOTH);
        self.wait_unlisted().await;
        assert_in_time("all lost while idle, worker unlisted", lost_at.elapsed());
        assert_eq!(count_answered(&self.frontend, 16).await, 16);
        self.restore(&BOTH, &held).await;
    }

    /// Caches these prompts in the remote engine and waits until the frontend knows.
    async fn cache_prompts(&self, texts: &[&str]) {
        for text in texts {
            self.observer.chat(&chat_body(text, 2)).await.ok();
        }
        self.wait_exact_knowledge().await;
    }

    /// Drops packets from now on and returns the current time.
    fn drop_packets(&self, directions: &[Direction]) -> Instant {
        directions.iter().for_each(|direction| self.link.drop_packets(*direction));
        Instant::now()
    }

    /// Restores the link. Asserts that the frontend knows the engine's blocks again, and that the
    /// engine finds the prompt `held` in its cache.
    async fn restore(&self, directions: &[Direction], held: &str) {
        directions.iter().for_each(|direction| self.link.restore(*direction));
        let restored_at = Instant::now();
        self.frontend.wait_ready(2, TIMEOUT).await;
        self.wait_exact_knowledge().await;
        eprintln!("{directions:?} restored: exact knowledge after {:?}", restored_at.elapsed());
        let again = self.frontend.chat(&chat_body(held, 2)).await;
        assert_eq!(again.header("x-chiasm-worker"), self.remote);
        let usage = &again.ok()["usage"];
        let tokens = usage["prompt_tokens"].as_u64().expect("a count");
        let blocks = tokens / BLOCK;
        assert_eq!(again.header("x-chiasm-overlap"), format!("{blocks}/{blocks}"));
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], (tokens - 1) / BLOCK * BLOCK);
    }

    /// Returns the frontend's entry for the remote worker, if it lists the worker.
    async fn listed_worker(&self) -> Option<Value> {
        workers(&self.frontend).await.into_iter().find(|worker| worker["id"] == *self.remote)
    }

    /// Returns the observer's entry for the remote worker. The observer's link never drops packets.
    async fn observed_worker(&self) -> Value {
        workers(&self.observer).await.pop().expect("a listed worker")
    }

    /// Returns the number of requests in the remote engine.
    async fn running(&self) -> u64 {
        self.observed_worker().await["engine"]["running"].as_u64().expect("a count")
    }

    /// Waits until the frontend no longer lists the remote worker.
    async fn wait_unlisted(&self) {
        wait_for("one worker less", TIMEOUT, async || self.listed_worker().await.is_none()).await;
        assert_eq!(self.frontend.ready_workers().await, 1);
    }

    /// Waits until the frontend knows exactly which blocks the remote engine holds.
    async fn wait_exact_knowledge(&self) {
        let known_blocks = |worker: Value| {
            (worker["knowledge"] == "exact").then(|| worker["known_blocks"].clone())
        };
        let is_known = async || {
            let listed = self.listed_worker().await.and_then(known_blocks);
            let observed = known_blocks(self.observed_worker().await);
            listed.is_some() && listed == observed
        };
        wait_for("exact knowledge", TIMEOUT, is_known).await;
    }
}

/// Prints the time between the first loss and `event`, and asserts that it is short.
fn assert_in_time(event: &str, after: Duration) {
    eprintln!("{event} after {after:?}");
    assert!(after < DETECTION_TIMEOUT + SLACK, "{event} after {after:?}");
}

/// Returns a prompt of many blocks, whose first block depends on `name`.
fn long_prompt(name: &str) -> String {
    format!("{name} {}", "one two three four five six seven eight nine ten ".repeat(20))
}

#[tokio::test]
async fn total_packet_loss_is_detected() {
    let Some(harness) = TestHarness::start().await else { return };
    harness.check_loss_with_requests(&BOTH).await;
    harness.check_loss_while_idle().await;
}

#[tokio::test]
async fn unidirectional_packet_loss_is_detected() {
    let Some(harness) = TestHarness::start().await else { return };
    harness.check_loss_with_requests(&[Direction::Inbound]).await;
    harness.check_loss_with_requests(&[Direction::Outbound]).await;
}

#[tokio::test]
async fn delay_with_packet_loss_fails_no_request() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1"]), cluster.agent(2, &["--sim", "1"])];
    let links = [Relay::start(&agents[0].address).await, Relay::start(&agents[1].address).await];
    let [one, other] = links.each_ref().map(Relay::address);
    let frontend = cluster.serve_at(&format!("{one},{other}"), &[]);
    frontend.wait_ready(2, TIMEOUT).await;
    for round in 0..2 {
        let requests = (0..8).map(|number| {
            let mut body = chat_body(&long_prompt(&format!("{number} of round {round}")), 50);
            body["stream"] = json!(true);
            let frontend = &frontend;
            async move {
                let started = Instant::now();
                let answer = frontend.chat(&body).await;
                (answer, started.elapsed())
            }
        });
        for (answer, elapsed) in futures_util::future::join_all(requests).await {
            let chunks = answer.chunks();
            assert!(
                chunks.len() > 10 && chunks.iter().all(|chunk| chunk.get("error").is_none()),
                "{}",
                answer.text
            );
            // At least one round trip.
            assert!(elapsed >= 2 * DELAY, "{elapsed:?}");
        }
        // Idle connections are kept alive by heartbeats.
        tokio::time::sleep(DETECTION_TIMEOUT / 2).await;
        assert_eq!(workers(&frontend).await.len(), 2);
    }
    assert_eq!(frontend.count_logged("engine lost"), 0);
    let lost = links.each_ref().map(Relay::lost_packets);
    eprintln!("packets lost: {lost:?}");
    assert!(lost.iter().all(|lost| *lost > 0), "{lost:?}");
}
