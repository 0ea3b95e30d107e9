//! Parsing of answers into reasoning, text and calls, and the constraints that make a model call.

mod tool_constraint;

use std::borrow::Cow;
use std::sync::{Arc, Once};

use chiasm_backend::{Constraint, Finish, ToolCallDelta};
use chiasm_parse::{CallEnd, Format, Parser, Sink, Tools};
use chiasm_request::ChoiceDelta;
use chiasm_request::{AnswerEvent, AnswerEvents};
use chiasm_request::{Chat, ToolChoice, ToolUse};
use chiasm_types::TokenId;
use serde_json::Value;

use super::error::RequestError;
use crate::model::ServedModel;

pub(super) use tool_constraint::combine_with_calls;

/// The parsing of the answers to one request.
#[derive(Debug)]
pub(crate) struct OutputParsing {
    format: Format,
    tools: Arc<Tools>,
    without_reasoning: bool,
    /// `true` if an answer with calls has the finish reason `tool_calls`.
    finishes_with_calls: bool,
    uses_short_call_ids: bool,
    has_single_call: bool,
}

impl OutputParsing {
    /// Plans the parsing of the answers to a conversation, and the constraint for calls. The
    /// parsing is `None` if answers are plain text.
    ///
    /// # Errors
    /// Returns an error if functions can't be called because the model's syntax of calls is
    /// unknown.
    pub(super) fn plan(
        model: &ServedModel,
        chat: &Chat,
        tools: Option<&ToolUse>,
        without_reasoning: bool,
    ) -> Result<(Option<Arc<Self>>, Option<Constraint>), RequestError> {
        let answers = &model.answers;
        let (format, constraint) = match tools.map(|tools| (tools, &tools.choice)) {
            None | Some((_, ToolChoice::None)) => (&answers.without_calls, None),
            Some((_, ToolChoice::Auto)) if !answers.whole.has_calls() => {
                let message = "'tool_choice': 'auto' needs a tool call parser, and this model has \
                               none (--tool-call-parser); use 'required' or name a function";
                return Err(RequestError::invalid("tools", message));
            }
            Some((tools, _)) => match tool_constraint::structural_tag(model, tools) {
                Some(tag) => (&answers.whole, Some(tag)),
                None if tools.choice == ToolChoice::Auto && tools.allowed.is_some() => {
                    let message = "'allowed_tools' with 'mode': 'auto' is not supported for this \
                                   model; use 'mode': 'required', or send only the allowed tools";
                    return Err(RequestError::invalid("tool_choice", message));
                }
                None if tools.choice == ToolChoice::Auto => {
                    if tool_constraint::has_strict(tools) {
                        warn_about_strict(answers.tool_parser.as_deref());
                    }
                    (&answers.whole, None)
                }
                None => (&answers.listed, Some(tool_constraint::json_list(tools))),
            },
        };
        let format = match format.thinks_by_default() {
            Some(default) if !chat.thinking_enabled(&model.chats).unwrap_or(default) => {
                Cow::Owned(format.without_reasoning())
            }
            _ => Cow::Borrowed(format),
        };
        if !format.has_calls() && format.reasoning_markers().is_none() {
            return Ok((None, constraint));
        }
        let functions = tools.iter().flat_map(|tools| tools.tools.as_array().into_iter().flatten());
        let functions = functions.map(|tool| {
            (tool["function"]["name"].as_str().unwrap_or(""), &tool["function"]["parameters"])
        });
        let parsing = Self {
            format: format.into_owned(),
            tools: Arc::new(Tools::new(functions)),
            without_reasoning,
            finishes_with_calls: tools
                .is_some_and(|tools| !matches!(tools.choice, ToolChoice::Named(_))),
            uses_short_call_ids: answers.tool_parser.as_deref() == Some("mistral"),
            has_single_call: tools.is_some_and(tool_constraint::is_single),
        };
        Ok((Some(Arc::new(parsing)), constraint))
    }

    /// Returns `true` if answers may have reasoning.
    pub(super) fn reads_reasoning(&self) -> bool {
        self.format.reasoning_markers().is_some()
    }

