//! Calls as a Python list: `[get_weather(city="Paris", days=3), now()]`.

use super::Step;
use super::json::leading_spaces;
use super::python_literal::{Arguments, Progress, is_identifier};
use crate::pending::Pending;
use crate::{CallEnd, Sink};

/// The size of the arguments' JSON from which an incomplete call is emitted. Shorter text that
/// begins like a call may still turn out to be something else.
const MIN_CALL_BYTES: usize = 64;

/// A reader of one list of calls. A call is emitted once it is whole or has [`MIN_CALL_BYTES`] of
/// JSON.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    /// The text before the list; may be empty.
    open: &'static str,
    /// The text that may follow the list.
    close: &'static str,
    /// The number of pending bytes that were read of the current call.
    at: usize,
    name: String,
    /// The current call's arguments, once they have begun.
    arguments: Option<Arguments>,
    /// `true` if the current call was emitted.
    is_reported: bool,
    state: State,
    /// `true` if a call was emitted.
    has_begun: bool,
}

/// The position of the reader in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Before,
    Call,
    Between,
    After,
}

impl Reader {
    pub(crate) fn new(open: &'static str, close: &'static str) -> Self {
        Self {
            open,
            close,
            at: 0,
            name: String::new(),
            arguments: None,
            is_reported: false,
            state: State::Before,
            has_begun: false,
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
                State::Call => self.call(pending, sink),
                State::Between => self.between(pending),
                State::After => self.after(pending, is_last),
            };
            match step {
                None => {}
                Some(Step::NotACall) if self.has_begun => return self.break_off(sink),
                Some(Step::More) if is_last && self.has_begun => return self.break_off(sink),
                Some(Step::More) if is_last => return Step::NotACall,
                Some(step) => return step,
            }
        }
    }

    /// Ends the list early, and the current call if it was emitted.
    fn break_off(&mut self, sink: &mut dyn Sink) -> Step {
        if self.is_reported {
            sink.end_call(CallEnd::Unfinished);
        }
        Step::Over
    }

    /// Finds the list's bracket. Consumes nothing, because the text may not be a call.
    fn before(&mut self, pending: &Pending) -> Option<Step> {
        let rest = pending.rest();
        self.at = self.at.max(self.open.len());
        self.at += leading_spaces(&rest[self.at..]);
        match rest.as_bytes().get(self.at) {
            None => Some(Step::More),
            Some(b'[') => {
                self.at += 1;
                self.state = State::Call;
                None
            }
            Some(_) => Some(Step::NotACall),
        }
    }

    /// Reads a call, which is a name and arguments in parentheses.
    fn call(&mut self, pending: &mut Pending, sink: &mut dyn Sink) -> Option<Step> {
        while let Some(char) = pending.rest()[self.at..].chars().next() {
            let Some(arguments) = &mut self.arguments else {
                self.at += char.len_utf8();
                if !self.name(char) {
                    return Some(Step::NotACall);
                }
                continue;
            };
            let Some(progress) = arguments.push(char) else {
                self.emit_arguments(pending, sink);
                return Some(Step::NotACall);
            };
            self.at += char.len_utf8();
            let is_whole = progress == Progress::Whole;
            if !self.is_reported && (is_whole || arguments.json().len() >= MIN_CALL_BYTES) {
                sink.call(self.name.trim(), None);
                self.is_reported = true;
                self.has_begun = true;
            }
            if is_whole {
                self.emit_arguments(pending, sink);
                sink.end_call(CallEnd::Closed);
                self.name.clear();
                self.arguments = None;
                self.is_reported = false;
                self.state = State::Between;
                return None;
            }
        }
        self.emit_arguments(pending, sink);
        Some(Step::More)
    }

    /// Reads a character of a name, or the parenthesis after it. Returns `false` if it is neither.
    fn name(&mut self, char: char) -> bool {
        if char == '(' {
            self.arguments = Some(Arguments::new());
            return self.name.trim().split('.').all(is_identifier);
        }
        let is_name_char = char.is_ascii_alphanumeric() || "_.".contains(char) || !char.is_ascii();
        if is_name_char {
            self.name.push(char);
        }
        is_name_char || (self.name.is_empty() && char.is_ascii_whitespace())
    }

    /// Emits and consumes the arguments that were read, if the call was emitted.
    fn emit_arguments(&mut self, pending: &mut Pending, sink: &mut dyn Sink) {
        if !self.is_reported {
            return;
        }
        pending.skip(std::mem::take(&mut self.at));
        let json = self.arguments.as_mut().map(Arguments::take_json).unwrap_or_default();
        if !json.is_empty() {
            sink.arguments(&json);
        }
    }

    fn between(&mut self, pending: &mut Pending) -> Option<Step> {
        pending.skip(leading_spaces(pending.rest()));
        match pending.rest().as_bytes().first() {
            None => Some(Step::More),
            Some(b',') => {
                pending.skip(1);
                self.state = State::Call;
                None
            }
            Some(b']') => {
                pending.skip(1);
                self.state = State::After;
                None
            }
            Some(_) => Some(Step::Over),
        }
    }

    fn after(&self, pending: &mut Pending, is_last: bool) -> Option<Step> {
        let rest = pending.rest();
        if !is_last && self.close.len() > rest.len() && self.close.starts_with(rest) {
            return Some(Step::More);
        }
        if rest.starts_with(self.close) {
            pending.skip(self.close.len());
        }
        Some(Step::Over)
    }
}
