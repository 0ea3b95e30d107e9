//! Hand-written scanners for the split patterns of well-known models. They are a few times as fast
//! as a regex engine, which has to look ahead and back.
//!
//! A pattern is a list of alternatives. The first alternative that matches wins, and its match is
//! as long as possible.

use super::super::char_class::{
    CharClasses, Class, LETTER, LOWER, MARK, NEWLINE, NUMBER, SPACE, UPPER,
};

/// GPT-2's pattern, which the byte-level step has built in.
pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const CONTRACTION: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";

/// A scanner for a supported pattern.
#[derive(Clone, Copy)]
pub(in super::super) struct Scan {
    classes: &'static CharClasses,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gpt2,
    /// GPT-4, Llama 3, Qwen, GLM: a word includes the character before it.
    Words {
        /// The characters of words: letters, or letters and marks.
        letters: Class,
        /// The maximum number of digits of a number.
        max_digits: usize,
    },
    /// GPT-4o, Llama 4, Mistral's Tekken: a word also ends between a lower-case and an upper-case
    /// letter.
    CasedWords {
        /// The maximum number of digits of a number.
        max_digits: usize,
        /// `true` if `'s` and other contractions belong to the preceding word.
        contractions: bool,
    },
}

impl Scan {
    /// Returns the scanner for a pattern; `None` if the pattern is not supported.
    pub(super) fn for_pattern(pattern: &str) -> Option<Self> {
        let kind = KINDS.into_iter().find(|kind| kind.pattern() == pattern)?;
        Some(Self { classes: CharClasses::get()?, kind })
    }
}

/// The supported kinds. Qwen's numbers have one digit, Llama 3's up to three.
const KINDS: [Kind; 9] = [
    Kind::Gpt2,
    Kind::Words { letters: LETTER, max_digits: 1 },
    Kind::Words { letters: LETTER, max_digits: 3 },
    Kind::Words { letters: LETTER | MARK, max_digits: 1 },
    Kind::Words { letters: LETTER | MARK, max_digits: 3 },
    Kind::CasedWords { max_digits: 1, contractions: false },
    Kind::CasedWords { max_digits: 1, contractions: true },
    Kind::CasedWords { max_digits: 3, contractions: false },
    Kind::CasedWords { max_digits: 3, contractions: true },
];

impl Kind {
    /// Returns the pattern in the form of `tokenizer.json`.
    fn pattern(self) -> String {
        let number = |max_digits| match max_digits {
            1 => r"\p{N}".to_owned(),
            _ => format!(r"\p{{N}}{{1,{max_digits}}}"),
        };
        let spaces = r"\s*[\r\n]+|\s+(?!\S)|\s+";
        match self {
            Self::Gpt2 => GPT2.to_owned(),
            Self::Words { letters, max_digits } => {
                let number = number(max_digits);
                let (word, mark) =
                    if letters == LETTER { (r"\p{L}", "") } else { (r"[\p{L}\p{M}]", r"\p{M}") };
                format!(
                    r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{word}+|{number}| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{spaces}"
                )
            }
            Self::CasedWords { max_digits, contractions } => {
                let number = number(max_digits);
                let suffix = if contractions { format!("{CONTRACTION}?") } else { String::new() };
                let upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]";
                let lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]";
                let before = r"[^\r\n\p{L}\p{N}]?";
                format!(
                    r"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{spaces}"
                )
            }
        }
    }
}

impl Scan {
    /// Returns the end of the word that begins at `at`, a character boundary before the end of
    /// `text`.
    pub(super) fn word_end(&self, text: &str, at: usize) -> usize {
        let (class, len) = self.classes.at(text, at);
        let next = at + len;
        let word = match self.kind {
            Kind::Gpt2 => self.gpt2(text, at, class, next),
            Kind::Words { letters, max_digits } => {
                self.word(text, at, class, next, letters, max_digits)
            }
            Kind::CasedWords { max_digits, contractions } => {
                self.cased_word(text, at, class, next, max_digits, contractions)
            }
        };
        word.unwrap_or_else(|| self.spaces(text, at, next))
    }

    fn gpt2(&self, text: &str, at: usize, class: Class, next: usize) -> Option<usize> {
        if let Some(end) = contraction(text, at, false) {
            return Some(end);
        }
        // A space belongs to the word that follows it.
        let (begin, class) = if text.as_bytes()[at] == b' ' {
            (next, self.classes.at(text, next).0)
        } else {
            (at, class)
        };
        if begin == text.len() || class & SPACE != 0 {
            None
        } else if class & LETTER != 0 {
            Some(self.run(text, begin, LETTER))
        } else if class & NUMBER != 0 {
            Some(self.run(text, begin, NUMBER))
        } else {
            Some(self.run_without(text, begin, SPACE | LETTER | NUMBER))
        }
    }

    fn word(
        &self,
        text: &str,
        at: usize,
        class: Class,
        next: usize,
        letters: Class,
        max_digits: usize,
    ) -> Option<usize> {
        if class & letters != 0 {
            return Some(self.run(text, next, letters));
        }
        if let Some(end) = contraction(text, at, true) {
            return Some(end);
        }
        if class & NUMBER != 0 {
            return Some(self.number(text, next, max_digits));
        }
        if class & NEWLINE == 0 && self.classes.at(text, next).0 & letters != 0 {
            return Some(self.run(text, next, letters));
        }
        self.symbols(text, at, class, next, SPACE | letters | NUMBER, |byte| {
            matches!(byte, b'\r' | b'\n')
        })
    }

