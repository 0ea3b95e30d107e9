//! What a custom tool is given: text, which the model writes as the one argument of a function, as
//! in vLLM (`custom_tool_parameters`, `vllm/tool_parsers/utils.py`).

use serde_json::{Map, Value, json};

/// The argument.
const INPUT: &str = "input";
/// What stands before the text where a call is written as it is asked for.
const OPENING: [&str; 4] = ["{", "\"input\"", ":", "\""];
/// White space between these is rarely more than a space each; so many bytes are something else.
const MAX_OPENING: usize = 64;

/// The parameters of the function.
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

/// The arguments of a call with this text.
pub(super) fn arguments(input: &str) -> String {
    format!("{{\"{INPUT}\": {}}}", Value::from(input))
}

/// Reads the text from a call's arguments as they come. Where they are something else, they are the
/// text themselves: what a model has called with, its client can tell it.
#[derive(Debug, PartialEq)]
pub(crate) struct InputReader {
    state: State,
    /// What has come and is not understood yet.
    left: String,
}

#[derive(Debug, PartialEq)]
enum State {
    /// Nothing is known yet.
    Opening,
    /// The text is not what comes first, and is looked for at the end.
    Whole,
    Text,
    /// The text has ended.
    Behind,
}

impl InputReader {
    pub(super) fn new() -> Self {
        Self { state: State::Opening, left: String::new() }
    }

    /// The text that these arguments go on with.
    pub(super) fn push(&mut self, arguments: &str) -> String {
        if self.state == State::Behind {
            return String::new();
        }
        self.left.push_str(arguments);
        if self.state == State::Opening {
            match opening(&self.left) {
                Some(Some(bytes)) => {
                    self.left.drain(..bytes);
                    self.state = State::Text;
                }
                Some(None) if self.left.len() <= MAX_OPENING => {}
                _ => self.state = State::Whole,
            }
        }
        if self.state == State::Text { self.text() } else { String::new() }
    }

    /// The text that is known only now that all arguments have come.
    pub(super) fn finish(&mut self) -> String {
        let left = std::mem::take(&mut self.left);
        let state = std::mem::replace(&mut self.state, State::Behind);
        if matches!(state, State::Text | State::Behind) {
            return String::new();
        }
        let input = serde_json::from_str::<Value>(&left).ok().and_then(|arguments| {
            let input = arguments.get(INPUT)?.as_str()?;
            Some(input.to_owned())
        });
        input.unwrap_or(left)
    }

    /// Takes the text out of what has come, up to its end or to an escape that is not there as a
    /// whole.
    fn text(&mut self) -> String {
        let (mut text, mut rest) = (String::new(), self.left.as_str());
        while let Some(at) = rest.find(['"', '\\']) {
            text.push_str(&rest[..at]);
            rest = &rest[at..];
            if rest.starts_with('"') {
                self.state = State::Behind;
                self.left.clear();
                return text;
            }
            let Some((character, bytes)) = escaped(rest) else {
                self.left = rest.to_owned();
                return text;
            };
            text.push(character);
            rest = &rest[bytes..];
        }
        text.push_str(rest);
        self.left.clear();
        text
    }
}

/// How many bytes there are before the text; nothing within, as long as more has to come to know,
/// and nothing at all if arguments begin in another way.
fn opening(arguments: &str) -> Option<Option<usize>> {
    let mut rest = arguments;
    for mark in OPENING {
        rest = rest.trim_start_matches([' ', '\t', '\r', '\n']);
        match rest.strip_prefix(mark) {
            Some(behind) => rest = behind,
            None => return mark.starts_with(rest).then_some(None),
        }
    }
    Some(Some(arguments.len() - rest.len()))
}

/// The character of an escape at the beginning of this text, and the escape's bytes. `None` if more
/// of it has to come.
fn escaped(text: &str) -> Option<(char, usize)> {
    let character = text[1..].chars().next()?;
    let character = match character {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'u' => return unit(text),
        other => return Some((other, 1 + other.len_utf8())),
    };
    Some((character, 2))
}

/// The same of `\uXXXX`, or of two that are one character.
fn unit(text: &str) -> Option<(char, usize)> {
    const LONE: char = char::REPLACEMENT_CHARACTER;
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
    let is_begun =
        next.len() < 6 && (next.is_empty() || b"\\u".starts_with(next) || next.starts_with(b"\\u"));
    if is_begun && (0xD800..0xDC00).contains(&first) {
        return None;
    }
    let second = next.get(2..6).filter(|_| next.starts_with(b"\\u")).and_then(code);
    match second.map(|second| char::decode_utf16([first, second]).next()) {
        Some(Some(Ok(character))) => Some((character, 12)),
        _ => Some((LONE, 6)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text of arguments that come in pieces of so many characters.
    fn read(arguments: &str, characters: usize) -> String {
        let mut reader = InputReader::new();
        let all: Vec<char> = arguments.chars().collect();
        let text: String = all
            .chunks(characters)
            .map(|piece| reader.push(&piece.iter().collect::<String>()))
            .collect();
        text + &reader.finish()
    }

    #[test]
    fn the_text_is_the_same_however_it_comes() {
        let text = "*** Begin Patch\n+\t\"a\\b\" é 😀 \u{1}\u{8}\u{c}\r\n/*";
        for arguments in [
            arguments(text),
            json!({"input": text}).to_string(),
            format!(" {{\n\"input\" :\t{} }}", json!(text)),
            json!({"note": "first", "input": text}).to_string(),
            arguments(text).replace('😀', "\\ud83d\\ude00").replace('/', "\\/"),
        ] {
            for characters in 1..arguments.chars().count() + 1 {
                assert_eq!(read(&arguments, characters), text, "{characters} of {arguments}");
            }
        }
    }

    #[test]
    fn text_is_told_as_it_comes() {
        let mut reader = InputReader::new();
        let told: Vec<String> =
            [r#"{"inp"#, r#"ut": ""#, "ab", r"c\", r"nd\ud83d\u", r"de00e", r#"f"}"#, " }"]
                .map(|arguments| reader.push(arguments))
                .into();
        assert_eq!(told, ["", "", "ab", "c", "\nd", "😀e", "f", ""]);
        assert_eq!(reader.finish(), "");
    }

    #[test]
    fn what_is_no_such_call_is_the_text_itself() {
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
            for characters in 1..=arguments.len().max(1) {
                assert_eq!(read(arguments, characters), arguments);
            }
        }
        let far = format!("{{{}\"input\": \"x\"}}", " ".repeat(100));
        assert_eq!(read(&far, 1), "x");
    }

    #[test]
    fn text_that_is_cut_off_or_broken_is_told_as_far_as_it_goes() {
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
            for characters in 1..=arguments.len() {
                assert_eq!(read(arguments, characters), text, "{arguments}");
            }
        }
    }

    #[test]
    fn calls_of_before_are_read_back() {
        assert_eq!(arguments("a\"\né"), "{\"input\": \"a\\\"\\né\"}");
    }
}
