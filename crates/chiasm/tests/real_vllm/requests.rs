//! Requests to compare with `vllm serve`, and the comparison.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, DUSK, NIGHT, Picture, SNOW};
use serde_json::{Value, json};

use crate::support::Server;

pub(crate) fn image(picture: Picture) -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
    json!({"type": "image_url", "image_url": {"url": url}})
}

pub(crate) fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Returns a greedy request to `model`, which also asks for token ids.
pub(crate) fn greedy_request(model: &str, content: &Value, max_tokens: u32) -> Value {
    json!({
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "return_token_ids": true,
    })
}

/// Returns greedy requests of 16 tokens, whose answers don't depend on the server.
pub(crate) fn comparable_requests() -> Vec<Value> {
    let request = |content: Value| greedy_request("m", &content, 16);
    let mut with_system = request(json!("the quick brown fox"));
    with_system["messages"] = json!([
        {"role": "system", "content": "you are a helpful assistant"},
        {"role": "user", "content": "describe the lazy dog briefly"},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": [text("and äöü 日本 🙂?")]},
    ]);
    let mut small = request(json!([image(DUSK), text("describe this image briefly.")]));
    small["mm_processor_kwargs"] = json!({"max_pixels": 50176, "min_pixels": 3136});
    let mut penalised = request(json!("the quick brown fox jumps"));
    penalised["repetition_penalty"] = json!(1.3);
    penalised["min_tokens"] = json!(4);
    vec![
        request(json!("the quick brown fox jumps over the lazy dog")),
        with_system,
        request(json!([image(DAWN), text("describe this image briefly.")])),
        request(json!([text("describe"), image(SNOW), text("and"), image(NIGHT)])),
        request(json!([image(DAWN), image(DAWN), text("the same image")])),
        small,
        penalised,
    ]
}

/// Returns requests that every image family supports. The last one has `mm_processor_kwargs` if
/// `kwargs` is not empty.
pub(crate) fn family_requests(kwargs: &Value) -> Vec<Value> {
    let request = |content: Value| greedy_request("m", &content, 12);
    let mut requests = vec![
        request(json!("the quick brown fox jumps over the lazy dog")),
        request(json!([image(DAWN), text("describe this image briefly.")])),
        request(json!([text("describe"), image(SNOW), text("and"), image(NIGHT)])),
        request(json!([image(DAWN), image(DAWN), text("the same image")])),
        request(json!([text("what is in"), image(DUSK)])),
    ];
    if kwargs.as_object().is_some_and(|kwargs| !kwargs.is_empty()) {
        let mut changed = request(json!([image(DUSK), text("describe this image briefly.")]));
        changed["mm_processor_kwargs"] = kwargs.clone();
        requests.push(changed);
    }
    requests
}

/// Returns the new token ids and the prompt token ids of an answer.
pub(crate) fn ids(answer: &Value) -> (Value, Value) {
    let new = answer["choices"][0]["token_ids"].clone();
    assert!(new.as_array().is_some_and(|ids| !ids.is_empty()), "{answer}");
    (new, answer["prompt_token_ids"].clone())
}

/// Asserts that the server gives the answers of `reference`: the same prompt tokens and the same
/// new tokens.
pub(crate) async fn assert_answers_match(server: &Server, requests: &[Value], reference: &[Value]) {
    for (request, theirs) in requests.iter().zip(reference) {
        let ours = server.chat(request).await.ok();
        let (our_new, our_prompt) = ids(&ours);
        let (new, prompt) = ids(theirs);
        assert_eq!(our_prompt, prompt, "prompt tokens of {}", request["messages"]);
        assert_eq!(our_new, new, "new tokens of {}", request["messages"]);
        let media_tokens = |answer: &Value| {
            answer["usage"]["prompt_tokens_details"].get("multimodal_tokens").cloned()
        };
        // Older versions don't report this count.
        if let Some(expected) = media_tokens(theirs) {
            assert_eq!(
                media_tokens(&ours).unwrap_or_default(),
                expected,
                "tokens of media in {}",
                request["messages"]
            );
        }
    }
}
