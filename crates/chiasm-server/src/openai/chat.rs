//! `POST /v1/chat/completions`: the body, the answer and the chunks of a stream.

use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::sampling::{Common, MAX_LOGPROBS};
use super::usage::Usage;
use super::{AnswerHead, logprobs, messages};
use crate::error::ApiError;
use crate::pipeline::{Caller, Chat, ChoiceDelta, FinishedChoice, GenerateRequest, Prompt};

/// A parsed body.
pub(crate) struct ChatRequest {
    pub(crate) common: Common,
    pub(crate) generate: GenerateRequest,
}

impl ChatRequest {
    pub(crate) fn parse(body: Value) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut common = Common::take(&mut fields)?;
        let max_tokens = fields.take_in("max_tokens", 1.., "at least 1")?;
        let max_completion_tokens = fields.take_in("max_completion_tokens", 1.., "at least 1")?;
        common.sampling.max_tokens = max_completion_tokens.or(max_tokens);
        let logprobs = fields.take("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.take_in("top_logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?;
        if top_logprobs.is_some_and(|top| top > 0) && !logprobs {
            return Err(ApiError::invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true"));
        }
        common.sampling.logprobs = logprobs.then_some(top_logprobs.unwrap_or(0));

        let (messages, media) = messages::parse(fields.require("messages")?)?;
        let chat = Chat {
            messages,
            media,
            add_generation_prompt: fields.take("add_generation_prompt")?.unwrap_or(true),
            continue_final_message: fields.take("continue_final_message")?.unwrap_or(false),
            template_kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
            processor_kwargs: fields.take::<Map<_, _>>("mm_processor_kwargs")?.unwrap_or_default(),
        };
        if chat.add_generation_prompt && chat.continue_final_message {
            return Err(ApiError::invalid(
                "continue_final_message",
                "'continue_final_message' needs 'add_generation_prompt': false",
            ));
        }
        fields.refuse_unless("add_special_tokens", |v| v == false)?;
        fields.refuse_unless("include_reasoning", |v| v == true)?;
        fields.finish()?;
        let generate = GenerateRequest {
            prompt: Prompt::Chat(chat),
            sampling: common.sampling.clone(),
            cache_salt: common.cache_salt.clone(),
            priority: common.priority,
            caller: Caller::default(),
        };
        Ok(Self { common, generate })
    }
}

/// The whole answer.
pub(crate) fn answer(
    head: &AnswerHead,
    tokenizer: &Tokenizer,
    choices: &[FinishedChoice],
    prompt_tokens: Option<&[TokenId]>,
    usage: Usage,
) -> Value {
    let choices: Vec<Value> = choices
        .iter()
        .enumerate()
        .map(|(index, choice)| {
            let mut body = json!({
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": null},
                "logprobs": choice.logprobs.as_ref().map(|tokens| logprobs::chat(tokenizer, tokens)),
                "finish_reason": choice.finish.reason(),
                "stop_reason": choice.finish.stop_reason(),
            });
            if prompt_tokens.is_some() {
                body["token_ids"] = super::ids(&choice.tokens);
            }
            body
        })
        .collect();
    let mut body = head.body("chat.completion", choices);
    body["usage"] = usage.to_json();
    if let Some(tokens) = prompt_tokens {
        body["prompt_token_ids"] = super::ids(tokens);
    }
    body
}

/// The first chunk of each choice: its role.
pub(crate) fn role_chunk(head: &AnswerHead, index: usize, prompt_tokens: Option<&[TokenId]>) -> Value {
    let choice = json!({
        "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null
    });
    let mut body = head.body("chat.completion.chunk", vec![choice]);
    if let Some(tokens) = prompt_tokens {
        body["prompt_token_ids"] = super::ids(tokens);
    }
    body
}

/// A chunk with new text, or with the reason of the end, or both.
pub(crate) fn delta_chunk(head: &AnswerHead, tokenizer: &Tokenizer, delta: &ChoiceDelta, with_ids: bool) -> Value {
    let mut choice = json!({
        "index": delta.index,
        "delta": {"content": delta.text},
        "logprobs": delta.logprobs.as_ref().map(|tokens| logprobs::chat(tokenizer, tokens)),
        "finish_reason": delta.finish.as_ref().map(|finish| finish.reason()),
    });
    if let Some(finish) = &delta.finish {
        choice["stop_reason"] = finish.stop_reason();
    }
    if with_ids {
        choice["token_ids"] = super::ids(&delta.tokens);
    }
    head.body("chat.completion.chunk", vec![choice])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(extra: Value) -> Option<String> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        ChatRequest::parse(body).err().and_then(|error| error.param)
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        assert_eq!(refused(json!({"reasoning_effort": "high"})).as_deref(), Some("reasoning_effort"));
        assert_eq!(refused(json!({"temprature": 1})).as_deref(), Some("temprature"));
        assert_eq!(refused(json!({})), None);
    }

    #[test]
    fn max_completion_tokens_wins_over_max_tokens_and_zero_is_refused() {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 7});
        assert_eq!(ChatRequest::parse(body).unwrap().generate.sampling.max_tokens, Some(7));
        assert_eq!(refused(json!({"max_tokens": 0})).as_deref(), Some("max_tokens"));
    }

    #[test]
    fn top_logprobs_need_logprobs() {
        assert_eq!(refused(json!({"top_logprobs": 2})).as_deref(), Some("top_logprobs"));
        assert_eq!(refused(json!({"top_logprobs": 21, "logprobs": true})).as_deref(), Some("top_logprobs"));
        assert_eq!(refused(json!({"top_logprobs": 2, "logprobs": true})), None);
    }

    #[test]
    fn messages_are_required() {
        let error = ChatRequest::parse(json!({"model": "m"})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
}
