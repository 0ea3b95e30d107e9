//! Conversion of outputs and failures of jobs to and from messages.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{
    Content, DeathReason, Finish, JobError, MediaDelivery, Output, Prefill, PromptLogprobs,
    SourceError, StoredEmbeddings, TokenLogprob,
};
use chiasm_types::TokenId;

use crate::job::hash;
use crate::proto::{self, finish::Reason, job_failure::Kind};

pub(crate) fn embeddings_to_message(stored: &StoredEmbeddings) -> proto::Embeddings {
    let StoredEmbeddings { item, bytes } = stored;
    proto::Embeddings { item: Bytes::copy_from_slice(item.as_bytes()), bytes: *bytes }
}

/// Parses stored embeddings; `None` if they are malformed.
pub(crate) fn embeddings_from_message(message: &proto::Embeddings) -> Option<StoredEmbeddings> {
    let proto::Embeddings { item, bytes } = message;
    Some(StoredEmbeddings { item: hash(item)?, bytes: *bytes })
}

pub(crate) fn delivered_to_message(
    delivered: MediaDelivery,
    hand_off: Duration,
) -> proto::Delivered {
    let MediaDelivery { cached, shared_memory, inline, unfound } = delivered;
    proto::Delivered {
        cached: cached as u32,
        shared_memory: shared_memory as u32,
        inline: inline as u32,
        unfound: unfound as u32,
        hand_off_us: u64::try_from(hand_off.as_micros()).unwrap_or(u64::MAX),
    }
}

/// Parses the counts of delivered items, and the time until the job was handed to the engine.
pub(crate) fn delivered_from_message(message: proto::Delivered) -> (MediaDelivery, Duration) {
    let proto::Delivered { cached, shared_memory, inline, unfound, hand_off_us } = message;
    let delivered = MediaDelivery {
        cached: cached as usize,
        shared_memory: shared_memory as usize,
        inline: inline as usize,
        unfound: unfound as usize,
    };
    (delivered, Duration::from_micros(hand_off_us))
}

/// Builds the message of an output. Text is dropped: only backends that take messages produce it,
/// and agents have no such backends.
pub(crate) fn output_to_message(output: Output) -> proto::Output {
    let Output { choice, content, finish, prefill, prompt_logprobs } = output;
    let (tokens, logprobs) = match content {
        Content::Tokens { tokens, logprobs } => (tokens, logprobs),
        Content::Text { .. } => (Vec::new(), None),
    };
    proto::Output {
        choice: choice as u32,
        tokens: tokens.into_iter().map(|token| token.0).collect(),
        has_logprobs: logprobs.is_some(),
        logprobs: logprobs.into_iter().flatten().map(logprob_to_message).collect(),
        finish: finish.map(finish_to_message),
        prefill: prefill.map(|Prefill { cached_tokens, created_tokens, queued }| proto::Prefill {
            cached_tokens: cached_tokens as u64,
            created_tokens: created_tokens.map(|tokens| tokens as u64),
            queued_us: queued.map(|queued| u64::try_from(queued.as_micros()).unwrap_or(u64::MAX)),
        }),
        prompt_logprobs: prompt_logprobs.map(
            |PromptLogprobs { width, tokens, logprobs, ranks }| proto::PromptLogprobs {
                width: width as u32,
                tokens: tokens.into_iter().map(|token| token.0).collect(),
                logprobs,
                ranks,
            },
        ),
    }
}

/// Parses an output; `None` if it is malformed.
pub(crate) fn output_from_message(message: proto::Output) -> Option<Output> {
    let proto::Output { choice, tokens, logprobs, has_logprobs, finish, prefill, prompt_logprobs } =
        message;
    let logprobs = logprobs.into_iter().map(logprob_from_message).collect::<Option<Vec<_>>>()?;
    let tokens = tokens.into_iter().map(TokenId).collect();
    let finish = match finish {
        Some(finish) => Some(finish_from_message(finish)?),
        None => None,
    };
    let prompt_logprobs =
        prompt_logprobs.map(|proto::PromptLogprobs { width, tokens, logprobs, ranks }| {
            let tokens = tokens.into_iter().map(TokenId).collect();
            PromptLogprobs { width: width as usize, tokens, logprobs, ranks }
        });
    Some(Output {
        choice: choice as usize,
        content: Content::Tokens { tokens, logprobs: has_logprobs.then_some(logprobs) },
        finish,
        prefill: prefill.map(|proto::Prefill { cached_tokens, created_tokens, queued_us }| {
            Prefill {
                cached_tokens: cached_tokens as usize,
                created_tokens: created_tokens.map(|tokens| tokens as usize),
                queued: queued_us.map(Duration::from_micros),
            }
        }),
        prompt_logprobs,
    })
}

