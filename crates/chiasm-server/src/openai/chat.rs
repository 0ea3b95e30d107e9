//! `POST /v1/chat/completions`: the body, the answer and the chunks of a stream.

use chiasm_backend::ToolCallDelta;
use chiasm_media::Charge;
use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde::Serialize;
use serde_json::{Map, Value};

use super::body::{Beside, Body, ChunkHead, Ids};
use super::fields::Fields;
use super::finish::{self, StopReason};
use super::intake::Intake;
use super::logprobs::ChatLogprobs;
use super::media_parts::take_media_kwargs;
use super::messages::Messages;
use super::prompt_logprobs::PromptLogprobsBody;
use super::request::RequestBody;
use super::sampling::{Common, MAX_LOGPROBS};
use super::usage::Usage;
use super::{AnswerHead, Nvext, request, tools};
use crate::error::ApiError;
use crate::frontend::ReasoningFields;
use crate::pipeline::{Chat, ChoiceDelta, FinishedChoice, GenerateRequest, ToolUse};
use crate::sse;

/// A parsed body.
pub(crate) struct ChatRequest {
    pub(crate) common: Common,
    pub(crate) generate: GenerateRequest,
}

impl RequestBody for ChatRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, messages) = request::read(&mut intake)?;
        let mut common = Common::take(&mut fields)?;
        common.check_given(common.sampling.n as usize)?;
        let max_tokens = fields.take_in("max_tokens", 1.., "at least 1")?;
        let max_completion_tokens = fields.take_in("max_completion_tokens", 1.., "at least 1")?;
        common.sampling.max_tokens = max_completion_tokens.or(max_tokens);
        let logprobs = fields.take("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.take_in("top_logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?;
        if top_logprobs.is_some_and(|top| top > 0) && !logprobs {
            return Err(ApiError::invalid("top_logprobs", "'top_logprobs' needs 'logprobs': true"));
        }
        common.sampling.logprobs = logprobs.then_some(top_logprobs.unwrap_or(0));

        let tools = tools::take(&mut fields)?;
        let chat = take_chat(&mut fields, messages, tools.as_ref())?;
        let without_reasoning = fields.take("include_reasoning")? == Some(false);
        fields.refuse_unless("echo", |v| v == false)?;
        fields.finish()?;
        let generate = common.of_chat(chat, tools, without_reasoning);
        Ok((Self { common, generate }, intake.into_charge()))
    }
}

/// Takes the fields that decide what a conversation becomes as a prompt.
pub(super) fn take_chat(fields: &mut Fields, messages: Messages, tools: Option<&ToolUse>) -> Result<Chat, ApiError> {
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
            "'continue_final_message' needs 'add_generation_prompt': false",
        ));
    }
    fields.refuse_unless("add_special_tokens", |v| v == false)?;
    Ok(chat)
}

/// Takes the variables of the chat template. `documents` is one of them, which vLLM has a field for.
fn take_variables(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let mut variables: Map<String, Value> = fields.take("chat_template_kwargs")?.unwrap_or_default();
    if let Some(documents) = fields.take::<Vec<Map<String, Value>>>("documents")? {
        variables.insert("documents".to_owned(), documents.into_iter().map(Value::Object).collect());
    }
    Ok(variables)
}

/// Takes the field that says how much a model is to think.
pub(crate) fn take_effort(fields: &mut Fields, field: &str) -> Result<Option<String>, ApiError> {
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

/// What an answer shows, and where.
pub(crate) struct Shown<'a> {
    /// Where it shows reasoning.
    pub(crate) fields: ReasoningFields,
    /// The prompt's tokens, if they were asked for; then its own, too.
    pub(crate) prompt_tokens: Option<&'a [TokenId]>,
}

/// The whole answer.
pub(crate) fn answer<'a>(
    head: &'a AnswerHead,
    tokenizer: &'a Tokenizer,
    choices: &'a [FinishedChoice],
    shown: Shown<'a>,
    usage: Usage,
    nvext: Option<Nvext>,
) -> impl Serialize + 'a {
    let Shown { fields, prompt_tokens } = shown;
    let choice = |(index, choice): (usize, &'a FinishedChoice)| WholeChoice {
        index,
        message: Message {
            role: "assistant",
            content: said(&choice.text, choice.reasoning.is_empty() && choice.tool_calls.is_empty()),
            refusal: (),
            reasoning: said(&choice.reasoning, false).filter(|_| fields.reasoning),
            reasoning_content: said(&choice.reasoning, false).filter(|_| fields.reasoning_content),
            tool_calls: tool_calls(&choice.tool_calls, false),
        },
        logprobs: choice.logprobs.as_ref().map(|tokens| ChatLogprobs { tokenizer, tokens }),
        finish_reason: finish::reason(&choice.finish),
        stop_reason: finish::stop_reason(&choice.finish),
        token_ids: prompt_tokens.is_some().then_some(Ids(&choice.tokens)),
    };
    let of_prompt = choices.first().and_then(|choice| choice.prompt_logprobs.as_ref());
    let prompt_logprobs = of_prompt.map(|logprobs| PromptLogprobsBody { tokenizer, logprobs });
    let choices: Vec<_> = choices.iter().enumerate().map(choice).collect();
    let prompt_token_ids = prompt_tokens.map(Ids);
    Body { usage: Some(usage), prompt_token_ids, prompt_logprobs, nvext, ..head.body("chat.completion", choices) }
}

