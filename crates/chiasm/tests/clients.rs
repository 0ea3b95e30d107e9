//! Clients that other people use against a server: each finds its words, usage, reasons and calls
//! where it looks for them, and what it breaks off ends in the engine. `cargo xtask test` provides
//! the packages.
//!
//! The engines are simulated: they say what they saw, which tells whether all of a request arrived,
//! or what they are told to.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use chiasm_prompt::Tokenizer;
use chiasm_sim_engine::{Pace, SimConfig, SimEngine};

use crate::support::{Server, demo_model, free_port, wait_for};

const SOON: Duration = Duration::from_secs(20);
/// A call in the format that the servers are told to read.
const CALL: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>";
/// An answer that begins with reasoning, in the format that `qwen3` reads.
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
    server.wait_ready(1, SOON).await;
    server
}

/// A server whose engine says the same to everybody.
async fn serve_text(text: &'static str) -> (Server, SimEngine) {
    serve_text_with(text, &[]).await
}

/// The same with these flags.
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

/// Runs a script of this folder, which fails by its exit status.
async fn run(program: &str, script: &str, args: &[&str]) {
    let mut command = Command::new(program);
    command.arg(format!("{}/tests/clients/{script}", env!("CARGO_MANIFEST_DIR"))).args(args);
    // Nothing is asked of the network, which for LiteLLM would be its list of prices.
    command.envs([
        ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
        ("HF_HUB_OFFLINE", "1"),
        ("LANGSMITH_TRACING", "false"),
    ]);
    let output = tokio::task::spawn_blocking(move || command.output().expect("it starts"))
        .await
        .expect("no panic");
    let told =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{script}: {}", told.concat());
}

/// Fails unless all requests come to their end, long before they would by themselves.
async fn nothing_is_left(server: &Server, script: &str) {
    for metric in ["chiasm_in_flight_requests", "chiasm_worker_running_requests"] {
        let what = format!("end of requests ({metric}) after {script}");
        wait_for(&what, Duration::from_secs(5), async || server.metric(metric).await == 0.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs packages of clients: `cargo xtask test` runs it"]
async fn clients_find_what_they_look_for() {
    let sees = serve(&["--sim", "1", "--sim-speedup", "1000"]).await;
    let (calls, _calling) = serve_text(CALL).await;
    let (says_json, _saying) = serve_text(r#"{"city": "Paris"}"#).await;
    let [of_sees, of_calls, of_json] =
        [&sees, &calls, &says_json].map(|server| format!("{}/v1", server.url));
    let python = variable("CHIASM_TEST_CLIENTS_PYTHON");
    run(&python, "langchain_client.py", &[&of_sees, &of_calls, &of_json, PICTURE]).await;
    run(&python, "litellm_client.py", &[&of_sees, &of_calls, PICTURE]).await;
    let (node, packages) = (variable("CHIASM_TEST_NODE"), variable("CHIASM_TEST_NODE_PACKAGES"));
    run(&node, "openai_npm.mjs", &[&packages, &of_sees, &of_calls, PICTURE]).await;
    for server in [&sees, &calls, &says_json] {
        nothing_is_left(server, "all clients").await;
        assert_eq!(
            server.metric("chiasm_refusals_total").await,
            0.0,
            "nothing that they sent was refused"
        );
        assert_eq!(server.metric("chiasm_stream_ends_total{how=\"left\"}").await, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs packages of clients: `cargo xtask test` runs it"]
async fn answers_fit_the_models_of_official_sdks() {
    let says = serve(&["--sim", "1", "--sim-speedup", "1000"]).await;
    let (calls, _calling) = serve_text(CALL).await;
    let (thinks, _thinking) = serve_text_with(THOUGHT, &["--reasoning-parser", "qwen3"]).await;
    let [of_says, of_calls, of_thinks] =
        [&says, &calls, &thinks].map(|server| format!("{}/v1", server.url));
    let python = variable("CHIASM_TEST_CLIENTS_PYTHON");
    run(&python, "conformance.py", &[&of_says, &of_calls, &of_thinks, PICTURE]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs packages of clients: `cargo xtask test` runs it"]
async fn what_clients_break_off_ends_in_the_engine() {
    // An answer takes minutes, and the first token of one with a long prompt some seconds.
    let server =
        serve(&["--sim", "1", "--sim-decode-rate", "30", "--sim-prefill-rate", "200"]).await;
    let url = format!("{}/v1", server.url);
    let packages = variable("CHIASM_TEST_NODE_PACKAGES");
    let clients = [
        (variable("CHIASM_TEST_CLIENTS_PYTHON"), "openai_leaves.py", vec![&url[..]]),
        (variable("CHIASM_TEST_NODE"), "openai_npm_leaves.mjs", vec![&packages, &url]),
    ];
    for (number, (program, script, args)) in (1..).zip(clients) {
        run(&program, script, &args).await;
        nothing_is_left(&server, script).await;
        // Each script leaves one stream in its midst, and times out over one that has not begun and
        // over a whole answer.
        let left = f64::from(number);
        assert_eq!(server.metric("chiasm_stream_ends_total{how=\"left\"}").await, left, "{script}");
        assert_eq!(
            server.metric("chiasm_stream_ends_total{how=\"finished\"}").await,
            0.0,
            "{script}"
        );
        assert_eq!(
            server.metric("chiasm_requests_total{endpoint=\"chat\",status=\"499\"}").await,
            2.0 * left,
            "{script}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn vllms_benchmark_measures() {
    // It loads the tokenizer by the model's name, and asks for the server's by it, too.
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--sim", "1", "--sim-speedup", "1000"]);
    server.wait_ready(1, SOON).await;
    run(&variable("CHIASM_TEST_PYTHON"), "vllm_bench.py", &[&server.url, &model]).await;
    nothing_is_left(&server, "vllm_bench.py").await;
    assert_eq!(
        server.metric("chiasm_refusals_total").await,
        0.0,
        "nothing that it sent was refused"
    );
    assert!(
        server.metric("chiasm_requests_total{endpoint=\"tokenize\",status=\"200\"}").await >= 1.0
    );
}
