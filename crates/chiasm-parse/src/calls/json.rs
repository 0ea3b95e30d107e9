//! Calls that are JSON objects: `{"name": "f", "arguments": {…}}`, alone or in a list.

use std::ops::Range;

use super::Step;
use crate::pending::Pending;
use crate::{CallEnd, Sink};

/// The maximum nesting depth of lists and objects. Deeper text is not a call.
const MAX_DEPTH: u32 = 256;

/// The syntax of these calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The text before the first call; may be empty.
    pub(crate) open: &'static str,
    /// `true` if the calls may be the elements of a list. A single object without a list is valid,
    /// too.
    pub(crate) allows_list: bool,
    /// The text after a call, which may be missing.
    pub(crate) close: &'static str,
    /// The separator between calls outside of a list.
    pub(crate) separator: Option<char>,
    /// `true` if an object with only a name is a call.
    pub(crate) allows_missing_arguments: bool,
}

/// A reader of these calls.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    state: State,
    object: Object,
    /// `true` if a call was emitted.
    has_begun: bool,
    /// `true` if the calls are in a list.
    in_list: bool,
}

/// The position of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Before,
    InObject,
    After,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            state: State::Before,
            object: Object::default(),
            has_begun: false,
            in_list: false,
        }
    }

    pub(crate) fn read(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        sink: &mut dyn Sink,
    ) -> Step {
        loop {
            let step = match self.state {
                State::Before => self.before(pending),
                State::InObject => self.in_object(pending, is_last, sink),
                State::After => self.after(pending, is_last),
            };
            match step {
                None => {}
                Some(Step::NotACall) if self.has_begun => return Step::Over,
                Some(Step::More) if is_last && !self.has_begun => return Step::NotACall,
                Some(step) => return step,
            }
        }
    }

    /// Finds the first object. Consumes nothing, because the text may not be a call.
    fn before(&mut self, pending: &Pending) -> Option<Step> {
        let rest = pending.rest();
        self.object.at = self.object.at.max(self.form.open.len());
        loop {
            self.object.at += leading_spaces(&rest[self.object.at..]);
            match rest[self.object.at..].chars().next() {
                None => return Some(Step::More),
                Some('[') if self.form.allows_list && !self.in_list => self.object.at += 1,
                Some('{') => {
                    self.state = State::InObject;
                    return None;
                }
                Some(_) => return Some(Step::NotACall),
            }
            self.in_list = true;
        }
    }

    fn in_object(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        sink: &mut dyn Sink,
    ) -> Option<Step> {
        let step = self.object.read(pending, self.form.allows_missing_arguments, sink);
        self.has_begun |= self.object.is_reported;
        match step {
            ObjectStep::More if is_last && self.object.is_reported => {
                sink.end_call(CallEnd::Unfinished);
                Some(Step::Over)
            }
            ObjectStep::More => Some(Step::More),
            ObjectStep::Invalid if self.object.is_reported => {
                sink.end_call(CallEnd::Unfinished);
                pending.skip(self.object.at);
                Some(Step::Over)
            }
            ObjectStep::Invalid => Some(Step::NotACall),
            ObjectStep::Whole => {
                pending.skip(self.object.at);
                self.state = State::After;
                None
            }
        }
    }

    /// Reads the end of the calls, or the separator before the next call.
    fn after(&mut self, pending: &mut Pending, is_last: bool) -> Option<Step> {
        pending.skip(leading_spaces(pending.rest()));
        let rest = pending.rest();
        let close = if self.in_list { "]" } else { self.form.close };
        if !close.is_empty() {
            if rest.starts_with(close) {
                pending.skip(close.len());
                return Some(Step::Over);
            }
            if !is_last && close.starts_with(rest) {
                return Some(Step::More);
            }
        }
        let separator = if self.in_list { Some(',') } else { self.form.separator };
        let Some(next) = rest.chars().next() else {
            return Some(if is_last { Step::Over } else { Step::More });
        };
        if Some(next) == separator {
            pending.skip(next.len_utf8());
            return None;
        }
        if next == '{' && separator.is_some() {
            self.object = Object::default();
            self.state = State::InObject;
            return None;
        }
        Some(Step::Over)
    }
}

/// Returns the number of bytes of leading white space.
pub(crate) fn leading_spaces(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// A scanner for the end of one JSON value. It only tracks brackets and quotes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Nesting {
    depth: u32,
    in_string: bool,
    is_escaped: bool,
    has_begun: bool,
}

/// The position of a byte relative to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BytePosition {
    Within,
    /// The last byte of the value.
    Last,
    /// The first byte after the value.
    After,
    /// Beyond [`MAX_DEPTH`].
    TooDeep,
}

impl Nesting {
    /// Scans the next byte.
    pub(crate) fn push(&mut self, byte: u8) -> BytePosition {
        if self.in_string {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => {
                    self.in_string = false;
                    return if self.depth == 0 { BytePosition::Last } else { BytePosition::Within };
                }
                _ => {}
            }
            return BytePosition::Within;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => {
                self.depth += 1;
                if self.depth > MAX_DEPTH {
                    return BytePosition::TooDeep;
                }
            }
            b'}' | b']' if self.depth == 0 => return BytePosition::After,
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return BytePosition::Last;
                }
            }
            b',' | b' ' | b'\t' | b'\n' | b'\r' if self.depth == 0 && self.has_begun => {
                return BytePosition::After;
            }
            _ => {}
        }
        self.has_begun = true;
        BytePosition::Within
    }
}

