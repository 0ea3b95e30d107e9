//! What is told of a prompt's tokens: `/tokenize` and `/detokenize`.

use std::time::Duration;

use crate::support::{Answer, Server, demo_model};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
/// Words that no simulated engine has room for.
const MANY: usize = 20_000;

/// A server before a fast simulated engine.
async fn serve(extra: &[&str]) -> Server {
    let model = demo_model().display().to_string();
    let mut args =
        vec![model.as_str(), "--served-model-name", "m", "--sim", "1", "--sim-speedup", "1000"];
    args.extend(extra);
    let server = Server::start(&args);
    server.wait_ready(1, SOON).await;
    server
}

fn with(mut body: Value, fields: Value) -> Value {
    let fields = fields.as_object().expect("an object").clone();
    body.as_object_mut().expect("an object").extend(fields);
    body
}

/// `cached_tokens` of an answer.
fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

#[tokio::test]
async fn who_skips_the_prefix_cache_has_the_whole_prompt_computed_and_nothing_is_predicted_for_it()
{
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
        let all = server.chat(&with(body.clone(), fields.clone())).await;
        assert_eq!(cached(&all.ok()), 0, "{fields}");
        assert!(all.header("x-chiasm-overlap").starts_with("0/"), "{fields}");
    }
    assert_eq!(server.metric("chiasm_overlap_error_blocks_total").await, errors);
    assert!(
        cached(&server.chat(&with(body, json!({"skip_reading_prefix_cache": false}))).await.ok())
            > 0
    );
}

#[tokio::test]
async fn prompt_tokens_have_log_probabilities_where_they_are_asked_for() {
    let server = serve(&[]).await;
    let fields = json!({"prompt_logprobs": 2, "return_token_ids": true, "max_tokens": 2, "tool_choice": "none"});
    let chat = server.chat(&with(conversation(), fields.clone())).await.ok();
    let text = json!({"prompt": ["the quick äöü", "t"], "n": 2, "temperature": 1});
    let text = server
        .post("/v1/completions", &with(text, with(fields.clone(), json!({"tool_choice": null}))))
        .await
        .ok();
    let choices = text["choices"].as_array().expect("choices");
    assert_eq!(choices.len(), 4);
    assert_eq!(choices[2]["prompt_logprobs"], json!([null]), "of one token there is none");
    for told in [&chat, &choices[0], &choices[1]] {
        let prompt: Vec<u64> = told["prompt_token_ids"]
            .as_array()
            .expect("ids")
            .iter()
            .filter_map(Value::as_u64)
            .collect();
        let logprobs = told["prompt_logprobs"].as_array().expect("a list");
        assert_eq!((logprobs.len(), &logprobs[0]), (prompt.len(), &Value::Null));
        for (token, candidates) in prompt.iter().zip(logprobs).skip(1) {
            let (own, count) =
                (&candidates[token.to_string()], candidates.as_object().map(|map| map.len()));
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
    assert_eq!(
        texts, "he quick äöü",
        "the text of a character in several tokens is that of its last one"
    );
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
    let said = async |fields: Value| {
        let answer = server.chat(&with(conversation(), with(plain.clone(), fields))).await;
        let chunks = answer
            .chunks()
            .into_iter()
            .filter(|chunk| chunk["choices"][0]["delta"]["content"] != "");
        chunks.map(|chunk| chunk["choices"].clone()).collect::<Vec<_>>()
    };
    let untold = said(json!({"prompt_logprobs": 0, "stream": true})).await;
    assert_eq!(untold, said(json!({"stream": true})).await, "a stream does not tell of them");
    assert_eq!(
        refused(json!({"thinking_token_budget": 5})).await,
        "thinking_token_budget",
        "there is no parser"
    );
    let circle = json!({"max_pattern_size": 4, "min_count": 3});
    server
        .chat(&with(conversation(), with(plain.clone(), json!({"repetition_detection": circle}))))
        .await
        .ok();
    let many = json!({"prompt": vec![5; 7000], "prompt_logprobs": 20, "n": 2, "temperature": 1});
    assert_eq!(server.post("/v1/completions", &many).await.refused(400), "prompt_logprobs");
}

/// A completion, whole or as what its chunks say together.
async fn complete(server: &Server, body: &Value, stream: bool) -> Value {
    let answer =
        server.post("/v1/completions", &with(body.clone(), json!({"stream": stream}))).await;
    if !stream {
        return answer.ok()["choices"][0].clone();
    }
    let (mut text, mut lists) = (String::new(), serde_json::Map::new());
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
async fn an_echoed_prompt_begins_its_answer_whole_and_in_chunks() {
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
            "ids stand for the prompt"
        );
    }
    let none = json!({"prompt": prompt, "max_tokens": 0});
    assert_eq!(server.post("/v1/completions", &none).await.refused(400), "max_tokens");
    assert_eq!(
        server.chat(&with(conversation(), json!({"echo": true, "tools": null}))).await.refused(400),
        "echo"
    );
}

/// A conversation with a picture and a function.
fn conversation() -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(DAWN.jpeg));
    let content = json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is this?"}]);
    let function =
        json!({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}});
    json!({"model": "m", "messages": [{"role": "user", "content": content}], "tools": [function]})
}

