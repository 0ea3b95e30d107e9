//! The fields that all bodies and chunks of answers have in common.

use std::time::{SystemTime, UNIX_EPOCH};

use chiasm_backend::RequestId;
use chiasm_types::TokenId;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::nvext::Nvext;
use super::prompt_logprobs::PromptLogprobsBody;
use super::usage::Usage;
use crate::sse;

/// The id, the creation time and the model of an answer.
#[derive(Clone, Debug)]
pub struct AnswerHead {
    id: String,
    created: u64,
    model: String,
}

/// The body of a whole answer.
#[derive(Debug, Serialize)]
pub struct Body<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<TokenIds<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<PromptLogprobsBody<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) nvext: Option<Nvext>,
}

impl AnswerHead {
    /// Creates the head of a new answer. The answer's id is `prefix-` and the request's id.
    pub fn new(prefix: &str, request: &RequestId, model: &str) -> Self {
        Self { id: format!("{prefix}-{request}"), created: unix_seconds(), model: model.to_owned() }
    }

    /// Returns a body with these choices and without optional fields.
    pub fn body<C>(&self, object: &'static str, choices: C) -> Body<'_, C> {
        let Self { id, created, model } = self;
        Body {
            id,
            object,
            created: *created,
            model,
            choices,
            prompt_token_ids: None,
            prompt_logprobs: None,
            usage: None,
            nvext: None,
        }
    }
}

/// The beginning of all chunks of a streamed answer, serialized once.
#[derive(Debug)]
pub(crate) struct ChunkHead(Vec<u8>);

/// The optional fields of a chunk, after its choices.
#[derive(Default, Serialize)]
pub(super) struct ChunkExtras<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<TokenIds<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) nvext: Option<Nvext>,
}

impl ChunkHead {
    /// Serializes the head of an answer's chunks.
    pub(super) fn new(
        AnswerHead { id, created, model }: &AnswerHead,
        object: &'static str,
    ) -> Self {
        let [id, object, model] = [id, object, model].map(Value::from);
        let head = format!(
            r#"data: {{"id":{id},"object":{object},"created":{created},"model":{model},"choices":"#
        );
        Self(head.into_bytes())
    }

    /// Returns the beginning of all chunks, up to their choices.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Appends a chunk. `choices` must serialize to an array.
    pub(super) fn write(
        &self,
        events: &mut Vec<u8>,
        choices: &impl Serialize,
        extras: &ChunkExtras<'_>,
    ) {
        let begin = events.len();
        events.extend_from_slice(&self.0);
        let mut written = serde_json::to_writer(&mut *events, choices);
        if let ChunkExtras { prompt_token_ids: None, usage: None, nvext: None } = extras {
            events.push(b'}');
        } else {
            let open = events.len();
            written = written.and_then(|()| serde_json::to_writer(&mut *events, extras));
            // The extras continue the chunk's object, so their opening brace becomes a comma.
            events[open..].first_mut().into_iter().for_each(|brace| *brace = b',');
        }
        match written {
            Ok(()) => events.extend_from_slice(b"\n\n"),
            Err(error) => sse::write_failed(events, begin, &error),
        }
    }
}

/// Returns the seconds since the Unix epoch.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Token ids, which serialize to a list of numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenIds<'a>(pub &'a [TokenId]);

impl Serialize for TokenIds<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|token| token.0))
    }
}
