//! What the text of an answer says: reasoning, text and calls; and how a model is made to call.

mod forced;

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

pub(super) use forced::calls_or;

/// How the answers to one request are read.
#[derive(Debug)]
pub(crate) struct Reading {
    format: Format,
    tools: Arc<Tools>,
    without_reasoning: bool,
    /// An answer with calls has ended because of them.
    ends_with_calls: bool,
    has_short_ids: bool,
    has_single_call: bool,
}

impl Reading {
    /// How the answers to a conversation are read, and what they are held to so that there are
    /// calls. `None` if they are text.
    ///
    /// # Errors
    /// A request whose functions can't be called: nobody knows how the model writes calls.
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
                let message = "it is not known how this model writes calls (--tool-call-parser); 'tool_choice' may be \
                               'required' or a function";
                return Err(RequestError::invalid("tools", message));
            }
            Some((tools, _)) => match forced::tag(model, tools) {
                Some(tag) => (&answers.whole, Some(tag)),
                None if tools.choice == ToolChoice::Auto && tools.allowed.is_some() => {
                    let message = "this model's calls can't be held to some of its tools, unless it has to call \
                                   ('mode': 'required'); send those tools alone";
                    return Err(RequestError::invalid("tool_choice", message));
                }
                None if tools.choice == ToolChoice::Auto => {
                    if forced::has_strict(tools) {
                        warn_of_strict(answers.tool_parser.as_deref());
                    }
                    (&answers.whole, None)
                }
                None => (&answers.listed, Some(forced::list(tools))),
            },
        };
        let format = match format.thinks_untold() {
            Some(untold) if !chat.thinks(&model.chats).unwrap_or(untold) => {
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
        let reading = Self {
            format: format.into_owned(),
            tools: Arc::new(Tools::new(functions)),
            without_reasoning,
            ends_with_calls: tools
                .is_some_and(|tools| !matches!(tools.choice, ToolChoice::Named(_))),
            has_short_ids: answers.tool_parser.as_deref() == Some("mistral"),
            has_single_call: tools.is_some_and(forced::is_single),
        };
        Ok((Some(Arc::new(reading)), constraint))
    }

    /// Whether answers may have reasoning.
    pub(super) fn reads_reasoning(&self) -> bool {
        self.format.reasoning_markers().is_some()
    }

    /// Begins to read an answer to this prompt.
    pub(super) fn begin(self: &Arc<Self>, model: &ServedModel, prompt: &[TokenId]) -> Reader {
        let start = self.format.start(model.answers.is_open(&model.tokenizer, prompt));
        let mut parser = Parser::new(&self.format, self.tools.clone(), start);
        if self.has_single_call {
            parser = parser.with_single_call();
        }
        Reader { parser, reading: self.clone(), calls: Calls::default() }
    }

    /// An id for a call that the model has given none. Mistral's templates want nine letters and
    /// digits.
    fn call_id(&self) -> String {
        let number: u128 = rand::random();
        if !self.has_short_ids {
            return format!("chatcmpl-tool-{number:032x}");
        }
        let digit = |place: u32| {
            char::from_digit((number / 36_u128.pow(place) % 36) as u32, 36).unwrap_or('0')
        };
        (0..9).map(digit).collect()
    }
}

/// Reads one continuation.
pub(super) struct Reader {
    parser: Parser,
    reading: Arc<Reading>,
    calls: Calls,
}

/// The calls of a continuation so far.
#[derive(Debug, Default)]
struct Calls {
    begun: usize,
    is_open: bool,
    /// The way those that ended did.
    ended: Option<CallEnd>,
}

impl Reader {
    /// Whether what comes next is reasoning.
    pub(super) fn is_reasoning(&self) -> bool {
        self.parser.is_reasoning()
    }

    /// Tells what text says.
    pub(super) fn read(&mut self, text: &str, delta: &mut ChoiceDelta) {
        let Self { parser, reading, calls } = self;
        parser.push(text, &mut EventSink { reading, calls, events: &mut delta.events });
    }

    /// Tells what is left, and why the continuation has ended.
    pub(super) fn finish(&mut self, delta: &mut ChoiceDelta) {
        let Self { parser, reading, calls } = self;
        parser.finish(&mut EventSink { reading, calls, events: &mut delta.events });
        let ended_by_itself = matches!(delta.finish, Some(Finish::Eos | Finish::StopToken(_)));
        // Clients run the calls of an answer with this finish, so an answer with half a call must
        // not have it.
        let are_whole = !calls.is_open && calls.ended == Some(CallEnd::Closed);
        if reading.ends_with_calls && ended_by_itself && are_whole {
            delta.finish = Some(Finish::ToolCalls);
        }
    }
}

/// Adds what a parser reads to the events of a delta.
struct EventSink<'a> {
    reading: &'a Reading,
    calls: &'a mut Calls,
    events: &'a mut AnswerEvents,
}

impl Sink for EventSink<'_> {
    fn reasoning(&mut self, text: &str) {
        if !self.reading.without_reasoning {
            self.events.push_reasoning(text);
        }
    }

    fn text(&mut self, text: &str) {
        self.events.push_text(text);
    }

    fn call(&mut self, name: &str, id: Option<&str>) {
        let id = id.map_or_else(|| self.reading.call_id(), str::to_owned);
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
        self.calls.ended = Some(CallEnd::joined(self.calls.ended, end));
        self.events.push(AnswerEvent::EndCall(end));
    }
}

/// Warns once that calls in this format are not held to the schemas of strict functions.
fn warn_of_strict(parser: Option<&str>) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        let parser = parser.unwrap_or("none");
        tracing::warn!(
            parser,
            "calls are not held to the schemas of strict functions: no grammar has this format"
        );
    });
}

/// A function's parameters; a function that names none takes an object without any.
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