    fn cased_word(
        &self,
        text: &str,
        at: usize,
        class: Class,
        next: usize,
        max_digits: usize,
        contractions: bool,
    ) -> Option<usize> {
        if class & NUMBER != 0 {
            return Some(self.number(text, next, max_digits));
        }
        // The pattern tries the optional character before a word first. A mark may be that
        // character, and part of a word too.
        let before = class & (NEWLINE | LETTER | NUMBER) == 0;
        let lower = before.then(|| self.ends_in_lower(text, next)).flatten();
        let lower = lower.or_else(|| self.ends_in_lower(text, at));
        let upper = || before.then(|| self.begins_in_upper(text, next)).flatten();
        let upper = || upper().or_else(|| self.begins_in_upper(text, at));
        if let Some(end) = lower.or_else(upper) {
            return Some(if contractions {
                contraction(text, end, true).unwrap_or(end)
            } else {
                end
            });
        }
        self.symbols(text, at, class, next, SPACE | LETTER | NUMBER, |byte| {
            matches!(byte, b'\r' | b'\n' | b'/')
        })
    }

    /// `UPPER*LOWER+`
    fn ends_in_lower(&self, text: &str, at: usize) -> Option<usize> {
        // `end_of_lower` is the end of the last character of the UPPER run that is LOWER too: the
        // LOWER part of the match may be that character.
        let mut end = at;
        let mut end_of_lower = None;
        loop {
            let (class, len) = self.classes.at(text, end);
            if class & UPPER == 0 {
                break if class & LOWER != 0 {
                    Some(self.run(text, end, LOWER))
                } else {
                    end_of_lower
                };
            }
            end += len;
            if class & LOWER != 0 {
                end_of_lower = Some(end);
            }
        }
    }

    /// `UPPER+LOWER*`
    fn begins_in_upper(&self, text: &str, at: usize) -> Option<usize> {
        let end = self.run(text, at, UPPER);
        (end > at).then(|| self.run(text, end, LOWER))
    }

    /// ` ?[^not]+` and a tail of the bytes that `is_tail` accepts.
    fn symbols(
        &self,
        text: &str,
        at: usize,
        class: Class,
        next: usize,
        not: Class,
        is_tail: impl Fn(u8) -> bool,
    ) -> Option<usize> {
        let begin = if text.as_bytes()[at] == b' ' { next } else { at };
        let first = if begin == at { class } else { self.classes.at(text, begin).0 };
        if begin == text.len() || first & not != 0 {
            return None;
        }
        let end = self.run_without(text, begin, not);
        Some(end + text.as_bytes()[end..].iter().take_while(|byte| is_tail(**byte)).count())
    }

    /// Returns the end of a number whose first digit ends at `next`.
    fn number(&self, text: &str, next: usize, max_digits: usize) -> usize {
        let mut end = next;
        for _ in 1..max_digits {
            let (class, len) = self.classes.at(text, end);
            if class & NUMBER == 0 {
                break;
            }
            end += len;
        }
        end
    }

    /// Returns the end of a match of white space, the last alternative of every pattern.
    ///
    /// The match ends after the last line break of the run, except in GPT-2's pattern. Without a
    /// line break, and before other text, the match excludes the last character of the run, which
    /// may belong to the next word. At the end of the text the match is the whole run.
    fn spaces(&self, text: &str, at: usize, next: usize) -> usize {
        let mut end = at;
        let mut last = at;
        let mut after_newline = None;
        loop {
            let (class, len) = self.classes.at(text, end);
            if class & SPACE == 0 {
                break;
            }
            last = end;
            end += len;
            if class & NEWLINE != 0 {
                after_newline = Some(end);
            }
        }
        match after_newline {
            Some(end) if self.kind != Kind::Gpt2 => end,
            _ if end == text.len() => end,
            _ => last.max(next),
        }
    }

    /// Returns the end of the run of characters in `class` that begins at `at`.
    fn run(&self, text: &str, at: usize, class: Class) -> usize {
        let mut end = at;
        loop {
            let (classes, len) = self.classes.at(text, end);
            if classes & class == 0 {
                return end;
            }
            end += len;
        }
    }

    /// Returns the end of the run of characters outside `not` that begins at `at`.
    fn run_without(&self, text: &str, at: usize, not: Class) -> usize {
        let mut end = at;
        loop {
            let (class, len) = self.classes.at(text, end);
            if len == 0 || class & not != 0 {
                return end;
            }
            end += len;
        }
    }
}

/// Returns the end of a contraction at `at`: `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d`. With
/// `any_case` the long s `ſ` is an s.
fn contraction(text: &str, at: usize, any_case: bool) -> Option<usize> {
    let rest = text.as_bytes()[at..].strip_prefix(b"'")?;
    let fold = |byte: u8| if any_case { byte.to_ascii_lowercase() } else { byte };
    let len = match (fold(*rest.first()?), rest.get(1).map(|byte| fold(*byte))) {
        (b's' | b't' | b'm' | b'd', _) => 1,
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => 2,
        // The UTF-8 bytes of ſ.
        (0xc5, Some(0xbf)) if any_case => 2,
        _ => return None,
    };
    Some(at + 1 + len)
}

#[cfg(test)]
mod tests;
