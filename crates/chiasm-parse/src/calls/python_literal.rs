//! Conversion of the arguments of a Python call to JSON, one character at a time.

use crate::tools::quoted;

/// The maximum nesting depth of values.
const MAX_DEPTH: usize = 64;

/// A converter for the arguments of one call, which stand between its parentheses.
#[derive(Clone, Debug)]
pub(super) struct Arguments {
    state: State,
    /// The open lists and dictionaries, outermost first.
    levels: Vec<Level>,
    /// `true` if an argument was read.
    has_arguments: bool,
    /// The argument's name, the number or the constant so far.
    word: String,
    /// `true` if the current string, number or constant is a dictionary's key, or may turn out to
    /// be one.
    is_key: bool,
    /// The JSON of the key.
    key: String,
    /// JSON that was written and not taken yet.
    json: String,
}

/// The position of the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    BeforeName,
    Name,
    BeforeValue,
    /// Within a string that ends with this quote.
    String(char),
    /// After a backslash in a string that ends with this quote.
    Escape(char),
    /// Within the hexadecimal code of a character.
    Code {
        quote: char,
        digits_left: u8,
        code: u32,
    },
    /// After a string. Python joins it with a string that follows.
    AfterString,
    Word,
    AfterValue,
    BeforeElement,
    /// After a brace that begins a dictionary or a set.
    AfterBrace,
    BeforeKey,
    AfterKey,
}

/// An open bracket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// A list, tuple or set, with the bracket that closes it.
    List {
        close: char,
        is_empty: bool,
    },
    Dictionary {
        is_empty: bool,
    },
    /// A dictionary or a set: the character after the first element decides.
    Either,
}

/// The progress of arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The arguments have not ended.
    More,
    /// The last character was the parenthesis that ends the arguments.
    Whole,
}

/// The effect of a character.
enum Effect {
    /// The character was consumed.
    Consumed,
    /// The character only changed the state, in which it is read again.
    Again,
    /// The character ended the arguments.
    Whole,
}

impl Arguments {
    pub(super) fn new() -> Self {
        Self {
            state: State::BeforeName,
            levels: Vec::new(),
            has_arguments: false,
            word: String::new(),
            is_key: false,
            key: String::new(),
            json: "{".to_owned(),
        }
    }

    /// Returns the JSON that was written since the last [`Self::take_json`].
    pub(super) fn json(&self) -> &str {
        &self.json
    }

    /// Returns the JSON that was written and clears it.
    pub(super) fn take_json(&mut self) -> String {
        std::mem::take(&mut self.json)
    }

    /// Reads the next character. Returns `None` if the arguments are not named literals, which
    /// means that the text is not a tool call.
    pub(super) fn push(&mut self, char: char) -> Option<Progress> {
        loop {
            match self.read(char)? {
                Effect::Consumed => return Some(Progress::More),
                Effect::Again => {}
                Effect::Whole => return Some(Progress::Whole),
            }
        }
    }

    fn read(&mut self, char: char) -> Option<Effect> {
        match self.state {
            State::String(quote) => self.string(char, quote),
            State::Escape(quote) => self.escape(char, quote),
            State::Code { quote, digits_left, code } => {
                let code = code * 16 + char.to_digit(16)?;
                self.code(quote, digits_left - 1, code)?;
            }
            State::Word if ",)]}:".contains(char) => {
                let word = constant(std::mem::take(&mut self.word).trim())?;
                self.out().push_str(&word);
                return Some(self.end_scalar());
            }
            State::Word => self.word.push(char),
            State::Name if char == '=' => self.end_name()?,
            State::Name if char.is_alphanumeric() || char == '_' || char.is_whitespace() => {
                self.word.push(char)
            }
            State::Name => return None,
            _ if char.is_whitespace() => {}
            State::AfterString if is_quote(char) => self.state = State::String(char),
            State::AfterString => {
                self.out().push('"');
                return Some(self.end_scalar());
            }
            State::BeforeName if char == ')' => return Some(self.end()),
            State::BeforeName => return Some(self.enter(State::Name)),
            State::BeforeValue => return self.begin_value(char),
            State::AfterBrace if char == '}' => {
                self.set_level(Level::Dictionary { is_empty: true });
                return Some(self.enter(State::BeforeKey));
            }
            State::AfterBrace if "[({".contains(char) => {
                self.set_level(Level::List { close: '}', is_empty: true });
                return Some(self.enter(State::BeforeElement));
            }
            State::AfterBrace => return self.begin_key(char),
            State::BeforeElement | State::BeforeKey => return self.before_element(char),
            State::AfterKey => return self.after_key(char),
            State::AfterValue => return self.after_value(char),
        }
        Some(Effect::Consumed)
    }

