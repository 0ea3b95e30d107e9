//! Real SGLang servers on CPU with tiny random models.
//!
//! `cargo xtask test --sglang` sets up the environment and runs these tests. They are not part of
//! the default run, because a server takes most of a minute to start.
//! `CHIASM_TEST_SHOW_SGLANG=1` shows the servers' logs.

mod environment;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, DUSK, NIGHT, Picture, SNOW, STORM};
use serde_json::{Value, json};

use self::environment::{BLOCK_SIZE, Environment, STARTUP_TIMEOUT, SglangServer, serve, workers};
use crate::support::{Answer, Server, scenario_run, wait_for};

const TIMEOUT: Duration = Duration::from_secs(30);

fn image(picture: Picture) -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Returns a greedy request with additional fields.
fn greedy_request(content: Value, fields: Value) -> Value {
    let messages = json!([{"role": "user", "content": content}]);
    let mut body = json!({"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12});
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("text")
}

/// Returns `cached_tokens` of an answer.
fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

/// Returns the number of predicted blocks of a prompt, and of all its blocks.
fn overlap(answer: &Answer) -> (u64, u64) {
    let header = answer.header("x-chiasm-overlap");
    let (predicted, total) = header.split_once('/').expect("X/Y");
    (predicted.parse().expect("a number"), total.parse().expect("a number"))
}

/// Returns the number of known blocks, summed over all workers.
async fn known_blocks(frontend: &Server) -> u64 {
    workers(frontend)
        .await
        .iter()
        .map(|worker| worker["known_blocks"].as_u64().expect("a number"))
        .sum()
}

/// Checks that a server's answers through a frontend equal its own.
async fn check_same_answers(frontend: &Server, server: &SglangServer) {
    for body in [
        greedy_request(json!("the quick brown fox jumps over the lazy dog"), json!({})),
        greedy_request(
            json!([image(DAWN), text("describe this image briefly.")]),
            json!({"ignore_eos": true}),
        ),
        greedy_request(
            json!([text("describe"), image(SNOW), text("and"), image(NIGHT)]),
            json!({"ignore_eos": true}),
        ),
        greedy_request(
            json!("a list"),
            json!({"repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": true}),
        ),
    ] {
        let own = server.post("/v1/chat/completions", &body).await.ok();
        let ours = frontend.chat(&body).await.ok();
        // Only one of them may return an incomplete character.
        let text = |answer: &Value| content(answer).trim_end_matches('\u{fffd}').to_owned();
        assert_eq!(text(&ours), text(&own));
        let finish = |answer: &Value| answer["choices"][0]["finish_reason"].clone();
        assert_eq!(finish(&ours), finish(&own));
        assert_eq!(ours["usage"]["prompt_tokens"], own["usage"]["prompt_tokens"]);
        assert_eq!(ours["usage"]["completion_tokens"], own["usage"]["completion_tokens"]);
    }
}

/// Checks parameters beyond the text: several choices, log probabilities, constraints, stop tokens.
async fn check_parameters(frontend: &Server) {
    let body = greedy_request(
        json!([image(DUSK), text("three of it")]),
        json!({"logprobs": true, "top_logprobs": 2}),
    );
    let answer = frontend.chat(&body).await.ok();
    for token in answer["choices"][0]["logprobs"]["content"].as_array().expect("log probabilities")
    {
        assert_eq!(
            token["logprob"], token["top_logprobs"][0]["logprob"],
            "greedy sampling takes the likeliest token: {token}"
        );
        assert_eq!(token["top_logprobs"].as_array().expect("a list").len(), 2);
    }
    let body = greedy_request(
        json!([image(NIGHT), text("three of it")]),
        json!({"n": 3, "temperature": 1, "seed": 1, "ignore_eos": true}),
    );
    let answer = frontend.chat(&body).await.ok();
    assert_eq!(answer["usage"]["completion_tokens"], 3 * 12);
    assert_eq!(answer["choices"].as_array().expect("choices").len(), 3);

    let schema = json!({
        "type": "object",
        "properties": {"a": {"enum": ["b"]}},
        "required": ["a"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let answer = frontend
        .chat(&greedy_request(
            json!("as JSON"),
            json!({"response_format": format, "max_tokens": 60}),
        ))
        .await
        .ok();
    let value: Value = serde_json::from_str(content(&answer)).expect("JSON");
    assert_eq!(value, json!({"a": "b"}));
    for (constraint, expected) in
        [(json!({"regex": "(ab){2}"}), "abab"), (json!({"grammar": "root ::= \"so\""}), "so")]
    {
        let answer = frontend
            .chat(&greedy_request(json!("a word"), json!({"structured_outputs": constraint})))
            .await
            .ok();
        assert_eq!(content(&answer), expected);
    }
    let bad = greedy_request(json!("a word"), json!({"structured_outputs": {"regex": "["}}));
    assert_eq!(frontend.chat(&bad).await.status, 400);

    // With `ignore_eos`, SGLang ignores stop tokens, too. The frontend applies them.
    let body = |fields: Value| greedy_request(json!("stop somewhere"), fields);
    let whole =
        frontend.chat(&body(json!({"ignore_eos": true, "return_token_ids": true}))).await.ok();
    let ids: Vec<u64> = whole["choices"][0]["token_ids"]
        .as_array()
        .expect("ids")
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    let stop = ids[4];
    let expected_tokens = ids.iter().position(|id| *id == stop).expect("a position") + 1;
    let stopped =
        frontend.chat(&body(json!({"ignore_eos": true, "stop_token_ids": [stop]}))).await.ok();
    assert_eq!(
        (&stopped["usage"]["completion_tokens"], &stopped["choices"][0]["finish_reason"]),
        (&json!(expected_tokens), &json!("stop"))
    );

    for (field, value) in [
        ("bad_words", json!(["a"])),
        ("prompt_logprobs", json!(1)),
        ("allowed_token_ids", json!([5])),
    ] {
        assert_eq!(frontend.chat(&body(json!({field: value}))).await.refused(400), field);
    }
}

/// Checks that a text with names of the image token is refused: SGLang would wait forever for the
/// missing images.
async fn check_extra_image_tokens_are_refused(frontend: &Server, server: &SglangServer) {
    let tokens = "<|image_pad|>".repeat(40);
    let content = json!([image(DAWN), text(&tokens)]);
    let answer = frontend.chat(&greedy_request(content, json!({}))).await;
    assert_eq!(answer.status, 400, "{}", answer.text);
    server.wait_idle().await;
}

/// Checks that a request is aborted in the server when its client disconnects.
async fn check_abort(frontend: &Server, servers: &[SglangServer]) {
    let body = greedy_request(
        json!("go on"),
        json!({"max_tokens": 4000, "ignore_eos": true, "stream": true}),
    );
    let answer = frontend.open("/v1/chat/completions", &body).await;
    let running = async || {
        let mut sum = 0.0;
        for server in servers {
            sum += server.gauge("sglang:num_running_reqs").await;
        }
        sum
    };
    wait_for("running request", TIMEOUT, async || running().await == 1.0).await;
    drop(answer);
    let after = wait_for("abort", TIMEOUT, async || running().await == 0.0).await;
    eprintln!("aborted after {after:?}");
}

/// Checks that the frontend knows when a server's cache is flushed.
async fn check_flushed_cache(frontend: &Server, servers: &[SglangServer]) {
    let body = greedy_request(json!([image(STORM), text("once more")]), json!({}));
    frontend.chat(&body).await.ok();
    wait_for("blocks", TIMEOUT, async || known_blocks(frontend).await > 0).await;
    for server in servers {
        server.wait_idle().await;
        assert_eq!(server.post("/flush_cache", &json!({})).await.status, 200);
    }
    wait_for("empty caches", TIMEOUT, async || known_blocks(frontend).await == 0).await;
    let answer = frontend.chat(&body).await;
    assert!(answer.header("x-chiasm-overlap").starts_with("0/"));
    assert_eq!(cached(&answer.ok()), 0);
}

/// Checks that the other server replaces a killed one, and that a restarted server is used again
/// with an empty cache.
async fn check_killed_server(frontend: &Server, servers: &mut [SglangServer]) {
    let body = greedy_request(
        json!([image(STORM), text("the quick brown fox")]),
        json!({"max_tokens": 300, "ignore_eos": true}),
    );
    let first = frontend.chat(&body).await;
    let killed = usize::from(first.header("x-chiasm-worker") == "worker_1");
    servers[killed].kill();
    let again = frontend.chat(&body).await;
    assert_eq!(content(&again.ok()), content(&first.ok()));
    assert_eq!(again.header("x-chiasm-worker"), format!("worker_{}", 1 - killed));
    wait_for("the removal of the server", TIMEOUT, async || frontend.ready_workers().await == 1)
        .await;
    servers[killed].start();
    servers[killed].wait_healthy().await;
    frontend.wait_ready(2, STARTUP_TIMEOUT).await;
    let is_exact =
        async || workers(frontend).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", TIMEOUT, is_exact).await;
    assert_eq!(workers(frontend).await[killed]["known_blocks"], 0);
}

#[tokio::test]
#[ignore = "needs SGLang: cargo xtask test --sglang"]
async fn two_servers_are_predicted_exactly() {
    let environment = Environment::read();
    let mut servers = [
        environment.sglang("qwen2vl", &[]),
        environment.sglang("qwen2vl", &["--incremental-streaming-output"]),
    ];
    for server in &mut servers {
        server.wait_healthy().await;
    }
    let frontend = serve(&environment, "qwen2vl", &[&servers[0], &servers[1]], "").await;
    let answers = scenario_run::play_all(&frontend, "m", BLOCK_SIZE, 8).await;
    for worker in workers(&frontend).await {
        assert_eq!(
            (&worker["knowledge"], &worker["condition"]),
            (&json!("exact"), &json!("answers")),
            "{worker}"
        );
    }
    check_same_answers(&frontend, &servers[0]).await;
    check_parameters(&frontend).await;
    check_extra_image_tokens_are_refused(&frontend, &servers[0]).await;
    check_abort(&frontend, &servers).await;
    check_flushed_cache(&frontend, &servers).await;
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
    check_killed_server(&frontend, &mut servers).await;
    for server in &servers {
        server.wait_idle().await;
        assert_eq!(server.post("/flush_cache", &json!({})).await.status, 200);
    }
    // The same again with a restarted server and flushed caches.
    wait_for("empty caches", TIMEOUT, async || known_blocks(&frontend).await == 0).await;
    assert_eq!(scenario_run::play_all(&frontend, "m", BLOCK_SIZE, 8).await, answers);
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
}

/// Starts a server of a model and its frontend, and sends two prompts with images twice each.
async fn try_family(
    environment: &Environment,
    model: &str,
    flags: &[&str],
) -> (Server, SglangServer, Vec<Answer>) {
    let mut server = environment.sglang(model, flags);
    server.wait_healthy().await;
    let frontend = serve(environment, model, &[&server], "sglang+").await;
    let mut answers = Vec::new();
    for content in [
        json!([image(DAWN), text("describe this image")]),
        json!([image(DAWN), image(SNOW), text("two")]),
    ] {
        for _ in 0..2 {
            let before = known_blocks(&frontend).await;
            let answer = frontend.chat(&greedy_request(content.clone(), json!({}))).await;
            if answer.status == 200 {
                // Events about stored blocks arrive shortly after the answer.
                let (predicted, total) = overlap(&answer);
                let expected = before + total - predicted;
                let is_known = async || known_blocks(&frontend).await >= expected;
                wait_for("the prompt's blocks", TIMEOUT, is_known).await;
            }
            answers.push(answer);
        }
    }
    (frontend, server, answers)
}

#[tokio::test]
#[ignore = "needs SGLang: cargo xtask test --sglang"]
async fn other_families_are_exact_or_refused() {
    let environment = Environment::read();
    let families: [(&str, &[&str]); 4] = [
        ("qwen25vl", &[]),
        // These have additional tokens inside images or around them.
        ("pixtral", &[]),
        ("mistral3", &["--mem-fraction-static", "0.3"]),
        ("gemma3", &["--enable-multimodal"]),
    ];
    for (model, flags) in families {
        let (frontend, _server, answers) = try_family(&environment, model, flags).await;
        for (number, answer) in answers.iter().enumerate() {
            let (predicted, _) = overlap(answer);
            let body = answer.ok();
            let prompt = body["usage"]["prompt_tokens"].as_u64().expect("a count");
            assert_eq!(
                cached(&body),
                predicted.min((prompt - 1) / BLOCK_SIZE) * BLOCK_SIZE,
                "{model} {number}: {body}"
            );
            assert!(number == 0 || predicted > 0, "{model} {number}");
        }
        assert_eq!(workers(&frontend).await[0]["knowledge"], "exact", "{model}");
        assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0, "{model}");
    }

    // Image prompts of this family are refused, text prompts work.
    let (frontend, _server, answers) = try_family(&environment, "llava_next", &[]).await;
    answers.iter().for_each(|answer| assert_eq!(answer.refused(400), "messages"));
    frontend.chat(&greedy_request(json!("text alone"), json!({}))).await.ok();
}
