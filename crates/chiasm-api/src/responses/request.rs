//! The request body, converted to a request for the pipeline.

use chiasm_backend::Constraint;
use chiasm_backend::Structured;
use chiasm_media::Charge;
use chiasm_prompt::{ChatContent, ChatMessage};
use chiasm_request::{Chat, GenerateRequest};
use serde_json::{Map, Value};

use super::input::Input;
use super::response::Echo;
use super::tools::{self, ToolNames};
use crate::error::ApiError;
use crate::openai::CommonFields;
use crate::openai::chat::take_effort;
use crate::openai::fields::Fields;
use crate::openai::intake::{Intake, PLANNING_BYTES_PER_TEXT_BYTE};
use crate::openai::media_parts::take_media_kwargs;
use crate::openai::request::{self, RequestBody};
use crate::openai::sampling::MAX_LOGPROBS;
use crate::openai::structured::json_schema;

/// The fields that only the other endpoints have. All endpoints share the rest.
const OTHER_ENDPOINT_FIELDS: [&str; 16] = [
    "n",
    "best_of",
    "echo",
    "prompt_logprobs",
    "thinking_token_budget",
    "repetition_detection",
    "functions",
    "function_call",
    "verbosity",
    "prediction",
    "response_format",
    "modalities",
    "use_beam_search",
    "length_penalty",
    "return_token_ids",
    "nvext",
];
/// The accepted values of `include`: log probabilities, parts of items that never occur here, and
/// parts that the client itself has sent.
const ACCEPTED_INCLUDES: [&str; 8] = [
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    TEXT_LOGPROBS,
];
const TEXT_LOGPROBS: &str = "message.output_text.logprobs";
const FORMAT: &str = "text.format";
const SCHEMA: &str = "text.format.schema";
/// The maximum number of metadata entries: OpenAI's limit.
const MAX_METADATA_ENTRIES: usize = 16;
/// The maximum length of a metadata key: OpenAI's limit.
const MAX_METADATA_KEY_CHARS: usize = 64;
/// The maximum length of a metadata value: OpenAI's limit.
const MAX_METADATA_VALUE_CHARS: usize = 512;

/// A parsed body.
pub struct ResponsesRequest {
    /// The fields that completions also have.
    pub common: CommonFields,
    /// The request itself.
    pub generate: GenerateRequest,
    /// The fields that the response repeats.
    pub echo: Echo,
    /// The tools that the model knows as other functions.
    pub names: ToolNames,
}

impl RequestBody for ResponsesRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, input) = request::read::<Input>(&mut intake)?;
        refuse_stored_state(&mut fields)?;
        let echo = Echo::from_fields(&fields)?;
        intake.reserve_for("body", echo.bytes())?;
        OTHER_ENDPOINT_FIELDS
            .iter()
            .try_for_each(|field| fields.refuse_unless(field, |_| false))?;
        take_stream_options(&mut fields)?;
        take_echoed_fields(&mut fields)?;
        let logprobs = take_logprobs(&mut fields)?;
        let mut common = CommonFields::take(&mut fields)?;
        common.sampling.logprobs = logprobs;
        common.sampling.logprobs_of_text = logprobs.is_some();
        common.sampling.max_tokens = fields.take_in("max_output_tokens", 1.., "at least 1")?;
        let format = take_format(&mut fields)?;
        if format.is_some() && common.sampling.structured.is_some() {
            let message =
                "only one of 'text.format' and 'structured_outputs' may have a constraint";
            return Err(ApiError::invalid("structured_outputs", message));
        }
        common.sampling.structured = format.or(common.sampling.structured);
        let (tools, names) = tools::take(&mut fields)?;
        let chat = Chat {
            media: input.media,
            add_generation_prompt: !input.is_open,
            continue_final_message: input.is_open,
            template_kwargs: fields.take("chat_template_kwargs")?.unwrap_or_default(),
            reasoning_effort: take_reasoning(&mut fields)?,
            tools: tools.as_ref().map(|tools| tools.tools.clone()),
            media_kwargs: take_media_kwargs(&mut fields)?,
            messages: add_instructions(&mut intake, fields.take("instructions")?, input.messages)?,
        };
        let without_reasoning = fields.take("include_reasoning")? == Some(false);
        fields.finish()?;
        let generate = common.chat_request(chat, tools, without_reasoning);
        Ok((Self { common, generate, echo, names }, intake.into_charge()))
    }
}

/// Refuses fields that need state from other requests, because no state is stored.
fn refuse_stored_state(fields: &mut Fields) -> Result<(), ApiError> {
    let refused = |field: &str, remedy: &str| {
        let error = ApiError::invalid(
            field,
            format!("'{field}' is not supported: this server stores no state; {remedy}"),
        );
        Err(ApiError { code: "unsupported_field", ..error })
    };
    for field in ["previous_response_id", "conversation"] {
        if fields.get(field).is_some() {
            return refused(field, "send the whole conversation as 'input'");
        }
    }
    if fields.take("background")? == Some(true) {
        return refused("background", "wait for the answer, or stream it");
    }
    match fields.get("prompt") {
        Some(_) => refused("prompt", "send 'instructions' and 'input'"),
        None => Ok(()),
    }
}

