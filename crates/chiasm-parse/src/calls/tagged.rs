//! Calls with one tag per parameter, whose value is text: `<parameter=city>Paris</parameter>`.

use super::Step;
use super::value::Value;
use crate::pending::{Markers, NextMarker, Pending};
use crate::tools::quoted;
use crate::{CallEnd, Sink, Tools};

/// The syntax of a format's calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The beginning of the section with all calls, which may be missing. If `call` is empty, the
    /// beginning of the one call.
    pub(crate) open: &'static str,
    /// The beginning of a call, before its name; may be empty.
    pub(crate) call: &'static str,
    /// The end of the name. The first `key` also ends the name.
    pub(crate) name_end: &'static str,
    /// The beginning of a parameter, before its key.
    pub(crate) key: &'static str,
    /// The end of the key. If `value` is empty, the value begins here.
    pub(crate) key_end: &'static str,
    /// The beginning of the value; may be empty.
    pub(crate) value: &'static str,
    /// The end of the value. The next `key` and `call_end` also end the value.
    pub(crate) value_end: &'static str,
    /// The end of the call.
    pub(crate) call_end: &'static str,
    /// The end of the section with all calls.
    pub(crate) close: &'static str,
    /// `true` if one line break at each end of a value is not part of it.
    pub(crate) trims_lines: bool,
    /// `true` if `string="true"` after a key declares that its value is text. Values without this
    /// attribute are JSON.
    pub(crate) has_type_attribute: bool,
}

impl Form {
    /// Returns all markers, some of which may be empty.
    pub(crate) fn markers(&self) -> [&'static str; 9] {
        let Self { open, call, name_end, key, key_end, value, value_end, call_end, close, .. } =
            self;
        [open, call, name_end, key, key_end, value, value_end, call_end, close]
    }
}

/// A reader of calls in one [`Form`].
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    state: State,
    /// The markers to look for in the current state.
    markers: Markers,
    /// The name or the key so far.
    head: String,
    name: String,
    /// The number of parameters that were emitted.
    parameters: usize,
    value: Value,
}

/// The position of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Before,
    Between,
    Name,
    Parameters,
    Key,
    BeforeValue,
    Value,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            state: State::Before,
            markers: Markers::new([]),
            head: String::new(),
            name: String::new(),
            parameters: 0,
            value: Value::new(None, false, form.trims_lines),
        }
    }

    pub(crate) fn read(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        tools: &Tools,
        sink: &mut dyn Sink,
    ) -> Step {
        if self.state == State::Before {
            // The beginning of the section may be missing.
            let has_open = pending.rest().starts_with(self.form.open);
            pending.skip(if has_open { self.form.open.len() } else { 0 });
            self.enter(if self.form.call.is_empty() { State::Name } else { State::Between });
        }
        loop {
            let NextMarker { clear, marker } = self.markers.find(pending.rest(), is_last);
            self.text(&pending.rest()[..clear], sink);
            pending.skip(clear);
            let Some(marker) = marker else {
                if is_last && self.is_in_call() {
                    sink.end_call(CallEnd::Unfinished);
                }
                return if is_last { Step::Over } else { Step::More };
            };
            if let Some(step) = self.marker(marker, pending, tools, sink) {
                return step;
            }
        }
    }

    fn is_in_call(&self) -> bool {
        !matches!(self.state, State::Before | State::Between | State::Name)
    }

    fn enter(&mut self, state: State) {
        let Form { call, name_end, key, key_end, value, value_end, call_end, close, .. } =
            self.form;
        self.state = state;
        let markers: &[&'static str] = match state {
            State::Before => &[],
            State::Between => &[call, close],
            State::Name => &[name_end, key, call_end, close],
            State::Parameters => &[key, call_end, call, close],
            State::Key => &[key_end, call_end],
            State::BeforeValue => &[value, call_end],
            State::Value => &[value_end, key, call_end],
        };
        self.markers = Markers::new(markers.iter().copied().filter(|marker| !marker.is_empty()));
    }

    /// Reads text without markers.
    fn text(&mut self, text: &str, sink: &mut dyn Sink) {
        match self.state {
            State::Name | State::Key => self.head.push_str(text),
            State::Value => self.value.push(text, sink),
            State::Before | State::Between | State::Parameters | State::BeforeValue => {}
        }
    }

    /// Handles a marker, which the pending text begins with.
    fn marker(
        &mut self,
        marker: &'static str,
        pending: &mut Pending,
        tools: &Tools,
        sink: &mut dyn Sink,
    ) -> Option<Step> {
        let form = self.form;
        match self.state {
            State::Before => {}
            State::Between if marker == form.call => self.enter(State::Name),
            State::Between => {
                pending.skip(marker.len());
                return Some(Step::Over);
            }
            State::Name => {
                self.begin_call(sink);
                self.enter(State::Parameters);
                // A marker other than the name's end is handled again in the new state.
                if marker != form.name_end {
                    return None;
                }
            }
            State::Parameters if marker == form.key => self.enter(State::Key),
            State::Key if marker == form.key_end => {
                self.begin_value(tools, sink);
                self.enter(if form.value.is_empty() { State::Value } else { State::BeforeValue });
            }
            State::BeforeValue if marker == form.value => self.enter(State::Value),
            State::Value => {
                self.value.end(sink);
                self.enter(State::Parameters);
                if marker != form.value_end {
                    return None;
                }
            }
            // The end of the call or of the section, or the beginning of the next call.
            State::Parameters | State::Key | State::BeforeValue => {
                if self.state == State::BeforeValue {
                    self.value.end(sink);
                }
                self.end_call(sink);
                self.enter(State::Between);
                if marker != form.call_end {
                    return None;
                }
                if form.call.is_empty() {
                    pending.skip(marker.len());
                    return Some(Step::Over);
                }
            }
        }
        pending.skip(marker.len());
        None
    }

    /// Emits the call's name.
    fn begin_call(&mut self, sink: &mut dyn Sink) {
        self.name = without_quotes(self.head.trim()).trim().to_owned();
        self.head.clear();
        self.parameters = 0;
        sink.call(&self.name, None);
    }

    /// Emits the key and begins its value.
    fn begin_value(&mut self, tools: &Tools, sink: &mut dyn Sink) {
        let head = std::mem::take(&mut self.head);
        let mut key = head.trim();
        let mut is_json = false;
        if self.form.has_type_attribute {
            let (name, rest) = split_quoted(key);
            key = name;
            is_json = !rest.contains("string=\"true\"");
        }
        let key = without_quotes(key);
        let begin = if self.parameters == 0 { "{" } else { ", " };
        sink.arguments(&format!("{begin}{}: ", quoted(key)));
        self.parameters += 1;
        self.value = Value::new(tools.types(&self.name, key), is_json, self.form.trims_lines);
    }

    fn end_call(&mut self, sink: &mut dyn Sink) {
        self.head.clear();
        sink.arguments(if self.parameters == 0 { "{}" } else { "}" });
        sink.end_call(CallEnd::Closed);
    }
}

/// Removes quotes from a name: `"a"`, `'a'` and `a` are the same name.
fn without_quotes(name: &str) -> &str {
    let inside =
        |quote: char| name.strip_prefix(quote).map(|name| name.strip_suffix(quote).unwrap_or(name));
    inside('"').or_else(|| inside('\'')).unwrap_or(name)
}

/// Splits text into a name in quotes and the text after it.
fn split_quoted(text: &str) -> (&str, &str) {
    let Some(inside) = text.strip_prefix('"') else { return (text, "") };
    inside.split_once('"').unwrap_or((inside, ""))
}
