//! Data about tokens: `/tokenize`, `/detokenize`, prompt log probabilities, echoed prompts and
//! skipped caches.

use std::time::Duration;

use crate::support::{Answer, Server, demo_model};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(20);
/// The number of words of a prompt that exceeds the model's context.
const TOO_MANY_WORDS: usize = 20_000;

/// Starts a server with a fast simulated engine.
async fn serve(extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(1, TIMEOUT).await;
    server
}

/// Returns `body` with additional fields.
fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

/// Returns `cached_tokens` of an answer.
fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

#[tokio::test]
async fn skipped_prefix_cache_is_predicted_as_no_overlap() {
    let server = serve(&[]).await;
    let body = with(conversation(), json!({"max_tokens": 4, "tool_choice": "none"}));
    server.chat(&body).await.ok();
    let again = server.chat(&body).await;
    assert!(
        cached(&again.ok()) > 0 && !again.header("x-chiasm-overlap").starts_with("0/"),
        "{}",
        again.text
    );
    let errors = server.metric("chiasm_overlap_error_blocks_total").await;
    for fields in [json!({"skip_reading_prefix_cache": true}), json!({"prompt_logprobs": 0})] {
        let answer = server.chat(&with(body.clone(), fields.clone())).await;
        assert_eq!(cached(&answer.ok()), 0, "{fields}");
        assert!(answer.header("x-chiasm-overlap").starts_with("0/"), "{fields}");
    }
    assert_eq!(server.metric("chiasm_overlap_error_blocks_total").await, errors);
    assert!(
        cached(&server.chat(&with(body, json!({"skip_reading_prefix_cache": false}))).await.ok())
            > 0
    );
}

