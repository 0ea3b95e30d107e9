//! Requests that are answered the same by `vllm serve`, and that they are.

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

/// Requests that are answered the same by `vllm serve`: greedy, 16 tokens.
pub(crate) fn comparable_requests() -> Vec<Value> {
    let ask = |content: Value| {
        json!({
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        })
    };
    let mut with_system = ask(json!("the quick brown fox"));
    with_system["messages"] = json!([
        {"role": "system", "content": "you are a helpful assistant"},
        {"role": "user", "content": "describe the lazy dog briefly"},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": [text("and äöü 日本 🙂?")]},
    ]);
    let mut small = ask(json!([image(DUSK), text("describe this image briefly.")]));
    small["mm_processor_kwargs"] = json!({"max_pixels": 50176, "min_pixels": 3136});
    let mut penalised = ask(json!("the quick brown fox jumps"));
    penalised["repetition_penalty"] = json!(1.3);
    penalised["min_tokens"] = json!(4);
    vec![
        ask(json!("the quick brown fox jumps over the lazy dog")),
        with_system,
        ask(json!([image(DAWN), text("describe this image briefly.")])),
        ask(json!([text("describe"), image(SNOW), text("and"), image(NIGHT)])),
        ask(json!([image(DAWN), image(DAWN), text("the same image")])),
        small,
        penalised,
    ]
}

/// Requests that every image family takes, the last with `mm_processor_kwargs` if there are any.
pub(crate) fn family_requests(kwargs: &Value) -> Vec<Value> {
    let ask = |content: Value| {
        json!({
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        })
    };
    let mut requests = vec![
        ask(json!("the quick brown fox jumps over the lazy dog")),
        ask(json!([image(DAWN), text("describe this image briefly.")])),
        ask(json!([text("describe"), image(SNOW), text("and"), image(NIGHT)])),
        ask(json!([image(DAWN), image(DAWN), text("the same image")])),
        ask(json!([text("what is in"), image(DUSK)])),
    ];
    if kwargs.as_object().is_some_and(|kwargs| !kwargs.is_empty()) {
        let mut changed = ask(json!([image(DUSK), text("describe this image briefly.")]));
        changed["mm_processor_kwargs"] = kwargs.clone();
        requests.push(changed);
    }
    requests
}

/// New token ids and prompt token ids of an answer.
pub(crate) fn ids(answer: &Value) -> (Value, Value) {
    let new = answer["choices"][0]["token_ids"].clone();
    assert!(new.as_array().is_some_and(|ids| !ids.is_empty()), "{answer}");
    (new, answer["prompt_token_ids"].clone())
}

pub(crate) async fn answers_are_those_of_vllm_serve(
    server: &Server,
    requests: &[Value],
    reference: &[Value],
) {
    for (request, theirs) in requests.iter().zip(reference) {
        let ours = server.chat(request).await.ok();
        let ((our_new, our_prompt), (new, prompt)) = (ids(&ours), ids(theirs));
        assert_eq!(our_prompt, prompt, "prompt tokens of {}", request["messages"]);
        assert_eq!(our_new, new, "new tokens of {}", request["messages"]);
        let of_media = |answer: &Value| {
            answer["usage"]["prompt_tokens_details"].get("multimodal_tokens").cloned()
        };
        // Older versions do not tell.
        if let Some(told) = of_media(theirs) {
            assert_eq!(
                of_media(&ours).unwrap_or_default(),
                told,
                "tokens of media in {}",
                request["messages"]
            );
        }
    }
}
