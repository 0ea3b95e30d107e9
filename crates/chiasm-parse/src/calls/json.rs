//! Calls that are JSON objects: `{"name": "f", "arguments": {…}}`, alone or in a list.

use std::ops::Range;

use super::Step;
use crate::pending::Pending;
use crate::{CallEnd, Sink};

/// Lists and objects within each other, beyond which text is no call.
const DEPTH: u32 = 256;

/// The syntax of such calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The text before the first call; may be empty.
    pub(crate) open: &'static str,
    /// The calls are the elements of a list. One object without a list is taken, too.
    pub(crate) is_list: bool,
    /// The text after a call, which may be missing.
    pub(crate) close: &'static str,
    /// The separator of calls.
    pub(crate) between: Option<char>,
    /// An object that only has a name is a call.
    pub(crate) may_lack_arguments: bool,
}

/// Reads calls of one form.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    place: Place,
    object: Object,
    /// Something was told of.
    has_begun: bool,
    /// The list's bracket was there.
    in_list: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Before,
    InObject,
    After,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            place: Place::Before,
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
            let step = match self.place {
                Place::Before => self.before(pending),
                Place::InObject => self.in_object(pending, is_last, sink),
                Place::After => self.after(pending, is_last),
            };
            match step {
                None => {}
                Some(Step::NotACall) if self.has_begun => return Step::Over,
                Some(Step::More) if is_last && !self.has_begun => return Step::NotACall,
                Some(step) => return step,
            }
        }
    }

    /// Looks for the first object. Nothing is taken: it may be no call.
    fn before(&mut self, pending: &Pending) -> Option<Step> {
        let rest = pending.rest();
        self.object.at = self.object.at.max(self.form.open.len());
        loop {
            self.object.at += spaces(&rest[self.object.at..]);
            match rest[self.object.at..].chars().next() {
                None => return Some(Step::More),
                Some('[') if self.form.is_list && !self.in_list => self.object.at += 1,
                Some('{') => {
                    self.place = Place::InObject;
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
        let went = self.object.read(pending, self.form.may_lack_arguments, sink);
        self.has_begun |= self.object.is_told;
        match went {
            Went::More if is_last && self.object.is_told => {
                sink.end_call(CallEnd::Unfinished);
                Some(Step::Over)
            }
            Went::More => Some(Step::More),
            Went::Wrong if self.object.is_told => {
                sink.end_call(CallEnd::Unfinished);
                pending.skip(self.object.at);
                Some(Step::Over)
            }
            Went::Wrong => Some(Step::NotACall),
            Went::Whole => {
                pending.skip(self.object.at);
                self.place = Place::After;
                None
            }
        }
    }

    /// Finds out whether another call follows.
    fn after(&mut self, pending: &mut Pending, is_last: bool) -> Option<Step> {
        pending.skip(spaces(pending.rest()));
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
        let between = if self.in_list { Some(',') } else { self.form.between };
        let Some(next) = rest.chars().next() else {
            return Some(if is_last { Step::Over } else { Step::More });
        };
        if Some(next) == between {
            pending.skip(next.len_utf8());
            return None;
        }
        if next == '{' && between.is_some() {
            self.object = Object::default();
            self.place = Place::InObject;
            return None;
        }
        Some(Step::Over)
    }
}

/// Bytes of white space at the front.
pub(crate) fn spaces(text: &str) -> usize {
    text.len() - text.trim_start().len()
}

/// The nesting of lists, objects and strings in one JSON value, by its brackets and quotes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Nesting {
    depth: u32,
    in_string: bool,
    is_escaped: bool,
    has_begun: bool,
}

/// The place of a byte in a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Is {
    Within,
    /// Its last.
    Last,
    /// The first that is no part of it.
    Behind,
    TooDeep,
}

impl Nesting {
    pub(crate) fn take(&mut self, byte: u8) -> Is {
        if self.in_string {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => {
                    self.in_string = false;
                    return if self.depth == 0 { Is::Last } else { Is::Within };
                }
                _ => {}
            }
            return Is::Within;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => {
                self.depth += 1;
                if self.depth > DEPTH {
                    return Is::TooDeep;
                }
            }
            b'}' | b']' if self.depth == 0 => return Is::Behind,
            b'}' | b']' => {
                self.depth -= 1;
                if self.depth == 0 {
                    return Is::Last;
                }
            }
            b',' | b' ' | b'\t' | b'\n' | b'\r' if self.depth == 0 && self.has_begun => {
                return Is::Behind;
            }
            _ => {}
        }
        self.has_begun = true;
        Is::Within
    }
}

