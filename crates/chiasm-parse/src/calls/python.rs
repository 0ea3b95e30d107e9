//! Calls as a list of Python's: `[get_weather(city="Paris", days=3), now()]`.

use super::Step;
use super::json::spaces;
use crate::Sink;
use crate::pending::Pending;
use crate::tools::quoted;

/// Values within values.
const DEPTH: usize = 64;

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
                sink.end_call();
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
    let mut values = Values { rest: rest.strip_suffix(')')? };
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
        values.value(&mut arguments, DEPTH)?;
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

/// Python's literals, written as JSON one after the other.
struct Values<'a> {
    rest: &'a str,
}

impl Values<'_> {
    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn value(&mut self, out: &mut String, depth: usize) -> Option<()> {
        self.skip_spaces();
        match self.rest.as_bytes().first()? {
            b'"' | b'\'' => self.strings(out),
            b'[' => self.list(']', out, depth),
            b'(' => self.list(')', out, depth),
            b'{' => self.braces(out, depth),
            _ => self.word(out),
        }
    }

    /// A string, or several in a row, which Python takes for one.
    fn strings(&mut self, out: &mut String) -> Option<()> {
        let mut text = String::new();
        while self.rest.starts_with(['"', '\'']) {
            self.string(&mut text)?;
            self.skip_spaces();
        }
        out.push_str(&quoted(&text));
        Some(())
    }

    fn string(&mut self, text: &mut String) -> Option<()> {
        let quote = self.rest.chars().next()?;
        let mut chars = self.rest[1..].char_indices();
        loop {
            let (at, char) = chars.next()?;
            match char {
                '\\' => escaped(&mut chars, text)?,
                char if char == quote => {
                    self.rest = &self.rest[1 + at + 1..];
                    return Some(());
                }
                char => text.push(char),
            }
        }
    }

    /// The elements of a list, a tuple or a set.
    fn list(&mut self, close: char, out: &mut String, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        self.rest = &self.rest[1..];
        out.push('[');
        let mut is_first = true;
        loop {
            self.skip_spaces();
            if self.take(close.encode_utf8(&mut [0; 4])) {
                out.push(']');
                return Some(());
            }
            if !is_first {
                out.push_str(", ");
            }
            is_first = false;
            self.value(out, depth)?;
            self.skip_spaces();
            if !self.take(",") && !self.rest.starts_with(close) {
                return None;
            }
        }
    }

    /// A dictionary, or a set.
    fn braces(&mut self, out: &mut String, depth: usize) -> Option<()> {
        let mut set = Values { rest: self.rest };
        let mut elements = String::new();
        if self.rest[1..].trim_start().starts_with('}') || set.list('}', &mut elements, depth).is_none() {
            return self.dictionary(out, depth);
        }
        self.rest = set.rest;
        out.push_str(&elements);
        Some(())
    }

    fn dictionary(&mut self, out: &mut String, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        self.rest = &self.rest[1..];
        out.push('{');
        let mut is_first = true;
        loop {
            self.skip_spaces();
            if self.take("}") {
                out.push('}');
                return Some(());
            }
            if !is_first {
                out.push_str(", ");
            }
            is_first = false;
            let mut key = String::new();
            self.value(&mut key, 0)?;
            // Keys of JSON are strings.
            out.push_str(&if key.starts_with('"') { key } else { quoted(&key) });
            self.skip_spaces();
            if !self.take(":") {
                return None;
            }
            out.push_str(": ");
            self.value(out, depth)?;
            self.skip_spaces();
            if !self.take(",") && !self.rest.starts_with('}') {
                return None;
            }
        }
    }

    /// A number, or one of the names that stand for values.
    fn word(&mut self, out: &mut String) -> Option<()> {
        let end = self.rest.find([',', ')', ']', '}', ':']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        let word = word.trim();
        match word {
            "True" | "true" => out.push_str("true"),
            "False" | "false" => out.push_str("false"),
            "None" | "null" => out.push_str("null"),
            number => out.push_str(&read_number(number)?),
        }
        Some(())
    }
}

/// The character behind a backslash.
fn escaped(chars: &mut std::str::CharIndices<'_>, text: &mut String) -> Option<()> {
    let (_, char) = chars.next()?;
    let digits = match char {
        'n' => return push(text, '\n'),
        't' => return push(text, '\t'),
        'r' => return push(text, '\r'),
        'b' => return push(text, '\u{8}'),
        'f' => return push(text, '\u{c}'),
        '0' => return push(text, '\0'),
        '\n' => return Some(()),
        '\\' | '\'' | '"' => return push(text, char),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        other => {
            text.push('\\');
            return push(text, other);
        }
    };
    let mut code = 0;
    for _ in 0..digits {
        code = code * 16 + chars.next()?.1.to_digit(16)?;
    }
    push(text, char::from_u32(code)?)
}

fn push(text: &mut String, char: char) -> Option<()> {
    text.push(char);
    Some(())
}

/// A number of Python's as JSON writes it.
fn read_number(text: &str) -> Option<String> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits.trim_start()),
        None => ("", text.strip_prefix('+').unwrap_or(text).trim_start()),
    };
    let digits = digits.replace('_', "");
    if digits.is_empty() || digits.starts_with(['+', '-']) {
        return None;
    }
    for (prefix, base) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(digits) = digits.to_ascii_lowercase().strip_prefix(prefix) {
            return u64::from_str_radix(digits, base).ok().map(|number| format!("{sign}{number}"));
        }
    }
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        let significant = digits.trim_start_matches('0');
        return Some(format!("{sign}{}", if significant.is_empty() { "0" } else { significant }));
    }
    if !digits.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte)) {
        return None;
    }
    let number: f64 = digits.parse().ok().filter(|number: &f64| number.is_finite())?;
    Some(format!("{sign}{}", serde_json::Number::from_f64(number)?))
}
