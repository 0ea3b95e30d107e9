//! One event of an answer (`GenerateTokensStreamResponse` of vLLM).

use chiasm_backend::{Finish, Prefill, TokenLogprob};
use chiasm_types::TokenId;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// Continuations in one event: more than a request has. A server can write each in a few bytes that
/// take many here.
const MOST_CHOICES: usize = 1024;

/// One event.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Chunk {
    #[serde(default, deserialize_with = "few")]
    pub(crate) choices: Vec<ChunkChoice>,
    pub(crate) usage: Option<Usage>,
    /// The tokens of the prompt; in the first event, if they were asked for.
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    /// The server's error, in place of all other fields.
    pub(crate) error: Option<ChunkError>,
}

/// Reads no more continuations than an event may have.
fn few<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ChunkChoice>, D::Error> {
    struct Few;

    impl<'de> Visitor<'de> for Few {
        type Value = Vec<ChunkChoice>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of continuations")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut choices = Vec::new();
            while let Some(choice) = seq.next_element()? {
                if choices.len() == MOST_CHOICES {
                    return Err(A::Error::custom(format!(
                        "more than {MOST_CHOICES} continuations"
                    )));
                }
                choices.push(choice);
            }
            Ok(choices)
        }
    }

    deserializer.deserialize_seq(Few)
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChunkError {
    #[serde(default)]
    pub(crate) message: String,
    /// An HTTP status.
    #[serde(default, deserialize_with = "status")]
    pub(crate) code: Option<u16>,
}

/// Reads a status; `None` for anything that is no number.
fn status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u16>, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    Ok(value.as_u64().and_then(|code| code.try_into().ok()))
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChunkChoice {
    pub(crate) index: usize,
    pub(crate) token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
    stop_reason: Option<StopReason>,
    logprobs: Option<Logprobs>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum StopReason {
    Token(u32),
    Text(String),
}

#[derive(Debug, Deserialize)]
struct Logprobs {
    content: Option<Vec<Logprob>>,
}

#[derive(Debug, Deserialize)]
struct Logprob {
    token_id: u32,
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Deserialize)]
struct TopLogprob {
    token_id: u32,
    logprob: f32,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Usage {
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Debug, Deserialize)]
struct PromptTokensDetails {
    cached_tokens: Option<usize>,
    created_cache_tokens: Option<usize>,
}

impl Usage {
    /// Returns how the engine computed the prompt, if the server tells
    /// (`--enable-prompt-tokens-details`).
    pub(crate) fn prefill(&self) -> Option<Prefill> {
        let details = self.prompt_tokens_details.as_ref()?;
        let cached_tokens = details.cached_tokens?;
        Some(Prefill { cached_tokens, created_tokens: details.created_cache_tokens, queued: None })
    }
}

/// The end of a continuation, as the server tells it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    Finished(Finish),
    /// It was aborted, or failed, and not by us.
    Failed,
}

impl ChunkChoice {
    /// Returns the end of the continuation, if it has ended.
    pub(crate) fn end(&self) -> Option<End> {
        let finish = match (self.finish_reason.as_deref()?, &self.stop_reason) {
            ("stop", None) => Finish::Eos,
            ("stop", Some(StopReason::Token(token))) => Finish::StopToken(TokenId(*token)),
            ("stop", Some(StopReason::Text(text))) => Finish::StopString(text.clone()),
            ("length", _) => Finish::Length,
            ("repetition", _) => Finish::Repetition,
            _ => return Some(End::Failed),
        };
        Some(End::Finished(finish))
    }

    /// The log probabilities of its tokens, with the first `top` candidates in the engine's order,
    /// which has the token itself first.
    pub(crate) fn logprobs(&self, top: usize) -> Option<Vec<TokenLogprob>> {
        let content = self.logprobs.as_ref()?.content.as_ref()?;
        let one = |told: &Logprob| TokenLogprob {
            token: TokenId(told.token_id),
            logprob: told.logprob,
            top: told
                .top_logprobs
                .iter()
                .take(top)
                .map(|top| (TokenId(top.token_id), top.logprob))
                .collect(),
        };
        Some(content.iter().map(one).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_no_more_continuations_than_a_request() {
        let event = |choices: usize| {
            format!(r#"{{"choices": [{}]}}"#, vec![r#"{"index":0}"#; choices].join(","))
        };
        let read = |choices| {
            serde_json::from_str::<Chunk>(&event(choices)).map(|chunk| chunk.choices.len()).ok()
        };
        assert_eq!(
            (read(0), read(MOST_CHOICES), read(MOST_CHOICES + 1)),
            (Some(0), Some(MOST_CHOICES), None)
        );
        assert!(serde_json::from_str::<Chunk>("{}").is_ok_and(|chunk| chunk.choices.is_empty()));
    }
}
