//! Calls as a list of Python's: `[get_weather(city="Paris", days=3), now()]`.

use super::Step;
use super::json::spaces;
use super::python_literal::Values;
use crate::pending::Pending;
use crate::tools::quoted;
use crate::{CallEnd, Sink};

/// Reads one list of calls. Each call is told of when it is whole.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    /// What stands before the list; may be empty.
    open: &'static str,
    /// What may stand behind it.
    close: &'static str,
    /// How far the current call was looked at.
    at: usize,
    nesting: Nesting,
    /// The current call's name has begun.
    has_name: bool,
    place: Place,
    has_begun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Before,
    Call,
    Between,
    Behind,
}

/// Brackets and quotes around a place.
#[derive(Clone, Copy, Debug, Default)]
struct Nesting {
    depth: usize,
    quote: Option<u8>,
    is_escaped: bool,
}

impl Reader {
    pub(crate) fn new(open: &'static str, close: &'static str) -> Self {
        Self {
            open,
            close,
            at: 0,
            nesting: Nesting::default(),
            has_name: false,
            place: Place::Before,
            has_begun: false,
        }
    }

    pub(crate) fn read(&mut self, pending: &mut Pending, is_last: bool, sink: &mut dyn Sink) -> Step {
        loop {
            let step = match self.place {
                Place::Before => self.before(pending),
                Place::Call => self.call(pending, sink),
                Place::Between => self.between(pending),
                Place::Behind => self.behind(pending, is_last),
            };
            match step {
                None => {}
                Some(Step::NotACall) if self.has_begun => return Step::Over,
                Some(Step::More) if is_last => {
                    return if self.has_begun { Step::Over } else { Step::NotACall };
                }
                Some(step) => return step,
            }
        }
    }

    /// Nothing is taken: it may be no call.
    fn before(&mut self, pending: &Pending) -> Option<Step> {
        let rest = pending.rest();
        self.at = self.at.max(self.open.len());
        self.at += spaces(&rest[self.at..]);
        match rest.as_bytes().get(self.at) {
            None => Some(Step::More),
            Some(b'[') => {
                self.at += 1;
                self.place = Place::Call;
                None
            }
            Some(_) => Some(Step::NotACall),
        }
    }

    /// Looks for the end of a call, which begins with a name and a parenthesis.
    fn call(&mut self, pending: &mut Pending, sink: &mut dyn Sink) -> Option<Step> {
        let rest = pending.rest();
        // What stands before the first call is still there.
        let begin = if self.has_begun { 0 } else { rest.find('[').map_or(0, |at| at + 1) };
        while let Some(&byte) = rest.as_bytes().get(self.at) {
            self.at += 1;
            if self.nesting.take(byte) {
                let Some((name, arguments)) = read_call(rest[begin..self.at].trim()) else {
                    return Some(Step::NotACall);
                };
                sink.call(&name, None);
                sink.arguments(&arguments);
                sink.end_call(CallEnd::Closed);
                self.has_begun = true;
                pending.skip(self.at);
                (self.at, self.nesting, self.has_name) = (0, Nesting::default(), false);
                self.place = Place::Between;
                return None;
            }
            let is_head = self.nesting.depth == 0;
            let is_of_name = byte.is_ascii_alphanumeric() || b"_.".contains(&byte) || !byte.is_ascii();
            if is_head && !is_of_name && (self.has_name || !byte.is_ascii_whitespace()) {
                return Some(Step::NotACall);
            }
            self.has_name |= is_of_name;
        }
        Some(Step::More)
    }

    fn between(&mut self, pending: &mut Pending) -> Option<Step> {
        pending.skip(spaces(pending.rest()));
        match pending.rest().as_bytes().first() {
            None => Some(Step::More),
            Some(b',') => {
                pending.skip(1);
                self.place = Place::Call;
                None
            }
            Some(b']') => {
                pending.skip(1);
                self.place = Place::Behind;
                None
            }
            Some(_) => Some(Step::Over),
        }
    }

    fn behind(&self, pending: &mut Pending, is_last: bool) -> Option<Step> {
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

impl Nesting {
    /// Whether this is the parenthesis that ends a call.
    fn take(&mut self, byte: u8) -> bool {
        if let Some(quote) = self.quote {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                _ if byte == quote => self.quote = None,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' | b'\'' => self.quote = Some(byte),
            b'(' | b'[' | b'{' => self.depth += 1,
            b')' | b']' | b'}' if self.depth > 0 => {
                self.depth -= 1;
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }
}

/// A call's name, and its arguments as JSON. Arguments without names are no arguments of a tool.
fn read_call(call: &str) -> Option<(String, String)> {
    let (name, rest) = call.split_once('(')?;
    let name = name.trim();
    let is_name = name.split('.').all(is_identifier);
    let mut values = Values::new(rest.strip_suffix(')')?);
    let mut arguments = String::from("{");
    values.skip_spaces();
    while !values.rest.is_empty() {
        let (key, rest) = values.rest.split_once('=')?;
        let key = key.trim();
        if !is_identifier(key) {
            return None;
        }
        values.rest = rest;
        if arguments.len() > 1 {
            arguments.push_str(", ");
        }
        arguments.push_str(&quoted(key));
        arguments.push_str(": ");
        values.value(&mut arguments)?;
        values.skip_spaces();
        if !values.rest.is_empty() && !values.take(",") {
            return None;
        }
        values.skip_spaces();
    }
    arguments.push('}');
    is_name.then(|| (name.to_owned(), arguments))
}

fn is_identifier(text: &str) -> bool {
    let is_first = |c: char| c.is_alphabetic() || c == '_';
    text.starts_with(is_first) && text.chars().all(|c| is_first(c) || c.is_numeric())
}
