//! One answer on its way from text to what it says.

use std::sync::Arc;

use crate::calls::{Reader, Step};
use crate::format::{Format, Start};
use crate::pending::{Found, Pending};
use crate::{CallEnd, Sink, Tools};

/// Reads one answer.
#[derive(Clone, Debug)]
pub struct Parser {
    format: Format,
    tools: Arc<Tools>,
    state: State,
    pending: Pending,
    /// The beginning of the answer's text, until it was passed on.
    begin: &'static str,
    /// White space that belongs to what is told of if more of it follows.
    spaces: String,
    /// The text so far that may still become the label of reasoning.
    label: String,
    /// There was text that is more than white space.
    has_text: bool,
    /// There was a call.
    has_called: bool,
    /// The current call is dropped: it has no name, or only one call is allowed and there was one.
    is_dropped: bool,
    /// All calls after the first are dropped.
    has_single_call: bool,
    /// Reasoning has been looked for: it does not begin in text any more.
    ignores_reasoning: bool,
}

#[derive(Clone, Debug)]
enum State {
    Reasoning,
    Text,
    Calls(Reader),
}

impl Parser {
    /// Reads an answer in this format, which begins at `start` and may call these functions.
    pub fn new(format: &Format, tools: Arc<Tools>, start: Start) -> Self {
        Self {
            format: format.clone(),
            tools,
            state: if start == Start::Reasoning { State::Reasoning } else { State::Text },
            pending: Pending::default(),
            begin: format.in_text_alone.map_or("", |reasoning| reasoning.open),
            spaces: String::new(),
            label: String::new(),
            has_text: false,
            has_called: false,
            is_dropped: false,
            has_single_call: false,
            ignores_reasoning: start == Start::NoReasoning,
        }
    }

    /// Drops all calls after the first. Some formats have no grammar that allows only one call.
    #[must_use]
    pub fn with_single_call(self) -> Self {
        Self { has_single_call: true, ..self }
    }

    /// Returns `true` if the next text is reasoning, as far as is known.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Takes the next piece of the answer.
    pub fn push(&mut self, text: &str, sink: &mut dyn Sink) {
        self.begin(sink);
        if self.pending.is_empty() && self.is_plain(text) {
            return self.tell(text, sink);
        }
        self.pending.push(text);
        self.read(false, sink);
    }

    /// Ends the answer.
    pub fn finish(&mut self, sink: &mut dyn Sink) {
        self.begin(sink);
        self.read(true, sink);
        match self.state {
            State::Reasoning => self.end_reasoning(sink),
            _ if !self.has_called && !self.spaces.is_empty() => {
                sink.text(&self.spaces);
                self.spaces.clear();
            }
            _ => {}
        }
    }

    fn begin(&mut self, sink: &mut dyn Sink) {
        let begin = std::mem::take(&mut self.begin);
        if !begin.is_empty() {
            self.tell(begin, sink);
        }
    }

    /// Returns `true` if nothing begins or ends in a text.
    fn is_plain(&self, text: &str) -> bool {
        match self.state {
            State::Reasoning => self.format.in_reasoning.are_far_from(text),
            State::Text => self.format.in_text.are_far_from(text),
            State::Calls(_) => false,
        }
    }

