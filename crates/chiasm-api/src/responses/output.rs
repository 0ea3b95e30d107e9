//! The items of a response's output, and the events that build them up, in order.

use std::iter::Peekable;
use std::slice::Iter;

use bytes::Bytes;
use chiasm_backend::{Finish, ToolCallDelta};
use chiasm_parse::CallEnd;
use chiasm_request::{AnswerEvent, ChoiceDelta, FinishedChoice, TextLogprob};

use super::custom_input::InputReader;
use super::events::{Event, Events};
use super::item::{Item, Kind, Status};
use super::logprobs::LogprobWriter;
use super::response::{Head, IncompleteReason, Response};
use super::tools::{ClientTool, ToolNames};
use crate::error::ApiError;
use crate::openai::Usage;

/// An answer so far, as output items.
pub struct Answer {
    /// The request's id, which is a part of each item's id.
    request: String,
    names: ToolNames,
    items: Vec<Item>,
    status: Status,
    /// The reason for an incomplete answer, if OpenAI has a name for it.
    incomplete_reason: Option<IncompleteReason>,
    events: Events,
    /// The writer of the text's log probabilities, if they were requested.
    logprobs: Option<LogprobWriter>,
}

impl Answer {
    /// Creates a complete answer. It emits no events.
    pub fn whole(
        request: &str,
        names: ToolNames,
        logprobs: Option<LogprobWriter>,
        choice: FinishedChoice,
    ) -> Self {
        let mut answer = Self { logprobs, ..Self::new(request, names, Events::disabled()) };
        let FinishedChoice { events, text_logprobs, finish, .. } = choice;
        answer.add(&ChoiceDelta {
            events,
            text_logprobs,
            finish: Some(finish),
            ..ChoiceDelta::default()
        });
        answer
    }

    /// Creates an empty answer that is streamed. Also returns its first two events.
    pub fn streamed(
        request: &str,
        names: ToolNames,
        logprobs: Option<LogprobWriter>,
        head: &Head,
    ) -> (Self, [Bytes; 2]) {
        let mut answer = Self { logprobs, ..Self::new(request, names, Events::enabled()) };
        let first_events = ["response.created", "response.in_progress"].map(|kind| {
            let response = head.response(&[], Status::InProgress);
            answer.events.push(Event { response: Some(response), ..Event::new(kind) });
            answer.take_events().unwrap_or_default()
        });
        (answer, first_events)
    }

    fn new(request: &str, names: ToolNames, events: Events) -> Self {
        Self {
            request: request.to_owned(),
            names,
            items: Vec::new(),
            status: Status::InProgress,
            incomplete_reason: None,
            events,
            logprobs: None,
        }
    }

    /// Returns the response with the output so far.
    pub fn response<'a>(&'a self, head: &'a Head, usage: Usage) -> Response<'a> {
        head.response(&self.items, self.status)
            .with_incomplete_reason(self.incomplete_reason)
            .with_usage(usage)
    }

    /// Adds the events of a delta. An item ends where the next item begins.
    pub fn add(&mut self, delta: &ChoiceDelta) {
        let mut tokens = delta.text_logprobs.iter().peekable();
        for event in delta.events.iter() {
            match event {
                AnswerEvent::Reasoning(text) => self.add_text(Kind::Reasoning, text),
                AnswerEvent::Text(text) => self.add_message_text(text, &mut tokens),
                AnswerEvent::Call(piece) => self.add_call(piece),
                AnswerEvent::EndCall(CallEnd::Closed) => self.close(Status::Completed),
                AnswerEvent::EndCall(CallEnd::Unfinished) => self.close(Status::Incomplete),
            }
        }
        if let Some(finish) = &delta.finish {
            let is_cut = *finish == Finish::Length;
            self.incomplete_reason = is_cut.then_some(IncompleteReason::MaxOutputTokens);
            let is_incomplete = is_cut || self.items.iter().any(Item::is_unfinished_call);
            self.status = if is_incomplete { Status::Incomplete } else { Status::Completed };
            // An unfinished call has already been closed.
            self.close(if is_cut { Status::Incomplete } else { Status::Completed });
        }
    }

    /// Emits the last event of a finished answer.
    pub fn end(&mut self, head: &Head, usage: Usage) {
        let kind = if self.status == Status::Incomplete {
            "response.incomplete"
        } else {
            "response.completed"
        };
        let response = head
            .response(&self.items, self.status)
            .with_incomplete_reason(self.incomplete_reason)
            .with_usage(usage);
        self.events.push(Event { response: Some(response), ..Event::new(kind) });
    }

    /// Ends the answer with an error, and emits its last event.
    pub fn fail(&mut self, head: &Head, error: &ApiError) {
        self.close(Status::Incomplete);
        let response = head.response(&self.items, Status::Failed).with_error(&error.message);
        self.events.push(Event { response: Some(response), ..Event::new("response.failed") });
    }

    /// Takes the events since the last call; `None` if there are none.
    pub fn take_events(&mut self) -> Option<Bytes> {
        self.events.take()
    }

    /// Adds text to an item of this kind. Opens an item if necessary.
    fn add_text(&mut self, kind: Kind, text: &str) {
        if !text.is_empty() {
            self.enter(kind);
            self.append(text);
        }
    }

