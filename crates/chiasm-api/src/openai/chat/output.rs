//! Chat answers: the whole body, and the chunks of a stream.

use std::borrow::Cow;
use std::iter::Peekable;

use chiasm_backend::ToolCallDelta;
use chiasm_prompt::Tokenizer;
use chiasm_request::{AnswerEvent, ChoiceDelta, FinishedChoice};
use chiasm_types::TokenId;
use serde::Serialize;

use crate::openai::ReasoningFields;
use crate::openai::body::{Body, ChunkExtras, ChunkHead, TokenIds};
use crate::openai::finish::{self, StopReason};
use crate::openai::logprobs::ChatLogprobs;
use crate::openai::prompt_logprobs::PromptLogprobsBody;
use crate::openai::{AnswerHead, Nvext, Usage};
use crate::sse;

/// The options of an answer: its optional parts.
pub struct AnswerOptions<'a> {
    /// The fields for reasoning.
    pub fields: ReasoningFields,
    /// The prompt's tokens, if token ids were requested. The choices then have token ids, too.
    pub prompt_tokens: Option<&'a [TokenId]>,
}

/// Returns the body of a whole answer.
pub fn answer<'a>(
    head: &'a AnswerHead,
    tokenizer: &'a Tokenizer,
    choices: &'a [FinishedChoice],
    options: AnswerOptions<'a>,
    usage: Usage,
    nvext: Option<Nvext>,
) -> impl Serialize + 'a {
    let AnswerOptions { fields, prompt_tokens } = options;
    let choice = |(index, choice): (usize, &'a FinishedChoice)| WholeChoice {
        index,
        message: Message::new(choice, fields),
        logprobs: choice.logprobs.as_ref().map(|tokens| ChatLogprobs { tokenizer, tokens }),
        finish_reason: finish::reason(&choice.finish),
        stop_reason: finish::stop_reason(&choice.finish),
        token_ids: prompt_tokens.is_some().then_some(TokenIds(&choice.tokens)),
    };
    let prompt_logprobs = choices
        .first()
        .and_then(|choice| choice.prompt_logprobs.as_ref())
        .map(|logprobs| PromptLogprobsBody { tokenizer, logprobs });
    let choices: Vec<_> = choices.iter().enumerate().map(choice).collect();
    let prompt_token_ids = prompt_tokens.map(TokenIds);
    Body {
        usage: Some(usage),
        prompt_token_ids,
        prompt_logprobs,
        nvext,
        ..head.body("chat.completion", choices)
    }
}

/// The writer of a streamed answer's chunks.
pub struct Chunks {
    head: ChunkHead,
    /// The beginning of a chunk with only text, for the first choice.
    text_head: Vec<u8>,
    tokenizer: Tokenizer,
    fields: ReasoningFields,
    with_ids: bool,
}

impl Chunks {
    /// Creates the writer of an answer's chunks. `with_ids` adds token ids to them.
    pub fn new(
        head: &AnswerHead,
        tokenizer: Tokenizer,
        fields: ReasoningFields,
        with_ids: bool,
    ) -> Self {
        let head = ChunkHead::new(head, CHUNK);
        let text_head = [head.bytes(), br#"[{"index":0,"delta":{"content":"#].concat();
        Self { head, text_head, tokenizer, fields, with_ids }
    }

    /// Appends the first chunk of a choice: its role.
    pub fn write_role(
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
        let prompt_token_ids = prompt_tokens.map(TokenIds);
        self.head.write(
            events,
            &[choice],
            &ChunkExtras { prompt_token_ids, usage, ..ChunkExtras::default() },
        );
    }

    /// Appends a delta as one chunk, or as several if the order of its events needs them.
    pub fn write_delta(
        &self,
        events: &mut Vec<u8>,
        delta: &ChoiceDelta,
        usage: Option<Usage>,
        nvext: Option<Nvext>,
    ) {
        let is_plain = usage.is_none() && nvext.is_none() && self.is_plain(delta);
        if let Some(text) = delta.events.only_text().filter(|_| is_plain) {
            return self.write_text(events, text);
        }
        self.write_chunks(events, delta, usage, nvext);
    }

    /// Returns `true` if a delta belongs to the first choice and only has events, like nearly every
    /// delta.
    fn is_plain(&self, delta: &ChoiceDelta) -> bool {
        delta.index == 0 && delta.finish.is_none() && delta.logprobs.is_none() && !self.with_ids
    }

    /// Appends the chunk of a plain delta with this text: the same as
    /// [`write_chunks`](Self::write_chunks) in a third of the time.
    fn write_text(&self, events: &mut Vec<u8>, text: &str) {
        let begin = events.len();
        events.extend_from_slice(&self.text_head);
        match serde_json::to_writer(&mut *events, text) {
            Ok(()) => events.extend_from_slice(TEXT_TAIL),
            Err(error) => sse::write_failed(events, begin, &error),
        }
    }

    fn write_chunks(
        &self,
        events: &mut Vec<u8>,
        delta: &ChoiceDelta,
        usage: Option<Usage>,
        nvext: Option<Nvext>,
    ) {
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
                logprobs: delta
                    .logprobs
                    .as_ref()
                    .filter(|_| is_first)
                    .map(|tokens| ChatLogprobs { tokenizer, tokens }),
                finish_reason: finish.map(finish::reason),
                stop_reason: finish.map(finish::stop_reason),
                token_ids: (*with_ids && is_first).then_some(TokenIds(&delta.tokens)),
            };
            let nvext = if is_last { nvext.take() } else { None };
            head.write(events, &[choice], &ChunkExtras { usage, nvext, ..ChunkExtras::default() });
            if is_last {
                return;
            }
            is_first = false;
        }
    }

    /// Appends the last chunk of a stream, which has no choices.
    pub fn write_usage(&self, events: &mut Vec<u8>, usage: Usage) {
        self.head.write(
            events,
            &[(); 0],
            &ChunkExtras { usage: Some(usage), ..ChunkExtras::default() },
        );
    }
}

