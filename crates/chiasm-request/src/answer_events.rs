//! The events of a continuation: reasoning, text and calls, in the order of the model's text.

use std::borrow::Cow;
use std::iter::Chain;
use std::{option, slice};

use chiasm_backend::ToolCallDelta;
use chiasm_parse::CallEnd;

/// An event of a continuation.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerEvent {
    /// More reasoning; never empty.
    Reasoning(String),
    /// More text; never empty.
    Text(String),
    /// A piece of a call. The first piece has the call's id and name.
    Call(ToolCallDelta),
    /// The end of the last call. No more pieces of it follow.
    EndCall(CallEnd),
}

/// A list of events. The first event is stored inline: nearly every delta has a single event, which
/// then needs no allocation for a list.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AnswerEvents {
    first: Option<AnswerEvent>,
    more: Vec<AnswerEvent>,
}

/// A call of a finished answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WholeCall<'a> {
    /// The id, name and arguments.
    pub call: &'a ToolCallDelta,
    /// The way the call ended.
    pub end: CallEnd,
}

impl AnswerEvents {
    /// Creates the single event of a text, or no event for an empty text.
    pub fn from_text(text: String) -> Self {
        let first = (!text.is_empty()).then_some(AnswerEvent::Text(text));
        Self { first, more: Vec::new() }
    }

    /// Iterates over the events in order.
    pub fn iter(&self) -> Chain<option::Iter<'_, AnswerEvent>, slice::Iter<'_, AnswerEvent>> {
        self.first.iter().chain(&self.more)
    }

    /// Adds an event. An event that continues the last one is merged into it.
    pub fn push(&mut self, event: AnswerEvent) {
        match (self.last_mut(), event) {
            (_, AnswerEvent::Text(more) | AnswerEvent::Reasoning(more)) if more.is_empty() => {}
            (Some(AnswerEvent::Text(text)), AnswerEvent::Text(more)) => text.push_str(&more),
            (Some(AnswerEvent::Reasoning(text)), AnswerEvent::Reasoning(more)) => {
                text.push_str(&more)
            }
            (Some(AnswerEvent::Call(call)), AnswerEvent::Call(more))
                if more.id.is_none() && more.index == call.index =>
            {
                call.arguments.push_str(&more.arguments);
            }
            (None, event) => self.first = Some(event),
            (Some(_), event) => self.more.push(event),
        }
    }

    /// Adds text. Allocates no new string if the last event is text.
    pub fn push_text(&mut self, more: &str) {
        match self.last_mut() {
            Some(AnswerEvent::Text(text)) => text.push_str(more),
            _ => self.push(AnswerEvent::Text(more.to_owned())),
        }
    }

    /// Adds reasoning. Allocates no new string if the last event is reasoning.
    pub fn push_reasoning(&mut self, more: &str) {
        match self.last_mut() {
            Some(AnswerEvent::Reasoning(text)) => text.push_str(more),
            _ => self.push(AnswerEvent::Reasoning(more.to_owned())),
        }
    }

    /// Adds arguments of the call with this index. Allocates no new string if the last event is a
    /// piece of that call.
    pub fn push_arguments(&mut self, index: usize, more: &str) {
        match self.last_mut() {
            Some(AnswerEvent::Call(call)) if call.index == index => call.arguments.push_str(more),
            _ => {
                let piece =
                    ToolCallDelta { index, arguments: more.to_owned(), ..ToolCallDelta::default() };
                self.push(AnswerEvent::Call(piece));
            }
        }
    }

    /// Appends the events of `next`.
    pub fn append(&mut self, next: Self) {
        let Self { first, more } = next;
        first.into_iter().chain(more).for_each(|event| self.push(event));
    }

