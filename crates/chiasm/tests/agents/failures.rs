//! Agents, engines and frontends that go away, or say nothing.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use serde_json::json;

use super::cluster::Cluster;
use super::{SOON, ask, workers};
use crate::support::{Server, chiasm, wait_for};

/// How soon a machine that says nothing is to be noticed.
pub(crate) const NOTICED: Duration = Duration::from_secs(3);
/// What a busy machine may add.
const SLACK: Duration = Duration::from_secs(3);

/// Asks for short answers until one fails, from several clients. How many were answered.
pub(crate) async fn answered(server: &Server, requests: usize) -> usize {
    let asked = (0..requests)
        .map(|number| async move { server.chat(&ask(&format!("question {number}"), 3)).await });
    let answers: Vec<_> = futures_util::stream::iter(asked).buffer_unordered(8).collect().await;
    answers.iter().filter(|answer| answer.status == 200).count()
}

#[tokio::test]
async fn a_killed_agent_costs_no_request_that_had_no_token_and_comes_back_empty() {
    let cluster = Cluster::new();
    let slow = ["--sim", "1", "--sim-decode-rate", "20"];
    let mut agents = [cluster.agent(1, &slow), cluster.agent(2, &slow)];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, SOON).await;
    let long = "one two three four five six seven eight nine ten ".repeat(20);
    let worker = server.chat(&ask(&long, 2)).await.header("x-chiasm-worker");
    let is_first = worker == first_worker(&server, &agents[0].address).await;
    let victim = usize::from(!is_first);

    // One that has tokens when its agent is killed, and others that come after.
    let mut body = ask(&long, 400);
    body["stream"] = json!(true);
    let mut streamed = server.open("/v1/chat/completions", &body).await;
    assert_eq!(streamed.headers()["x-chiasm-worker"], worker.as_str());
    streamed.chunk().await.expect("bytes").expect("an event");
    agents[victim].kill();
    let rest = streamed.text().await.expect("an end");
    assert!(rest.contains("\"error\""), "{rest}");
    assert_eq!(answered(&server, 40).await, 40);
    assert_eq!(server.ready_workers().await, 1);

    // It comes back where it was, with an engine that holds nothing.
    let (host, port) = (
        agents[victim].address.rsplit_once(':').expect("host:port").0.to_owned(),
        agents[victim].port(),
    );
    agents[victim] = cluster.agent_at(&host, &port, &slow);
    server.wait_ready(2, SOON).await;
    let known = workers(&server)
        .await
        .iter()
        .find(|known| known["id"] == *worker)
        .expect("it is listed")["known_blocks"]
        .clone();
    assert_eq!(known, 0);
    assert_eq!(answered(&server, 40).await, 40);
}

/// The first worker whose engine is the agent's at this address.
pub(crate) async fn first_worker(server: &Server, address: &str) -> String {
    let log = server.logged_line(&format!("engine 0 of the agent at {address}"));
    log.split_once("worker=")
        .and_then(|(_, rest)| rest.split(' ').next())
        .expect("a worker")
        .to_owned()
}

#[tokio::test]
async fn a_silent_machine_is_noticed_and_its_requests_move() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1"]), cluster.agent(2, &["--sim", "1"])];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, SOON).await;
    agents[0].signal("STOP");
    let stopped = Instant::now();
    assert_eq!(answered(&server, 16).await, 16);
    wait_for("one worker less", NOTICED + SLACK, async || server.ready_workers().await == 1).await;
    let took = stopped.elapsed();
    assert!(took < NOTICED + SLACK, "{took:?}");
    agents[0].signal("CONT");
    server.wait_ready(2, SOON).await;
    assert_eq!(answered(&server, 16).await, 16);
}

#[tokio::test]
async fn requests_of_a_killed_frontend_end_in_the_engine() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--sim-decode-rate", "10"])];
    let (mut gone, stays) = (cluster.serve(&agents, &[]), cluster.serve(&agents, &[]));
    gone.wait_ready(1, SOON).await;
    stays.wait_ready(1, SOON).await;
    let mut body = ask("hello", 4000);
    body["stream"] = json!(true);
    let streams = [
        gone.open("/v1/chat/completions", &body).await,
        gone.open("/v1/chat/completions", &body).await,
    ];
    let running = async |server: &Server| workers(server).await[0]["engine"]["running"].as_u64();
    wait_for("two requests", SOON, async || running(&stays).await == Some(2)).await;
    gone.end_by("KILL");
    let took = wait_for("no request", SOON, async || running(&stays).await == Some(0)).await;
    assert!(took < Duration::from_secs(1) + SLACK, "{took:?}");
    drop(streams);
}

#[tokio::test]
async fn an_agent_that_goes_down_finishes_what_it_has() {
    let cluster = Cluster::new();
    let slow = ["--sim", "1", "--sim-decode-rate", "30"];
    let mut agents = [cluster.agent(1, &slow), cluster.agent(2, &slow)];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, SOON).await;
    let both =
        async || workers(&server).await.iter().all(|worker| worker["engine"]["running"] == 1);
    let (one, other) = (ask("hello", 60), ask("good morning", 60));
    let (one, other) = (server.chat(&one), server.chat(&other));
    let down = async {
        wait_for("a request on both", SOON, both).await;
        agents[0].signal("TERM");
        answered(&server, 20).await
    };
    let (one, other, meanwhile) = futures_util::future::join3(one, other, down).await;
    for answer in [one, other] {
        assert_eq!(answer.ok()["usage"]["completion_tokens"], 60);
    }
    assert_eq!(meanwhile, 20);
    assert!(agents[0].wait());
    wait_for("one worker less", SOON, async || server.ready_workers().await == 1).await;
}

