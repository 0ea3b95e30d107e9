//! Log probabilities in the shapes of the two endpoints.

use chiasm_backend::TokenLogprob;
use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde_json::{Map, Value, json};

/// JSON has no infinity; vLLM and OpenAI write this instead.
pub(super) const LOWEST: f32 = -9999.0;

/// A log probability in as few digits as tell it from all others. As a 64-bit number it would get nine more that it does not have.
fn shortest(logprob: f32) -> Value {
    logprob.max(LOWEST).to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Chat: `{"content": [{token, logprob, bytes, top_logprobs}]}`. `bytes` are the token's own, also of half a character.
pub(super) fn chat(tokenizer: &Tokenizer, tokens: &[TokenLogprob]) -> Value {
    let entry = |token: TokenId, logprob: f32| {
        json!({
            "token": tokenizer.decode(&[token], false),
            "logprob": shortest(logprob),
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
                chosen.top.iter().map(|&(token, logprob)| (text(token), shortest(logprob))).collect();
            // The chosen token is always told, so there may be one more than asked for.
            top.entry(text(chosen.token)).or_insert(shortest(chosen.logprob));
            Value::Object(top)
        })
        .collect();
    json!({
        "text_offset": offsets,
        "token_logprobs": tokens.iter().map(|chosen| shortest(chosen.logprob)).collect::<Vec<_>>(),
        "tokens": texts,
        "top_logprobs": tops,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_no_more_digits_than_they_need() {
        for (logprob, shown) in [
            (-0.1, "-0.1"),
            (-1.234_567_8, "-1.2345678"),
            (-2.345e-7, "-2.345e-7"),
            (0.0, "0.0"),
            (-12.5, "-12.5"),
            (f32::NEG_INFINITY, "-9999.0"),
        ] {
            let value = shortest(logprob);
            assert_eq!(value.to_string(), shown);
            assert_eq!(value.as_f64().map(|value| value as f32), Some(logprob.max(LOWEST)), "the same number");
        }
    }
}