/// What all chunks of a streamed answer have in common.
pub(crate) struct Chunks {
    head: ChunkHead,
    /// What a chunk of the first choice begins with that has text and nothing else.
    text_head: Vec<u8>,
    tokenizer: Tokenizer,
    fields: ReasoningFields,
    with_ids: bool,
}

impl Chunks {
    pub(crate) fn new(head: &AnswerHead, tokenizer: Tokenizer, fields: ReasoningFields, with_ids: bool) -> Self {
        let head = ChunkHead::new(head, CHUNK);
        let text_head = [head.bytes(), br#"[{"index":0,"delta":{"content":"#].concat();
        Self { head, text_head, tokenizer, fields, with_ids }
    }

    /// Appends the first chunk of a choice: its role.
    pub(crate) fn write_role(
        &self,
        events: &mut Vec<u8>,
        index: usize,
        prompt_tokens: Option<&[TokenId]>,
        usage: Option<Usage>,
    ) {
        let choice = ChunkChoice {
            index,
            delta: Delta { role: Some("assistant"), content: Some(""), ..Delta::default() },
            logprobs: None,
            finish_reason: None,
            stop_reason: None,
            token_ids: None,
        };
        let prompt_token_ids = prompt_tokens.map(Ids);
        self.head.write(events, &[choice], &Beside { prompt_token_ids, usage, ..Beside::default() });
    }

    /// Appends a chunk with new text, or with the reason of the end, or both.
    pub(crate) fn write_delta(
        &self,
        events: &mut Vec<u8>,
        delta: &ChoiceDelta,
        usage: Option<Usage>,
        nvext: Option<Nvext>,
    ) {
        if usage.is_none() && nvext.is_none() && self.is_text(delta) {
            return self.write_text(events, &delta.text);
        }
        self.write_whole(events, delta, usage, nvext);
    }

    /// Whether a delta adds text to the first choice, and nothing else is to be told of it: nearly every one.
    fn is_text(&self, delta: &ChoiceDelta) -> bool {
        let says_more = !delta.reasoning.is_empty() || !delta.tool_calls.is_empty() || delta.logprobs.is_some();
        delta.index == 0 && delta.finish.is_none() && !self.with_ids && !says_more
    }

    /// Appends what [`write_whole`](Self::write_whole) would for such a delta, in a third of the time.
    fn write_text(&self, events: &mut Vec<u8>, text: &str) {
        let begin = events.len();
        events.extend_from_slice(&self.text_head);
        match serde_json::to_writer(&mut *events, text) {
            Ok(()) => events.extend_from_slice(TEXT_TAIL),
            Err(failed) => sse::write_failed(events, begin, &failed),
        }
    }

    fn write_whole(&self, events: &mut Vec<u8>, delta: &ChoiceDelta, usage: Option<Usage>, nvext: Option<Nvext>) {
        let Self { head, tokenizer, fields, with_ids, .. } = self;
        let choice = ChunkChoice {
            index: delta.index,
            delta: Delta {
                role: None,
                content: said(&delta.text, delta.reasoning.is_empty() && delta.tool_calls.is_empty()),
                reasoning: said(&delta.reasoning, false).filter(|_| fields.reasoning),
                reasoning_content: said(&delta.reasoning, false).filter(|_| fields.reasoning_content),
                tool_calls: tool_calls(&delta.tool_calls, true),
            },
            logprobs: delta.logprobs.as_ref().map(|tokens| ChatLogprobs { tokenizer, tokens }),
            finish_reason: delta.finish.as_ref().map(finish::reason),
            stop_reason: delta.finish.as_ref().map(finish::stop_reason),
            token_ids: with_ids.then_some(Ids(&delta.tokens)),
        };
        head.write(events, &[choice], &Beside { usage, nvext, ..Beside::default() });
    }

    /// Appends the last chunk of a stream, which has no choices.
    pub(crate) fn write_usage(&self, events: &mut Vec<u8>, usage: Usage) {
        self.head.write(events, &[(); 0], &Beside { usage: Some(usage), ..Beside::default() });
    }
}

const CHUNK: &str = "chat.completion.chunk";

/// What a chunk ends with that has text and nothing else.
const TEXT_TAIL: &[u8] = b"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
    stop_reason: Option<StopReason<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Ids<'a>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    /// Null if there is nothing but calls or reasoning.
    content: Option<&'a str>,
    /// Null: models say no in their text.
    refusal: (),
    /// vLLM's name of it, and the older one that many clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
    /// Only in a choice's last chunk, and null there if nothing stopped it.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Option<StopReason<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Ids<'a>>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
}

