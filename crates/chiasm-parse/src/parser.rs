//! The streaming parser of one answer.

use std::sync::Arc;

use crate::calls::{Reader, Step};
use crate::format::{Format, Start};
use crate::pending::{NextMarker, Pending};
use crate::{CallEnd, Sink, Tools};

/// A parser of one answer.
#[derive(Clone, Debug)]
pub struct Parser {
    format: Format,
    tools: Arc<Tools>,
    state: State,
    pending: Pending,
    /// The text to emit before the answer. Empty once it was emitted.
    prefix: &'static str,
    /// White space that is emitted if more text of the same kind follows.
    held_spaces: String,
    /// The beginning of a label, such as `thought\n`, that the model writes at the start of
    /// reasoning. The whole label once it is decided.
    label: String,
    /// `true` if text other than white space was emitted.
    has_text: bool,
    /// `true` if a call was emitted.
    has_called: bool,
    /// `true` if the current call is dropped: it has no name, or is a second call where one is
    /// allowed.
    drops_call: bool,
    /// `true` if every call after the first is dropped.
    allows_single_call: bool,
    /// `true` if markers of reasoning that occur within text are plain text.
    ignores_reasoning: bool,
}

/// The kind of text at the parser's position.
#[derive(Clone, Debug)]
enum State {
    Reasoning,
    Text,
    Calls(Reader),
}

impl Parser {
    /// Creates a parser for an answer in this format, which begins at `start`. `tools` has the
    /// types of calls' arguments.
    pub fn new(format: &Format, tools: Arc<Tools>, start: Start) -> Self {
        Self {
            format: format.clone(),
            tools,
            state: if start == Start::Reasoning { State::Reasoning } else { State::Text },
            pending: Pending::default(),
            prefix: format.text_reasoning.map_or("", |reasoning| reasoning.open),
            held_spaces: String::new(),
            label: String::new(),
            has_text: false,
            has_called: false,
            drops_call: false,
            allows_single_call: false,
            ignores_reasoning: start == Start::NoReasoning,
        }
    }

    /// Drops every call after the first. Some formats have no grammar that allows only one call.
    #[must_use]
    pub fn with_single_call(self) -> Self {
        Self { allows_single_call: true, ..self }
    }

    /// Returns `true` if the parser is within reasoning, judging by the text so far.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Parses the next piece of the answer.
    pub fn push(&mut self, text: &str, sink: &mut dyn Sink) {
        self.emit_prefix(sink);
        if self.pending.is_empty() && self.is_plain(text) {
            return self.emit(text, sink);
        }
        self.pending.push(text);
        self.read(false, sink);
    }

    /// Ends the answer and emits the rest of it.
    pub fn finish(&mut self, sink: &mut dyn Sink) {
        self.emit_prefix(sink);
        self.read(true, sink);
        match self.state {
            State::Reasoning => self.end_reasoning(sink),
            _ if !self.has_called && !self.held_spaces.is_empty() => {
                sink.text(&self.held_spaces);
                self.held_spaces.clear();
            }
            _ => {}
        }
    }

    fn emit_prefix(&mut self, sink: &mut dyn Sink) {
        let prefix = std::mem::take(&mut self.prefix);
        if !prefix.is_empty() {
            self.emit(prefix, sink);
        }
    }

    /// Returns `true` if no marker begins in `text`.
    fn is_plain(&self, text: &str) -> bool {
        match self.state {
            State::Reasoning => self.format.markers_in_reasoning.none_begins_in(text),
            State::Text => self.format.markers_in_text.none_begins_in(text),
            State::Calls(_) => false,
        }
    }

    /// Parses the pending text as far as possible.
    fn read(&mut self, is_last: bool, sink: &mut dyn Sink) {
        loop {
            let continues = match &mut self.state {
                State::Calls(reader) => {
                    let mut calls = CallSink {
                        sink: &mut *sink,
                        has_called: &mut self.has_called,
                        drops_call: &mut self.drops_call,
                        allows_single_call: self.allows_single_call,
                    };
                    let step = reader.read(&mut self.pending, is_last, &self.tools, &mut calls);
                    self.leave_calls(step, is_last, sink)
                }
                State::Reasoning | State::Text => self.read_plain(is_last, sink),
            };
            if !continues {
                return;
            }
        }
    }

    /// Parses reasoning or text, and the next marker. Returns `false` if no marker was found.
    fn read_plain(&mut self, is_last: bool, sink: &mut dyn Sink) -> bool {
        let is_reasoning = self.is_reasoning();
        let markers = if is_reasoning {
            &self.format.markers_in_reasoning
        } else {
            &self.format.markers_in_text
        };
        let NextMarker { clear, marker } = markers.find(self.pending.rest(), is_last);
        let text = self.pending.rest()[..clear].to_owned();
        self.pending.skip(clear);
        self.emit(&text, sink);
        let Some(marker) = marker else { return false };
        if is_reasoning {
            self.leave_reasoning(marker, sink)
        } else {
            self.leave_text(marker, sink)
        }
        true
    }

