//! Log probabilities in the formats of the two completion endpoints.

use chiasm_backend::{PromptLogprobs, TokenLogprob};
use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use super::prompt_logprobs::{MAX_CONTEXT_TOKENS, MIN_LOGPROB, PromptLogprobsBody, token_text};

/// Returns a log probability with the fewest digits that identify its 32-bit number. As a 64-bit
/// number it would get nine more digits without meaning.
fn shortest(logprob: f32) -> Value {
    logprob.max(MIN_LOGPROB).to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// The log probabilities of a chat: `{"content": [{token, logprob, bytes, top_logprobs}]}`.
pub(super) struct ChatLogprobs<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) tokens: &'a [TokenLogprob],
}

#[derive(Serialize)]
struct ChatToken<'a> {
    token: String,
    /// The log probability, which serializes with the fewest digits that identify the 32-bit
    /// number.
    logprob: f32,
    /// The token's own bytes, even if they are a part of a character.
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Candidates<'a>>,
}

/// Returns the JSON of a token with its alternatives, in the format of chats and responses.
pub fn token_json(
    tokenizer: &Tokenizer,
    logprob: &TokenLogprob,
) -> serde_json::Result<Box<RawValue>> {
    let TokenLogprob { token, logprob, top: candidates } = logprob;
    to_raw_value(&ChatToken::new(
        tokenizer,
        *token,
        *logprob,
        Some(Candidates { tokenizer, candidates }),
    ))
}

struct Candidates<'a> {
    tokenizer: &'a Tokenizer,
    candidates: &'a [(TokenId, f32)],
}

impl<'a> ChatToken<'a> {
    fn new(
        tokenizer: &Tokenizer,
        token: TokenId,
        logprob: f32,
        top_logprobs: Option<Candidates<'a>>,
    ) -> Self {
        let text = tokenizer.decode(&[token], false);
        let bytes = tokenizer.token_bytes(token);
        Self { token: text, logprob: logprob.max(MIN_LOGPROB), bytes, top_logprobs }
    }
}

impl Serialize for ChatLogprobs<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        struct Content<'a>(&'a Tokenizer, &'a [TokenLogprob]);
        impl Serialize for Content<'_> {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                let Self(tokenizer, tokens) = *self;
                to.collect_seq(tokens.iter().map(
                    |TokenLogprob { token, logprob, top: candidates }| {
                        ChatToken::new(
                            tokenizer,
                            *token,
                            *logprob,
                            Some(Candidates { tokenizer, candidates }),
                        )
                    },
                ))
            }
        }
        let mut object = to.serialize_struct("logprobs", 1)?;
        object.serialize_field("content", &Content(self.tokenizer, self.tokens))?;
        object.end()
    }
}

impl Serialize for Candidates<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { tokenizer, candidates } = self;
        to.collect_seq(
            candidates
                .iter()
                .map(|&(token, logprob)| ChatToken::new(tokenizer, token, logprob, None)),
        )
    }
}

/// The state of a choice's log probabilities between two chunks.
#[derive(Default)]
pub struct LogprobState {
    /// The number of characters of all tokens so far.
    characters: usize,
    /// The last new tokens, which may share a character with the next token.
    context: Vec<TokenId>,
}

/// The log probabilities of a completion: parallel lists.
#[derive(Default)]
pub struct LogprobLists {
    texts: Vec<String>,
    logprobs: Vec<Value>,
    tops: Vec<Value>,
}

impl LogprobLists {
    /// Adds the tokens of a prompt, each with at most `top` alternatives. The first token has no
    /// log probability.
    pub fn add_prompt(
        &mut self,
        tokenizer: &Tokenizer,
        tokens: &[TokenId],
        logprobs: &PromptLogprobs,
        top: u32,
    ) {
        let body = PromptLogprobsBody { tokenizer, logprobs };
        for (position, &token) in tokens.iter().enumerate() {
            let mut candidates =
                position.checked_sub(1).map_or_else(Vec::new, |position| body.candidates(position));
            // The token itself is always included.
            candidates.truncate(top as usize + 1);
            let Some((_, own)) = candidates.first() else {
                self.push(tokenizer.decode(&[token], false), Value::Null, Value::Null);
                continue;
            };
            let text = own.decoded_token.clone();
            let logprob = shortest(own.logprob);
            let top = candidates
                .into_iter()
                .map(|(_, candidate)| (candidate.decoded_token, shortest(candidate.logprob)));
            self.push(text, logprob, Value::Object(top.collect()));
        }
    }

    /// Adds new tokens.
    pub(super) fn add(
        &mut self,
        tokenizer: &Tokenizer,
        tokens: &[TokenLogprob],
        state: &mut LogprobState,
    ) {
        for chosen in tokens {
            let text = |token: TokenId| token_text(tokenizer, token, &state.context);
            let mut top: Map<String, Value> = chosen
                .top
                .iter()
                .map(|&(token, logprob)| (text(token), shortest(logprob)))
                .collect();
            // The chosen token is always included, so there may be one entry more than requested.
            top.entry(text(chosen.token)).or_insert(shortest(chosen.logprob));
            self.push(text(chosen.token), shortest(chosen.logprob), Value::Object(top));
            let surplus = (state.context.len() + 1).saturating_sub(MAX_CONTEXT_TOKENS);
            state.context.drain(..surplus);
            state.context.push(chosen.token);
        }
    }

    fn push(&mut self, text: String, logprob: Value, top: Value) {
        self.texts.push(text);
        self.logprobs.push(logprob);
        self.tops.push(top);
    }

    /// Returns the JSON object, whose text offsets continue from `state`.
    pub(super) fn finish(self, state: &mut LogprobState) -> Value {
        let Self { texts, logprobs, tops } = self;
        let mut offsets = Vec::with_capacity(texts.len());
        for text in &texts {
            offsets.push(state.characters);
            state.characters += text.chars().count();
        }
        json!({
            "text_offset": offsets,
            "token_logprobs": logprobs,
            "tokens": texts,
            "top_logprobs": tops,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprob_has_fewest_exact_digits() {
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
            assert_eq!(
                serde_json::to_string(&logprob.max(MIN_LOGPROB)).unwrap(),
                shown,
                "in chats"
            );
            assert_eq!(
                value.as_f64().map(|value| value as f32),
                Some(logprob.max(MIN_LOGPROB)),
                "the same number"
            );
        }
    }
}