    /// Returns the text of all events.
    pub fn text(&self) -> Cow<'_, str> {
        join(self.iter().filter_map(|event| match event {
            AnswerEvent::Text(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    /// Returns the reasoning of all events.
    pub fn reasoning(&self) -> Cow<'_, str> {
        join(self.iter().filter_map(|event| match event {
            AnswerEvent::Reasoning(text) => Some(text.as_str()),
            _ => None,
        }))
    }

    /// Returns the text if there are no other events; empty if there are no events.
    pub fn only_text(&self) -> Option<&str> {
        match &self.first {
            None => Some(""),
            Some(AnswerEvent::Text(text)) if self.more.is_empty() => Some(text),
            _ => None,
        }
    }

    /// Returns the calls of a finished answer. A call without an end is unfinished.
    pub fn calls(&self) -> Vec<WholeCall<'_>> {
        let mut calls: Vec<WholeCall<'_>> = Vec::new();
        for event in self.iter() {
            match (event, calls.last_mut()) {
                (AnswerEvent::Call(call), _) => {
                    calls.push(WholeCall { call, end: CallEnd::Unfinished })
                }
                (AnswerEvent::EndCall(end), Some(last)) => last.end = *end,
                _ => {}
            }
        }
        calls
    }

    fn last_mut(&mut self) -> Option<&mut AnswerEvent> {
        self.more.last_mut().or(self.first.as_mut())
    }
}

/// Joins texts. A single text is borrowed.
fn join<'a>(mut texts: impl Iterator<Item = &'a str>) -> Cow<'a, str> {
    let mut all = Cow::Borrowed(texts.next().unwrap_or(""));
    texts.for_each(|more| all.to_mut().push_str(more));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> AnswerEvent {
        AnswerEvent::Text(text.to_owned())
    }

    fn reasoning(text: &str) -> AnswerEvent {
        AnswerEvent::Reasoning(text.to_owned())
    }

    fn call(index: usize, name: Option<&str>, arguments: &str) -> AnswerEvent {
        let id = name.map(|name| format!("call_{name}"));
        AnswerEvent::Call(ToolCallDelta {
            index,
            id,
            name: name.map(str::to_owned),
            arguments: arguments.to_owned(),
        })
    }

    fn events(all: impl IntoIterator<Item = AnswerEvent>) -> AnswerEvents {
        let mut events = AnswerEvents::default();
        all.into_iter().for_each(|event| events.push(event));
        events
    }

    #[test]
    fn appended_deltas_join_in_order() {
        let closed = || AnswerEvent::EndCall(CallEnd::Closed);
        let deltas = [
            events([reasoning("h")]),
            events([]),
            events([reasoning("m"), text("so"), text(" ")]),
            events([text("far"), call(0, Some("f"), ""), call(0, None, "{\"a\"")]),
            events([call(0, None, ": 1}"), closed(), reasoning("again"), call(1, Some("g"), "{")]),
            events([call(1, None, "}"), closed(), call(2, Some("h"), "{}")]),
        ];
        let mut whole = AnswerEvents::default();
        deltas.into_iter().for_each(|delta| whole.append(delta));
        let expected = [
            reasoning("hm"),
            text("so far"),
            call(0, Some("f"), "{\"a\": 1}"),
            closed(),
            reasoning("again"),
            call(1, Some("g"), "{}"),
            closed(),
            call(2, Some("h"), "{}"),
        ];
        assert_eq!(whole.iter().cloned().collect::<Vec<_>>(), expected);
        assert_eq!((whole.reasoning().as_ref(), whole.text().as_ref()), ("hmagain", "so far"));
        let ends: Vec<_> = whole.calls().iter().map(|call| call.end).collect();
        assert_eq!(ends, [CallEnd::Closed, CallEnd::Closed, CallEnd::Unfinished]);
    }

    #[test]
    fn single_event_allocates_no_list() {
        let mut events = AnswerEvents::from_text("a".to_owned());
        events.push_text("b");
        events.push(text(""));
        assert_eq!((events.only_text(), events.more.capacity()), (Some("ab"), 0));
        assert_eq!(AnswerEvents::default().only_text(), Some(""));
        events.push_reasoning("c");
        assert_eq!(events.only_text(), None);
    }

    #[test]
    fn arguments_only_join_pieces_of_their_call() {
        let mut joined = events([call(0, Some("f"), "{")]);
        joined.push_arguments(0, "}");
        joined.push(AnswerEvent::EndCall(CallEnd::Closed));
        joined.push_arguments(1, "x");
        let expected =
            [call(0, Some("f"), "{}"), AnswerEvent::EndCall(CallEnd::Closed), call(1, None, "x")];
        assert_eq!(joined, events(expected));
    }
}