fn logprob_to_message(logprob: TokenLogprob) -> proto::TokenLogprob {
    let TokenLogprob { token, logprob, top } = logprob;
    let (top_tokens, top_logprobs) =
        top.into_iter().map(|(token, logprob)| (token.0, logprob)).unzip();
    proto::TokenLogprob { token: token.0, logprob, top_tokens, top_logprobs }
}

fn logprob_from_message(message: proto::TokenLogprob) -> Option<TokenLogprob> {
    let proto::TokenLogprob { token, logprob, top_tokens, top_logprobs } = message;
    if top_tokens.len() != top_logprobs.len() {
        return None;
    }
    let top = top_tokens.into_iter().map(TokenId).zip(top_logprobs).collect();
    Some(TokenLogprob { token: TokenId(token), logprob, top })
}

fn finish_to_message(finish: Finish) -> proto::Finish {
    let reason = match finish {
        // The frontend parses calls from the tokens.
        Finish::Eos | Finish::ToolCalls => Reason::Eos(true),
        Finish::StopToken(token) => Reason::StopToken(token.0),
        Finish::StopString(text) => Reason::StopString(text),
        Finish::Length => Reason::Length(true),
        Finish::Repetition => Reason::Repetition(true),
    };
    proto::Finish { reason: Some(reason) }
}

fn finish_from_message(finish: proto::Finish) -> Option<Finish> {
    Some(match finish.reason? {
        Reason::Eos(_) => Finish::Eos,
        Reason::StopToken(token) => Finish::StopToken(TokenId(token)),
        Reason::StopString(text) => Finish::StopString(text),
        Reason::Length(_) => Finish::Length,
        Reason::Repetition(_) => Finish::Repetition,
    })
}

pub(crate) fn failure_to_message(error: &JobError) -> proto::JobFailure {
    let failure = |kind: Kind, message: String| proto::JobFailure {
        kind: kind.into(),
        field: String::new(),
        message,
    };
    match error {
        JobError::NotTaken(death) => failure(Kind::NotTaken, death.to_string()),
        JobError::Dead(death) => failure(Kind::Dead, death.to_string()),
        JobError::Refused { field, message } => {
            proto::JobFailure { field: field.clone(), ..failure(Kind::Refused, message.clone()) }
        }
        // Older frontends read only the kind.
        JobError::ConstraintFailed { field, message } => {
            proto::JobFailure { field: field.clone(), ..failure(Kind::Failed, message.clone()) }
        }
        JobError::Source(error) => failure(Kind::Media, error.to_string()),
        JobError::KeepsLosingMedia => failure(Kind::KeepsLosingMedia, String::new()),
        JobError::Unread => failure(Kind::Unread, String::new()),
        JobError::Unfinished => failure(Kind::Unfinished, String::new()),
        error => failure(Kind::Failed, error.to_string()),
    }
}

/// The agent's message about a media item that it could not process.
#[derive(Debug)]
pub(crate) struct RemoteMediaError(String);

impl fmt::Display for RemoteMediaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RemoteMediaError {}

/// Parses a job's error. `constraint` is the field of the client's request that has the constraint.
pub(crate) fn failure_from_message(
    failure: proto::JobFailure,
    constraint: Option<&'static str>,
) -> JobError {
    let proto::JobFailure { kind, field, message } = failure;
    let client_field = |field: String| {
        let is_constraint = field == "structured_outputs";
        constraint.filter(|_| is_constraint).map_or(field, str::to_owned)
    };
    match Kind::try_from(kind) {
        Ok(Kind::NotTaken) => JobError::NotTaken(DeathReason::new(message)),
        Ok(Kind::Dead) => JobError::Dead(DeathReason::new(message)),
        Ok(Kind::Refused) => JobError::Refused { field: client_field(field), message },
        Ok(Kind::Media) => JobError::Source(SourceError::new(RemoteMediaError(message))),
        Ok(Kind::KeepsLosingMedia) => JobError::KeepsLosingMedia,
        Ok(Kind::Unread) => JobError::Unread,
        Ok(Kind::Unfinished) => JobError::Unfinished,
        Ok(Kind::Failed) if !field.is_empty() => {
            JobError::ConstraintFailed { field: client_field(field), message }
        }
        Ok(Kind::Failed) | Err(_) => JobError::Failed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_constraint_names_the_clients_field() {
        let failed = JobError::ConstraintFailed {
            field: "structured_outputs".to_owned(),
            message: "the engine's message".to_owned(),
        };
        let parsed = failure_from_message(failure_to_message(&failed), Some("response_format"));
        assert!(
            matches!(&parsed, JobError::ConstraintFailed { field, message }
            if field == "response_format" && message == "the engine's message"),
            "{parsed}"
        );
        let parsed = failure_from_message(failure_to_message(&JobError::Failed), None);
        assert!(matches!(parsed, JobError::Failed), "{parsed}");
    }
}