    /// Adds text to a message, with the tokens that begin in the text.
    fn add_message_text(&mut self, text: &str, tokens: &mut Peekable<Iter<'_, TextLogprob>>) {
        let Some(writer) = self.logprobs.as_mut().filter(|_| !text.is_empty()) else {
            return self.add_text(Kind::Message, text);
        };
        let written = writer.write(text, tokens);
        self.enter(Kind::Message);
        let Some(item) = self.items.last_mut() else { return };
        item.text.push_str(text);
        let logprobs = Some(&written[..]);
        self.events.push(Event {
            delta: Some(text),
            logprobs,
            ..Event::for_content(item.kind.delta_event(), item)
        });
        if let Some(writer) = &mut self.logprobs {
            writer.keep(&mut item.logprobs, written);
        }
    }

    /// Opens an item of this kind, unless the last item has the kind and is in progress.
    fn enter(&mut self, kind: Kind) {
        if self
            .items
            .last()
            .is_none_or(|item| item.kind != kind || item.status != Status::InProgress)
        {
            self.open(kind);
        }
    }

    fn add_call(&mut self, piece: &ToolCallDelta) {
        if let (Some(call_id), Some(name)) = (&piece.id, &piece.name) {
            let ClientTool { namespace, name, is_custom } = self.names.client_tool(name.clone());
            let input = is_custom.then(InputReader::new);
            self.open(Kind::Call { call_id: call_id.clone(), name, namespace, input });
        }
        match self.custom_input() {
            Some(input) => {
                let text = input.push(&piece.arguments);
                self.append(&text);
            }
            None => self.append(&piece.arguments),
        }
    }

    /// Returns the reader of a custom tool's input, if the last item is a call of a custom tool in
    /// progress.
    fn custom_input(&mut self) -> Option<&mut InputReader> {
        match self.items.last_mut() {
            Some(Item { kind: Kind::Call { input, .. }, status: Status::InProgress, .. }) => {
                input.as_mut()
            }
            _ => None,
        }
    }

    /// Completes the item in progress, and opens a new one.
    fn open(&mut self, kind: Kind) {
        self.close(Status::Completed);
        let index = self.items.len();
        let id = format!("{}_{}_{index}", kind.prefix(), self.request);
        let item = Item {
            id,
            index,
            kind,
            status: Status::InProgress,
            text: String::new(),
            logprobs: Vec::new(),
        };
        self.events.push(Event {
            item: Some(&item),
            ..Event::for_item("response.output_item.added", &item)
        });
        if let Some(part) = item.part() {
            self.events.push(Event {
                part: Some(part),
                ..Event::for_content("response.content_part.added", &item)
            });
        }
        self.items.push(item);
    }

    /// Appends text to the last item.
    fn append(&mut self, text: &str) {
        let Some(item) = self.items.last_mut().filter(|_| !text.is_empty()) else { return };
        item.text.push_str(text);
        self.events
            .push(Event { delta: Some(text), ..Event::for_content(item.kind.delta_event(), item) });
    }

    /// Ends the item in progress with this status.
    fn close(&mut self, status: Status) {
        if let Some(text) = self.custom_input().map(InputReader::finish) {
            self.append(&text);
        }
        let Some(item) = self.items.last_mut().filter(|item| item.status == Status::InProgress)
        else {
            return;
        };
        item.status = status;
        // Clients run finished calls. The truncated text of a custom tool looks complete to them,
        // unlike a truncated JSON object, so its `done` events are not sent.
        if status != Status::Completed && matches!(item.kind, Kind::Call { input: Some(_), .. }) {
            return;
        }
        let done = Event::for_content(item.kind.done_event(), item);
        match (&item.kind, item.part()) {
            (_, Some(part)) => {
                let logprobs = done.logprobs.and(Some(&item.logprobs[..]));
                self.events.push(Event { text: Some(&item.text), logprobs, ..done });
                self.events.push(Event {
                    part: Some(part),
                    ..Event::for_content("response.content_part.done", item)
                });
            }
            (Kind::Call { input: Some(_), .. }, None) => {
                self.events.push(Event { input: Some(&item.text), ..done });
            }
            (Kind::Call { name, .. }, None) => {
                self.events.push(Event { name: Some(name), arguments: Some(&item.text), ..done });
            }
            (_, None) => {}
        }
        self.events
            .push(Event { item: Some(item), ..Event::for_item("response.output_item.done", item) });
    }
}

impl Kind {
    /// Returns the prefix of the item's id.
    fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::Call { input: Some(_), .. } => "ctc",
            Self::Call { .. } => "fc",
        }
    }

    /// Returns the event for new text.
    fn delta_event(&self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text.delta",
            Self::Message => "response.output_text.delta",
            Self::Call { input: Some(_), .. } => "response.custom_tool_call_input.delta",
            Self::Call { .. } => "response.function_call_arguments.delta",
        }
    }

    /// Returns the event for the end of the text.
    fn done_event(&self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text.done",
            Self::Message => "response.output_text.done",
            Self::Call { input: Some(_), .. } => "response.custom_tool_call_input.done",
            Self::Call { .. } => "response.function_call_arguments.done",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
