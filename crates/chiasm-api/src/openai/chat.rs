//! The body of `POST /v1/chat/completions`.

mod output;

use chiasm_media::Charge;
use chiasm_request::{Chat, GenerateRequest, ToolUse};
use serde_json::{Map, Value};

pub use self::output::{AnswerOptions, Chunks, answer};
use super::fields::Fields;
use super::intake::Intake;
use super::media_parts::take_media_kwargs;
use super::messages::Messages;
use super::request::RequestBody;
use super::sampling::{CommonFields, MAX_LOGPROBS};
use super::{request, tools};
use crate::error::ApiError;

/// A parsed body.
pub struct ChatRequest {
    /// The fields of both completion endpoints.
    pub common: CommonFields,
    /// The request itself.
    pub generate: GenerateRequest,
}

impl RequestBody for ChatRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, messages) = request::read(&mut intake)?;
        // First, so that errors can suggest it for `functions`.
        let tools = tools::take(&mut fields)?;
        let mut common = CommonFields::take(&mut fields)?;
        common.check_fan_out(common.sampling.n as usize)?;
        let max_tokens = fields.take_in("max_tokens", 1.., "at least 1")?;
        let max_completion_tokens = fields.take_in("max_completion_tokens", 1.., "at least 1")?;
        common.sampling.max_tokens = max_completion_tokens.or(max_tokens);
        let logprobs = fields.take("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.take_in("top_logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?;
        if top_logprobs.is_some_and(|top| top > 0) && !logprobs {
            return Err(ApiError::invalid(
                "top_logprobs",
                "'top_logprobs' requires 'logprobs': true",
            ));
        }
        common.sampling.logprobs = logprobs.then_some(top_logprobs.unwrap_or(0));

        let chat = take_chat(&mut fields, messages, tools.as_ref())?;
        let without_reasoning = fields.take("include_reasoning")? == Some(false);
        fields.refuse_unless("echo", |v| v == false)?;
        fields.finish()?;
        let generate = common.chat_request(chat, tools, without_reasoning);
        Ok((Self { common, generate }, intake.into_charge()))
    }
}

/// Takes the fields that determine the prompt of a conversation.
pub(super) fn take_chat(
    fields: &mut Fields,
    messages: Messages,
    tools: Option<&ToolUse>,
) -> Result<Chat, ApiError> {
    let Messages { messages, media } = messages;
    let chat = Chat {
        messages,
        media,
        add_generation_prompt: fields.take("add_generation_prompt")?.unwrap_or(true),
        continue_final_message: fields.take("continue_final_message")?.unwrap_or(false),
        template_kwargs: take_variables(fields)?,
        reasoning_effort: take_effort(fields, "reasoning_effort")?,
        tools: tools.map(|tools| tools.tools.clone()),
        media_kwargs: take_media_kwargs(fields)?,
    };
    if chat.add_generation_prompt && chat.continue_final_message {
        return Err(ApiError::invalid(
            "continue_final_message",
            "'continue_final_message' requires 'add_generation_prompt': false",
        ));
    }
    fields.refuse_unless("add_special_tokens", |v| v == false)?;
    Ok(chat)
}

/// Takes the variables of the chat template. As in vLLM, the variable `documents` has its own
/// field.
fn take_variables(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut variables: Map<String, Value> =
        fields.take("chat_template_kwargs")?.unwrap_or_default();
    if let Some(documents) = fields.take::<Vec<Map<String, Value>>>("documents")? {
        variables
            .insert("documents".to_owned(), documents.into_iter().map(Value::Object).collect());
    }
    Ok(variables)
}

/// Takes a field with a reasoning effort.
pub fn take_effort(fields: &mut Fields, field: &'static str) -> Result<Option<String>, ApiError> {
    const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];
    let effort: Option<String> = fields.take(field)?;
    match effort {
        Some(other) if !EFFORTS.contains(&other.as_str()) => {
            let name = fields.name(field);
            let message = format!("'{name}' must be one of {}, got '{other}'", EFFORTS.join(", "));
            Err(ApiError::invalid(name, message))
        }
        effort => Ok(effort),
    }
}

#[cfg(test)]
mod tests {
    use chiasm_request::Prompt;
    use serde_json::json;

    use super::*;

    fn parse(body: Value) -> Result<ChatRequest, ApiError> {
        ChatRequest::parse(Intake::from_json(&body)).map(|(request, _)| request)
    }

    fn refused(extra: Value) -> Option<String> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        parse(body).err().and_then(|error| error.param)
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        assert_eq!(
            refused(json!({"reasoning_effort": "huge"})).as_deref(),
            Some("reasoning_effort")
        );
        assert_eq!(refused(json!({"reasoning_effort": "high"})), None);
        assert_eq!(refused(json!({"temprature": 1})).as_deref(), Some("temprature"));
        assert_eq!(refused(json!({})), None);
    }

    #[test]
    fn intended_field_is_suggested() {
        for (field, meant) in [
            ("max_tokns", "max_tokens"),
            ("functions", "tools"),
            ("guided_json", "structured_outputs.json"),
        ] {
            let body = json!({"messages": [{"role": "user", "content": "hi"}], field: [1]});
            let message = parse(body).err().unwrap().message;
            let expected = format!("'{field}' is not supported; did you mean '{meant}'?");
            assert_eq!(message, expected);
        }
    }

    #[test]
    fn wrong_type_of_messages_is_named_in_json_terms() {
        let message = |messages: Value| parse(json!({"messages": messages})).err().unwrap().message;
        let error = parse(json!([])).err().unwrap();
        assert!(error.message.starts_with("the body: expected an object, got a list"), "{error}");
        let expected = "'messages': expected a list of messages, got 5 at line 1 column 13";
        assert_eq!(message(json!(5)), expected);
        let expected = "'messages': expected a list of messages, got an object at line 1 column 14";
        assert_eq!(message(json!({})), expected);
    }

    #[test]
    fn documents_become_template_variable() {
        let documents = json!([{"title": "t", "text": "x"}]);
        let body = json!({"messages": [{"role": "user", "content": "x"}], "documents": documents,
            "chat_template_kwargs": {"documents": [], "a": 1}});
        let Prompt::Chat(chat) = parse(body).unwrap().generate.prompt else {
            panic!("a conversation")
        };
        assert_eq!(Value::Object(chat.template_kwargs), json!({"documents": documents, "a": 1}));
        assert_eq!(refused(json!({"documents": ["x"]})).as_deref(), Some("documents"));
    }

    #[test]
    fn max_completion_tokens_overrides_max_tokens() {
        let body = json!({
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 5,
            "max_completion_tokens": 7,
        });
        assert_eq!(parse(body).unwrap().generate.sampling.max_tokens, Some(7));
        assert_eq!(refused(json!({"max_tokens": 0})).as_deref(), Some("max_tokens"));
    }

    #[test]
    fn top_logprobs_need_logprobs() {
        assert_eq!(refused(json!({"top_logprobs": 2})).as_deref(), Some("top_logprobs"));
        assert_eq!(
            refused(json!({"top_logprobs": 21, "logprobs": true})).as_deref(),
            Some("top_logprobs")
        );
        assert_eq!(refused(json!({"top_logprobs": 2, "logprobs": true})), None);
    }

    #[test]
    fn messages_are_required() {
        let error = parse(json!({"model": "m"})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
}
