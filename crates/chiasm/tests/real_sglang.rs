//! Real SGLang servers on CPU with tiny random models. `cargo xtask test --sglang` sets up what
//! this needs and runs it; it is no part of the default run, as a server takes the better part of a
//! minute to start. `CHIASM_TEST_SHOW_SGLANG=1` shows what the servers say.

mod environment;

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, DUSK, NIGHT, Picture, SNOW, STORM};
use serde_json::{Value, json};

use self::environment::{BLOCK_SIZE, Environment, STARTUP, Sglang, before, workers};
use crate::support::{Answer, Server, scenario_run, wait_for};

const SOON: Duration = Duration::from_secs(30);

fn image(picture: Picture) -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A greedy request with more fields.
fn ask(content: Value, more: Value) -> Value {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 12});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("text")
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

/// Blocks that the worker of an answer held of the prompt, and those of the prompt.
fn overlap(answer: &Answer) -> (u64, u64) {
    let told = answer.header("x-chiasm-overlap");
    let (held, all) = told.split_once('/').expect("X/Y");
    (held.parse().expect("a number"), all.parse().expect("a number"))
}

/// Blocks that a frontend knows all its workers to hold.
async fn known_blocks(frontend: &Server) -> u64 {
    workers(frontend)
        .await
        .iter()
        .map(|worker| worker["known_blocks"].as_u64().expect("a number"))
        .sum()
}

/// Answers through a frontend are those that a server gives by itself.
async fn a_server_answers_through_us_as_by_itself(frontend: &Server, server: &Sglang) {
    for body in [
        ask(json!("the quick brown fox jumps over the lazy dog"), json!({})),
        ask(
            json!([image(DAWN), text("describe this image briefly.")]),
            json!({"ignore_eos": true}),
        ),
        ask(
            json!([text("describe"), image(SNOW), text("and"), image(NIGHT)]),
            json!({"ignore_eos": true}),
        ),
        ask(
            json!("a list"),
            json!({"repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": true}),
        ),
    ] {
        let own = server.post("/v1/chat/completions", &body).await.ok();
        let ours = frontend.chat(&body).await.ok();
        // One of both tells of a character that is not complete.
        let text = |answer: &Value| content(answer).trim_end_matches('\u{fffd}').to_owned();
        assert_eq!(text(&ours), text(&own));
        let finish = |answer: &Value| answer["choices"][0]["finish_reason"].clone();
        assert_eq!(finish(&ours), finish(&own));
        assert_eq!(ours["usage"]["prompt_tokens"], own["usage"]["prompt_tokens"]);
        assert_eq!(ours["usage"]["completion_tokens"], own["usage"]["completion_tokens"]);
    }
}

