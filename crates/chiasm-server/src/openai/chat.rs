//! `POST /v1/chat/completions`: the body, the answer and the chunks of a stream.

use std::borrow::Cow;
use std::iter::Peekable;

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
use crate::pipeline::{AnswerEvent, Chat, ChoiceDelta, FinishedChoice, GenerateRequest, ToolUse};
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
        message: Message::new(choice, fields),
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

    /// Appends the chunks of a delta: one, unless the order of its events needs more.
    pub(crate) fn write_delta(
        &self,
        events: &mut Vec<u8>,
        delta: &ChoiceDelta,
        usage: Option<Usage>,
        nvext: Option<Nvext>,
    ) {
        let is_plain = usage.is_none() && nvext.is_none() && self.is_plain(delta);
        if let Some(text) = delta.events.text_alone().filter(|_| is_plain) {
            return self.write_text(events, text);
        }
        self.write_chunks(events, delta, usage, nvext);
    }

    /// Whether a delta of the first choice has nothing for a chunk but its events, as nearly every one.
    fn is_plain(&self, delta: &ChoiceDelta) -> bool {
        delta.index == 0 && delta.finish.is_none() && delta.logprobs.is_none() && !self.with_ids
    }

    /// Appends what [`write_chunks`](Self::write_chunks) would for a plain delta with this text, in a third of the time.
    fn write_text(&self, events: &mut Vec<u8>, text: &str) {
        let begin = events.len();
        events.extend_from_slice(&self.text_head);
        match serde_json::to_writer(&mut *events, text) {
            Ok(()) => events.extend_from_slice(TEXT_TAIL),
            Err(failed) => sse::write_failed(events, begin, &failed),
        }
    }

    fn write_chunks(&self, events: &mut Vec<u8>, delta: &ChoiceDelta, usage: Option<Usage>, nvext: Option<Nvext>) {
        let Self { head, tokenizer, fields, with_ids, .. } = self;
        let mut rest = delta.events.iter().peekable();
        let mut nvext = nvext;
        let mut is_first = true;
        loop {
            let part = ChunkPart::take(&mut rest);
            let is_last = rest.peek().is_none();
            let finish = delta.finish.as_ref().filter(|_| is_last);
            let choice = ChunkChoice {
                index: delta.index,
                delta: part.into_delta(*fields),
                logprobs: delta.logprobs.as_ref().filter(|_| is_first).map(|tokens| ChatLogprobs { tokenizer, tokens }),
                finish_reason: finish.map(finish::reason),
                stop_reason: finish.map(finish::stop_reason),
                token_ids: (*with_ids && is_first).then_some(Ids(&delta.tokens)),
            };
            let nvext = if is_last { nvext.take() } else { None };
            head.write(events, &[choice], &Beside { usage, nvext, ..Beside::default() });
            if is_last {
                return;
            }
            is_first = false;
        }
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
    content: Option<Cow<'a, str>>,
    /// Null: models say no in their text.
    refusal: (),
    /// vLLM's name of it, and the older one that many clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<Cow<'a, str>>,
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

/// The events of one chunk. Clients read reasoning, then text, then calls, in whatever order a chunk has them.
#[derive(Default)]
struct ChunkPart<'a> {
    reasoning: &'a str,
    text: &'a str,
    tool_calls: Vec<ToolCall<'a>>,
}

impl<'a> ChunkPart<'a> {
    /// Takes the events that may stand in one chunk.
    fn take(events: &mut Peekable<impl Iterator<Item = &'a AnswerEvent>>) -> Self {
        let mut part = Self::default();
        while let Some(event) = events.next_if(|event| part.may_go_on(event)) {
            match event {
                AnswerEvent::Reasoning(text) => part.reasoning = text,
                AnswerEvent::Text(text) => part.text = text,
                AnswerEvent::Call(piece) => part.tool_calls.push(ToolCall::new(piece, Some(piece.index))),
                AnswerEvent::EndCall(_) => {}
            }
        }
        part
    }

    fn may_go_on(&self, event: &AnswerEvent) -> bool {
        let has_text = !self.text.is_empty() || !self.tool_calls.is_empty();
        match event {
            AnswerEvent::Reasoning(_) => self.reasoning.is_empty() && !has_text,
            AnswerEvent::Text(_) => !has_text,
            AnswerEvent::Call(_) | AnswerEvent::EndCall(_) => true,
        }
    }

    fn into_delta(self, fields: ReasoningFields) -> Delta<'a> {
        let Self { reasoning, text, tool_calls } = self;
        Delta {
            role: None,
            content: said(text, reasoning.is_empty() && tool_calls.is_empty()),
            reasoning: said(reasoning, false).filter(|_| fields.reasoning),
            reasoning_content: said(reasoning, false).filter(|_| fields.reasoning_content),
            tool_calls,
        }
    }
}

impl<'a> Message<'a> {
    fn new(choice: &'a FinishedChoice, fields: ReasoningFields) -> Self {
        let reasoning = Some(choice.events.reasoning()).filter(|reasoning| !reasoning.is_empty());
        let calls = choice.events.calls();
        let says_more = reasoning.is_some() || !calls.is_empty();
        Self {
            role: "assistant",
            content: Some(choice.events.text()).filter(|text| !says_more || !text.is_empty()),
            refusal: (),
            reasoning: reasoning.clone().filter(|_| fields.reasoning),
            reasoning_content: reasoning.filter(|_| fields.reasoning_content),
            tool_calls: calls.into_iter().map(|whole| ToolCall::new(whole.call, None)).collect(),
        }
    }
}

impl<'a> ToolCall<'a> {
    fn new(piece: &'a ToolCallDelta, index: Option<usize>) -> Self {
        let ToolCallDelta { index: _, id, name, arguments } = piece;
        Self {
            index,
            id: id.as_deref(),
            kind: id.is_some().then_some("function"),
            function: Function { name: name.as_deref(), arguments },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use chiasm_backend::RequestId;
    use serde_json::json;

    use super::*;
    use crate::pipeline::{AnswerEvents, Prompt};

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
            let events = AnswerEvents::of_text(text.to_owned());
            let delta = ChoiceDelta { events, tokens: vec![TokenId(1)], ..ChoiceDelta::default() };
            assert!(chunks.is_plain(&delta));
            let (mut written, mut whole) = (Vec::new(), Vec::new());
            chunks.write_delta(&mut written, &delta, None, None);
            chunks.write_chunks(&mut whole, &delta, None, None);
            assert_eq!(String::from_utf8(written), String::from_utf8(whole));
        }
        let more = ChoiceDelta { index: 1, ..ChoiceDelta::default() };
        assert!(!chunks.is_plain(&more));
    }

    #[test]
    fn messages_are_required() {
        let error = parse(json!({"model": "m"})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("messages"));
    }
}
