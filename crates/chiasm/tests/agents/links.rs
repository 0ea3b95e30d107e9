//! Links between machines that lose packets, silently. Agents behind them are processes in network
//! namespaces.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::time::timeout;

use super::cluster::{Agent, Cluster};
use super::failures::{NOTICED, answered, first_worker};
use super::network::{Link, Machine, Towards};
use super::relay::{DELAY, Relay};
use super::security::Authority;
use super::{BLOCK, SOON, ask, workers};
use crate::support::{Server, wait_for};

/// The name that all agents have in common.
const AGENTS: &str = "agents.chiasm";
/// What a busy machine may add to the time in which silence is noticed: less than would hide a
/// longer one.
const BUSY: Duration = Duration::from_secs(1);
const BOTH: [Towards; 2] = [Towards::Here, Towards::There];

/// A frontend of two agents, of which one is behind a link, and a frontend that has a link of its
/// own to that agent alone. Fields are dropped in their order: processes first.
struct Stand {
    frontend: Server,
    observer: Server,
    _agents: [Agent; 2],
    /// The frontend's.
    link: Link,
    _link_of_observer: Link,
    _machine: Machine,
    _cluster: Cluster,
    _authority: Authority,
    /// The frontend's worker that is behind the link.
    far: String,
}

impl Stand {
    /// None where there can be no such machine, which is said.
    async fn start() -> Option<Self> {
        let machine = Machine::new();
        let parts =
            machine.and_then(|machine| Ok((Link::to(&machine)?, Link::to(&machine)?, machine)));
        let (link, link_of_observer, machine) = match parts {
            Ok(parts) => parts,
            Err(why) => {
                // Told whether or not the test's output is.
                let told = writeln!(
                    std::io::stdout(),
                    "links between machines can't be tested here: {why}"
                );
                told.expect("an output");
                return None;
            }
        };
        let (cluster, authority) = (Cluster::new(), Authority::new());
        let certified = authority.flags(AGENTS, &authority);
        let slow = ["--sim", "1", "--sim-decode-rate", "20"].into_iter();
        let flags: Vec<&str> = slow.chain(certified.iter().map(String::as_str)).collect();
        let agents =
            [cluster.agent_by(machine.chiasm(), "0.0.0.0", "0", &flags), cluster.agent(2, &flags)];
        let port = agents[0].port();
        let [far, far_of_observer] =
            [&link, &link_of_observer].map(|link| format!("{}:{port}", link.address()));
        let mut certified = authority.flags("frontend", &authority);
        certified.extend(["--agent-tls-name".to_owned(), AGENTS.to_owned()]);
        let certified: Vec<&str> = certified.iter().map(String::as_str).collect();
        let frontend = cluster.serve_at(&format!("{far},{}", agents[1].address), &certified);
        let observer = cluster.serve_at(&far_of_observer, &certified);
        frontend.wait_ready(2, SOON).await;
        observer.wait_ready(1, SOON).await;
        let far = first_worker(&frontend, &far).await;
        Some(Self {
            frontend,
            observer,
            _agents: agents,
            link,
            _link_of_observer: link_of_observer,
            _machine: machine,
            _cluster: cluster,
            _authority: authority,
            far,
        })
    }

    /// Loses what goes there while requests run and, once all have noticed it, no more.
    async fn lose_with_requests(&self, towards: &[Towards]) {
        let [streamed, moved, held] =
            ["streamed", "moved", "held"].map(|what| long(&format!("{what} {towards:?}")));
        self.hold(&[&streamed, &moved, &held]).await;
        let mut body = ask(&streamed, 4000);
        body["stream"] = json!(true);
        let mut stream = self.frontend.open("/v1/chat/completions", &body).await;
        assert_eq!(stream.headers()["x-chiasm-worker"], self.far.as_str());
        stream.chunk().await.expect("bytes").expect("an event");
        wait_for("a request", SOON, async || self.running().await == 1).await;

        let tried_again = async || self.frontend.metric("chiasm_retries_total").await;
        let before = tried_again().await;
        let silent = self.lose(towards);
        let unlisted = async {
            self.is_unlisted().await;
            silent.elapsed()
        };
        let streamed = async {
            let rest = stream.text().await.expect("an end");
            assert!(rest.contains("\"error\""), "{rest}");
            silent.elapsed()
        };
        let moved = async {
            // As far as the frontend knows, the silent worker holds most of it and answers.
            let answer = self.frontend.chat(&ask(&moved, 2)).await;
            answer.ok();
            assert_ne!(answer.header("x-chiasm-worker"), self.far);
            silent.elapsed()
        };
        let ended = async {
            wait_for("no request in the engine", SOON, async || self.running().await == 0).await;
            silent.elapsed()
        };
        let all = timeout(SOON, async { futures_util::join!(unlisted, streamed, moved, ended) });
        let (unlisted, streamed, moved, ended) = all.await.expect("all notice it");
        for (what, after) in [
            ("the worker was not listed", unlisted),
            ("the stream ended with an error", streamed),
            ("a request without a token was answered", moved),
            ("nothing ran in the engine", ended),
        ] {
            is_in_time(&format!("{towards:?} lost, {what}"), after);
        }
        assert!(tried_again().await > before, "no request was given to the silent worker");
        assert_eq!(answered(&self.frontend, 16).await, 16);
        assert_eq!(self.running().await, 0);
        self.carry(towards, &held).await;
    }