    fn read(&mut self, is_last: bool, sink: &mut dyn Sink) {
        loop {
            let goes_on = match &mut self.state {
                State::Calls(reader) => {
                    let mut calls = CallSink {
                        sink: &mut *sink,
                        has_called: &mut self.has_called,
                        is_dropped: &mut self.is_dropped,
                        has_single_call: self.has_single_call,
                    };
                    let step = reader.read(&mut self.pending, is_last, &self.tools, &mut calls);
                    self.leave_calls(step, is_last, sink)
                }
                State::Reasoning | State::Text => self.read_plain(is_last, sink),
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Reads reasoning or text up to the next marker. False if there is none.
    fn read_plain(&mut self, is_last: bool, sink: &mut dyn Sink) -> bool {
        let is_reasoning = self.is_reasoning();
        let markers = if is_reasoning { &self.format.in_reasoning } else { &self.format.in_text };
        let (clear, marker) = match markers.find(self.pending.rest(), is_last) {
            Found::Nothing { clear } => (clear, None),
            Found::Marker { at, number } => (at, Some(markers.text(number))),
        };
        let text = self.pending.rest()[..clear].to_owned();
        self.pending.skip(clear);
        self.tell(&text, sink);
        let Some(marker) = marker else { return false };
        if is_reasoning {
            self.leave_reasoning(marker, sink)
        } else {
            self.leave_text(marker, sink)
        }
        true
    }

    fn leave_reasoning(&mut self, marker: &'static str, sink: &mut dyn Sink) {
        let (open, close) = self.format.reasoning_markers().unwrap_or_default();
        if marker == open {
            // It has begun already.
            return self.pending.skip(marker.len());
        }
        self.end_reasoning(sink);
        self.state = State::Text;
        if marker == close {
            self.pending.skip(marker.len());
        }
    }

    fn end_reasoning(&mut self, sink: &mut dyn Sink) {
        let label = self.format.reasoning.map_or("", |reasoning| reasoning.label);
        if self.label.len() < label.len()
            && self.label != label.trim_end()
            && !self.label.is_empty()
        {
            sink.reasoning(&self.label);
        }
        self.label.clear();
        let trims = self.format.reasoning.is_some_and(|reasoning| reasoning.trims_end);
        if !trims && !self.spaces.is_empty() {
            sink.reasoning(&self.spaces);
        }
        self.spaces.clear();
    }

    fn leave_text(&mut self, marker: &'static str, sink: &mut dyn Sink) {
        let reasoning = self.format.reasoning;
        if let Some(reasoning) =
            reasoning.filter(|reasoning| marker == reasoning.open || marker == reasoning.close)
        {
            let is_late = self.has_text && !reasoning.may_follow_text && marker == reasoning.open;
            if self.ignores_reasoning || is_late {
                self.tell(marker, sink);
            } else if marker == reasoning.open {
                self.state = State::Reasoning;
                self.flush_spaces(sink);
            }
            return self.pending.skip(marker.len());
        }
        if self.has_text && self.format.calls.is_some_and(|calls| calls.stand_alone) {
            self.tell(marker, sink);
            return self.pending.skip(marker.len());
        }
        let openings = self.format.calls.into_iter().flat_map(|calls| calls.openings);
        let kind = openings.into_iter().find(|(open, _)| *open == marker).map(|(_, kind)| *kind);
        match kind.and_then(|kind| kind.reader()) {
            Some(reader) => self.state = State::Calls(reader),
            None => self.pending.skip(marker.len()),
        }
    }

    /// Continues after a step within calls. Returns `false` if more text has to come.
    fn leave_calls(&mut self, step: Step, is_last: bool, sink: &mut dyn Sink) -> bool {
        match step {
            Step::More => return false,
            Step::Over => {
                if self.has_called {
                    self.spaces.clear();
                }
                self.state = State::Text;
            }
            Step::NotACall => {
                self.state = State::Text;
                let rest = self.pending.rest();
                // Nothing more comes, so whatever begins in the rest is no call either.
                let opening = match self.format.in_text.find(rest, true) {
                    Found::Marker { number, .. } if !is_last => {
                        self.format.in_text.text(number).len()
                    }
                    _ => rest.len(),
                };
                let text = rest[..opening].to_owned();
                self.pending.skip(opening);
                self.tell(&text, sink);
            }
        }
        !self.pending.is_empty()
    }

    /// Tells of reasoning or text, but keeps white space at its end back.
    fn tell(&mut self, text: &str, sink: &mut dyn Sink) {
        if text.is_empty() {
            return;
        }
        if self.is_reasoning() {
            self.tell_reasoning(text, sink)
        } else {
            self.tell_text(text, sink)
        }
    }

    fn tell_reasoning(&mut self, text: &str, sink: &mut dyn Sink) {
        let Some(reasoning) = self.format.reasoning else { return };
        let (label, trims) = (reasoning.label, reasoning.trims_end);
        let mut text = text;
        let joined;
        if !label.is_empty() && self.label.len() < label.len() {
            joined = format!("{}{text}", self.label);
            if label.starts_with(&joined) && joined.len() < label.len() {
                self.label = joined;
                return;
            }
            text = joined.strip_prefix(label).unwrap_or(&joined);
            // It is known now, whatever it is.
            self.label = label.to_owned();
        }
        let end = if trims { text.trim_end().len() } else { text.len() };
        if end > 0 {
            self.flush_spaces_as(sink, |sink, spaces| sink.reasoning(spaces));
            sink.reasoning(&text[..end]);
        }
        self.spaces.push_str(&text[end..]);
    }

    fn tell_text(&mut self, text: &str, sink: &mut dyn Sink) {
        let Some(calls) = self.format.calls else {
            self.has_text = self.has_text || !text.trim().is_empty();
            return sink.text(text);
        };
        if self.has_called && calls.are_last {
            return;
        }
        let end = text.trim_end().len();
        if end > 0 {
            self.flush_spaces(sink);
            sink.text(&text[..end]);
            self.has_text = true;
        }
        self.spaces.push_str(&text[end..]);
    }

    fn flush_spaces(&mut self, sink: &mut dyn Sink) {
        self.flush_spaces_as(sink, |sink, spaces| sink.text(spaces));
    }

    fn flush_spaces_as(&mut self, sink: &mut dyn Sink, tell: impl FnOnce(&mut dyn Sink, &str)) {
        if !self.spaces.is_empty() {
            tell(sink, &self.spaces);
            self.spaces.clear();
        }
    }
}

/// Tells of calls, and remembers that there was one.
struct CallSink<'a> {
    sink: &'a mut dyn Sink,
    has_called: &'a mut bool,
    is_dropped: &'a mut bool,
    has_single_call: bool,
}

impl Sink for CallSink<'_> {
    fn reasoning(&mut self, text: &str) {
        self.sink.reasoning(text);
    }

    fn text(&mut self, text: &str) {
        self.sink.text(text);
    }

    fn call(&mut self, name: &str, id: Option<&str>) {
        *self.is_dropped = name.is_empty() || (self.has_single_call && *self.has_called);
        if !*self.is_dropped {
            *self.has_called = true;
            self.sink.call(name, id);
        }
    }

    fn arguments(&mut self, json: &str) {
        if !*self.is_dropped {
            self.sink.arguments(json);
        }
    }

    fn end_call(&mut self, end: CallEnd) {
        if !*self.is_dropped {
            self.sink.end_call(end);
        }
    }
}