    /// Creates a parser for an answer to this prompt.
    pub(super) fn parser(
        self: &Arc<Self>,
        model: &ServedModel,
        prompt: &[TokenId],
    ) -> OutputParser {
        let start = self.format.start(model.answers.is_reasoning_open(&model.tokenizer, prompt));
        let mut parser = Parser::new(&self.format, self.tools.clone(), start);
        if self.has_single_call {
            parser = parser.with_single_call();
        }
        OutputParser { parser, parsing: self.clone(), calls: CallState::default() }
    }

    /// Generates an id for a call without one. Mistral's templates require nine letters and digits.
    fn call_id(&self) -> String {
        let number: u128 = rand::random();
        if !self.uses_short_call_ids {
            return format!("chatcmpl-tool-{number:032x}");
        }
        let digit = |place: u32| {
            char::from_digit((number / 36_u128.pow(place) % 36) as u32, 36).unwrap_or('0')
        };
        (0..9).map(digit).collect()
    }
}

/// The parser of one continuation.
pub(super) struct OutputParser {
    parser: Parser,
    parsing: Arc<OutputParsing>,
    calls: CallState,
}

/// The state of a continuation's calls.
#[derive(Debug, Default)]
struct CallState {
    /// The number of calls that have begun.
    begun: usize,
    is_open: bool,
    /// The combined end of all ended calls.
    ended: Option<CallEnd>,
}

impl OutputParser {
    /// Returns `true` if the next text is reasoning.
    pub(super) fn is_reasoning(&self) -> bool {
        self.parser.is_reasoning()
    }

    /// Parses text, and adds its events to the delta.
    pub(super) fn push(&mut self, text: &str, delta: &mut ChoiceDelta) {
        let Self { parser, parsing, calls } = self;
        parser.push(text, &mut EventSink { parsing, calls, events: &mut delta.events });
    }

    /// Adds the remaining events to the last delta, and changes its finish reason if the answer
    /// ended with calls.
    pub(super) fn finish(&mut self, delta: &mut ChoiceDelta) {
        let Self { parser, parsing, calls } = self;
        parser.finish(&mut EventSink { parsing, calls, events: &mut delta.events });
        let ended_by_itself = matches!(delta.finish, Some(Finish::Eos | Finish::StopToken(_)));
        // Clients run the calls of an answer with this finish reason, so an answer with a partial
        // call must not have it.
        let are_complete = !calls.is_open && calls.ended == Some(CallEnd::Closed);
        if parsing.finishes_with_calls && ended_by_itself && are_complete {
            delta.finish = Some(Finish::ToolCalls);
        }
    }
}

/// A parser's sink, which adds events to a delta.
struct EventSink<'a> {
    parsing: &'a OutputParsing,
    calls: &'a mut CallState,
    events: &'a mut AnswerEvents,
}

impl Sink for EventSink<'_> {
    fn reasoning(&mut self, text: &str) {
        if !self.parsing.without_reasoning {
            self.events.push_reasoning(text);
        }
    }

    fn text(&mut self, text: &str) {
        self.events.push_text(text);
    }

    fn call(&mut self, name: &str, id: Option<&str>) {
        let id = id.map_or_else(|| self.parsing.call_id(), str::to_owned);
        let first = ToolCallDelta {
            index: self.calls.begun,
            id: Some(id),
            name: Some(name.to_owned()),
            arguments: String::new(),
        };
        self.events.push(AnswerEvent::Call(first));
        self.calls.begun += 1;
        self.calls.is_open = true;
    }

    fn arguments(&mut self, json: &str) {
        if !json.is_empty() {
            self.events.push_arguments(self.calls.begun.saturating_sub(1), json);
        }
    }

    fn end_call(&mut self, end: CallEnd) {
        self.calls.is_open = false;
        self.calls.ended = Some(CallEnd::combine(self.calls.ended, end));
        self.events.push(AnswerEvent::EndCall(end));
    }
}

/// Warns once that calls in this format are not constrained by the schemas of strict functions.
fn warn_about_strict(parser: Option<&str>) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        let parser = parser.unwrap_or("none");
        tracing::warn!(
            parser,
            "the schemas of strict functions are not enforced: no grammar for this call format"
        );
    });
}

/// Returns the schema of a function's parameters. A function without one accepts an empty object.
fn parameters(tool: &Value) -> Value {
    let parameters = &tool["function"]["parameters"];
    if parameters.is_object() {
        parameters.clone()
    } else {
        serde_json::json!({"type": "object", "properties": {}})
    }
}

#[cfg(test)]
mod tests;
