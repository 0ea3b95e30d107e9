//! Splits a normalized piece into words.

mod scan;

use serde_json::Value;
use tokenizers::utils::SysRegex;

pub(super) use scan::Scan;

/// A splitting step. Its parts are in order and cover the whole text.
pub(super) enum Splitter {
    /// A hand-written scanner for a well-known pattern.
    Scan(Scan),
    /// Any other pattern, with the regex engine of `tokenizers`. The parts are the matches and the
    /// text between them.
    Regex(SysRegex),
    /// Splits before each run of a delimiter, except after the characters of `not_after`. Valid
    /// only for a model that merges nothing across such a position.
    BeforeRuns { delimiter: char, not_after: Vec<char> },
    /// Splits before each occurrence of a character.
    BeforeEach(char),
}

impl Splitter {
    /// Compiles a pattern in Oniguruma's syntax whose matches become parts of their own. Returns
    /// `None` if the pattern is invalid.
    pub(super) fn from_pattern(pattern: &str) -> Option<Self> {
        match Scan::for_pattern(pattern) {
            Some(scan) => Some(Self::Scan(scan)),
            None => SysRegex::new(pattern).ok().map(Self::Regex),
        }
    }

    /// Calls `each` with the parts of a text.
    fn split<'t>(&self, text: &'t str, each: &mut dyn FnMut(&'t str)) {
        match self {
            Self::Scan(scan) => {
                let mut at = 0;
                while at < text.len() {
                    let end = scan.word_end(text, at);
                    each(&text[at..end]);
                    at = end;
                }
            }
            Self::Regex(regex) => {
                let mut at = 0;
                for (begin, end) in regex.find_iter(text) {
                    for part in [&text[at..begin], &text[begin..end]] {
                        if !part.is_empty() {
                            each(part);
                        }
                    }
                    at = end;
                }
                if at < text.len() {
                    each(&text[at..]);
                }
            }
            Self::BeforeRuns { delimiter, not_after } => {
                split_before(
                    text,
                    *delimiter,
                    |before| before != *delimiter && !not_after.contains(&before),
                    each,
                );
            }
            Self::BeforeEach(delimiter) => split_before(text, *delimiter, |_| true, each),
        }
    }
}

/// Splits before each delimiter whose preceding character satisfies `may_split_after`.
fn split_before<'t>(
    text: &'t str,
    delimiter: char,
    may_split_after: impl Fn(char) -> bool,
    each: &mut dyn FnMut(&'t str),
) {
    let mut begin = 0;
    for (at, _) in text.match_indices(delimiter) {
        if text[..at].chars().next_back().is_some_and(&may_split_after) {
            each(&text[begin..at]);
            begin = at;
        }
    }
    if begin < text.len() {
        each(&text[begin..]);
    }
}

/// Splits a text by each step in turn and calls `each` with the parts.
pub(super) fn split<'t>(steps: &[Splitter], text: &'t str, each: &mut dyn FnMut(&'t str)) {
    match steps {
        [] if text.is_empty() => {}
        [] => each(text),
        [last] => last.split(text, each),
        [first, rest @ ..] => first.split(text, &mut |part| split(rest, part, each)),
    }
}

/// Parses a pre-tokenizer of `tokenizer.json`. Returns its steps, and `true` if it ends with the
/// byte-level alphabet. Returns `None` for an unsupported step.
///
/// `is_absent` returns `true` for patterns that normalized texts never contain.
pub(super) fn parse_steps(
    json: &Value,
    is_absent: &dyn Fn(&str) -> bool,
) -> Option<(Vec<Splitter>, bool)> {
    let mut steps = Vec::new();
    let mut byte_level = false;
    let parts = match json["type"].as_str() {
        None if json.is_null() => &[],
        None => return None,
        Some("Sequence") => json["pretokenizers"].as_array()?.as_slice(),
        Some(_) => std::slice::from_ref(json),
    };
    for part in parts {
        // A step after the byte-level alphabet would see that alphabet's characters.
        if byte_level {
            return None;
        }
        match part["type"].as_str()? {
            "Split" if part["behavior"] == "Isolated" && part["pattern"]["Regex"].is_string() => {
                steps.push(Splitter::from_pattern(part["pattern"]["Regex"].as_str()?)?);
            }
            "Split"
                if part["invert"] == false && is_absent(part["pattern"]["String"].as_str()?) => {}
            "ByteLevel" if part["add_prefix_space"] == false => {
                if part["use_regex"] != false {
                    steps.push(Splitter::from_pattern(scan::GPT2)?);
                }
                byte_level = true;
            }
            _ => return None,
        }
    }
    Some((steps, byte_level))
}
