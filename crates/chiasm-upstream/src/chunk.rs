//! One event of a streamed answer (`GenerateTokensStreamResponse` of vLLM).

use chiasm_backend::{Finish, Prefill, TokenLogprob};
use chiasm_types::TokenId;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};

/// The maximum number of choices in one event, more than any request has. A choice of a few bytes
/// takes many bytes once parsed.
const MAX_CHOICES: usize = 1024;

/// One event of a streamed answer.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Chunk {
    #[serde(default, deserialize_with = "bounded_choices")]
    pub(crate) choices: Vec<ChunkChoice>,
    pub(crate) usage: Option<Usage>,
    /// The tokens of the prompt; only in the first event, if the request asked for them.
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    /// The server's error, in place of all other fields.
    pub(crate) error: Option<ChunkError>,
}

/// Deserializes at most [`MAX_CHOICES`] choices.
fn bounded_choices<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<ChunkChoice>, D::Error> {
    struct BoundedChoices;

    impl<'de> Visitor<'de> for BoundedChoices {
        type Value = Vec<ChunkChoice>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of continuations")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut choices = Vec::new();
            while let Some(choice) = seq.next_element()? {
                if choices.len() == MAX_CHOICES {
                    return Err(A::Error::custom(format!("more than {MAX_CHOICES} continuations")));
                }
                choices.push(choice);
            }
            Ok(choices)
        }
    }

    deserializer.deserialize_seq(BoundedChoices)
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChunkError {
    #[serde(default)]
    pub(crate) message: String,
    /// An HTTP status.
    #[serde(default, deserialize_with = "status")]
    pub(crate) code: Option<u16>,
}

/// Deserializes an HTTP status; `None` for anything that is not a number.
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
    /// Returns how the engine computed the prompt, if the server reports it
    /// (`--enable-prompt-tokens-details`).
    pub(crate) fn prefill(&self) -> Option<Prefill> {
        let details = self.prompt_tokens_details.as_ref()?;
        let cached_tokens = details.cached_tokens?;
        Some(Prefill { cached_tokens, created_tokens: details.created_cache_tokens, queued: None })
    }
}

/// The end of a choice, as the server reports it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    Finished(Finish),
    /// The choice was aborted by the server, or failed.
    Failed,
}

impl ChunkChoice {
    /// Returns the end of the choice, if it has ended.
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

    /// Returns the log probabilities of the choice's tokens, with the first `top` candidates in the
    /// engine's order. The engine lists the sampled token first.
    pub(crate) fn logprobs(&self, top: usize) -> Option<Vec<TokenLogprob>> {
        let content = self.logprobs.as_ref()?.content.as_ref()?;
        let convert = |reported: &Logprob| TokenLogprob {
            token: TokenId(reported.token_id),
            logprob: reported.logprob,
            top: reported
                .top_logprobs
                .iter()
                .take(top)
                .map(|top| (TokenId(top.token_id), top.logprob))
                .collect(),
        };
        Some(content.iter().map(convert).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_with_too_many_choices_is_refused() {
        let event = |choices: usize| {
            format!(r#"{{"choices": [{}]}}"#, vec![r#"{"index":0}"#; choices].join(","))
        };
        let parse = |choices| {
            serde_json::from_str::<Chunk>(&event(choices)).map(|chunk| chunk.choices.len()).ok()
        };
        assert_eq!(
            (parse(0), parse(MAX_CHOICES), parse(MAX_CHOICES + 1)),
            (Some(0), Some(MAX_CHOICES), None)
        );
        assert!(serde_json::from_str::<Chunk>("{}").is_ok_and(|chunk| chunk.choices.is_empty()));
    }
}
