//! LoRA adapters loaded by agents.

use std::process::Stdio;

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{TIMEOUT, workers};
use crate::support::adapters::{adapter, answered_by, body, overlap};
use crate::support::{Answer, Server, chiasm, demo_model, wait_for};

async fn models(server: &Server) -> Vec<Value> {
    let response =
        server.client.get(format!("{}/v1/models", server.url)).send().await.expect("an answer");
    let models = Answer::read(response).await.ok();
    models["data"].as_array().expect("a list").iter().map(|model| model["id"].clone()).collect()
}

/// Returns the id of the worker that has an adapter, and the other worker's reason for lacking it.
async fn adapter_holder(server: &Server, name: &str) -> (Value, String) {
    let mut holder = Value::Null;
    let mut reason = String::new();
    for worker in workers(server).await {
        let adapters = worker["lora_adapters"].as_array().expect("a list").clone();
        let found =
            adapters.into_iter().find(|adapter| adapter["name"] == name).expect("an adapter");
        if found["loaded"] == true {
            holder = worker["id"].clone();
        } else {
            reason = found["error"].as_str().expect("a reason").to_owned();
        }
    }
    (holder, reason)
}

#[tokio::test]
async fn adapter_is_served_by_the_agent_that_has_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::new();
    let module = |name: &str| format!("{name}={}", adapter(dir.path(), name, 24).display());
    let a = module("a");
    let b = module("b");
    let sim = ["--sim", "1", "--sim-speedup", "1000"];
    let with_module = |module: &str| [&sim[..], &["--lora-modules", module]].concat().join(" ");
    let start = |machine: &str, port: &str, flags: &str| {
        cluster.agent_at(machine, port, &flags.split(' ').collect::<Vec<_>>())
    };
    let mut agents =
        [start("127.0.0.1", "0", &with_module(&a)), start("127.0.0.2", "0", &sim.join(" "))];
    let one = cluster.serve(&agents, &[]);
    let other = cluster.serve(&agents, &[]);
    for server in [&one, &other] {
        server.wait_ready(2, TIMEOUT).await;
        assert_eq!(models(server).await, ["m", "a"]);
    }
    let (holder, reason) = adapter_holder(&one, "a").await;
    assert!(reason.contains("chiasm agent --lora-modules"), "{reason}");

    // Blocks of the base model never match prompts of the adapter.
    assert_eq!(answered_by(&one.chat(&body("m")).await), None);
    let first = one.chat(&body("a")).await;
    let name = answered_by(&first).expect("an adapter");
    assert!(name.starts_with("a@"), "{name}");
    assert_eq!((first.ok()["model"].clone(), overlap(&first)), (json!("a"), (0, 0)));
    assert_eq!(first.header("x-chiasm-worker"), holder.as_str().expect("a name"));
    // A frontend that has sent no request knows the adapter's blocks from the agent.
    let is_known = async || {
        let answer = other.chat(&body("a")).await;
        let (predicted, found) = overlap(&answer);
        assert_eq!(answered_by(&answer).as_ref(), Some(&name));
        predicted > 5 && found == 16 * predicted
    };
    wait_for("the adapter's blocks", TIMEOUT, is_known).await;
    assert_eq!(one.chat(&body("c")).await.refused(404), "model");

    // The agent is lost: the adapter has no worker, but may come back.
    agents[0].kill();
    wait_for("the loss of the agent", TIMEOUT, async || one.ready_workers().await == 1).await;
    assert_eq!(one.chat(&body("a")).await.refused(503), "model");
    let port = agents[0].port();
    agents[0] = start("127.0.0.1", &port, &with_module(&a));
    one.wait_ready(2, TIMEOUT).await;
    assert_eq!(overlap(&one.chat(&body("a")).await), (0, 0), "a new start holds nothing");

    // The agent returns with another adapter: the first one has no worker and is forgotten.
    agents[0].kill();
    wait_for("the loss of the agent", TIMEOUT, async || one.ready_workers().await == 1).await;
    agents[0] = start("127.0.0.1", &port, &with_module(&b));
    for server in [&one, &other] {
        wait_for("the other adapter", TIMEOUT, async || models(server).await == ["m", "b"]).await;
        assert_eq!(server.chat(&body("a")).await.refused(404), "model");
    }
    assert!(answered_by(&one.chat(&body("b")).await).is_some_and(|name| name.starts_with("b@")));
}

#[tokio::test]
async fn copies_of_adapter_on_two_machines_are_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let cluster = Cluster::new();
    let agent = |machine: u8| {
        // Each agent has its own folder with the same files.
        let folder = adapter(&dir.path().join(machine.to_string()), "files", 8);
        let module = format!("a={}", folder.display());
        cluster
            .agent(machine, &["--sim", "1", "--sim-decode-rate", "20", "--lora-modules", &module])
    };
    let agents = [agent(1), agent(2)];
    // The frontend also has an engine of its own, without adapters.
    let server = cluster.serve(&agents, &["--sim", "1"]);
    server.wait_ready(3, TIMEOUT).await;
    let text = "one two three four five six seven eight nine ten ".repeat(20);
    let long = json!({
        "model": "a",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 400,
        "ignore_eos": true,
        "stream": true,
    });
    let stream = server.open("/v1/chat/completions", &long).await;
    let busy = stream.headers()["x-chiasm-worker"].clone();
    // A prompt without cached blocks goes to the other worker with the adapter.
    let mut request = body("a");
    request["max_tokens"] = json!(2);
    let answer = server.chat(&request).await;
    answer.ok();
    assert_ne!(answer.header("x-chiasm-worker"), busy.to_str().expect("text"));
    let has = |worker: &&Value| worker["lora_adapters"][0]["loaded"] == true;
    assert_eq!(workers(&server).await.iter().filter(has).count(), 2);
}

#[test]
fn misplaced_adapter_flags_are_refused_at_start() {
    let model = demo_model().display().to_string();
    let dir = tempfile::tempdir().expect("a folder");
    let folder = adapter(dir.path(), "a", 8).display().to_string();
    let nowhere = format!("a={}", dir.path().join("none").display());
    let here = format!("a={folder}");
    for (flags, expected) in [
        (
            &["agent", &model, "--sim", "1", "--port", "0", "--lora-modules", &nowhere][..],
            "--lora-modules a: no adapter found at",
        ),
        (
            &["agent", &model, "--sim", "1", "--allow-runtime-lora-updating"],
            "--allow-runtime-lora-updating is a flag of frontends",
        ),
        (
            &["serve", &model, "--agents", "127.0.0.1:1", "--port", "0", "--lora-modules", &here],
            "for engines of this frontend",
        ),
        (
            &["serve", &model, "--sim", "1", "--port", "0", "--fetch-media"],
            "--fetch-media is for chiasm agent",
        ),
    ] {
        let output = chiasm(flags)
            .env("CHIASM_STATE_DIR", dir.path())
            .stdin(Stdio::null())
            .output()
            .expect("chiasm runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && stderr.contains(expected), "{flags:?}: {stderr}");
    }
}
