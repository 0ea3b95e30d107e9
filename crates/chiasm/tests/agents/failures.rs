//! Agents, engines and frontends that die, drain or fall silent.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use serde_json::json;

use super::cluster::Cluster;
use super::{TIMEOUT, chat_body, workers};
use crate::support::{Server, chiasm, wait_for};

/// The deadline for detecting a silent machine.
pub(crate) const DETECTION_TIMEOUT: Duration = Duration::from_secs(3);
/// The margin for a busy machine.
const SLACK: Duration = Duration::from_secs(3);

/// Sends short requests, eight at a time. Returns how many were answered with status 200.
pub(crate) async fn count_answered(server: &Server, requests: usize) -> usize {
    let requests = (0..requests).map(|number| async move {
        server.chat(&chat_body(&format!("question {number}"), 3)).await
    });
    let answers: Vec<_> = futures_util::stream::iter(requests).buffer_unordered(8).collect().await;
    answers.iter().filter(|answer| answer.status == 200).count()
}

#[tokio::test]
async fn killed_agent_fails_only_requests_with_tokens() {
    let cluster = Cluster::new();
    let slow = ["--sim", "1", "--sim-decode-rate", "20"];
    let mut agents = [cluster.agent(1, &slow), cluster.agent(2, &slow)];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, TIMEOUT).await;
    let long = "one two three four five six seven eight nine ten ".repeat(20);
    let worker = server.chat(&chat_body(&long, 2)).await.header("x-chiasm-worker");
    let is_first = worker == first_worker_at(&server, &agents[0].address).await;
    let victim = usize::from(!is_first);

    // One request that has tokens when its agent is killed, and others after it.
    let mut body = chat_body(&long, 400);
    body["stream"] = json!(true);
    let mut streamed = server.open("/v1/chat/completions", &body).await;
    assert_eq!(streamed.headers()["x-chiasm-worker"], worker.as_str());
    streamed.chunk().await.expect("bytes").expect("an event");
    agents[victim].kill();
    let rest = streamed.text().await.expect("an end");
    assert!(rest.contains("\"error\""), "{rest}");
    assert_eq!(count_answered(&server, 40).await, 40);
    assert_eq!(server.ready_workers().await, 1);

    // The agent restarts at the same address with an engine whose cache is empty.
    let host = agents[victim].address.rsplit_once(':').expect("host:port").0.to_owned();
    let port = agents[victim].port();
    agents[victim] = cluster.agent_at(&host, &port, &slow);
    server.wait_ready(2, TIMEOUT).await;
    let known = workers(&server)
        .await
        .iter()
        .find(|known| known["id"] == *worker)
        .expect("a listed worker")["known_blocks"]
        .clone();
    assert_eq!(known, 0);
    assert_eq!(count_answered(&server, 40).await, 40);
}

/// Returns the id of the worker for engine 0 of the agent at `address`.
pub(crate) async fn first_worker_at(server: &Server, address: &str) -> String {
    let log = server.wait_for_log_line(&format!("engine 0 of the agent at {address}"));
    log.split_once("worker=")
        .and_then(|(_, rest)| rest.split(' ').next())
        .expect("a worker")
        .to_owned()
}

#[tokio::test]
async fn requests_move_away_from_silent_machine() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1"]), cluster.agent(2, &["--sim", "1"])];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, TIMEOUT).await;
    agents[0].signal("STOP");
    let stopped = Instant::now();
    assert_eq!(count_answered(&server, 16).await, 16);
    wait_for("one worker less", DETECTION_TIMEOUT + SLACK, async || {
        server.ready_workers().await == 1
    })
    .await;
    let elapsed = stopped.elapsed();
    assert!(elapsed < DETECTION_TIMEOUT + SLACK, "{elapsed:?}");
    agents[0].signal("CONT");
    server.wait_ready(2, TIMEOUT).await;
    assert_eq!(count_answered(&server, 16).await, 16);
}

#[tokio::test]
async fn requests_of_killed_frontend_are_aborted() {
    let cluster = Cluster::new();
    let agents = [cluster.agent(1, &["--sim", "1", "--sim-decode-rate", "10"])];
    let mut victim = cluster.serve(&agents, &[]);
    let survivor = cluster.serve(&agents, &[]);
    victim.wait_ready(1, TIMEOUT).await;
    survivor.wait_ready(1, TIMEOUT).await;
    let mut body = chat_body("hello", 4000);
    body["stream"] = json!(true);
    let streams = [
        victim.open("/v1/chat/completions", &body).await,
        victim.open("/v1/chat/completions", &body).await,
    ];
    let running = async |server: &Server| workers(server).await[0]["engine"]["running"].as_u64();
    wait_for("two requests", TIMEOUT, async || running(&survivor).await == Some(2)).await;
    victim.signal_and_wait("KILL");
    let elapsed =
        wait_for("no request", TIMEOUT, async || running(&survivor).await == Some(0)).await;
    assert!(elapsed < Duration::from_secs(1) + SLACK, "{elapsed:?}");
    drop(streams);
}