    /// Handles a marker within reasoning.
    fn leave_reasoning(&mut self, marker: &'static str, sink: &mut dyn Sink) {
        let (open, close) = self.format.reasoning_markers().unwrap_or_default();
        if marker == open {
            // Reasoning has begun already.
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
        if !trims && !self.held_spaces.is_empty() {
            sink.reasoning(&self.held_spaces);
        }
        self.held_spaces.clear();
    }

    /// Handles a marker within text.
    fn leave_text(&mut self, marker: &'static str, sink: &mut dyn Sink) {
        let reasoning = self.format.reasoning;
        if let Some(reasoning) =
            reasoning.filter(|reasoning| marker == reasoning.open || marker == reasoning.close)
        {
            let is_late = self.has_text && !reasoning.may_follow_text && marker == reasoning.open;
            if self.ignores_reasoning || is_late {
                self.emit(marker, sink);
            } else if marker == reasoning.open {
                self.state = State::Reasoning;
                self.flush_spaces(sink);
            }
            return self.pending.skip(marker.len());
        }
        if self.has_text && self.format.calls.is_some_and(|calls| calls.must_come_first) {
            self.emit(marker, sink);
            return self.pending.skip(marker.len());
        }
        let openings = self.format.calls.into_iter().flat_map(|calls| calls.openings);
        let kind = openings.into_iter().find(|(open, _)| *open == marker).map(|(_, kind)| *kind);
        match kind.and_then(|kind| kind.reader()) {
            Some(reader) => self.state = State::Calls(reader),
            None => self.pending.skip(marker.len()),
        }
    }

    /// Continues after a step within calls. Returns `false` if more text is needed.
    fn leave_calls(&mut self, step: Step, is_last: bool, sink: &mut dyn Sink) -> bool {
        match step {
            Step::More => return false,
            Step::Over => {
                if self.has_called {
                    self.held_spaces.clear();
                }
                self.state = State::Text;
            }
            Step::NotACall => {
                self.state = State::Text;
                let rest = self.pending.rest();
                let NextMarker { marker, .. } = self.format.markers_in_text.find(rest, true);
                // At the end of the answer, the rest is text as a whole: no later marker in it can
                // begin a call.
                let length = marker.filter(|_| !is_last).map_or(rest.len(), str::len);
                let text = rest[..length].to_owned();
                self.pending.skip(length);
                self.emit(&text, sink);
            }
        }
        !self.pending.is_empty()
    }

    /// Emits reasoning or text, but holds back white space at its end.
    fn emit(&mut self, text: &str, sink: &mut dyn Sink) {
        if text.is_empty() {
            return;
        }
        if self.is_reasoning() {
            self.emit_reasoning(text, sink)
        } else {
            self.emit_text(text, sink)
        }
    }

    fn emit_reasoning(&mut self, text: &str, sink: &mut dyn Sink) {
        let Some(reasoning) = self.format.reasoning else { return };
        let label = reasoning.label;
        let mut text = text;
        let joined;
        if !label.is_empty() && self.label.len() < label.len() {
            joined = format!("{}{text}", self.label);
            if label.starts_with(&joined) && joined.len() < label.len() {
                self.label = joined;
                return;
            }
            text = joined.strip_prefix(label).unwrap_or(&joined);
            // `self.label` has its full length from here on, so this branch is not entered again.
            self.label = label.to_owned();
        }
        let end = if reasoning.trims_end { text.trim_end().len() } else { text.len() };
        if end > 0 {
            self.flush_spaces_to(sink, |sink, spaces| sink.reasoning(spaces));
            sink.reasoning(&text[..end]);
        }
        self.held_spaces.push_str(&text[end..]);
    }

    fn emit_text(&mut self, text: &str, sink: &mut dyn Sink) {
        let Some(calls) = self.format.calls else {
            self.has_text = self.has_text || !text.trim().is_empty();
            return sink.text(text);
        };
        if self.has_called && calls.drops_later_text {
            return;
        }
        let end = text.trim_end().len();
        if end > 0 {
            self.flush_spaces(sink);
            sink.text(&text[..end]);
            self.has_text = true;
        }
        self.held_spaces.push_str(&text[end..]);
    }

    fn flush_spaces(&mut self, sink: &mut dyn Sink) {
        self.flush_spaces_to(sink, |sink, spaces| sink.text(spaces));
    }

    fn flush_spaces_to(&mut self, sink: &mut dyn Sink, emit: impl FnOnce(&mut dyn Sink, &str)) {
        if !self.held_spaces.is_empty() {
            emit(sink, &self.held_spaces);
            self.held_spaces.clear();
        }
    }
}

/// A sink that forwards calls, except dropped ones, and records that there was one.
struct CallSink<'a> {
    sink: &'a mut dyn Sink,
    has_called: &'a mut bool,
    drops_call: &'a mut bool,
    allows_single_call: bool,
}

impl Sink for CallSink<'_> {
    fn reasoning(&mut self, text: &str) {
        self.sink.reasoning(text);
    }

    fn text(&mut self, text: &str) {
        self.sink.text(text);
    }

    fn call(&mut self, name: &str, id: Option<&str>) {
        *self.drops_call = name.is_empty() || (self.allows_single_call && *self.has_called);
        if !*self.drops_call {
            *self.has_called = true;
            self.sink.call(name, id);
        }
    }

    fn arguments(&mut self, json: &str) {
        if !*self.drops_call {
            self.sink.arguments(json);
        }
    }

    fn end_call(&mut self, end: CallEnd) {
        if !*self.drops_call {
            self.sink.end_call(end);
        }
    }
}
