//! Splitting a normalised piece into words.

mod scan;

use serde_json::Value;
use tokenizers::utils::SysRegex;

pub(super) use scan::Scan;

/// A step of splitting. Every part of a text comes out of it, in order.
pub(super) enum Splitter {
    /// A well-known pattern, by hand.
    Scan(Scan),
    /// Any other pattern, by the engine that `tokenizers` uses: matches and what lies between them.
    Regex(SysRegex),
    /// Splits before each run of a character, but not behind some. Only for a model that merges
    /// nothing across such a place.
    BeforeRuns { sign: char, not_after: Vec<char> },
    /// Splits before each of this character.
    BeforeEach(char),
}

impl Splitter {
    /// Compiles a pattern in the syntax of Oniguruma, the matches of which stand alone. `None` if
    /// it is not valid.
    pub(super) fn of_pattern(pattern: &str) -> Option<Self> {
        match Scan::of(pattern) {
            Some(scan) => Some(Self::Scan(scan)),
            None => SysRegex::new(pattern).ok().map(Self::Regex),
        }
    }

    fn split<'t>(&self, text: &'t str, each: &mut dyn FnMut(&'t str)) {
        match self {
            Self::Scan(scan) => {
                let mut at = 0;
                while at < text.len() {
                    let end = scan.end_of_word(text, at);
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
            Self::BeforeRuns { sign, not_after } => {
                split_before(
                    text,
                    *sign,
                    |before| before != *sign && !not_after.contains(&before),
                    each,
                );
            }
            Self::BeforeEach(sign) => split_before(text, *sign, |_| true, each),
        }
    }
}

/// Splits before a sign where the character before it lets it.
fn split_before<'t>(
    text: &'t str,
    sign: char,
    lets: impl Fn(char) -> bool,
    each: &mut dyn FnMut(&'t str),
) {
    let mut begin = 0;
    for (at, _) in text.match_indices(sign) {
        if text[..at].chars().next_back().is_some_and(&lets) {
            each(&text[begin..at]);
            begin = at;
        }
    }
    if begin < text.len() {
        each(&text[begin..]);
    }
}

/// Splits by each step in turn.
pub(super) fn split<'t>(steps: &[Splitter], text: &'t str, each: &mut dyn FnMut(&'t str)) {
    match steps {
        [] if text.is_empty() => {}
        [] => each(text),
        [last] => last.split(text, each),
        [first, rest @ ..] => first.split(text, &mut |part| split(rest, part, each)),
    }
}

/// The steps of a pre-tokenizer as `tokenizer.json` writes it, and whether it ends in the
/// byte-level alphabet. `None` if a step is not known.
///
/// `absent`: whether a text can be known not to hold a pattern.
pub(super) fn steps(json: &Value, absent: &dyn Fn(&str) -> bool) -> Option<(Vec<Splitter>, bool)> {
    let mut steps = Vec::new();
    let mut byte_level = false;
    let parts = match json["type"].as_str() {
        None if json.is_null() => &[],
        None => return None,
        Some("Sequence") => json["pretokenizers"].as_array()?.as_slice(),
        Some(_) => std::slice::from_ref(json),
    };
    for part in parts {
        // Behind the byte-level alphabet, other characters would be met.
        if byte_level {
            return None;
        }
        match part["type"].as_str()? {
            "Split" if part["behavior"] == "Isolated" && part["pattern"]["Regex"].is_string() => {
                steps.push(Splitter::of_pattern(part["pattern"]["Regex"].as_str()?)?);
            }
            "Split" if part["invert"] == false && absent(part["pattern"]["String"].as_str()?) => {}
            "ByteLevel" if part["add_prefix_space"] == false => {
                if part["use_regex"] != false {
                    steps.push(Splitter::of_pattern(scan::GPT2)?);
                }
                byte_level = true;
            }
            _ => return None,
        }
    }
    Some((steps, byte_level))
}
