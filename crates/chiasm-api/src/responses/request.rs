//! A body to what the pipeline is asked.

use chiasm_backend::Constraint;
use chiasm_backend::Structured;
use chiasm_media::Charge;
use chiasm_prompt::{ChatContent, ChatMessage};
use chiasm_request::{Chat, GenerateRequest};
use serde_json::{Map, Value};

use super::input::Input;
use super::response::Echo;
use super::tools::{self, Names};
use crate::error::ApiError;
use crate::openai::Common;
use crate::openai::chat::take_effort;
use crate::openai::fields::Fields;
use crate::openai::intake::{Intake, PLANNED_BYTES};
use crate::openai::media_parts::take_media_kwargs;
use crate::openai::request::{self, RequestBody};
use crate::openai::sampling::MAX_LOGPROBS;
use crate::openai::structured::json_schema;

/// Fields of the other endpoints alone, which share the rest.
const OF_OTHERS: [&str; 16] = [
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
/// The values of `include`: log probabilities, parts of items that never occur here, and parts that
/// the client has sent itself.
const INCLUDABLE: [&str; 8] = [
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
/// OpenAI's bounds.
const MAX_METADATA: usize = 16;
const MAX_METADATA_KEY: usize = 64;
const MAX_METADATA_VALUE: usize = 512;

/// A parsed body.
pub struct ResponsesRequest {
    /// The fields that completions have, too.
    pub common: Common,
    /// The request itself.
    pub generate: GenerateRequest,
    /// The fields that the response repeats.
    pub echo: Echo,
    /// The names of tools that the model knows by others.
    pub names: Names,
}

impl RequestBody for ResponsesRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, input) = request::read::<Input>(&mut intake)?;
        refuse_what_is_kept(&mut fields)?;
        let echo = Echo::of(&fields)?;
        intake.take_for("body", echo.bytes())?;
        OF_OTHERS.iter().try_for_each(|field| fields.refuse_unless(field, |_| false))?;
        take_stream_options(&mut fields)?;
        take_what_is_echoed(&mut fields)?;
        let logprobs = take_logprobs(&mut fields)?;
        let mut common = Common::take(&mut fields)?;
        common.sampling.logprobs = logprobs;
        common.sampling.logprobs_of_text = logprobs.is_some();
        common.sampling.max_tokens = fields.take_in("max_output_tokens", 1.., "at least 1")?;
        let format = take_format(&mut fields)?;
        if format.is_some() && common.sampling.structured.is_some() {
            let message = "'text.format' and 'structured_outputs' are two constraints; give one";
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
            messages: instructed(&mut intake, fields.take("instructions")?, input.messages)?,
        };
        let without_reasoning = fields.take("include_reasoning")? == Some(false);
        fields.finish()?;
        let generate = common.of_chat(chat, tools, without_reasoning);
        Ok((Self { common, generate, echo, names }, intake.into_charge()))
    }
}

/// Refuses what would need something that outlives a request.
fn refuse_what_is_kept(fields: &mut Fields) -> Result<(), ApiError> {
    let refused = |field: &str, why: &str| {
        let error = ApiError::invalid(
            field,
            format!("'{field}' is not supported: this server keeps nothing; {why}"),
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

/// The instructions are the first message, as in vLLM.
fn instructed(
    intake: &mut Intake,
    instructions: Option<String>,
    mut messages: Vec<ChatMessage>,
) -> Result<Vec<ChatMessage>, ApiError> {
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        intake.take_for("instructions", PLANNED_BYTES * text.len() as u64)?;
        let content = Some(ChatContent::Text(text));
        messages.insert(
            0,
            ChatMessage { role: "system".to_owned(), content, ..ChatMessage::default() },
        );
    }
    Ok(messages)
}

/// Fields that change nothing but the response, as far as chats do not have them, and those whose
/// only value here is their default.
fn take_what_is_echoed(fields: &mut Fields) -> Result<(), ApiError> {
    // It bounds calls of tools that the server runs, of which there are none.
    fields.take_in::<u64>("max_tool_calls", 0.., "0 or more")?;
    // Nothing is ever cut off: a conversation that is too long is refused in any case.
    fields.refuse_unless("truncation", |value| value == "disabled" || value == "auto")?;
    // What Codex notes of who asks.
    fields.take::<Map<String, Value>>("client_metadata")?;
    let metadata: Map<String, Value> = fields.take("metadata")?.unwrap_or_default();
    let is_fine = |(name, value): (&String, &Value)| {
        let length = value.as_str().map(|value| value.chars().count());
        name.chars().count() <= MAX_METADATA_KEY
            && length.is_some_and(|length| length <= MAX_METADATA_VALUE)
    };
    if metadata.len() > MAX_METADATA || !metadata.iter().all(is_fine) {
        let message = format!(
            "'metadata' may have {MAX_METADATA} strings of {MAX_METADATA_VALUE} characters, \
             by names of {MAX_METADATA_KEY} characters"
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

/// Takes `include` and `top_logprobs`, each of which can ask for log probabilities of the text.
/// Returns the number of alternatives per token if they are wanted.
fn take_logprobs(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let include: Vec<String> = fields.take("include")?.unwrap_or_default();
    if let Some(i) = include.iter().position(|asked| !INCLUDABLE.contains(&asked.as_str())) {
        return Err(ApiError::unsupported(format!("include[{i}]")));
    }
    let top = fields.take_in("top_logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?.unwrap_or(0);
    let are_wanted = top > 0 || include.iter().any(|asked| asked == TEXT_LOGPROBS);
    Ok(are_wanted.then_some(top))
}

/// Takes the reasoning effort. Reasoning itself is shown, so there are no summaries.
fn take_reasoning(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let Some(reasoning) = fields.take("reasoning")? else { return Ok(None) };
    let mut reasoning = Fields::new(reasoning, "reasoning")?;
    let effort = take_effort(&mut reasoning, "effort")?;
    // Chat templates decide which reasoning of before they show.
    reasoning.refuse_unless("context", |value| value == "auto")?;
    reasoning.refuse_unless("mode", |value| value == "standard")?;
    reasoning.ignore(&["summary", "generate_summary"]);
    reasoning.finish()?;
    Ok(effort)
}

/// Takes the format that the text of the answer must have.
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
            // The model is held to the schema in any case.
            format.ignore(&["name", "description", "strict"]);
            field = SCHEMA;
            Some(json_schema(schema, SCHEMA)?)
        }
        other => {
            let message = format!("it must be text, json_object or json_schema, got '{other}'");
            return Err(ApiError::invalid(format.name("type"), message));
        }
    };
    format.finish()?;
    Ok(constraint.map(|constraint| Structured { constraint, field }))
}

#[cfg(test)]
mod tests;