    /// Enters a state that reads the character again.
    fn enter(&mut self, state: State) -> Effect {
        self.state = state;
        Effect::Again
    }

    /// Returns the buffer for the current string, number or constant.
    fn out(&mut self) -> &mut String {
        if self.is_key { &mut self.key } else { &mut self.json }
    }

    fn end_name(&mut self) -> Option<()> {
        let word = std::mem::take(&mut self.word);
        let name = word.trim();
        if !is_identifier(name) {
            return None;
        }
        let separator = if self.has_arguments { ", " } else { "" };
        self.json.push_str(&format!("{separator}{}: ", quoted(name)));
        self.has_arguments = true;
        self.state = State::BeforeValue;
        Some(())
    }

    fn begin_value(&mut self, char: char) -> Option<Effect> {
        let level = match char {
            '[' => Level::List { close: ']', is_empty: true },
            '(' => Level::List { close: ')', is_empty: true },
            '{' => Level::Either,
            _ => return Some(self.begin_scalar(char)),
        };
        if self.levels.len() == MAX_DEPTH {
            return None;
        }
        self.levels.push(level);
        self.state = if level == Level::Either {
            State::AfterBrace
        } else {
            self.json.push('[');
            State::BeforeElement
        };
        Some(Effect::Consumed)
    }

    fn begin_key(&mut self, char: char) -> Option<Effect> {
        self.is_key = true;
        (!"[({".contains(char)).then(|| self.begin_scalar(char))
    }

    /// Begins a string, a number or a constant.
    fn begin_scalar(&mut self, char: char) -> Effect {
        if !is_quote(char) {
            return self.enter(State::Word);
        }
        self.out().push('"');
        self.state = State::String(char);
        Effect::Consumed
    }

    fn end_scalar(&mut self) -> Effect {
        let is_key = std::mem::take(&mut self.is_key);
        self.enter(if is_key { State::AfterKey } else { State::AfterValue })
    }

    fn string(&mut self, char: char, quote: char) {
        match char {
            '\\' => self.state = State::Escape(quote),
            _ if char == quote => self.state = State::AfterString,
            _ => self.write(char),
        }
    }

    /// Writes a character of a string.
    fn write(&mut self, char: char) {
        if char.is_control() || "\"\\".contains(char) {
            let json = quoted(char.encode_utf8(&mut [0; 4]));
            self.out().push_str(&json[1..json.len() - 1]);
        } else {
            self.out().push(char);
        }
    }

