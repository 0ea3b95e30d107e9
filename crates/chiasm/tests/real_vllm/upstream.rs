//! `vllm serve` as an upstream server, by tokens and by requests.

use std::time::Duration;

use chiasm::scenarios::STORM;
use serde_json::{Value, json};

use super::environment::{BLOCK_SIZE, ENGINES, Environment, Reference, STARTUP_TIMEOUT};
use super::requests::{assert_answers_match, image, text};
use crate::support::{Server, scenario_run, wait_for};

/// The option for a server with two engines.
const TWO_RANKS: &str = ",ranks=2";

/// The engines of one server are workers, and knowledge of each one's cache is exact.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn each_engine_of_one_server_is_a_worker() {
    const MODEL: &str = "qwen2vl";
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let server = environment.reference(MODEL, &["--data-parallel-size", "2"]);
    server.wait_healthy().await;
    let frontend = serve(&environment, MODEL, &[&server], TWO_RANKS).await;
    scenario_run::play_all(&frontend, "m", BLOCK_SIZE, 8).await;
    assert_predictions_exact(&frontend).await;
}

/// Starts a frontend of these servers. `options` are appended to each `--upstream`. Without
/// options, the frontend detects that the servers are vLLM.
async fn serve(
    environment: &Environment,
    model: &str,
    servers: &[&Reference],
    options: &str,
) -> Server {
    let mut args = vec![environment.model(model), "--served-model-name".to_owned(), "m".to_owned()];
    args.push("--allow-private-media".to_owned());
    let kind = if options.is_empty() { "" } else { "vllm+" };
    for server in servers {
        args.extend(["--upstream".to_owned(), format!("{kind}{}{options}", server.url())]);
    }
    let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
    let frontend = Server::start(&args);
    let engines = if options == TWO_RANKS { 2 } else { 1 };
    frontend.wait_ready(engines * servers.len() as u64, STARTUP_TIMEOUT).await;
    frontend
}

/// Checks that a server's answers through a frontend equal its own, and that its prompts are as
/// predicted. Requests with `mm_processor_kwargs` must be refused, as they can't be passed on.
pub(crate) async fn check_server(
    environment: &Environment,
    model: &str,
    server: &Reference,
    requests: &[Value],
    answers: &[Value],
) {
    let frontend = serve(environment, model, &[server], "").await;
    let has_kwargs = |request: &Value| !request["mm_processor_kwargs"].is_null();
    let plain = requests.iter().zip(answers).filter(|(request, _)| !has_kwargs(request));
    let (plain, answers): (Vec<Value>, Vec<Value>) =
        plain.map(|(request, answer)| (request.clone(), answer.clone())).unzip();
    assert_answers_match(&frontend, &plain, &answers).await;
    for request in requests.iter().filter(|request| has_kwargs(request)) {
        assert_eq!(frontend.chat(request).await.refused(400), "mm_processor_kwargs");
    }
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0, "{model}");

    // In chat mode, requests are forwarded as they are. All must succeed, also with kwargs.
    let frontend = serve(environment, model, &[server], ",mode=chat").await;
    for request in requests {
        frontend.chat(request).await.ok();
    }
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0, "{model}, chat mode");
}

/// Checks with two servers that predictions are exact, and that the second server replaces the
/// first one when that is stopped.
pub(crate) async fn check_two_servers(
    environment: &Environment,
    server: Reference,
    answers: &[String],
) {
    const MODEL: &str = "qwen2vl";
    let other = environment.reference(MODEL, &[]);
    other.wait_healthy().await;
    let frontend = serve(environment, MODEL, &[&server, &other], "").await;
    assert_eq!(scenario_run::play_all(&frontend, "m", BLOCK_SIZE, 8).await, answers);
    assert_predictions_exact(&frontend).await;
    {
        let frontend = serve(environment, MODEL, &[&server, &other], ",mode=chat").await;
        let again = scenario_run::play_all_again("once more", &frontend, "m", BLOCK_SIZE, 8).await;
        assert_eq!(again, answers, "chat mode gives the same answers");
        assert_predictions_exact(&frontend).await;
    }

    let content = json!([image(STORM), text("the quick brown fox")]);
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 400,
        "ignore_eos": true,
        "temperature": 0,
    });
    let first = frontend.chat(&body).await.ok();
    drop(server);
    // The remaining server has cached the whole prompt or nothing. The answer is the same.
    for _ in 0..2 {
        let content = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
        assert_eq!(content(&frontend.chat(&body).await.ok()), content(&first));
    }
    let is_removed = async || frontend.ready_workers().await == 1;
    wait_for("the removal of the server", Duration::from_secs(20), is_removed).await;
}

/// Asserts that knowledge of the servers' caches is exact and that all prompts were as predicted.
async fn assert_predictions_exact(frontend: &Server) {
    let workers =
        frontend.client.get(format!("{}/workers", frontend.url)).send().await.expect("workers");
    let workers: Value = serde_json::from_str(&workers.text().await.expect("text")).expect("JSON");
    for worker in workers["workers"].as_array().expect("workers") {
        assert_eq!(
            (&worker["knowledge"], &worker["condition"]),
            (&json!("exact"), &json!("answers")),
            "{worker}"
        );
    }
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
}
