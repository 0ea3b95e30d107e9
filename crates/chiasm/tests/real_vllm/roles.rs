//! Engines that encode, prefill or decode alone: token for token what `vllm serve` answers by
//! itself.

use serde_json::json;

use super::environment::{
    BLOCK_SIZE, ENGINE_FLAGS, ENGINES, Environment, Reference, STARTUP, serve_flags,
};
use super::processes::engine_process;
use super::requests::{answers_are_those_of_vllm_serve, comparable_requests, family_requests};
use crate::support::{Process, Server, chiasm, free_port, scenario_run, send_signal, wait_for};

/// Whatever is not computed yet is computed by an engine that is there for it.
const ALWAYS: [&str; 4] = ["--disturb-weight", "1000", "--hop-weight", "0"];

/// Prompts that were computed for another engine.
async fn prefilled(server: &Server) -> f64 {
    server.metric("chiasm_prefilled_requests_total").await
}

/// Prompts that were computed twice.
async fn recomputed(server: &Server) -> f64 {
    server.metric("chiasm_recomputed_prompts_total").await
}

/// Images that were encoded for another engine.
async fn encoded(server: &Server) -> f64 {
    server.metric("chiasm_encoded_items_total").await
}

/// Images that an engine was to leave the embeddings of and did not, or that were not found where
/// they were taken to be.
async fn missed(server: &Server) -> f64 {
    let gone = server.metric("chiasm_mm_transfer_fallback_total{cause=\"no_embeddings\"}").await;
    server.metric("chiasm_unencoded_items_total").await + gone
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn engines_with_roles_answer_as_one() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let requests = comparable_requests();
    let server =
        environment.serve_with("shm", "qwen2vl", "encode=1,prefill=1,decode=1", &ALWAYS, &[]);
    let vllm_serve = environment.reference("qwen2vl", &[]);
    let reference = vllm_serve.answers(&requests).await;
    drop(vllm_serve);
    server.wait_ready(3, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    assert_eq!((prefilled(&server).await, recomputed(&server).await), (requests.len() as f64, 0.0));
    assert!(encoded(&server).await > 0.0);
    scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await;
    assert_eq!((recomputed(&server).await, missed(&server).await), (0.0, 0.0));
    // One of them dies: the others do everything until there is a new one.
    for (worker, does) in [("worker_0", "encode"), ("worker_1", "prefill"), ("worker_2", "decode")]
    {
        send_signal(engine_process(&server, worker, "VLLM::EngineCore"), "KILL");
        answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
        server.wait_ready(3, STARTUP).await;
        let before = prefilled(&server).await;
        let mut unseen = requests.clone();
        unseen.iter_mut().for_each(|request| request["cache_salt"] = json!(does));
        answers_are_those_of_vllm_serve(&server, &unseen, &reference).await;
        assert!(prefilled(&server).await > before, "after the end of the engine that does {does}");
    }
    wait_for("nothing to be left", STARTUP, async || {
        let workers =
            server.client.get(format!("{}/workers", server.url)).send().await.expect("workers");
        let workers = crate::support::json(workers).await;
        let all = workers["workers"].as_array().expect("a list");
        all.iter().all(|worker| worker["requests"] == 0)
    })
    .await;
}

/// Engines of a model that hand prompts over through files, and by NIXL:
/// `CHIASM_TEST_ROLE_MODELS=qwen25vl,llava` by hand.
#[tokio::test]
#[ignore = "needs vLLM, and the names of models in CHIASM_TEST_ROLE_MODELS"]
async fn engines_with_roles_answer_as_one_for_more_models() {
    let Some(models) = models() else { return };
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    for model in &models {
        let vllm_serve: Reference = environment.reference(model, &[]);
        let requests = match model.starts_with("qwen") {
            true => comparable_requests(),
            false => family_requests(&json!({})),
        };
        let reference = vllm_serve.answers(&requests).await;
        drop(vllm_serve);
        let folder = tempfile::tempdir().expect("a folder");
        let files = format!("files:{}", folder.path().display());
        for connector in ["nixl", &files] {
            let own = [&ALWAYS[..], &["--kv-connector", connector]].concat();
            let server =
                environment.serve_with("shm", model, "encode=1,prefill=1,decode=1", &own, &[]);
            server.wait_ready(3, STARTUP).await;
            answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
            let (prefilled, recomputed) = (prefilled(&server).await, recomputed(&server).await);
            let (encoded, missed) = (encoded(&server).await, missed(&server).await);
            eprintln!(
                "{model} by {connector}: {prefilled} prompts of {} were handed over, {recomputed} computed again; {encoded} images were \
                 encoded elsewhere, {missed} missed",
                requests.len()
            );
            // What files have is not always found again.
            assert!(prefilled > 0.0 && (recomputed == 0.0 || connector != "nixl"));
            assert!(encoded > 0.0 && missed == 0.0);
        }
    }
}

/// Models by hand.
fn models() -> Option<Vec<String>> {
    let models = std::env::var("CHIASM_TEST_ROLE_MODELS").ok();
    if models.is_none() {
        eprintln!("CHIASM_TEST_ROLE_MODELS names no models: this is a test to be run by hand");
    }
    models.map(|models| models.split(',').map(str::to_owned).collect())
}

/// Engines of agents on two addresses, one of which prefills for the other by NIXL:
/// `CHIASM_TEST_ROLE_MODELS=qwen2vl` by hand.
#[tokio::test]
#[ignore = "needs vLLM, and the names of models in CHIASM_TEST_ROLE_MODELS"]
async fn engines_with_roles_on_two_machines_answer_as_one() {
    let Some(models) = models() else { return };
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    for model in models {
        let vllm_serve: Reference = environment.reference(&model, &[]);
        let requests = match model.starts_with("qwen") {
            true => comparable_requests(),
            false => family_requests(&json!({})),
        };
        let reference = vllm_serve.answers(&requests).await;
        drop(vllm_serve);
        let folder = tempfile::tempdir().expect("a folder");
        let secret = folder.path().join("block-keys").display().to_string();
        std::fs::write(&secret, "7".repeat(64)).expect("a secret");
        let agent = |host: &str, engines: &str| {
            let (port, network) = (free_port().to_string(), format!("{host}/24"));
            let path = environment.model(&model);
            let mut command =
                chiasm(&["agent", &path, "--host", host, "--port", &port, "--engines", engines]);
            command.args(["--vllm", &environment.vllm, "--block-key-secret", &secret]);
            // An agent has no name for its model.
            command.args(&serve_flags("shm", "0.1")[2..]).args([
                "--roles-private-network",
                &network,
                "--",
            ]);
            command
                .args(ENGINE_FLAGS)
                .envs(environment.variables())
                .env("CHIASM_STATE_DIR", folder.path());
            (Process(command.spawn().expect("an agent")), format!("{host}:{port}"))
        };
        let ((_prefills, first), (_decodes, second)) =
            (agent("127.0.0.2", "prefill=1"), agent("127.0.0.3", "decode=1"));
        let (path, agents) = (environment.model(&model), format!("{first},{second}"));
        let own =
            [&path, "--served-model-name", "m", "--agents", &agents, "--block-key-secret", &secret];
        let server = Server::start(&[&own[..], &ALWAYS, &["--allow-private-media"]].concat());
        server.wait_ready(2, STARTUP).await;
        answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
        assert_eq!(
            (prefilled(&server).await, recomputed(&server).await),
            (requests.len() as f64, 0.0)
        );
    }
}