#[tokio::test]
async fn the_tokens_of_a_conversation_are_those_that_an_engine_gets() {
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
        let told = server.post("/tokenize", &body).await.ok();
        let asked =
            with(body, json!({"return_token_ids": true, "max_tokens": 1, "tool_choice": "none"}));
        let answered = server.chat(&asked).await.ok();
        assert_eq!(told["tokens"], answered["prompt_token_ids"]);
        assert_eq!(told["count"], answered["usage"]["prompt_tokens"]);
        assert_eq!((&told["max_model_len"], &told["token_strs"]), (&context, &Value::Null));
    }
}

#[tokio::test]
async fn a_text_becomes_tokens_with_their_names_and_is_made_of_them_again() {
    let server = serve(&[]).await;
    let text = "the quick fox äöü 日本 🙂<|im_end|>";
    let told =
        server.post("/tokenize", &json!({"prompt": text, "return_token_strs": true})).await.ok();
    let names: Vec<&str> =
        told["token_strs"].as_array().expect("names").iter().filter_map(Value::as_str).collect();
    assert_eq!(told["count"], names.len());
    assert!(
        names.starts_with(&["t", "h", "e", "Ġ", "q"]) && names.ends_with(&["<|im_end|>"]),
        "{names:?}"
    );
    let back =
        server.post("/detokenize", &json!({"model": "m", "tokens": told["tokens"]})).await.ok();
    assert_eq!(back, json!({"prompt": text}));
    assert_eq!(
        server.post("/detokenize", &json!({"tokens": []})).await.ok(),
        json!({"prompt": ""})
    );
    assert_eq!(server.post("/tokenize", &json!({"prompt": ""})).await.ok()["count"], 0);

    // Whoever asks whether a prompt fits is told, also if it does not.
    let long = "the ".repeat(MANY);
    let told = server.post("/tokenize", &json!({"prompt": long})).await.ok();
    assert!(told["count"].as_u64() > told["max_model_len"].as_u64(), "{}", told["count"]);
    let told = server
        .post("/tokenize", &json!({"messages": [{"role": "user", "content": long}]}))
        .await
        .ok();
    assert!(told["count"].as_u64() > told["max_model_len"].as_u64(), "{}", told["count"]);
    assert_eq!(
        server.metric("chiasm_requests_total{endpoint=\"detokenize\",status=\"200\"}").await,
        2.0
    );
}

#[tokio::test]
async fn what_is_wrong_names_its_field_and_who_has_no_key_is_told_nothing() {
    let server = serve(&["--api-key", "k"]).await;
    let post = async |path: &str, body: Value, key: &str| {
        let request = server
            .client
            .post(format!("{}{path}", server.url))
            .header("content-type", "application/json");
        let request =
            request.header("authorization", format!("Bearer {key}")).body(body.to_string());
        Answer::of(request.send().await.expect("an answer")).await
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
