//! What every body and every chunk of an answer has in common.

use std::time::{SystemTime, UNIX_EPOCH};

use chiasm_backend::RequestId;
use chiasm_types::TokenId;
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::nvext::Nvext;
use super::prompt_logprobs::PromptLogprobsBody;
use super::usage::Usage;
use crate::sse;

/// Id, time and model of one answer.
#[derive(Clone, Debug)]
pub struct AnswerHead {
    id: String,
    created: u64,
    model: String,
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub struct Body<'a, C> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Ids<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<PromptLogprobsBody<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) nvext: Option<Nvext>,
}

impl AnswerHead {
    /// The head of a new answer: its id is `prefix-` and the request's.
    pub fn new(prefix: &str, request: &RequestId, model: &str) -> Self {
        Self { id: format!("{prefix}-{request}"), created: unix_seconds(), model: model.to_owned() }
    }

    /// A body with these choices and nothing beside them.
    pub fn body<C>(&self, object: &'static str, choices: C) -> Body<'_, C> {
        let Self { id, created, model } = self;
        let (prompt_token_ids, prompt_logprobs) = (None, None);
        Body {
            id,
            object,
            created: *created,
            model,
            choices,
            prompt_token_ids,
            prompt_logprobs,
            usage: None,
            nvext: None,
        }
    }
}

/// What all chunks of a streamed answer begin with, written once.
#[derive(Debug)]
pub(crate) struct ChunkHead(Vec<u8>);

/// What a chunk has beside its choices.
#[derive(Default, Serialize)]
pub(super) struct Beside<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<Ids<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) nvext: Option<Nvext>,
}

impl ChunkHead {
    /// The head of an answer's chunks.
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

    /// What all chunks begin with, up to their choices.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Appends a chunk with these choices, an array.
    pub(super) fn write(
        &self,
        events: &mut Vec<u8>,
        choices: &impl Serialize,
        beside: &Beside<'_>,
    ) {
        let begin = events.len();
        events.extend_from_slice(&self.0);
        let mut written = serde_json::to_writer(&mut *events, choices);
        if let Beside { prompt_token_ids: None, usage: None, nvext: None } = beside {
            events.push(b'}');
        } else {
            let open = events.len();
            written = written.and_then(|()| serde_json::to_writer(&mut *events, beside));
            // What an object of its own begins with goes on with this one.
            events[open..].first_mut().into_iter().for_each(|brace| *brace = b',');
        }
        match written {
            Ok(()) => events.extend_from_slice(b"\n\n"),
            Err(failed) => sse::write_failed(events, begin, &failed),
        }
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Token ids as a list of numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ids<'a>(pub &'a [TokenId]);

impl Serialize for Ids<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|token| token.0))
    }
}
