//! Engines that only encode, prefill or decode: their answers match `vllm serve` token for token.

use serde_json::{Value, json};

use super::environment::{
    BLOCK_SIZE, ENGINE_FLAGS, ENGINES, Environment, Reference, STARTUP_TIMEOUT, serve_flags,
};
use super::processes::engine_process;
use super::requests::{assert_answers_match, comparable_requests, family_requests};
use crate::support::{Process, Server, chiasm, free_port, scenario_run, send_signal, wait_for};

/// Flags with which the router always sends stages to dedicated engines.
const ALWAYS_SPLIT: [&str; 4] = ["--disturb-weight", "1000", "--hop-weight", "0"];

/// Returns the number of prompts that were computed for another engine.
async fn prefilled(server: &Server) -> f64 {
    server.metric("chiasm_prefilled_requests_total").await
}

/// Returns the number of prompts that were computed twice.
async fn recomputed(server: &Server) -> f64 {
    server.metric("chiasm_recomputed_prompts_total").await
}

/// Returns the number of images that were encoded for another engine.
async fn encoded(server: &Server) -> f64 {
    server.metric("chiasm_encoded_items_total").await
}

/// Returns the number of images whose embeddings an engine failed to provide, or that were missing
/// where they were expected.
async fn missed(server: &Server) -> f64 {
    let missing = server.metric("chiasm_mm_transfer_fallback_total{cause=\"no_embeddings\"}").await;
    server.metric("chiasm_unencoded_items_total").await + missing
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn roles_match_vllm_serve() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let requests = comparable_requests();
    let server = environment.serve_with_flags(
        "shm",
        "qwen2vl",
        "encode=1,prefill=1,decode=1",
        &ALWAYS_SPLIT,
        &[],
    );
    let vllm_serve = environment.reference("qwen2vl", &[]);
    let reference = vllm_serve.answers(&requests).await;
    drop(vllm_serve);
    server.wait_ready(3, STARTUP_TIMEOUT).await;
    assert_answers_match(&server, &requests, &reference).await;
    assert_eq!((prefilled(&server).await, recomputed(&server).await), (requests.len() as f64, 0.0));
    assert!(encoded(&server).await > 0.0);
    scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await;
    assert_eq!((recomputed(&server).await, missed(&server).await), (0.0, 0.0));
    // One engine dies: the others take its role until it is replaced.
    for (worker, role) in [("worker_0", "encode"), ("worker_1", "prefill"), ("worker_2", "decode")]
    {
        send_signal(engine_process(&server, worker, "VLLM::EngineCore"), "KILL");
        assert_answers_match(&server, &requests, &reference).await;
        server.wait_ready(3, STARTUP_TIMEOUT).await;
        let before = prefilled(&server).await;
        let mut uncached = requests.clone();
        uncached.iter_mut().for_each(|request| request["cache_salt"] = json!(role));
        assert_answers_match(&server, &uncached, &reference).await;
        assert!(prefilled(&server).await > before, "after the death of the {role} engine");
    }
    wait_for("the end of all requests", STARTUP_TIMEOUT, async || {
        let workers =
            server.client.get(format!("{}/workers", server.url)).send().await.expect("workers");
        let workers = crate::support::json(workers).await;
        let all = workers["workers"].as_array().expect("a list");
        all.iter().all(|worker| worker["requests"] == 0)
    })
    .await;
}

/// Checks engines that hand prompts over through files and by NIXL. Run by hand, with
/// `CHIASM_TEST_ROLE_MODELS=qwen25vl,llava`.
#[tokio::test]
#[ignore = "needs vLLM, and the names of models in CHIASM_TEST_ROLE_MODELS"]
async fn roles_of_chosen_models_match_vllm_serve() {
    let Some(models) = models() else { return };
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    for model in &models {
        let vllm_serve: Reference = environment.reference(model, &[]);
        let requests = requests_for(model);
        let reference = vllm_serve.answers(&requests).await;
        drop(vllm_serve);
        let folder = tempfile::tempdir().expect("a folder");
        let files = format!("files:{}", folder.path().display());
        for connector in ["nixl", &files] {
            let frontend_flags = [&ALWAYS_SPLIT[..], &["--kv-connector", connector]].concat();
            let engines = "encode=1,prefill=1,decode=1";
            let server = environment.serve_with_flags("shm", model, engines, &frontend_flags, &[]);
            server.wait_ready(3, STARTUP_TIMEOUT).await;
            assert_answers_match(&server, &requests, &reference).await;
            let prefilled = prefilled(&server).await;
            let recomputed = recomputed(&server).await;
            let encoded = encoded(&server).await;
            let missed = missed(&server).await;
            eprintln!(
                "{model} by {connector}: {prefilled} of {} prompts were handed over, \
                 {recomputed} computed again; {encoded} images were encoded elsewhere, \
                 {missed} missed",
                requests.len()
            );
            // The connector for files does not always find what it has stored.
            assert!(prefilled > 0.0 && (recomputed == 0.0 || connector != "nixl"));
            assert!(encoded > 0.0 && missed == 0.0);
        }
    }
}

/// Returns requests that `model` supports.
fn requests_for(model: &str) -> Vec<Value> {
    if model.starts_with("qwen") { comparable_requests() } else { family_requests(&json!({})) }
}

/// Returns the models in `CHIASM_TEST_ROLE_MODELS`.
fn models() -> Option<Vec<String>> {
    let models = std::env::var("CHIASM_TEST_ROLE_MODELS").ok();
    if models.is_none() {
        eprintln!("skipped: CHIASM_TEST_ROLE_MODELS names no models; this test is run by hand");
    }
    models.map(|models| models.split(',').map(str::to_owned).collect())
}

/// Checks agents on two addresses, one of which prefills for the other by NIXL. Run by hand, with
/// `CHIASM_TEST_ROLE_MODELS=qwen2vl`.
#[tokio::test]
#[ignore = "needs vLLM, and the names of models in CHIASM_TEST_ROLE_MODELS"]
async fn roles_on_two_machines_match_vllm_serve() {
    let Some(models) = models() else { return };
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    for model in models {
        let vllm_serve: Reference = environment.reference(&model, &[]);
        let requests = requests_for(&model);
        let reference = vllm_serve.answers(&requests).await;
        drop(vllm_serve);
        let folder = tempfile::tempdir().expect("a folder");
        let secret = folder.path().join("block-keys").display().to_string();
        std::fs::write(&secret, "7".repeat(64)).expect("a secret");
        let agent = |host: &str, engines: &str| {
            let port = free_port().to_string();
            let network = format!("{host}/24");
            let path = environment.model(&model);
            let mut command =
                chiasm(&["agent", &path, "--host", host, "--port", &port, "--engines", engines]);
            command.args(["--vllm", &environment.vllm, "--block-key-secret", &secret]);
            // Agents don't take `--served-model-name`, the first two flags.
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
        let (_prefill_agent, first) = agent("127.0.0.2", "prefill=1");
        let (_decode_agent, second) = agent("127.0.0.3", "decode=1");
        let path = environment.model(&model);
        let agents = format!("{first},{second}");
        let args =
            [&path, "--served-model-name", "m", "--agents", &agents, "--block-key-secret", &secret];
        let server =
            Server::start(&[&args[..], &ALWAYS_SPLIT, &["--allow-private-media"]].concat());
        server.wait_ready(2, STARTUP_TIMEOUT).await;
        assert_answers_match(&server, &requests, &reference).await;
        assert_eq!(
            (prefilled(&server).await, recomputed(&server).await),
            (requests.len() as f64, 0.0)
        );
    }
}
