//! Gemma's calls: `call:get_weather{city:<|"|>Paris<|"|>,days:3}` between markers.

use serde_json::{Map, Value};

use super::Step;
use crate::pending::{Found, Markers, Pending};
use crate::tools::Types;
use crate::{CallEnd, Sink, Tools};

/// Values within values.
const DEPTH: usize = 64;

/// How such calls are written.
#[derive(Debug)]
pub(crate) struct Form {
    /// What a call begins with.
    pub(crate) open: &'static str,
    /// What stands around text.
    pub(crate) quote: &'static str,
    /// What ends a call.
    pub(crate) close: &'static str,
}

/// Reads one call, whose arguments are told of when it is whole.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    markers: Markers,
    has_begun: bool,
    body: String,
    /// A text has begun, in which nothing else does.
    in_text: bool,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        let markers = Markers::new([form.close, form.quote]);
        Self { form, markers, has_begun: false, body: String::new(), in_text: false }
    }

    pub(crate) fn read(&mut self, pending: &mut Pending, is_last: bool, tools: &Tools, sink: &mut dyn Sink) -> Step {
        if !self.has_begun {
            pending.skip(self.form.open.len());
            self.has_begun = true;
        }
        loop {
            let (clear, marker) = match self.markers.find(pending.rest(), is_last) {
                Found::Nothing { clear } => (clear, None),
                Found::Marker { at, number } => (at, Some(self.markers.text(number))),
            };
            self.body.push_str(&pending.rest()[..clear]);
            pending.skip(clear + marker.map_or(0, str::len));
            match marker {
                Some(marker) if marker == self.form.quote || self.in_text => {
                    self.body.push_str(marker);
                    self.in_text ^= marker == self.form.quote;
                }
                None if !is_last => return Step::More,
                _ => {
                    self.tell(marker.is_some(), tools, sink);
                    return Step::Over;
                }
            }
        }
    }

    /// Tells of the call, if it has got as far as its arguments. Those of one that breaks off are not closed.
    fn tell(&self, is_whole: bool, tools: &Tools, sink: &mut dyn Sink) {
        let (head, body) = match self.body.split_once('{') {
            Some(parts) => parts,
            None if is_whole => (self.body.as_str(), ""),
            None => return,
        };
        let name = head.rsplit(':').next().unwrap_or(head).trim();
        if name.is_empty() {
            return;
        }
        let mut fields = Fields { rest: body, quote: self.form.quote };
        let arguments = Value::Object(fields.object(|key| tools.types(name, key), DEPTH)).to_string();
        sink.call(name, None);
        if is_whole {
            sink.arguments(&arguments);
            sink.end_call(CallEnd::Closed);
        } else {
            sink.arguments(&arguments[..arguments.len() - 1]);
            sink.end_call(CallEnd::Unfinished);
        }
    }
}

/// What is still to be read of a call's arguments. What is missing at the end is taken as if it were there.
struct Fields<'a> {
    rest: &'a str,
    quote: &'static str,
}

impl<'a> Fields<'a> {
    /// The fields up to a closing brace. `types`: what a field may be by its key, if that is known.
    fn object(&mut self, types: impl Fn(&str) -> Option<Types>, depth: usize) -> Map<String, Value> {
        let mut object = Map::new();
        loop {
            self.skip_between();
            if self.rest.is_empty() || self.take("}") {
                return object;
            }
            let key = match self.text() {
                Some(key) => key,
                None => self.until(&[':', '}']).trim(),
            };
            // A key without a value is none.
            if self.take(":") {
                let value = self.value(types(key), depth);
                object.insert(key.to_owned(), value);
            }
        }
    }

    fn list(&mut self, depth: usize) -> Vec<Value> {
        let mut list = Vec::new();
        loop {
            self.skip_between();
            if self.rest.is_empty() || self.rest.starts_with('}') || self.take("]") {
                return list;
            }
            // Something is taken: the next is no end.
            list.push(self.value(None, depth));
        }
    }

    /// A value. Without quotes it is what it is as JSON, if nothing else is known.
    fn value(&mut self, types: Option<Types>, depth: usize) -> Value {
        self.skip_spaces();
        if let Some(text) = self.text() {
            return types.unwrap_or(Types::STRING).value(text);
        }
        if depth > 0 && self.take("{") {
            return Value::Object(self.object(|_| None, depth - 1));
        }
        if depth > 0 && self.take("[") {
            return Value::Array(self.list(depth - 1));
        }
        types.unwrap_or(Types::ANY).value(self.until(&[',', '}', ']']).trim())
    }

    /// A text in quotes, if there is one.
    fn text(&mut self) -> Option<&'a str> {
        let inside = self.rest.strip_prefix(self.quote)?;
        let (text, rest) = inside.split_once(self.quote).unwrap_or((inside, ""));
        self.rest = rest;
        Some(text)
    }

    /// Takes what stands before one of these.
    fn until(&mut self, ends: &[char]) -> &'a str {
        let end = self.rest.find(ends).unwrap_or(self.rest.len());
        let (text, rest) = self.rest.split_at(end);
        self.rest = rest;
        text
    }

    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn skip_between(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', ',', '\n', '\t']);
    }
}