const CHUNK: &str = "chat.completion.chunk";

/// The end of a chunk that only has text.
const TEXT_TAIL: &[u8] = b"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";

#[derive(Serialize)]
struct WholeChoice<'a> {
    index: usize,
    message: Message<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
    stop_reason: Option<StopReason<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<TokenIds<'a>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    /// Null if the answer has only calls or reasoning.
    content: Option<Cow<'a, str>>,
    /// Always null: models refuse in their text.
    refusal: (),
    /// The reasoning under vLLM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Cow<'a, str>>,
    /// The reasoning under the older name, which many clients read.
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
    /// Only in a choice's last chunk, and null there if no stop string or token ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<Option<StopReason<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<TokenIds<'a>>,
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
    /// The index of the call; only in chunks, to match the pieces of a call.
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

/// Returns the text; `None` if it is empty and the chunk has other content.
fn optional_text(text: &str, is_only_content: bool) -> Option<&str> {
    (is_only_content || !text.is_empty()).then_some(text)
}

/// The events of one chunk. A chunk's fields have no order: clients read reasoning, then text, then
/// calls.
#[derive(Default)]
struct ChunkPart<'a> {
    reasoning: &'a str,
    text: &'a str,
    tool_calls: Vec<ToolCall<'a>>,
}

impl<'a> ChunkPart<'a> {
    /// Takes the leading events that fit into one chunk.
    fn take(events: &mut Peekable<impl Iterator<Item = &'a AnswerEvent>>) -> Self {
        let mut part = Self::default();
        while let Some(event) = events.next_if(|event| part.accepts(event)) {
            match event {
                AnswerEvent::Reasoning(text) => part.reasoning = text,
                AnswerEvent::Text(text) => part.text = text,
                AnswerEvent::Call(piece) => {
                    part.tool_calls.push(ToolCall::new(piece, Some(piece.index)))
                }
                AnswerEvent::EndCall(_) => {}
            }
        }
        part
    }

    /// Returns `true` if the event can follow those of this part in the same chunk.
    fn accepts(&self, event: &AnswerEvent) -> bool {
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
            content: optional_text(text, reasoning.is_empty() && tool_calls.is_empty()),
            reasoning: optional_text(reasoning, false).filter(|_| fields.reasoning),
            reasoning_content: optional_text(reasoning, false).filter(|_| fields.reasoning_content),
            tool_calls,
        }
    }
}

impl<'a> Message<'a> {
    fn new(choice: &'a FinishedChoice, fields: ReasoningFields) -> Self {
        let reasoning = Some(choice.events.reasoning()).filter(|reasoning| !reasoning.is_empty());
        let calls = choice.events.calls();
        let has_more = reasoning.is_some() || !calls.is_empty();
        Self {
            role: "assistant",
            content: Some(choice.events.text()).filter(|text| !has_more || !text.is_empty()),
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
    use chiasm_request::AnswerEvents;

    use super::*;

    #[test]
    fn text_chunk_equals_general_chunk() {
        let model = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model"));
        let tokenizer = Tokenizer::from_model_dir(model).unwrap();
        let head = AnswerHead::new("chatcmpl", &RequestId::new("r").unwrap(), "a \"model\"");
        let chunks = Chunks::new(&head, tokenizer, ReasoningFields::default(), false);
        for text in ["", "hello", "\"quoted\"\n\\ \u{0}\u{7f} é 😀", "</script>"] {
            let events = AnswerEvents::from_text(text.to_owned());
            let delta = ChoiceDelta { events, tokens: vec![TokenId(1)], ..ChoiceDelta::default() };
            assert!(chunks.is_plain(&delta));
            let mut written = Vec::new();
            let mut whole = Vec::new();
            chunks.write_delta(&mut written, &delta, None, None);
            chunks.write_chunks(&mut whole, &delta, None, None);
            assert_eq!(String::from_utf8(written), String::from_utf8(whole));
        }
        let more = ChoiceDelta { index: 1, ..ChoiceDelta::default() };
        assert!(!chunks.is_plain(&more));
    }
}
