//! Log probabilities in the shapes of the two endpoints.

use chiasm_backend::{PromptLogprobs, TokenLogprob};
use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use super::prompt_logprobs::{LOWEST, MAX_CONTEXT, PromptLogprobsBody, text_of};

/// A log probability in as few digits as tell it from all others. As a 64-bit number it would get
/// nine more that it does not have.
fn shortest(logprob: f32) -> Value {
    logprob.max(LOWEST).to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// Chat: `{"content": [{token, logprob, bytes, top_logprobs}]}`.
pub(super) struct ChatLogprobs<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) tokens: &'a [TokenLogprob],
}

#[derive(Serialize)]
struct ChatToken<'a> {
    token: String,
    /// Written in as few digits as tell it from all other 32-bit numbers.
    logprob: f32,
    /// The token's own, also of half a character.
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Candidates<'a>>,
}

/// Returns the JSON of a token with its alternatives, as chats and responses have it.
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
        let (text, bytes) = (tokenizer.decode(&[token], false), tokenizer.token_bytes(token));
        Self { token: text, logprob: logprob.max(LOWEST), bytes, top_logprobs }
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

/// The state of one choice after the lists before.
#[derive(Default)]
pub struct Told {
    /// Characters of all tokens.
    characters: usize,
    /// The last new tokens, which the next one may share a character with.
    last: Vec<TokenId>,
}

/// Completions: parallel lists.
#[derive(Default)]
pub struct Lists {
    texts: Vec<String>,
    logprobs: Vec<Value>,
    tops: Vec<Value>,
}

impl Lists {
    /// Adds the tokens of a prompt, the first of which has no log probability, with at most `top`
    /// alternatives to each.
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
            // The token itself is always told.
            candidates.truncate(top as usize + 1);
            let Some((_, own)) = candidates.first() else {
                self.push(tokenizer.decode(&[token], false), Value::Null, Value::Null);
                continue;
            };
            let (text, logprob) = (own.decoded_token.clone(), shortest(own.logprob));
            let top = candidates
                .into_iter()
                .map(|(_, candidate)| (candidate.decoded_token, shortest(candidate.logprob)));
            self.push(text, logprob, Value::Object(top.collect()));
        }
    }

    /// Adds new tokens.
    pub(super) fn add(&mut self, tokenizer: &Tokenizer, tokens: &[TokenLogprob], told: &mut Told) {
        for chosen in tokens {
            let text = |token: TokenId| text_of(tokenizer, token, &told.last);
            let mut top: Map<String, Value> = chosen
                .top
                .iter()
                .map(|&(token, logprob)| (text(token), shortest(logprob)))
                .collect();
            // The chosen token is always told, so there may be one more than asked for.
            top.entry(text(chosen.token)).or_insert(shortest(chosen.logprob));
            self.push(text(chosen.token), shortest(chosen.logprob), Value::Object(top));
            told.last.drain(..(told.last.len() + 1).saturating_sub(MAX_CONTEXT));
            told.last.push(chosen.token);
        }
    }

    fn push(&mut self, text: String, logprob: Value, top: Value) {
        self.texts.push(text);
        self.logprobs.push(logprob);
        self.tops.push(top);
    }

    /// The object, which goes on from what was told before.
    pub(super) fn finish(self, told: &mut Told) -> Value {
        let Self { texts, logprobs, tops } = self;
        let mut offsets = Vec::with_capacity(texts.len());
        for text in &texts {
            offsets.push(told.characters);
            told.characters += text.chars().count();
        }
        json!({"text_offset": offsets, "token_logprobs": logprobs, "tokens": texts, "top_logprobs": tops})
    }
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
            assert_eq!(serde_json::to_string(&logprob.max(LOWEST)).unwrap(), shown, "in chats");
            assert_eq!(
                value.as_f64().map(|value| value as f32),
                Some(logprob.max(LOWEST)),
                "the same number"
            );
        }
    }
}