/// One object with a name and arguments, which are passed on as they come once the name is known.
#[derive(Clone, Debug, Default)]
struct Object {
    /// The number of pending bytes that were read.
    at: usize,
    place: Within,
    /// The key of the current value.
    key: Range<usize>,
    value: usize,
    nesting: Nesting,
    name: Option<String>,
    /// Arguments that came before the name.
    kept: Option<Range<usize>>,
    /// The call was told of, and all of its arguments so far.
    is_told: bool,
    are_arguments_over: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Within {
    #[default]
    Open,
    BeforeKey,
    Key,
    BeforeColon,
    BeforeValue,
    Value,
    AfterValue,
}

enum Went {
    More,
    Whole,
    Wrong,
}

impl Object {
    /// Reads on. `at` is behind the object at its end.
    fn read(
        &mut self,
        pending: &mut Pending,
        may_lack_arguments: bool,
        sink: &mut dyn Sink,
    ) -> Went {
        loop {
            let rest = pending.rest();
            let Some(&byte) = rest.as_bytes().get(self.at) else {
                self.pass_on(pending, sink);
                return Went::More;
            };
            if self.place == Within::Value {
                match self.nesting.take(byte) {
                    Is::Within => self.at += 1,
                    Is::TooDeep => {
                        self.pass_on(pending, sink);
                        return Went::Wrong;
                    }
                    is => {
                        self.at += usize::from(is == Is::Last);
                        if !self.end_value(pending, sink) {
                            return Went::Wrong;
                        }
                        self.place = Within::AfterValue;
                    }
                }
                continue;
            }
            if self.place == Within::Key {
                if self.nesting.take(byte) == Is::Last {
                    self.key.end = self.at;
                    self.place = Within::BeforeColon;
                }
                self.at += 1;
                continue;
            }
            if byte.is_ascii_whitespace() {
                self.at += 1;
                continue;
            }
            self.place = match (self.place, byte) {
                (Within::Open, b'{') => Within::BeforeKey,
                (Within::BeforeKey, b'"') => {
                    self.nesting = Nesting::default();
                    self.nesting.take(byte);
                    self.key = self.at + 1..self.at + 1;
                    Within::Key
                }
                (Within::BeforeColon, b':') => Within::BeforeValue,
                (Within::BeforeValue, _) => {
                    self.begin_value(pending, sink);
                    continue;
                }
                (Within::AfterValue, b',') => Within::BeforeKey,
                (Within::BeforeKey | Within::AfterValue, b'}') => {
                    self.at += 1;
                    return self.end(pending, may_lack_arguments, sink);
                }
                _ => return Went::Wrong,
            };
            self.at += 1;
        }
    }

    fn has_arguments(&self) -> bool {
        self.are_arguments_over || self.kept.is_some()
    }

    fn begin_value(&mut self, pending: &mut Pending, sink: &mut dyn Sink) {
        self.place = Within::Value;
        self.nesting = Nesting::default();
        let is_first = !self.has_arguments() && is_arguments(&pending.rest()[self.key.clone()]);
        if is_first && let Some(name) = &self.name {
            sink.call(name, None);
            self.is_told = true;
            pending.skip(self.at);
            self.at = 0;
        }
        self.value = self.at;
    }

    /// Passes on what there is of arguments.
    fn pass_on(&mut self, pending: &mut Pending, sink: &mut dyn Sink) {
        if self.is_told && !self.are_arguments_over {
            sink.arguments(&pending.rest()[..self.at]);
            pending.skip(self.at);
            self.at = 0;
        }
    }

    /// False if the value can't be one of a call.
    fn end_value(&mut self, pending: &mut Pending, sink: &mut dyn Sink) -> bool {
        if self.is_told {
            self.pass_on(pending, sink);
            self.are_arguments_over = true;
            return true;
        }
        let (key, value) =
            (&pending.rest()[self.key.clone()], &pending.rest()[self.value..self.at]);
        if key == "name" {
            self.name = serde_json::from_str(value).ok().filter(|name: &String| !name.is_empty());
            return self.name.is_some();
        }
        if is_arguments(key) && self.kept.is_none() {
            self.kept = Some(self.value..self.at);
        }
        true
    }

    fn end(&mut self, pending: &Pending, may_lack_arguments: bool, sink: &mut dyn Sink) -> Went {
        if !self.is_told {
            let kept = self.kept.clone().map(|kept| &pending.rest()[kept]);
            let arguments = kept.or_else(|| may_lack_arguments.then_some("{}"));
            let (Some(name), Some(arguments)) = (&self.name, arguments) else { return Went::Wrong };
            sink.call(name, None);
            sink.arguments(arguments);
            self.is_told = true;
        }
        sink.end_call(CallEnd::Closed);
        Went::Whole
    }
}

fn is_arguments(key: &str) -> bool {
    key == "arguments" || key == "parameters"
}