/// What is asked for beside the text: several continuations, log probabilities, constraints, stop
/// tokens.
async fn parts_of_requests_mean_the_same(frontend: &Server) {
    let body = ask(
        json!([image(DUSK), text("three of it")]),
        json!({"logprobs": true, "top_logprobs": 2}),
    );
    let answer = frontend.chat(&body).await.ok();
    for token in answer["choices"][0]["logprobs"]["content"].as_array().expect("log probabilities")
    {
        assert_eq!(
            token["logprob"], token["top_logprobs"][0]["logprob"],
            "greedy takes the likeliest: {token}"
        );
        assert_eq!(token["top_logprobs"].as_array().expect("a list").len(), 2);
    }
    let body = ask(
        json!([image(NIGHT), text("three of it")]),
        json!({"n": 3, "temperature": 1, "seed": 1, "ignore_eos": true}),
    );
    let answer = frontend.chat(&body).await.ok();
    assert_eq!(answer["usage"]["completion_tokens"], 3 * 12);
    assert_eq!(answer["choices"].as_array().expect("choices").len(), 3);

    let schema = json!({"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let answer = frontend
        .chat(&ask(json!("as JSON"), json!({"response_format": format, "max_tokens": 60})))
        .await
        .ok();
    let told: Value = serde_json::from_str(content(&answer)).expect("JSON");
    assert_eq!(told, json!({"a": "b"}));
    for (constraint, wanted) in
        [(json!({"regex": "(ab){2}"}), "abab"), (json!({"grammar": "root ::= \"so\""}), "so")]
    {
        let answer = frontend
            .chat(&ask(json!("a word"), json!({"structured_outputs": constraint})))
            .await
            .ok();
        assert_eq!(content(&answer), wanted);
    }
    let bad = ask(json!("a word"), json!({"structured_outputs": {"regex": "["}}));
    assert_eq!(frontend.chat(&bad).await.status, 400);

    // A server that goes on after the end goes on after stop tokens too; these are held to here.
    let body = |more: Value| ask(json!("stop somewhere"), more);
    let whole =
        frontend.chat(&body(json!({"ignore_eos": true, "return_token_ids": true}))).await.ok();
    let ids: Vec<u64> = whole["choices"][0]["token_ids"]
        .as_array()
        .expect("ids")
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    let stop = ids[4];
    let until = ids.iter().position(|id| *id == stop).expect("it is there") + 1;
    let stopped =
        frontend.chat(&body(json!({"ignore_eos": true, "stop_token_ids": [stop]}))).await.ok();
    assert_eq!(
        (&stopped["usage"]["completion_tokens"], &stopped["choices"][0]["finish_reason"]),
        (&json!(until), &json!("stop"))
    );

    for (field, value) in [
        ("bad_words", json!(["a"])),
        ("prompt_logprobs", json!(1)),
        ("allowed_token_ids", json!([5])),
    ] {
        assert_eq!(frontend.chat(&body(json!({field: value}))).await.refused(400), field);
    }
}

/// A prompt that would have the server wait for ever is refused before it is sent: the name of the
/// image token in a text.
async fn more_image_tokens_than_images_are_refused(frontend: &Server, server: &Sglang) {
    let named = "<|image_pad|>".repeat(40);
    let answer = frontend.chat(&ask(json!([image(DAWN), text(&named)]), json!({}))).await;
    assert_eq!(answer.status, 400, "{}", answer.text);
    server.wait_idle().await;
}

/// A client that leaves ends the work.
async fn a_client_that_leaves_is_told_to_the_server(frontend: &Server, servers: &[Sglang]) {
    let body = ask(json!("go on"), json!({"max_tokens": 4000, "ignore_eos": true, "stream": true}));
    let answer = frontend.open("/v1/chat/completions", &body).await;
    let running = async || {
        let mut all = 0.0;
        for server in servers {
            all += server.gauge("sglang:num_running_reqs").await;
        }
        all
    };
    wait_for("running request", SOON, async || running().await == 1.0).await;
    drop(answer);
    let after = wait_for("abort", SOON, async || running().await == 0.0).await;
    eprintln!("aborted after {after:?}");
}

/// All that a server is told to forget is forgotten here.
async fn a_flushed_cache_is_known_to_be_empty(frontend: &Server, servers: &[Sglang]) {
    let body = ask(json!([image(STORM), text("once more")]), json!({}));
    frontend.chat(&body).await.ok();
    wait_for("blocks", SOON, async || known_blocks(frontend).await > 0).await;
    for server in servers {
        server.wait_idle().await;
        assert_eq!(server.post("/flush_cache", &json!({})).await.status, 200);
    }
    wait_for("empty caches", SOON, async || known_blocks(frontend).await == 0).await;
    let answer = frontend.chat(&body).await;
    assert!(answer.header("x-chiasm-overlap").starts_with("0/"));
    assert_eq!(cached(&answer.ok()), 0);
}

/// One that is killed under a request is replaced by the other, and used again when it is back,
/// with an empty cache.
async fn a_killed_server_is_replaced_and_comes_back(frontend: &Server, servers: &mut [Sglang]) {
    let body = ask(
        json!([image(STORM), text("the quick brown fox")]),
        json!({"max_tokens": 300, "ignore_eos": true}),
    );
    let own = frontend.chat(&body).await;
    let busy = usize::from(own.header("x-chiasm-worker") == "worker_1");
    servers[busy].kill();
    let again = frontend.chat(&body).await;
    assert_eq!(content(&again.ok()), content(&own.ok()));
    assert_eq!(again.header("x-chiasm-worker"), format!("worker_{}", 1 - busy));
    wait_for("the server to be let go", SOON, async || frontend.ready_workers().await == 1).await;
    servers[busy].start();
    servers[busy].wait_healthy().await;
    frontend.wait_ready(2, STARTUP).await;
    let is_exact =
        async || workers(frontend).await.iter().all(|worker| worker["knowledge"] == "exact");
    wait_for("exact knowledge", SOON, is_exact).await;
    assert_eq!(workers(frontend).await[busy]["known_blocks"], 0);
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
    let frontend = before(&environment, "qwen2vl", &[&servers[0], &servers[1]]).await;
    let answers = scenario_run::play_all(&frontend, "m", BLOCK_SIZE, 8).await;
    for worker in workers(&frontend).await {
        assert_eq!(
            (&worker["knowledge"], &worker["condition"]),
            (&json!("exact"), &json!("answers")),
            "{worker}"
        );
    }
    a_server_answers_through_us_as_by_itself(&frontend, &servers[0]).await;
    parts_of_requests_mean_the_same(&frontend).await;
    more_image_tokens_than_images_are_refused(&frontend, &servers[0]).await;
    a_client_that_leaves_is_told_to_the_server(&frontend, &servers).await;
    a_flushed_cache_is_known_to_be_empty(&frontend, &servers).await;
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
    a_killed_server_is_replaced_and_comes_back(&frontend, &mut servers).await;
    for server in &servers {
        server.wait_idle().await;
        assert_eq!(server.post("/flush_cache", &json!({})).await.status, 200);
    }
    // Another life, and caches that were emptied: the same once more.
    wait_for("empty caches", SOON, async || known_blocks(&frontend).await == 0).await;
    assert_eq!(scenario_run::play_all(&frontend, "m", BLOCK_SIZE, 8).await, answers);
    assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0);
}

/// What comes of a prompt with an image, told twice.
async fn family(
    environment: &Environment,
    model: &str,
    flags: &[&str],
) -> (Server, Sglang, Vec<Answer>) {
    let mut server = environment.sglang(model, flags);
    server.wait_healthy().await;
    let frontend = before(environment, model, &[&server]).await;
    let mut answers = Vec::new();
    for content in [
        json!([image(DAWN), text("describe this image")]),
        json!([image(DAWN), image(SNOW), text("two")]),
    ] {
        for _ in 0..2 {
            let before = known_blocks(&frontend).await;
            let answer = frontend.chat(&ask(content.clone(), json!({}))).await;
            if answer.status == 200 {
                // What was stored is told soon after the answer, not before.
                let (held, all) = overlap(&answer);
                let is_told = async || known_blocks(&frontend).await >= before + all - held;
                wait_for("the prompt's blocks", SOON, is_told).await;
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
    let of_families: [(&str, &[&str]); 4] = [
        ("qwen25vl", &[]),
        // Images with tokens of rows among theirs, or with others around them.
        ("pixtral", &[]),
        ("mistral3", &["--mem-fraction-static", "0.3"]),
        ("gemma3", &["--enable-multimodal"]),
    ];
    for (model, flags) in of_families {
        let (frontend, _server, answers) = family(&environment, model, flags).await;
        for (number, answer) in answers.iter().enumerate() {
            let ((held, _), told) = (overlap(answer), answer.ok());
            let prompt = told["usage"]["prompt_tokens"].as_u64().expect("a count");
            assert_eq!(
                cached(&told),
                held.min((prompt - 1) / BLOCK_SIZE) * BLOCK_SIZE,
                "{model} {number}: {told}"
            );
            assert!(number == 0 || held > 0, "{model} {number}");
        }
        assert_eq!(workers(&frontend).await[0]["knowledge"], "exact", "{model}");
        assert_eq!(frontend.metric("chiasm_distrusted_workers_total").await, 0.0, "{model}");
    }

    // It takes images beside text alone.
    let (frontend, _server, answers) = family(&environment, "llava_next", &[]).await;
    answers.iter().for_each(|answer| assert_eq!(answer.refused(400), "messages"));
    frontend.chat(&ask(json!("text alone"), json!({}))).await.ok();
}
