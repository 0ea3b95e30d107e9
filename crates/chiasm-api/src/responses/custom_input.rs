//! The input of custom tools: a text, which the model writes as the only argument of a function, as
//! in vLLM (`custom_tool_parameters`, `vllm/tool_parsers/utils.py`).

use serde_json::{Map, Value, json};

/// The name of the argument.
const INPUT: &str = "input";
/// The tokens in front of the text in arguments of the expected form.
const OPENING_TOKENS: [&str; 4] = ["{", "\"input\"", ":", "\""];
/// The maximum length of the opening. Its tokens are rarely separated by more than a space, so a
/// longer opening has another form.
const MAX_OPENING_BYTES: usize = 64;

/// Returns the parameters of the function.
pub(super) fn parameters() -> Map<String, Value> {
    let description = "The freeform text payload for this tool.";
    let input = json!({"type": "string", "description": description});
    let fields = [
        ("type", json!("object")),
        ("properties", json!({INPUT: input})),
        ("required", json!([INPUT])),
        ("additionalProperties", json!(false)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Returns the arguments of a call with this text.
pub(super) fn arguments(input: &str) -> String {
    format!("{{\"{INPUT}\": {}}}", Value::from(input))
}

/// An incremental reader of the text in a call's arguments.
///
/// Arguments of any other form become the text themselves, so that the client can show the model
/// its mistake.
#[derive(Debug, PartialEq)]
pub(crate) struct InputReader {
    state: State,
    /// The arguments that are not decoded yet.
    pending: String,
}

#[derive(Debug, PartialEq)]
enum State {
    /// The opening is not complete yet.
    Opening,
    /// The arguments do not start with the text. They are parsed at their end.
    Whole,
    /// The text has started.
    Text,
    /// The text has ended.
    AfterText,
}

/// The result of parsing the opening of a call's arguments.
enum Opening {
    /// The opening has this length in bytes.
    Complete(usize),
    /// The rest of the opening has not arrived yet.
    Incomplete,
    /// The arguments start in another way.
    Mismatch,
}

impl InputReader {
    pub(super) fn new() -> Self {
        Self { state: State::Opening, pending: String::new() }
    }

    /// Adds arguments and returns the next part of the text.
    pub(super) fn push(&mut self, arguments: &str) -> String {
        if self.state == State::AfterText {
            return String::new();
        }
        self.pending.push_str(arguments);
        if self.state == State::Opening {
            match parse_opening(&self.pending) {
                Opening::Complete(bytes) => {
                    self.pending.drain(..bytes);
                    self.state = State::Text;
                }
                Opening::Incomplete if self.pending.len() <= MAX_OPENING_BYTES => {}
                Opening::Incomplete | Opening::Mismatch => self.state = State::Whole,
            }
        }
        if self.state == State::Text { self.take_text() } else { String::new() }
    }

    /// Ends the arguments and returns the text that is only known at their end.
    pub(super) fn finish(&mut self) -> String {
        let pending = std::mem::take(&mut self.pending);
        let state = std::mem::replace(&mut self.state, State::AfterText);
        if matches!(state, State::Text | State::AfterText) {
            return String::new();
        }
        let input = serde_json::from_str::<Value>(&pending).ok().and_then(|arguments| {
            let input = arguments.get(INPUT)?.as_str()?;
            Some(input.to_owned())
        });
        input.unwrap_or(pending)
    }

    /// Takes the text out of the pending arguments, up to its end or to an incomplete escape.
    fn take_text(&mut self) -> String {
        let mut text = String::new();
        let mut rest = self.pending.as_str();
        while let Some(at) = rest.find(['"', '\\']) {
            text.push_str(&rest[..at]);
            rest = &rest[at..];
            if rest.starts_with('"') {
                self.state = State::AfterText;
                self.pending.clear();
                return text;
            }
            let Some((character, bytes)) = parse_escape(rest) else {
                self.pending = rest.to_owned();
                return text;
            };
            text.push(character);
            rest = &rest[bytes..];
        }
        text.push_str(rest);
        self.pending.clear();
        text
    }
}

/// Parses the part of a call's arguments in front of the text.
fn parse_opening(arguments: &str) -> Opening {
    let mut rest = arguments;
    for token in OPENING_TOKENS {
        rest = rest.trim_start_matches([' ', '\t', '\r', '\n']);
        match rest.strip_prefix(token) {
            Some(after) => rest = after,
            None if token.starts_with(rest) => return Opening::Incomplete,
            None => return Opening::Mismatch,
        }
    }
    Opening::Complete(arguments.len() - rest.len())
}

/// Parses the escape at the start of `text`. Returns its character and its length in bytes; `None`
/// if the escape is incomplete.
fn parse_escape(text: &str) -> Option<(char, usize)> {
    let character = text[1..].chars().next()?;
    let character = match character {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'u' => return parse_unicode_escape(text),
        other => return Some((other, 1 + other.len_utf8())),
    };
    Some((character, 2))
}

/// Parses the escape `\uXXXX`, or two of them that form one character. Returns the same as
/// [`parse_escape`].
fn parse_unicode_escape(text: &str) -> Option<(char, usize)> {
    /// The character for half of a surrogate pair.
    const UNPAIRED: char = char::REPLACEMENT_CHARACTER;
    let bytes = text.as_bytes();
    let code = |digits: &[u8]| {
        let digits = std::str::from_utf8(digits)
            .ok()
            .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        u16::from_str_radix(digits?, 16).ok()
    };
    let Some(first) = code(bytes.get(2..6)?) else { return Some(('u', 2)) };
    if let Some(character) = char::from_u32(first.into()) {
        return Some((character, 6));
    }
    let next = &bytes[6..];
    let may_continue =
        next.len() < 6 && (next.is_empty() || b"\\u".starts_with(next) || next.starts_with(b"\\u"));
    if may_continue && (0xD800..0xDC00).contains(&first) {
        return None;
    }
    let second = next.get(2..6).filter(|_| next.starts_with(b"\\u")).and_then(code);
    match second.map(|second| char::decode_utf16([first, second]).next()) {
        Some(Some(Ok(character))) => Some((character, 12)),
        _ => Some((UNPAIRED, 6)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the text of arguments that arrive in pieces of `piece_chars` characters.
    fn read(arguments: &str, piece_chars: usize) -> String {
        let mut reader = InputReader::new();
        let all: Vec<char> = arguments.chars().collect();
        let text: String = all
            .chunks(piece_chars)
            .map(|piece| reader.push(&piece.iter().collect::<String>()))
            .collect();
        text + &reader.finish()
    }

    #[test]
    fn text_is_independent_of_piece_size() {
        let text = "*** Begin Patch\n+\t\"a\\b\" é 😀 \u{1}\u{8}\u{c}\r\n/*";
        for arguments in [
            arguments(text),
            json!({"input": text}).to_string(),
            format!(" {{\n\"input\" :\t{} }}", json!(text)),
            json!({"note": "first", "input": text}).to_string(),
            arguments(text).replace('😀', "\\ud83d\\ude00").replace('/', "\\/"),
        ] {
            for piece_chars in 1..arguments.chars().count() + 1 {
                assert_eq!(read(&arguments, piece_chars), text, "{piece_chars} of {arguments}");
            }
        }
    }

    #[test]
    fn text_is_returned_incrementally() {
        let mut reader = InputReader::new();
        let parts: Vec<String> =
            [r#"{"inp"#, r#"ut": ""#, "ab", r"c\", r"nd\ud83d\u", r"de00e", r#"f"}"#, " }"]
                .map(|arguments| reader.push(arguments))
                .into();
        assert_eq!(parts, ["", "", "ab", "c", "\nd", "😀e", "f", ""]);
        assert_eq!(reader.finish(), "");
    }

    #[test]
    fn arguments_of_other_form_become_the_text() {
        for arguments in [
            "",
            "ls -l",
            "[1]",
            r#"{"text": "x"}"#,
            r#"{"input": 3}"#,
            r#"{"inp"#,
            "{}",
            "{ \"input\" }",
        ] {
            for piece_chars in 1..=arguments.len().max(1) {
                assert_eq!(read(arguments, piece_chars), arguments);
            }
        }
        let far = format!("{{{}\"input\": \"x\"}}", " ".repeat(100));
        assert_eq!(read(&far, 1), "x");
    }

    #[test]
    fn truncated_or_invalid_text_is_returned_in_part() {
        for (arguments, text) in [
            (r#"{"input": "ab"#, "ab"),
            (r#"{"input": "ab\"#, "ab"),
            (r#"{"input": "ab\u00"#, "ab"),
            (r#"{"input": "\ud83d x"}"#, "\u{fffd} x"),
            (r#"{"input": "\ud83d\u0041"}"#, "\u{fffd}A"),
            (r#"{"input": "\ude00"}"#, "\u{fffd}"),
            (r#"{"input": "\uzzzz\q"}"#, "uzzzzq"),
            (r#"{"input": "a"} more"#, "a"),
        ] {
            for piece_chars in 1..=arguments.len() {
                assert_eq!(read(arguments, piece_chars), text, "{arguments}");
            }
        }
    }

    #[test]
    fn arguments_escape_the_text() {
        assert_eq!(arguments("a\"\né"), "{\"input\": \"a\\\"\\né\"}");
    }
}
