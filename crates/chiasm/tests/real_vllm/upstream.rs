//! Servers that somebody else runs: `vllm serve` in token mode.

use std::time::Duration;

use chiasm::scenarios::STORM;
use serde_json::{Value, json};

use super::environment::{BLOCK_SIZE, Environment, Reference, STARTUP};
use super::requests::{answers_are_those_of_vllm_serve, image, text};
use crate::support::{Server, scenario_run, wait_for};

/// A frontend before these servers alone, which have such options.
async fn before(
    environment: &Environment,
    model: &str,
    servers: &[&Reference],
    options: &str,
) -> Server {
    let mut args = vec![environment.model(model), "--served-model-name".to_owned(), "m".to_owned()];
    args.push("--allow-private-media".to_owned());
    for server in servers {
        args.extend(["--upstream".to_owned(), format!("{}{options}", server.upstream())]);
    }
    let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
    let frontend = Server::start(&args);
    frontend.wait_ready(servers.len() as u64, STARTUP).await;
    frontend
}

/// A server's answers through a frontend are its own, and its prompts are what was expected of it.
/// The requests' own settings for their images can't be passed on, which is said.
pub(crate) async fn a_server_answers_through_us_as_by_itself(
    environment: &Environment,
    model: &str,
    server: &Reference,
    requests: &[Value],
    answers: &[Value],
) {
    let frontend = before(environment, model, &[server], "").await;
    let is_own = |request: &Value| !request["mm_processor_kwargs"].is_null();
    let plain = requests.iter().zip(answers).filter(|(request, _)| !is_own(request));
    let (plain, answers): (Vec<Value>, Vec<Value>) =
        plain.map(|(one, other)| (one.clone(), other.clone())).unzip();
    answers_are_those_of_vllm_serve(&frontend, &plain, &answers).await;
    for request in requests.iter().filter(|request| is_own(request)) {
        assert_eq!(frontend.chat(request).await.refused(400), "mm_processor_kwargs");
    }
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0, "{model}");

    // Given requests as they come it answers with the same, if with other words around it.
    let frontend = before(environment, model, &[server], ",mode=chat").await;
    for request in requests {
        frontend.chat(request).await.ok();
    }
    assert_eq!(
        frontend.metric("chiasm_distrusted_workers_total").await,
        0.0,
        "{model}, as they come"
    );
}

/// Two servers: what was predicted is what they find, and one that dies under a request is replaced
/// by the other.
pub(crate) async fn two_servers_are_predicted_exactly(
    environment: &Environment,
    server: Reference,
    answers: &[String],
) {
    const MODEL: &str = "qwen2vl";
    let other = environment.reference(MODEL, &[]);
    other.wait_healthy().await;
    let frontend = before(environment, MODEL, &[&server, &other], "").await;
    assert_eq!(scenario_run::play_all(&frontend, "m", BLOCK_SIZE, 8).await, answers);
    everything_is_as_expected(&frontend).await;
    {
        let frontend = before(environment, MODEL, &[&server, &other], ",mode=chat").await;
        let again = scenario_run::play_all_again("once more", &frontend, "m", BLOCK_SIZE, 8).await;
        assert_eq!(again, answers, "requests as they come get the same");
        everything_is_as_expected(&frontend).await;
    }

    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": [image(STORM), text("the quick brown fox")]}],
        "max_tokens": 400, "ignore_eos": true, "temperature": 0,
    });
    let own = frontend.chat(&body).await.ok();
    drop(server);
    // Whoever was there before has all of it in its cache or none: either way it answers the same.
    for _ in 0..2 {
        let content = |answer: &Value| answer["choices"][0]["message"]["content"].clone();
        assert_eq!(content(&frontend.chat(&body).await.ok()), content(&own));
    }
    let gone = async || frontend.ready_workers().await == 1;
    wait_for("the server to be let go", Duration::from_secs(20), gone).await;
}

/// What is known of the servers is exact, and none has made another prompt than was expected.
async fn everything_is_as_expected(frontend: &Server) {
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