    /// Loses all while nothing runs and, once that is noticed, nothing any more.
    async fn lose_idle(&self) {
        let held = long("held while nothing runs");
        self.hold(&[&held]).await;
        let silent = self.lose(&BOTH);
        self.is_unlisted().await;
        is_in_time("all lost while nothing runs, the worker was not listed", silent.elapsed());
        assert_eq!(answered(&self.frontend, 16).await, 16);
        self.carry(&BOTH, &held).await;
    }

    /// Has the far engine hold these prompts, and the frontend know it.
    async fn hold(&self, texts: &[&str]) {
        for text in texts {
            self.observer.chat(&ask(text, 2)).await.ok();
        }
        self.knows_all().await;
    }

    fn lose(&self, towards: &[Towards]) -> Instant {
        towards.iter().for_each(|towards| self.link.lose(*towards));
        Instant::now()
    }

    /// Loses no more. What the engine held before is known and found again.
    async fn carry(&self, towards: &[Towards], held: &str) {
        towards.iter().for_each(|towards| self.link.carry(*towards));
        let carried = Instant::now();
        self.frontend.wait_ready(2, SOON).await;
        self.knows_all().await;
        eprintln!("{towards:?} carried: all is known again after {:?}", carried.elapsed());
        let again = self.frontend.chat(&ask(held, 2)).await;
        assert_eq!(again.header("x-chiasm-worker"), self.far);
        let usage = &again.ok()["usage"];
        let tokens = usage["prompt_tokens"].as_u64().expect("a count");
        let blocks = tokens / BLOCK;
        assert_eq!(again.header("x-chiasm-overlap"), format!("{blocks}/{blocks}"));
        assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], (tokens - 1) / BLOCK * BLOCK);
    }

    /// What the frontend tells of the far worker, if it lists it.
    async fn told(&self) -> Option<Value> {
        workers(&self.frontend).await.into_iter().find(|worker| worker["id"] == *self.far)
    }

    /// What the observer tells of the far engine. What happens to links of others is nothing to it.
    async fn observed(&self) -> Value {
        workers(&self.observer).await.pop().expect("it is listed")
    }

    /// Requests in the far engine.
    async fn running(&self) -> u64 {
        self.observed().await["engine"]["running"].as_u64().expect("a count")
    }

    /// Waits until the far worker gets no requests any more.
    async fn is_unlisted(&self) {
        wait_for("one worker less", SOON, async || self.told().await.is_none()).await;
        assert_eq!(self.frontend.ready_workers().await, 1);
    }

    /// Waits until the frontend knows exactly what the far engine holds.
    async fn knows_all(&self) {
        let known = |worker: Value| {
            (worker["knowledge"] == "exact").then(|| worker["known_blocks"].clone())
        };
        let is_known = async || {
            let (told, observed) =
                (self.told().await.and_then(known), known(self.observed().await));
            told.is_some() && told == observed
        };
        wait_for("exact knowledge", SOON, is_known).await;
    }
}

/// Tells how long after the first loss something was so, which must not be long.
fn is_in_time(what: &str, after: Duration) {
    eprintln!("{what} after {after:?}");
    assert!(after < NOTICED + BUSY, "{what} after {after:?}");
}

/// A prompt of many blocks, which differs from others in the first one.
fn long(name: &str) -> String {
    format!("{name} {}", "one two three four five six seven eight nine ten ".repeat(20))
}

#[tokio::test]
async fn a_link_that_loses_everything_is_noticed_at_both_ends_and_comes_back() {
    let Some(stand) = Stand::start().await else { return };
    stand.lose_with_requests(&BOTH).await;
    stand.lose_idle().await;
}

#[tokio::test]
async fn a_link_that_loses_one_direction_is_noticed_at_both_ends_and_comes_back() {
    let Some(stand) = Stand::start().await else { return };
    stand.lose_with_requests(&[Towards::Here]).await;
    stand.lose_with_requests(&[Towards::There]).await;
}

#[tokio::test]
async fn delay_and_loss_fail_nothing() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1"]), cluster.agent(2, &["--sim", "1"])];
    let links = [Relay::to(&agents[0].address).await, Relay::to(&agents[1].address).await];
    let [one, other] = links.each_ref().map(Relay::address);
    let frontend = cluster.serve_at(&format!("{one},{other}"), &[]);
    frontend.wait_ready(2, SOON).await;
    for round in 0..2 {
        let asked = (0..8).map(|number| {
            let mut body = ask(&long(&format!("{number} of round {round}")), 50);
            body["stream"] = json!(true);
            let frontend = &frontend;
            async move {
                let began = Instant::now();
                let answer = frontend.chat(&body).await;
                (answer, began.elapsed())
            }
        });
        for (answer, took) in futures_util::future::join_all(asked).await {
            let chunks = answer.chunks();
            assert!(
                chunks.len() > 10 && chunks.iter().all(|chunk| chunk.get("error").is_none()),
                "{}",
                answer.text
            );
            // There and back.
            assert!(took >= 2 * DELAY, "{took:?}");
        }
        // Connections on which nothing passes are asked for a sign of life.
        tokio::time::sleep(NOTICED / 2).await;
        assert_eq!(workers(&frontend).await.len(), 2);
    }
    assert_eq!(frontend.lines_logged("engine lost"), 0);
    let lost = links.each_ref().map(Relay::lost);
    eprintln!("packets lost: {lost:?}");
    assert!(lost.iter().all(|lost| *lost > 0), "{lost:?}");
}