/// Adds the instructions as the first message, as in vLLM.
fn add_instructions(
    intake: &mut Intake,
    instructions: Option<String>,
    mut messages: Vec<ChatMessage>,
) -> Result<Vec<ChatMessage>, ApiError> {
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        intake.reserve_for("instructions", PLANNING_BYTES_PER_TEXT_BYTE * text.len() as u64)?;
        let content = Some(ChatContent::Text(text));
        messages.insert(
            0,
            ChatMessage { role: "system".to_owned(), content, ..ChatMessage::default() },
        );
    }
    Ok(messages)
}

/// Takes fields that only the response repeats, and fields that must have their default. Fields of
/// chats are not among them.
fn take_echoed_fields(fields: &mut Fields) -> Result<(), ApiError> {
    // This limits calls of tools that the server runs; there are none.
    fields.take_in::<u64>("max_tool_calls", 0.., "0 or more")?;
    // Conversations are never truncated: one that is too long is refused.
    fields.refuse_unless("truncation", |value| value == "disabled" || value == "auto")?;
    // Codex describes the client here.
    fields.take::<Map<String, Value>>("client_metadata")?;
    let metadata: Map<String, Value> = fields.take("metadata")?.unwrap_or_default();
    let is_valid = |(name, value): (&String, &Value)| {
        let length = value.as_str().map(|value| value.chars().count());
        name.chars().count() <= MAX_METADATA_KEY_CHARS
            && length.is_some_and(|length| length <= MAX_METADATA_VALUE_CHARS)
    };
    if metadata.len() > MAX_METADATA_ENTRIES || !metadata.iter().all(is_valid) {
        let message = format!(
            "'metadata' may have at most {MAX_METADATA_ENTRIES} entries, with keys of at most \
             {MAX_METADATA_KEY_CHARS} characters and strings of at most \
             {MAX_METADATA_VALUE_CHARS} characters as values"
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(())
}

fn take_stream_options(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(options) = fields.take("stream_options")? else { return Ok(()) };
    let mut options = Fields::new(options, "stream_options")?;
    options.ignore(&["include_obfuscation"]);
    options.finish()
}

/// Takes `include` and `top_logprobs`, either of which can request log probabilities of the text.
/// Returns the number of alternatives per token, if they are requested.
fn take_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let include: Vec<String> = fields.take("include")?.unwrap_or_default();
    if let Some(i) = include.iter().position(|name| !ACCEPTED_INCLUDES.contains(&name.as_str())) {
        return Err(ApiError::unsupported(format!("include[{i}]")));
    }
    let top = fields.take_in("top_logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?.unwrap_or(0);
    let are_requested = top > 0 || include.iter().any(|name| name == TEXT_LOGPROBS);
    Ok(are_requested.then_some(top))
}

/// Takes the reasoning effort. The response has the reasoning itself, so requests for summaries are
/// ignored.
fn take_reasoning(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let Some(reasoning) = fields.take("reasoning")? else { return Ok(None) };
    let mut reasoning = Fields::new(reasoning, "reasoning")?;
    let effort = take_effort(&mut reasoning, "effort")?;
    // Chat templates decide which earlier reasoning they show.
    reasoning.refuse_unless("context", |value| value == "auto")?;
    reasoning.refuse_unless("mode", |value| value == "standard")?;
    reasoning.ignore(&["summary", "generate_summary"]);
    reasoning.finish()?;
    Ok(effort)
}

/// Takes the constraint on the answer's text.
fn take_format(fields: &mut Fields) -> Result<Option<Structured>, ApiError> {
    let Some(text) = fields.take("text")? else { return Ok(None) };
    let mut text = Fields::new(text, "text")?;
    text.refuse_unless("verbosity", |value| value == "medium")?;
    let format = text.take::<Value>("format")?;
    text.finish()?;
    let Some(format) = format else { return Ok(None) };
    let mut format = Fields::new(format, FORMAT)?;
    let kind: String =
        format.take("type")?.ok_or_else(|| ApiError::missing(&format.name("type")))?;
    let mut field = FORMAT;
    let constraint = match kind.as_str() {
        "text" => None,
        "json_object" => Some(Constraint::JsonObject),
        "json_schema" => {
            let schema = format.take("schema")?.ok_or_else(|| ApiError::missing(SCHEMA))?;
            // The schema is always enforced.
            format.ignore(&["name", "description", "strict"]);
            field = SCHEMA;
            Some(json_schema(schema, SCHEMA)?)
        }
        other => {
            let name = format.name("type");
            let message =
                format!("'{name}' must be text, json_object or json_schema, got '{other}'");
            return Err(ApiError::invalid(name, message));
        }
    };
    format.finish()?;
    Ok(constraint.map(|constraint| Structured { constraint, field }))
}

#[cfg(test)]
mod tests;