#[tokio::test]
async fn terminated_agent_finishes_its_requests() {
    let cluster = Cluster::new();
    let slow = ["--sim", "1", "--sim-decode-rate", "30"];
    let mut agents = [cluster.agent(1, &slow), cluster.agent(2, &slow)];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, TIMEOUT).await;
    let both =
        async || workers(&server).await.iter().all(|worker| worker["engine"]["running"] == 1);
    let one = chat_body("hello", 60);
    let other = chat_body("good morning", 60);
    let one = server.chat(&one);
    let other = server.chat(&other);
    let down = async {
        wait_for("a request on both", TIMEOUT, both).await;
        agents[0].signal("TERM");
        count_answered(&server, 20).await
    };
    let (one, other, meanwhile) = futures_util::future::join3(one, other, down).await;
    for answer in [one, other] {
        assert_eq!(answer.ok()["usage"]["completion_tokens"], 60);
    }
    assert_eq!(meanwhile, 20);
    assert!(agents[0].wait());
    wait_for("one worker less", TIMEOUT, async || server.ready_workers().await == 1).await;
}

#[tokio::test]
async fn drained_agent_gets_no_requests_until_resumed() {
    let cluster = Cluster::new();
    let agents = [
        cluster.agent(1, &["--sim", "1"]),
        cluster.agent(2, &["--sim", "1", "--sim-decode-rate", "20"]),
    ];
    let server = cluster.serve(&agents, &[]);
    server.wait_ready(2, TIMEOUT).await;
    let drain_at = |agent: usize, more: &[&str]| {
        let status = chiasm(&["drain", &agents[agent].address])
            .args(more)
            .stderr(std::process::Stdio::null())
            .status();
        status.expect("chiasm runs").success()
    };
    let drain = |more: &[&str]| drain_at(1, more);
    // One request on each agent.
    let requests = [chat_body("hello", 60), chat_body("good morning", 60)];
    let [one, other] = requests.each_ref().map(|body| server.chat(body));
    let both =
        async || workers(&server).await.iter().all(|worker| worker["engine"]["running"] == 1);
    let drained = async {
        wait_for("a request on both", TIMEOUT, both).await;
        // The request on the drained agent takes longer than this wait.
        assert!(!drain(&["--wait", "0.3"]));
        count_answered(&server, 20).await
    };
    let (one, other, meanwhile) = futures_util::future::join3(one, other, drained).await;
    [one, other].iter().for_each(|answer| drop(answer.ok()));
    assert_eq!(meanwhile, 20);
    assert!(drain(&["--wait", "10"]));
    let first = server.chat(&chat_body("hello", 2)).await.header("x-chiasm-worker");
    for number in 0..8 {
        assert_eq!(
            server
                .chat(&chat_body(&format!("question {number}"), 2))
                .await
                .header("x-chiasm-worker"),
            first
        );
    }
    assert_eq!(server.ready_workers().await, 1);
    // `/ready` tells load balancers when all agents are drained.
    assert!(drain_at(0, &["--wait", "10"]));
    let url = format!("{}/ready", server.url);
    let ready = async || server.client.get(&url).send().await.expect("it answers");
    wait_for("503 at /ready", TIMEOUT, async || ready().await.status() == 503).await;
    let why = ready().await.text().await.expect("text");
    assert!(why.contains("engines_drained"), "{why}");
    assert!(drain(&["--resume"]));
    server.wait_ready(1, TIMEOUT).await;
    assert!(drain_at(0, &["--resume"]));
    let is_on_other = async || {
        server.chat(&chat_body("good evening", 2)).await.header("x-chiasm-worker") != first
    };
    wait_for("a request on the other agent", TIMEOUT, is_on_other).await;
}

/// The engines that agents of a cluster have launched. Stops those that are left on drop.
struct LaunchedEngines<'a>(&'a Cluster);

impl LaunchedEngines<'_> {
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

impl Drop for LaunchedEngines<'_> {
    fn drop(&mut self) {
        self.command(&["--stop-all"]);
    }
}

#[tokio::test]
async fn restarted_agent_takes_over_engines_with_their_caches() {
    let cluster = Cluster::new();
    let vllm = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in_vllm.sh");
    let flags = ["--engines", "1", "--vllm", vllm, "--keep-engines", "600", "--drain-timeout", "1"];
    let launched = LaunchedEngines(&cluster);
    let mut agent = cluster.agent(1, &flags);
    let server = cluster.serve(std::slice::from_ref(&agent), &[]);
    server.wait_ready(1, TIMEOUT).await;
    let long = chat_body(&"one two three four five six seven eight nine ten ".repeat(20), 2);
    server.chat(&long).await.ok();
    let known =
        async || workers(&server).await.first().map(|worker| worker["known_blocks"].clone());
    let pids = launched.pids();
    let held = known().await;
    assert_eq!(pids.len(), 1);
    for signal in ["KILL", "TERM"] {
        let host = "127.0.0.1";
        let port = agent.port();
        agent.signal(signal);
        agent.wait();
        wait_for("no worker", TIMEOUT, async || server.ready_workers().await == 0).await;
        agent = cluster.agent_at(host, &port, &flags);
        server.wait_ready(1, TIMEOUT).await;
        wait_for("the blocks that the engine holds", TIMEOUT, async || known().await == held).await;
        assert_eq!(launched.pids(), pids, "after {signal}");
        let again = server.chat(&long).await;
        let overlap = again.header("x-chiasm-overlap");
        assert_eq!(
            overlap.split_once('/').map(|(held, total)| held == total),
            Some(true),
            "{overlap} after {signal}"
        );
        assert!(again.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));
    }
}
