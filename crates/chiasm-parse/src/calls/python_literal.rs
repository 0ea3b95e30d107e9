//! Values of Python's as JSON writes them.

use crate::tools::quoted;

/// Values within values.
const DEPTH: usize = 64;

/// Python's literals, written as JSON one after the other.
pub(super) struct Values<'a> {
    /// What was not read yet.
    pub(super) rest: &'a str,
}

impl<'a> Values<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { rest: text }
    }

    pub(super) fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    pub(super) fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Reads a value and writes it as JSON. `None` if there is none.
    pub(super) fn value(&mut self, out: &mut String) -> Option<()> {
        self.value_within(out, DEPTH)
    }

    fn value_within(&mut self, out: &mut String, depth: usize) -> Option<()> {
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
            self.value_within(out, depth)?;
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
            self.value_within(&mut key, 0)?;
            // Keys of JSON are strings.
            out.push_str(&if key.starts_with('"') { key } else { quoted(&key) });
            self.skip_spaces();
            if !self.take(":") {
                return None;
            }
            out.push_str(": ");
            self.value_within(out, depth)?;
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