#[tokio::test]
async fn prompt_logprobs_are_returned_when_requested() {
    let server = serve(&[]).await;
    let fields = json!({
        "prompt_logprobs": 2,
        "return_token_ids": true,
        "max_tokens": 2,
        "tool_choice": "none",
    });
    let chat = server.chat(&with(conversation(), fields.clone())).await.ok();
    let text = json!({"prompt": ["the quick äöü", "t"], "n": 2, "temperature": 1});
    let text = server
        .post("/v1/completions", &with(text, with(fields.clone(), json!({"tool_choice": null}))))
        .await
        .ok();
    let choices = text["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 4);
    assert_eq!(choices[2]["prompt_logprobs"], json!([null]), "a single token has none");
    for answer in [&chat, &choices[0], &choices[1]] {
        let prompt: Vec<u64> = answer["prompt_token_ids"]
            .as_array()
            .expect("ids")
            .iter()
            .filter_map(Value::as_u64)
            .collect();
        let logprobs = answer["prompt_logprobs"].as_array().expect("a list");
        assert_eq!((logprobs.len(), &logprobs[0]), (prompt.len(), &Value::Null));
        for (token, candidates) in prompt.iter().zip(logprobs).skip(1) {
            let own = &candidates[token.to_string()];
            let count = candidates.as_object().map(|map| map.len());
            assert_eq!((own["rank"].as_u64(), count), (Some(1), Some(2)), "{candidates}");
            assert!(
                own["logprob"].as_f64().is_some_and(|logprob| (-1.0..=0.0).contains(&logprob)),
                "{candidates}"
            );
        }
    }
    let texts: String = choices[0]["prompt_logprobs"]
        .as_array()
        .expect("a list")
        .iter()
        .zip(choices[0]["prompt_token_ids"].as_array().expect("ids"))
        .filter_map(|(candidates, token)| candidates[token.to_string()]["decoded_token"].as_str())
        .collect();
    assert_eq!(texts, "he quick äöü", "the last token of a character has its text");
    assert!(
        server
            .chat(&with(conversation(), json!({"tools": null})))
            .await
            .ok()
            .get("prompt_logprobs")
            .is_none()
    );

    let refused = async |fields: Value| {
        server
            .chat(&with(conversation(), with(json!({"tool_choice": "none"}), fields)))
            .await
            .refused(400)
    };
    assert_eq!(refused(json!({"prompt_logprobs": 2, "stream": true})).await, "prompt_logprobs");
    let plain = json!({"tool_choice": "none", "max_tokens": 4});
    let stream_choices = async |fields: Value| {
        let answer = server.chat(&with(conversation(), with(plain.clone(), fields))).await;
        let chunks = answer
            .chunks()
            .into_iter()
            .filter(|chunk| chunk["choices"][0]["delta"]["content"] != "");
        chunks.map(|chunk| chunk["choices"].clone()).collect::<Vec<_>>()
    };
    let with_zero = stream_choices(json!({"prompt_logprobs": 0, "stream": true})).await;
    let without = stream_choices(json!({"stream": true})).await;
    assert_eq!(with_zero, without, "streams have no prompt log probabilities");
    assert_eq!(
        refused(json!({"thinking_token_budget": 5})).await,
        "thinking_token_budget",
        "no reasoning parser"
    );
    let repetition = json!({"max_pattern_size": 4, "min_count": 3});
    let fields = with(plain.clone(), json!({"repetition_detection": repetition}));
    server.chat(&with(conversation(), fields)).await.ok();
    let many = json!({"prompt": vec![5; 7000], "prompt_logprobs": 20, "n": 2, "temperature": 1});
    assert_eq!(server.post("/v1/completions", &many).await.refused(400), "prompt_logprobs");
}

/// Returns the first choice of a completion. The chunks of a stream are concatenated.
async fn complete(server: &Server, body: &Value, stream: bool) -> Value {
    let answer =
        server.post("/v1/completions", &with(body.clone(), json!({"stream": stream}))).await;
    if !stream {
        return answer.ok()["choices"][0].clone();
    }
    let mut text = String::new();
    let mut lists = serde_json::Map::new();
    for chunk in answer.chunks() {
        let choice = &chunk["choices"][0];
        text.push_str(choice["text"].as_str().expect("text"));
        for (name, more) in choice["logprobs"].as_object().into_iter().flatten() {
            let list =
                lists.entry(name).or_insert_with(|| json!([])).as_array_mut().expect("a list");
            list.extend(more.as_array().expect("a list").iter().cloned());
        }
    }
    json!({"text": text, "logprobs": lists})
}

#[tokio::test]
async fn echo_prepends_the_prompt() {
    let server = serve(&[]).await;
    let prompt = "the quick äöü";
    let tokens = server.post("/tokenize", &json!({"prompt": prompt})).await.ok()["tokens"].clone();
    let count = tokens.as_array().expect("ids").len();
    let base = json!({"max_tokens": 4, "logprobs": 1, "skip_reading_prefix_cache": true});
    let alone = complete(&server, &with(base.clone(), json!({"prompt": prompt})), false).await;
    let answer = alone["text"].as_str().expect("text");
    for (stream, given) in
        [(false, json!(prompt)), (false, tokens.clone()), (true, json!(prompt)), (true, tokens)]
    {
        let body = with(base.clone(), json!({"prompt": given, "echo": true}));
        let echoed = complete(&server, &body, stream).await;
        assert_eq!(echoed["text"], format!("{prompt}{answer}"));
        let list = |name: &str| echoed["logprobs"][name].as_array().expect("a list").clone();
        assert_eq!(list("tokens").len(), count + 4);
        assert_eq!(
            (&list("token_logprobs")[0], &list("top_logprobs")[0]),
            (&Value::Null, &Value::Null)
        );
        assert!(list("token_logprobs")[1..].iter().all(Value::is_number));
        assert_eq!(
            list("tokens")[count..],
            *alone["logprobs"]["tokens"].as_array().expect("tokens")
        );
        assert!(list("text_offset").is_sorted_by_key(|offset| offset.as_u64()));

        let only = complete(&server, &with(body.clone(), json!({"max_tokens": 0})), stream).await;
        assert_eq!(only["text"], prompt);
        assert_eq!(only["logprobs"]["tokens"], json!(list("tokens")[..count]));
        let ids = json!({"return_token_ids": true, "logprobs": null});
        assert_eq!(
            complete(&server, &with(body, ids), stream).await["text"],
            answer,
            "with token ids, the text has no prompt"
        );
    }
    let none = json!({"prompt": prompt, "max_tokens": 0});
    assert_eq!(server.post("/v1/completions", &none).await.refused(400), "max_tokens");
    assert_eq!(
        server.chat(&with(conversation(), json!({"echo": true, "tools": null}))).await.refused(400),
        "echo"
    );
}

/// Returns a conversation with a picture and a function.
fn conversation() -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    let content = json!([
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what is this?"},
    ]);
    let function =
        json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    json!({"model": "m", "messages": [{"role": "user", "content": content}], "tools": [function]})
}

