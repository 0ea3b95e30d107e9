//! LoRA adapters that agents have.

use std::process::Stdio;

use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{SOON, workers};
use crate::support::adapters::{adapter, answered_by, body, overlap};
use crate::support::{Answer, Server, chiasm, demo_model, wait_for};

async fn models(server: &Server) -> Vec<Value> {
    let response =
        server.client.get(format!("{}/v1/models", server.url)).send().await.expect("an answer");
    let models = Answer::of(response).await.ok();
    models["data"].as_array().expect("a list").iter().map(|model| model["id"].clone()).collect()
}

/// The worker that has an adapter, and why the other has not.
async fn who_has(server: &Server, name: &str) -> (Value, String) {
    let (mut has, mut why) = (Value::Null, String::new());
    for worker in workers(server).await {
        let adapters = worker["lora_adapters"].as_array().expect("a list").clone();
        let found =
            adapters.into_iter().find(|adapter| adapter["name"] == name).expect("an adapter");
        match found["loaded"] == true {
            true => has = worker["id"].clone(),
            false => why = found["error"].as_str().expect("a reason").to_owned(),
        }
    }
    (has, why)
}

#[tokio::test]
async fn an_adapter_is_served_by_the_agent_that_has_it() {
    let (dir, cluster) = (tempfile::tempdir().expect("a folder"), Cluster::new());
    let module = |name: &str| format!("{name}={}", adapter(dir.path(), name, 24).display());
    let (a, b) = (module("a"), module("b"));
    let sim = ["--sim", "1", "--sim-speedup", "1000"];
    let with = |module: &str| [&sim[..], &["--lora-modules", module]].concat().join(" ");
    let start = |machine: &str, port: &str, flags: &str| {
        cluster.agent_at(machine, port, &flags.split(' ').collect::<Vec<_>>())
    };
    let mut agents = [start("127.0.0.1", "0", &with(&a)), start("127.0.0.2", "0", &sim.join(" "))];
    let (one, other) = (cluster.serve(&agents, &[]), cluster.serve(&agents, &[]));
    for server in [&one, &other] {
        server.wait_ready(2, SOON).await;
        assert_eq!(models(server).await, ["m", "a"]);
    }
    let (has, why) = who_has(&one, "a").await;
    assert!(why.contains("--lora-modules of chiasm agent"), "{why}");

    // The model's blocks are none of the adapter's, wherever they are.
    assert_eq!(answered_by(&one.chat(&body("m")).await), None);
    let first = one.chat(&body("a")).await;
    let name = answered_by(&first).expect("an adapter");
    assert!(name.starts_with("a@"), "{name}");
    assert_eq!((first.ok()["model"].clone(), overlap(&first)), (json!("a"), (0, 0)));
    assert_eq!(first.header("x-chiasm-worker"), has.as_str().expect("a name"));
    // A frontend that has sent nothing there knows the adapter's blocks from the agent.
    let is_known = async || {
        let answer = other.chat(&body("a")).await;
        let (predicted, found) = overlap(&answer);
        assert_eq!(answered_by(&answer).as_ref(), Some(&name));
        predicted > 5 && found == 16 * predicted
    };
    wait_for("the adapter's blocks", SOON, is_known).await;
    assert_eq!(one.chat(&body("c")).await.refused(404), "model");

    // Gone for now: nobody can answer, and what there is may be back.
    agents[0].kill();
    wait_for("the loss of the agent", SOON, async || one.ready_workers().await == 1).await;
    assert_eq!(one.chat(&body("a")).await.refused(503), "model");
    let port = agents[0].port();
    agents[0] = start("127.0.0.1", &port, &with(&a));
    one.wait_ready(2, SOON).await;
    assert_eq!(overlap(&one.chat(&body("a")).await), (0, 0), "a new start holds nothing");

    // Back with another one: nobody has the first any more.
    agents[0].kill();
    wait_for("the loss of the agent", SOON, async || one.ready_workers().await == 1).await;
    agents[0] = start("127.0.0.1", &port, &with(&b));
    for server in [&one, &other] {
        wait_for("the other adapter", SOON, async || models(server).await == ["m", "b"]).await;
        assert_eq!(server.chat(&body("a")).await.refused(404), "model");
    }
    assert!(answered_by(&one.chat(&body("b")).await).is_some_and(|name| name.starts_with("b@")));
}

#[tokio::test]
async fn copies_of_an_adapter_are_one_on_all_machines() {
    let (dir, cluster) = (tempfile::tempdir().expect("a folder"), Cluster::new());
    let agent = |machine: u8| {
        // Each has its own folder with the same files.
        let folder = adapter(&dir.path().join(machine.to_string()), "files", 8);
        let module = format!("a={}", folder.display());
        cluster
            .agent(machine, &["--sim", "1", "--sim-decode-rate", "20", "--lora-modules", &module])
    };
    let agents = [agent(1), agent(2)];
    // And an engine of its own that has none.
    let server = cluster.serve(&agents, &["--sim", "1"]);
    server.wait_ready(3, SOON).await;
    let text = "one two three four five six seven eight nine ten ".repeat(20);
    let long = json!({
        "model": "a", "messages": [{"role": "user", "content": text}], "max_tokens": 400, "ignore_eos": true,
        "stream": true,
    });
    let stream = server.open("/v1/chat/completions", &long).await;
    let busy = stream.headers()["x-chiasm-worker"].clone();
    // What nobody holds goes to the other one that has the adapter.
    let mut asked = body("a");
    asked["max_tokens"] = json!(2);
    let answer = server.chat(&asked).await;
    answer.ok();
    assert_ne!(answer.header("x-chiasm-worker"), busy.to_str().expect("text"));
    let has = |worker: &&Value| worker["lora_adapters"][0]["loaded"] == true;
    assert_eq!(workers(&server).await.iter().filter(has).count(), 2);
}

#[test]
fn whose_adapters_they_are_is_told_at_the_start() {
    let (model, dir) = (demo_model().display().to_string(), tempfile::tempdir().expect("a folder"));
    let folder = adapter(dir.path(), "a", 8).display().to_string();
    let nowhere = format!("a={}", dir.path().join("none").display());
    let here = format!("a={folder}");
    for (flags, told) in [
        (
            &["agent", &model, "--sim", "1", "--port", "0", "--lora-modules", &nowhere][..],
            "--lora-modules a: no adapter is found at",
        ),
        (
            &["agent", &model, "--sim", "1", "--allow-runtime-lora-updating"],
            "--allow-runtime-lora-updating is a frontend's",
        ),
        (
            &["serve", &model, "--agents", "127.0.0.1:1", "--port", "0", "--lora-modules", &here],
            "for engines of this frontend",
        ),
        (
            &["serve", &model, "--sim", "1", "--port", "0", "--fetch-media"],
            "--fetch-media is of chiasm agent",
        ),
    ] {
        let ended = chiasm(flags)
            .env("CHIASM_STATE_DIR", dir.path())
            .stdin(Stdio::null())
            .output()
            .expect("chiasm runs");
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(!ended.status.success() && said.contains(told), "{flags:?}: {said}");
    }
}