/// One object with a name and arguments. Arguments are streamed once the name is known.
#[derive(Clone, Debug, Default)]
struct Object {
    /// The number of pending bytes that were read.
    at: usize,
    state: ObjectState,
    /// The key of the current value, as a range of the pending bytes.
    key: Range<usize>,
    /// The beginning of the current value in the pending bytes.
    value: usize,
    nesting: Nesting,
    name: Option<String>,
    /// Arguments that came before the name, as a range of the pending bytes.
    early_arguments: Option<Range<usize>>,
    /// `true` if the call and its arguments so far were emitted.
    is_reported: bool,
    /// `true` if the call's arguments were emitted to their end.
    has_all_arguments: bool,
}

/// The position of the reader in an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ObjectState {
    #[default]
    Open,
    BeforeKey,
    Key,
    BeforeColon,
    BeforeValue,
    Value,
    AfterValue,
}

/// The result of reading an object.
enum ObjectStep {
    More,
    Whole,
    Invalid,
}

impl Object {
    /// Reads the pending bytes. Leaves `at` after the object's last byte if it is whole.
    fn read(
        &mut self,
        pending: &mut Pending,
        allows_missing_arguments: bool,
        sink: &mut dyn Sink,
    ) -> ObjectStep {
        loop {
            let rest = pending.rest();
            let Some(&byte) = rest.as_bytes().get(self.at) else {
                self.emit_arguments(pending, sink);
                return ObjectStep::More;
            };
            if self.state == ObjectState::Value {
                match self.nesting.push(byte) {
                    BytePosition::Within => self.at += 1,
                    BytePosition::TooDeep => {
                        self.emit_arguments(pending, sink);
                        return ObjectStep::Invalid;
                    }
                    position => {
                        self.at += usize::from(position == BytePosition::Last);
                        if !self.end_value(pending, sink) {
                            return ObjectStep::Invalid;
                        }
                        self.state = ObjectState::AfterValue;
                    }
                }
                continue;
            }
            if self.state == ObjectState::Key {
                if self.nesting.push(byte) == BytePosition::Last {
                    self.key.end = self.at;
                    self.state = ObjectState::BeforeColon;
                }
                self.at += 1;
                continue;
            }
            if byte.is_ascii_whitespace() {
                self.at += 1;
                continue;
            }
            self.state = match (self.state, byte) {
                (ObjectState::Open, b'{') => ObjectState::BeforeKey,
                (ObjectState::BeforeKey, b'"') => {
                    self.nesting = Nesting::default();
                    self.nesting.push(byte);
                    self.key = self.at + 1..self.at + 1;
                    ObjectState::Key
                }
                (ObjectState::BeforeColon, b':') => ObjectState::BeforeValue,
                (ObjectState::BeforeValue, _) => {
                    self.begin_value(pending, sink);
                    continue;
                }
                (ObjectState::AfterValue, b',') => ObjectState::BeforeKey,
                (ObjectState::BeforeKey | ObjectState::AfterValue, b'}') => {
                    self.at += 1;
                    return self.end(pending, allows_missing_arguments, sink);
                }
                _ => return ObjectStep::Invalid,
            };
            self.at += 1;
        }
    }

    fn has_arguments(&self) -> bool {
        self.has_all_arguments || self.early_arguments.is_some()
    }

    fn begin_value(&mut self, pending: &mut Pending, sink: &mut dyn Sink) {
        self.state = ObjectState::Value;
        self.nesting = Nesting::default();
        let is_first = !self.has_arguments() && is_arguments_key(&pending.rest()[self.key.clone()]);
        if is_first && let Some(name) = &self.name {
            sink.call(name, None);
            self.is_reported = true;
            pending.skip(self.at);
            self.at = 0;
        }
        self.value = self.at;
    }

    /// Emits and consumes the arguments so far.
    fn emit_arguments(&mut self, pending: &mut Pending, sink: &mut dyn Sink) {
        if self.is_reported && !self.has_all_arguments {
            sink.arguments(&pending.rest()[..self.at]);
            pending.skip(self.at);
            self.at = 0;
        }
    }

    /// Ends a value. Returns `false` if the value can't be a part of a call.
    fn end_value(&mut self, pending: &mut Pending, sink: &mut dyn Sink) -> bool {
        if self.is_reported {
            self.emit_arguments(pending, sink);
            self.has_all_arguments = true;
            return true;
        }
        let key = &pending.rest()[self.key.clone()];
        let value = &pending.rest()[self.value..self.at];
        if key == "name" {
            self.name = serde_json::from_str(value).ok().filter(|name: &String| !name.is_empty());
            return self.name.is_some();
        }
        if is_arguments_key(key) && self.early_arguments.is_none() {
            self.early_arguments = Some(self.value..self.at);
        }
        true
    }

    fn end(
        &mut self,
        pending: &Pending,
        allows_missing_arguments: bool,
        sink: &mut dyn Sink,
    ) -> ObjectStep {
        if !self.is_reported {
            let early = self.early_arguments.clone().map(|range| &pending.rest()[range]);
            let arguments = early.or_else(|| allows_missing_arguments.then_some("{}"));
            let (Some(name), Some(arguments)) = (&self.name, arguments) else {
                return ObjectStep::Invalid;
            };
            sink.call(name, None);
            sink.arguments(arguments);
            self.is_reported = true;
        }
        sink.end_call(CallEnd::Closed);
        ObjectStep::Whole
    }
}

fn is_arguments_key(key: &str) -> bool {
    key == "arguments" || key == "parameters"
}