#[tokio::test]
async fn tokenized_conversation_matches_engine_prompt() {
    let server = serve(&[]).await;
    let context =
        server.client.get(format!("{}/v1/models", server.url)).send().await.expect("models");
    let context = crate::support::json(context).await["data"][0]["max_model_len"].clone();
    for changes in [
        json!({}),
        json!({"add_generation_prompt": false}),
        json!({"mm_processor_kwargs": {"max_pixels": 50176}, "chat_template_kwargs": {"a": 1}}),
    ] {
        let body = with(conversation(), changes);
        let tokenized = server.post("/tokenize", &body).await.ok();
        let request =
            with(body, json!({"return_token_ids": true, "max_tokens": 1, "tool_choice": "none"}));
        let answer = server.chat(&request).await.ok();
        assert_eq!(tokenized["tokens"], answer["prompt_token_ids"]);
        assert_eq!(tokenized["count"], answer["usage"]["prompt_tokens"]);
        assert_eq!(
            (&tokenized["max_model_len"], &tokenized["token_strs"]),
            (&context, &Value::Null)
        );
    }
}

#[tokio::test]
async fn text_survives_tokenize_then_detokenize() {
    let server = serve(&[]).await;
    let text = "the quick fox äöü 日本 🙂<|im_end|>";
    let tokenized =
        server.post("/tokenize", &json!({"prompt": text, "return_token_strs": true})).await.ok();
    let strings: Vec<&str> = tokenized["token_strs"]
        .as_array()
        .expect("strings")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert_eq!(tokenized["count"], strings.len());
    assert!(
        strings.starts_with(&["t", "h", "e", "Ġ", "q"]) && strings.ends_with(&["<|im_end|>"]),
        "{strings:?}"
    );
    let body = json!({"model": "m", "tokens": tokenized["tokens"]});
    let detokenized = server.post("/detokenize", &body).await.ok();
    assert_eq!(detokenized, json!({"prompt": text}));
    assert_eq!(
        server.post("/detokenize", &json!({"tokens": []})).await.ok(),
        json!({"prompt": ""})
    );
    assert_eq!(server.post("/tokenize", &json!({"prompt": ""})).await.ok()["count"], 0);

    // Prompts over the context length are counted, too, so that clients can check whether they fit.
    let long = "the ".repeat(TOO_MANY_WORDS);
    let messages = json!([{"role": "user", "content": long}]);
    for body in [json!({"prompt": long}), json!({"messages": messages})] {
        let tokenized = server.post("/tokenize", &body).await.ok();
        let count = tokenized["count"].as_u64();
        assert!(count > tokenized["max_model_len"].as_u64(), "{count:?}");
    }
    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"detokenize\",status=\"200\"}").await,
        2.0
    );
}

#[tokio::test]
async fn invalid_token_requests_name_the_field() {
    let server = serve(&["--api-key", "k"]).await;
    let post = async |path: &str, body: Value, key: &str| {
        let request = server
            .client
            .post(format!("{}{path}", server.url))
            .header("content-type", "application/json");
        let request =
            request.header("authorization", format!("Bearer {key}")).body(body.to_string());
        Answer::read(request.send().await.expect("an answer")).await
    };
    for (path, body, status, param) in [
        ("/tokenize", json!({"prompt": 5}), 400, "prompt"),
        ("/tokenize", json!({"model": "other", "prompt": "a"}), 404, "model"),
        (
            "/tokenize",
            json!({"messages": [{"role": "nobody", "content": "a"}]}),
            400,
            "messages[0].role",
        ),
        ("/detokenize", json!({"tokens": [1, u32::MAX]}), 400, "tokens"),
        ("/detokenize", json!({"tokens": [1, -1]}), 400, "tokens"),
        ("/detokenize", json!({}), 400, "tokens"),
    ] {
        assert_eq!(post(path, body.clone(), "k").await.refused(status), param, "{body}");
        assert_eq!(post(path, body, "wrong").await.status, 401);
    }
}