    /// Reads the character after a backslash.
    fn escape(&mut self, char: char, quote: char) {
        self.state = State::String(quote);
        let digits_left = match char {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        match char {
            'n' => self.write('\n'),
            't' => self.write('\t'),
            'r' => self.write('\r'),
            'b' => self.write('\u{8}'),
            'f' => self.write('\u{c}'),
            '0' => self.write('\0'),
            '\n' => {}
            '\\' | '\'' | '"' => self.write(char),
            _ if digits_left > 0 => self.state = State::Code { quote, digits_left, code: 0 },
            other => {
                self.write('\\');
                self.write(other);
            }
        }
    }

    /// Continues with the code of an escaped character after one of its digits was read.
    fn code(&mut self, quote: char, digits_left: u8, code: u32) -> Option<()> {
        self.state = State::Code { quote, digits_left, code };
        if digits_left == 0 {
            self.state = State::String(quote);
            self.write(char::from_u32(code)?);
        }
        Some(())
    }

    /// Decides what the innermost brace is, and writes its JSON bracket.
    fn set_level(&mut self, level: Level) {
        self.json.push(if matches!(level, Level::Dictionary { .. }) { '{' } else { '[' });
        self.levels.pop();
        self.levels.push(level);
    }

    /// Reads a character before an element of a list, or before a key.
    fn before_element(&mut self, char: char) -> Option<Effect> {
        match self.levels.last_mut()? {
            Level::List { close, .. } if char == *close => Some(self.end_level("]")),
            Level::List { is_empty, .. } => {
                if !std::mem::replace(is_empty, false) {
                    self.json.push_str(", ");
                }
                Some(self.enter(State::BeforeValue))
            }
            Level::Dictionary { .. } if char == '}' => Some(self.end_level("}")),
            Level::Dictionary { .. } | Level::Either => self.begin_key(char),
        }
    }

    fn end_level(&mut self, close: &str) -> Effect {
        self.json.push_str(close);
        self.levels.pop();
        self.state = State::AfterValue;
        Effect::Consumed
    }

    /// Reads the character after a key, or after the first element of a set.
    fn after_key(&mut self, char: char) -> Option<Effect> {
        let key = std::mem::take(&mut self.key);
        if char == ':' {
            if self.levels.last() == Some(&Level::Either) {
                self.set_level(Level::Dictionary { is_empty: true });
            }
            if let Some(Level::Dictionary { is_empty }) = self.levels.last_mut()
                && !std::mem::replace(is_empty, false)
            {
                self.json.push_str(", ");
            }
            // JSON keys are strings.
            let key = if key.starts_with('"') { key } else { quoted(&key) };
            self.json.push_str(&format!("{key}: "));
            self.state = State::BeforeValue;
            return Some(Effect::Consumed);
        }
        if self.levels.last() != Some(&Level::Either) {
            return None;
        }
        self.set_level(Level::List { close: '}', is_empty: false });
        self.json.push_str(&key);
        Some(self.enter(State::AfterValue))
    }

    fn after_value(&mut self, char: char) -> Option<Effect> {
        let (next, close) = match self.levels.last() {
            None => (State::BeforeName, ')'),
            Some(Level::List { close, .. }) => (State::BeforeElement, *close),
            Some(Level::Dictionary { .. } | Level::Either) => (State::BeforeKey, '}'),
        };
        if char == ',' {
            self.state = next;
            return Some(Effect::Consumed);
        }
        if char != close {
            return None;
        }
        Some(match self.levels.last() {
            None => self.end(),
            Some(Level::List { .. }) => self.end_level("]"),
            Some(_) => self.end_level("}"),
        })
    }

    fn end(&mut self) -> Effect {
        self.json.push('}');
        Effect::Whole
    }
}

fn is_quote(char: char) -> bool {
    char == '"' || char == '\''
}

/// Returns `true` for a Python identifier.
pub(super) fn is_identifier(text: &str) -> bool {
    let is_first = |c: char| c.is_alphabetic() || c == '_';
    text.starts_with(is_first) && text.chars().all(|c| is_first(c) || c.is_numeric())
}

/// Returns the JSON of a number, or of one of the names that stand for values.
fn constant(word: &str) -> Option<String> {
    match word {
        "True" | "true" => Some("true".to_owned()),
        "False" | "false" => Some("false".to_owned()),
        "None" | "null" => Some("null".to_owned()),
        number => read_number(number),
    }
}

/// Returns a Python number as JSON.
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
