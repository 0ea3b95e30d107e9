//! Log probabilities in the shapes of the two endpoints.

use chiasm_backend::TokenLogprob;
use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde_json::{Map, Value, json};

/// JSON has no infinity; vLLM and OpenAI write this instead.
const LOWEST: f32 = -9999.0;

/// Chat: `{"content": [{token, logprob, bytes, top_logprobs}]}`. `bytes` are the token's own, also of half a character.
pub(super) fn chat(tokenizer: &Tokenizer, tokens: &[TokenLogprob]) -> Value {
    let entry = |token: TokenId, logprob: f32| {
        json!({
            "token": tokenizer.decode(&[token], false),
            "logprob": logprob.max(LOWEST),
            "bytes": tokenizer.token_bytes(token),
        })
    };
    let content: Vec<Value> = tokens
        .iter()
        .map(|chosen| {
            let mut content = entry(chosen.token, chosen.logprob);
            content["top_logprobs"] = chosen.top.iter().map(|&(token, logprob)| entry(token, logprob)).collect();
            content
        })
        .collect();
    json!({"content": content})
}

/// Completions: parallel lists. `offset` counts the characters that came before, and is moved on.
pub(super) fn completion(tokenizer: &Tokenizer, tokens: &[TokenLogprob], offset: &mut usize) -> Value {
    let text = |token: TokenId| tokenizer.decode(&[token], false);
    let mut offsets = Vec::with_capacity(tokens.len());
    let mut texts = Vec::with_capacity(tokens.len());
    for chosen in tokens {
        let token = text(chosen.token);
        offsets.push(*offset);
        *offset += token.chars().count();
        texts.push(token);
    }
    let tops: Vec<Value> = tokens
        .iter()
        .map(|chosen| {
            let mut top: Map<String, Value> =
                chosen.top.iter().map(|&(token, logprob)| (text(token), json!(logprob.max(LOWEST)))).collect();
            // The chosen token is always told, so there may be one more than asked for.
            top.entry(text(chosen.token)).or_insert(json!(chosen.logprob.max(LOWEST)));
            Value::Object(top)
        })
        .collect();
    json!({
        "text_offset": offsets,
        "token_logprobs": tokens.iter().map(|chosen| chosen.logprob.max(LOWEST)).collect::<Vec<_>>(),
        "tokens": texts,
        "top_logprobs": tops,
    })
}
