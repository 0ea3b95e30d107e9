//! The items of a response's output, and the events that report them while they grow.

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
use super::tools::{Called, Names};
use crate::error::ApiError;
use crate::openai::Usage;

/// All that was said so far.
pub struct Answer {
    /// The request's id, of which those of items are made.
    request: String,
    names: Names,
    items: Vec<Item>,
    status: Status,
    /// The reason for an incomplete answer, if OpenAI has a word for it.
    incomplete_reason: Option<IncompleteReason>,
    events: Events,
    /// The writer of the text's log probabilities, if they are wanted.
    logprobs: Option<LogprobWriter>,
}

impl Answer {
    /// A whole answer, of which no events tell.
    pub fn whole(
        request: &str,
        names: Names,
        logprobs: Option<LogprobWriter>,
        choice: FinishedChoice,
    ) -> Self {
        let mut answer = Self { logprobs, ..Self::new(request, names, Events::unwanted()) };
        let FinishedChoice { events, text_logprobs, finish, .. } = choice;
        answer.add(&ChoiceDelta {
            events,
            text_logprobs,
            finish: Some(finish),
            ..ChoiceDelta::default()
        });
        answer
    }

    /// An answer of which events tell, and the first two of them.
    pub fn streamed(
        request: &str,
        names: Names,
        logprobs: Option<LogprobWriter>,
        head: &Head,
    ) -> (Self, [Bytes; 2]) {
        let mut answer = Self { logprobs, ..Self::new(request, names, Events::wanted()) };
        let begun = ["response.created", "response.in_progress"].map(|kind| {
            let response = head.response(&[], Status::InProgress);
            answer.events.tell(Event { response: Some(response), ..Event::of(kind) });
            answer.take_events().unwrap_or_default()
        });
        (answer, begun)
    }

    fn new(request: &str, names: Names, events: Events) -> Self {
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

    /// The response with all that was said.
    pub fn response<'a>(&'a self, head: &'a Head, usage: Usage) -> Response<'a> {
        head.response(&self.items, self.status)
            .with_incomplete_reason(self.incomplete_reason)
            .with_usage(usage)
    }

    /// Adds the events of a delta. An item ends where the next one begins.
    pub fn add(&mut self, delta: &ChoiceDelta) {
        let mut tokens = delta.text_logprobs.iter().peekable();
        for event in delta.events.iter() {
            match event {
                AnswerEvent::Reasoning(text) => self.say(Kind::Reasoning, text),
                AnswerEvent::Text(text) => self.say_text(text, &mut tokens),
                AnswerEvent::Call(piece) => self.call(piece),
                AnswerEvent::EndCall(CallEnd::Closed) => self.close(Status::Completed),
                AnswerEvent::EndCall(CallEnd::Unfinished) => self.close(Status::Incomplete),
            }
        }
        if let Some(finish) = &delta.finish {
            let is_cut = *finish == Finish::Length;
            self.incomplete_reason = is_cut.then_some(IncompleteReason::MaxOutputTokens);
            let is_incomplete = is_cut || self.items.iter().any(Item::is_unfinished_call);
            self.status = if is_incomplete { Status::Incomplete } else { Status::Completed };
            // An unfinished call was closed before.
            self.close(if is_cut { Status::Incomplete } else { Status::Completed });
        }
    }

    /// Tells that this was all.
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
        self.events.tell(Event { response: Some(response), ..Event::of(kind) });
    }

    /// Tells that no more comes, because of an error.
    pub fn fail(&mut self, head: &Head, error: &ApiError) {
        self.close(Status::Incomplete);
        let response = head.response(&self.items, Status::Failed).with_error(&error.message);
        self.events.tell(Event { response: Some(response), ..Event::of("response.failed") });
    }

    /// The events since the last time; `None` if there are none.
    pub fn take_events(&mut self) -> Option<Bytes> {
        self.events.take()
    }

    fn say(&mut self, kind: Kind, text: &str) {
        if !text.is_empty() {
            self.enter(kind);
            self.grow(text);
        }
    }