#[derive(Serialize)]
struct ToolCall<'a> {
    /// Only in chunks, whose pieces belong together by it.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    /// `function`; present in a call's first piece, like its id.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

/// Text that is left out if it is empty, unless nothing else is there.
fn said(text: &str, is_all: bool) -> Option<&str> {
    (is_all || !text.is_empty()).then_some(text)
}

fn tool_calls(calls: &[ToolCallDelta], in_chunk: bool) -> Vec<ToolCall<'_>> {
    let mut bodies = Vec::with_capacity(calls.len());
    for ToolCallDelta { index, id, name, arguments } in calls {
        bodies.push(ToolCall {
            index: in_chunk.then_some(*index),
            id: id.as_deref(),
            kind: id.is_some().then_some("function"),
            function: Function { name: name.as_deref(), arguments },
        });
    }
    bodies
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use chiasm_backend::RequestId;
    use serde_json::json;

    use super::*;
    use crate::pipeline::Prompt;

    fn parse(body: Value) -> Result<ChatRequest, ApiError> {
        ChatRequest::parse(Intake::of(&body)).map(|(request, _)| request)
    }

    fn refused(extra: Value) -> Option<String> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        parse(body).err().and_then(|error| error.param)
    }

    #[test]
    fn unknown_fields_are_refused_by_name() {
        assert_eq!(refused(json!({"reasoning_effort": "huge"})).as_deref(), Some("reasoning_effort"));
        assert_eq!(refused(json!({"reasoning_effort": "high"})), None);
        assert_eq!(refused(json!({"temprature": 1})).as_deref(), Some("temprature"));
        assert_eq!(refused(json!({})), None);
    }

    #[test]
    fn documents_are_a_variable_of_the_template() {
        let documents = json!([{"title": "t", "text": "x"}]);
        let body = json!({"messages": [{"role": "user", "content": "x"}], "documents": documents,
            "chat_template_kwargs": {"documents": [], "a": 1}});
        let Prompt::Chat(chat) = parse(body).unwrap().generate.prompt else { panic!("a conversation") };
        assert_eq!(Value::Object(chat.template_kwargs), json!({"documents": documents, "a": 1}));
        assert_eq!(refused(json!({"documents": ["x"]})).as_deref(), Some("documents"));
    }

    #[test]
    fn max_completion_tokens_wins_over_max_tokens_and_zero_is_refused() {
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "max_completion_tokens": 7});
        assert_eq!(parse(body).unwrap().generate.sampling.max_tokens, Some(7));
        assert_eq!(refused(json!({"max_tokens": 0})).as_deref(), Some("max_tokens"));
    }

    #[test]
    fn top_logprobs_need_logprobs() {
        assert_eq!(refused(json!({"top_logprobs": 2})).as_deref(), Some("top_logprobs"));
        assert_eq!(refused(json!({"top_logprobs": 21, "logprobs": true})).as_deref(), Some("top_logprobs"));
        assert_eq!(refused(json!({"top_logprobs": 2, "logprobs": true})), None);
    }

    #[test]
    fn a_chunk_of_text_alone_is_as_any_other() {
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model"));
        let tokenizer = Tokenizer::from_model_dir(model).unwrap();
        let head = AnswerHead::new("chatcmpl", &RequestId::new("r").unwrap(), "a \"model\"");
        let chunks = Chunks::new(&head, tokenizer, ReasoningFields::default(), false);
        for text in ["", "hello", "\"quoted\"\n\\ \u{0}\u{7f} é 😀", "</script>"] {
            let delta = ChoiceDelta { text: text.to_owned(), tokens: vec![TokenId(1)], ..ChoiceDelta::default() };
            assert!(chunks.is_text(&delta));
            let (mut written, mut whole) = (Vec::new(), Vec::new());
            chunks.write_delta(&mut written, &delta, None, None);
            chunks.write_whole(&mut whole, &delta, None, None);
            assert_eq!(String::from_utf8(written), String::from_utf8(whole));
        }
        let more = ChoiceDelta { index: 1, text: "x".to_owned(), ..ChoiceDelta::default() };
        assert!(!chunks.is_text(&more));
    }

    #[test]
    fn messages_are_required() {
        let error = parse(json!({"model": "m"})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
}