#[tokio::test]
async fn an_agent_that_is_drained_gets_nothing_new_until_it_is_resumed() {
    let cluster = Cluster::new();
    let agents = [
        cluster.agent(1, &["--sim", "1"]),
        cluster.agent(2, &["--sim", "1", "--sim-decode-rate", "20"]),
    ];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, SOON).await;
    let drain_at = |agent: usize, more: &[&str]| {
        let status = chiasm(&["drain", &agents[agent].address])
            .args(more)
            .stderr(std::process::Stdio::null())
            .status();
        status.expect("chiasm runs").success()
    };
    let drain = |more: &[&str]| drain_at(1, more);
    // One request on each of them.
    let requests = [ask("hello", 60), ask("good morning", 60)];
    let [one, other] = requests.each_ref().map(|body| server.chat(body));
    let both =
        async || workers(&server).await.iter().all(|worker| worker["engine"]["running"] == 1);
    let drained = async {
        wait_for("a request on both", SOON, both).await;
        // That one ends, and is not waited for long enough.
        assert!(!drain(&["--wait", "0.3"]));
        answered(&server, 20).await
    };
    let (one, other, meanwhile) = futures_util::future::join3(one, other, drained).await;
    [one, other].iter().for_each(|answer| drop(answer.ok()));
    assert_eq!(meanwhile, 20);
    assert!(drain(&["--wait", "10"]));
    let first = server.chat(&ask("hello", 2)).await.header("x-chiasm-worker");
    for number in 0..8 {
        assert_eq!(
            server.chat(&ask(&format!("question {number}"), 2)).await.header("x-chiasm-worker"),
            first
        );
    }
    assert_eq!(server.ready_workers().await, 1);
    // Load balancers learn that requests should go elsewhere when all of them are drained.
    assert!(drain_at(0, &["--wait", "10"]));
    let url = format!("{}/ready", server.url);
    let ready = async || server.client.get(&url).send().await.expect("it answers");
    wait_for("503 at /ready", SOON, async || ready().await.status() == 503).await;
    let why = ready().await.text().await.expect("text");
    assert!(why.contains("engines_drained"), "{why}");
    assert!(drain(&["--resume"]));
    server.wait_ready(1, SOON).await;
    assert!(drain_at(0, &["--resume"]));
    let is_other =
        async || server.chat(&ask("good evening", 2)).await.header("x-chiasm-worker") != first;
    wait_for("a request on the other", SOON, is_other).await;
}

/// Engines that an agent has launched. Those that are left are ended when it is dropped.
struct Launched<'a>(&'a Cluster);

impl Launched<'_> {
    fn command(&self, args: &[&str]) -> String {
        let output = chiasm(&["engines", "--state-dir", &self.0.state()])
            .args(args)
            .output()
            .expect("chiasm runs");
        String::from_utf8(output.stdout).expect("text")
    }

    fn pids(&self) -> Vec<u64> {
        let engines = self.command(&["--json"]);
        let pid = |line: &str| {
            serde_json::from_str::<serde_json::Value>(line).expect("JSON")["pid"].as_u64()
        };
        engines.lines().filter_map(pid).collect()
    }
}

impl Drop for Launched<'_> {
    fn drop(&mut self) {
        self.command(&["--stop-all"]);
    }
}

#[tokio::test]
async fn an_agent_that_is_started_again_takes_over_its_engines_and_what_they_hold() {
    let cluster = Cluster::new();
    let vllm = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in_vllm.sh");
    let flags = ["--engines", "1", "--vllm", vllm, "--keep-engines", "600", "--drain-timeout", "1"];
    let launched = Launched(&cluster);
    let mut agent = cluster.agent(1, &flags);
    let server = cluster.serve(std::slice::from_ref(&agent), &[]);
    server.wait_ready(1, SOON).await;
    let long = ask(&"one two three four five six seven eight nine ten ".repeat(20), 2);
    server.chat(&long).await.ok();
    let known =
        async || workers(&server).await.first().map(|worker| worker["known_blocks"].clone());
    let (pids, held) = (launched.pids(), known().await);
    assert_eq!(pids.len(), 1);
    for signal in ["KILL", "TERM"] {
        let (host, port) = ("127.0.0.1", agent.port());
        agent.signal(signal);
        agent.wait();
        wait_for("no worker", SOON, async || server.ready_workers().await == 0).await;
        agent = cluster.agent_at(host, &port, &flags);
        server.wait_ready(1, SOON).await;
        wait_for("what the engine holds", SOON, async || known().await == held).await;
        assert_eq!(launched.pids(), pids, "after {signal}");
        let again = server.chat(&long).await;
        let overlap = again.header("x-chiasm-overlap");
        assert_eq!(
            overlap.split_once('/').map(|(held, of)| held == of),
            Some(true),
            "{overlap} after {signal}"
        );
        assert!(again.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));
    }
}