    /// Adds text, and the tokens that begin in it.
    fn say_text(&mut self, text: &str, tokens: &mut Peekable<Iter<'_, TextLogprob>>) {
        let Some(writer) = self.logprobs.as_mut().filter(|_| !text.is_empty()) else {
            return self.say(Kind::Message, text);
        };
        let written = writer.write(text, tokens);
        self.enter(Kind::Message);
        let Some(item) = self.items.last_mut() else { return };
        item.text.push_str(text);
        let logprobs = Some(&written[..]);
        self.events.tell(Event {
            delta: Some(text),
            logprobs,
            ..Event::within(item.kind.grows(), item)
        });
        if let Some(writer) = &mut self.logprobs {
            writer.keep(&mut item.logprobs, written);
        }
    }

    /// Opens an item of this kind, unless the last item has this kind and is in progress.
    fn enter(&mut self, kind: Kind) {
        if self
            .items
            .last()
            .is_none_or(|item| item.kind != kind || item.status != Status::InProgress)
        {
            self.open(kind);
        }
    }

    fn call(&mut self, piece: &ToolCallDelta) {
        if let (Some(call_id), Some(name)) = (&piece.id, &piece.name) {
            let Called { namespace, name, is_custom } = self.names.called(name.clone());
            let input = is_custom.then(InputReader::new);
            self.open(Kind::Call { call_id: call_id.clone(), name, namespace, input });
        }
        match self.input() {
            Some(input) => {
                let text = input.push(&piece.arguments);
                self.grow(&text);
            }
            None => self.grow(&piece.arguments),
        }
    }

    /// Returns the reader of a custom tool's input, if the last item is such a call in progress.
    fn input(&mut self) -> Option<&mut InputReader> {
        match self.items.last_mut() {
            Some(Item { kind: Kind::Call { input, .. }, status: Status::InProgress, .. }) => {
                input.as_mut()
            }
            _ => None,
        }
    }

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
        self.events
            .tell(Event { item: Some(&item), ..Event::at("response.output_item.added", &item) });
        if let Some(part) = item.part() {
            self.events.tell(Event {
                part: Some(part),
                ..Event::within("response.content_part.added", &item)
            });
        }
        self.items.push(item);
    }

    fn grow(&mut self, text: &str) {
        let Some(item) = self.items.last_mut().filter(|_| !text.is_empty()) else { return };
        item.text.push_str(text);
        self.events.tell(Event { delta: Some(text), ..Event::within(item.kind.grows(), item) });
    }

    fn close(&mut self, status: Status) {
        if let Some(text) = self.input().map(InputReader::finish) {
            self.grow(&text);
        }
        let Some(item) = self.items.last_mut().filter(|item| item.status == Status::InProgress)
        else {
            return;
        };
        item.status = status;
        // Half of a text looks like a whole one to whoever runs what is done, unlike half of a JSON
        // object.
        if status != Status::Completed && matches!(item.kind, Kind::Call { input: Some(_), .. }) {
            return;
        }
        let done = Event::within(item.kind.is_done(), item);
        match (&item.kind, item.part()) {
            (_, Some(part)) => {
                let logprobs = done.logprobs.and(Some(&item.logprobs[..]));
                self.events.tell(Event { text: Some(&item.text), logprobs, ..done });
                self.events.tell(Event {
                    part: Some(part),
                    ..Event::within("response.content_part.done", item)
                });
            }
            (Kind::Call { input: Some(_), .. }, None) => {
                self.events.tell(Event { input: Some(&item.text), ..done });
            }
            (Kind::Call { name, .. }, None) => {
                self.events.tell(Event { name: Some(name), arguments: Some(&item.text), ..done });
            }
            (_, None) => {}
        }
        self.events
            .tell(Event { item: Some(item), ..Event::at("response.output_item.done", item) });
    }
}

impl Kind {
    fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
            Self::Call { input: Some(_), .. } => "ctc",
            Self::Call { .. } => "fc",
        }
    }

    fn grows(&self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text.delta",
            Self::Message => "response.output_text.delta",
            Self::Call { input: Some(_), .. } => "response.custom_tool_call_input.delta",
            Self::Call { .. } => "response.function_call_arguments.delta",
        }
    }

    fn is_done(&self) -> &'static str {
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
