//! Third-party clients: they find texts, usage, finish reasons and calls where they expect them.
//! Requests that they cancel end in the engine. `cargo xtask test` provides their packages.
//!
//! The engines are simulated. Their answers are fixed texts, or describe the request, which shows
//! that the whole request arrived.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use chiasm_prompt::Tokenizer;
use chiasm_sim_engine::{Pace, SimConfig, SimEngine};

use crate::support::{Server, demo_model, free_port, wait_for};

const TIMEOUT: Duration = Duration::from_secs(20);
/// A call in the format of `--tool-call-parser hermes`.
const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";
/// An answer that begins with reasoning, in the format of `--reasoning-parser qwen3`.
const THOUGHT: &str = "<think>Let me see.</think>\nIt is fine.";
const PICTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/images/dawn.jpg");

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run `cargo xtask test`"))
}

async fn serve(flags: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let server = Server::start(
        &[&[&model, "--served-model-name", "m", "--tool-call-parser", "hermes"], flags].concat(),
    );
    server.wait_ready(1, TIMEOUT).await;
    server
}

/// Starts a server whose engine always answers `text`.
async fn serve_text(text: &'static str) -> (Server, SimEngine) {
    serve_text_with(text, &[]).await
}

/// Like [`serve_text`], with flags of the server.
async fn serve_text_with(text: &'static str, flags: &[&str]) -> (Server, SimEngine) {
    let tokenizer = Tokenizer::from_model_dir(&demo_model()).expect("a tokenizer");
    let handshake = format!("tcp://127.0.0.1:{}", free_port());
    let engine = SimEngine::start(SimConfig {
        pace: Pace::instant(),
        eos: tokenizer.eos_token(),
        vocab_size: tokenizer.vocab_size() as u32,
        reply: Arc::new(move |_| tokenizer.encode(text, false).unwrap_or_default()),
        ..SimConfig::new(&handshake)
    });
    (serve(&[&["--attach", &handshake], flags].concat()).await, engine)
}

/// Runs a script of `tests/clients` and asserts that its exit status is 0.
async fn run_script(program: &str, script: &str, args: &[&str]) {
    let mut command = Command::new(program);
    command.arg(format!("{}/tests/clients/{script}", env!("CARGO_MANIFEST_DIR"))).args(args);
    // No network access. LiteLLM would otherwise load its list of prices.
    command.envs([
        ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
        ("HF_HUB_OFFLINE", "1"),
        ("LANGSMITH_TRACING", "false"),
    ]);
    let output = tokio::task::spawn_blocking(move || command.output().expect("the script starts"))
        .await
        .expect("no panic");
    let streams =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{script}: {}", streams.concat());
}

/// Asserts that all requests end within 5 s, long before they would complete.
async fn assert_requests_end(server: &Server, script: &str) {
    for metric in ["chiasm_in_flight_requests", "chiasm_worker_running_requests"] {
        let what = format!("end of requests ({metric}) after {script}");
        wait_for(&what, Duration::from_secs(5), async || server.metric(metric).await == 0.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs packages of clients: `cargo xtask test` runs it"]
async fn third_party_clients_understand_answers() {
    let describing = serve(&["--sim", "1", "--sim-speedup", "1000"]).await;
    let (calling, _calling_engine) = serve_text(CALL).await;
    let (json, _json_engine) = serve_text(r#"{"city": "Paris"}"#).await;
    let [describing_url, calling_url, json_url] =
        [&describing, &calling, &json].map(|server| format!("{}/v1", server.url));
    let python = variable("CHIASM_TEST_CLIENTS_PYTHON");
    let urls = [&*describing_url, &calling_url, &json_url, PICTURE];
    run_script(&python, "langchain_client.py", &urls).await;
    run_script(&python, "litellm_client.py", &[&describing_url, &calling_url, PICTURE]).await;
    let node = variable("CHIASM_TEST_NODE");
    let packages = variable("CHIASM_TEST_NODE_PACKAGES");
    let args = [&*packages, &describing_url, &calling_url, PICTURE];
    run_script(&node, "openai_npm.mjs", &args).await;
    for server in [&describing, &calling, &json] {
        assert_requests_end(server, "all clients").await;
        assert_eq!(server.metric("chiasm_refusals_total").await, 0.0, "no request was refused");
        assert_eq!(server.metric("chiasm_stream_ends_total{how=\"left\"}").await, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs packages of clients: `cargo xtask test` runs it"]
async fn answers_match_the_models_of_official_sdks() {
    let describing = serve(&["--sim", "1", "--sim-speedup", "1000"]).await;
    let (calling, _calling_engine) = serve_text(CALL).await;
    let (thinking, _thinking_engine) =
        serve_text_with(THOUGHT, &["--reasoning-parser", "qwen3"]).await;
    let [describing_url, calling_url, thinking_url] =
        [&describing, &calling, &thinking].map(|server| format!("{}/v1", server.url));
    let python = variable("CHIASM_TEST_CLIENTS_PYTHON");
    let args = [&*describing_url, &calling_url, &thinking_url, PICTURE];
    run_script(&python, "conformance.py", &args).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs packages of clients: `cargo xtask test` runs it"]
async fn cancelled_requests_end_in_the_engine() {
    // An answer takes minutes, and the first token of a long prompt some seconds.
    let server =
        serve(&["--sim", "1", "--sim-decode-rate", "30", "--sim-prefill-rate", "200"]).await;
    let url = format!("{}/v1", server.url);
    let packages = variable("CHIASM_TEST_NODE_PACKAGES");
    let clients = [
        (variable("CHIASM_TEST_CLIENTS_PYTHON"), "openai_leaves.py", vec![&url[..]]),
        (variable("CHIASM_TEST_NODE"), "openai_npm_leaves.mjs", vec![&packages, &url]),
    ];
    for (number, (program, script, args)) in (1..).zip(clients) {
        run_script(&program, script, &args).await;
        assert_requests_end(&server, script).await;
        // Each script cancels one stream halfway, and times out on a stream without tokens and on a
        // whole answer.
        let count = f64::from(number);
        let left = server.metric("chiasm_stream_ends_total{how=\"left\"}").await;
        assert_eq!(left, count, "{script}");
        assert_eq!(
            server.metric("chiasm_stream_ends_total{how=\"finished\"}").await,
            0.0,
            "{script}"
        );
        assert_eq!(
            server.metric("chiasm_requests_total{endpoint=\"chat\",status=\"499\"}").await,
            2.0 * count,
            "{script}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn vllm_benchmark_runs() {
    // The benchmark loads the tokenizer by the model's name. One run gets the name from the server.
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--sim", "1", "--sim-speedup", "1000"]);
    server.wait_ready(1, TIMEOUT).await;
    run_script(&variable("CHIASM_TEST_PYTHON"), "vllm_bench.py", &[&server.url, &model]).await;
    assert_requests_end(&server, "vllm_bench.py").await;
    assert_eq!(server.metric("chiasm_refusals_total").await, 0.0, "no request was refused");
    assert!(
        server.metric("chiasm_requests_total{endpoint=\"tokenize\",status=\"200\"}").await >= 1.0
    );
}
