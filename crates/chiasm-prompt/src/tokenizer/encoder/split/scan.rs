//! The patterns of well-known models, by hand: a few times as fast as a regex engine, which has to
//! look ahead and back.
//!
//! The patterns are lists of alternatives of which the first that matches counts, each as long as
//! it can be.

use super::super::char_class::{
    CharClasses, Class, LETTER, LOWER, MARK, NEWLINE, NUMBER, SPACE, UPPER,
};

/// GPT-2's, which the byte-level step has built in.
pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

const CONTRACTION: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";

/// A pattern that is known.
#[derive(Clone, Copy)]
pub(in super::super) struct Scan {
    classes: &'static CharClasses,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Gpt2,
    /// GPT-4, Llama 3, Qwen, GLM: words with the character before them.
    Words {
        /// What words are made of: letters, or letters and marks.
        letters: Class,
        /// Most digits in a number.
        digits: usize,
    },
    /// GPT-4o, Llama 4, Mistral's Tekken: words that also end where small letters meet capital
    /// ones.
    CasedWords {
        digits: usize,
        /// Whether `'s` and the like belong to the word before.
        contractions: bool,
    },
}

impl Scan {
    /// `None` for a pattern that is not known.
    pub(super) fn of(pattern: &str) -> Option<Self> {
        let kind = KINDS.into_iter().find(|kind| kind.pattern() == pattern)?;
        Some(Self { classes: CharClasses::get()?, kind })
    }
}

/// Every kind that is known. Qwen's numbers are of one digit, Llama 3's of three.
const KINDS: [Kind; 9] = [
    Kind::Gpt2,
    Kind::Words { letters: LETTER, digits: 1 },
    Kind::Words { letters: LETTER, digits: 3 },
    Kind::Words { letters: LETTER | MARK, digits: 1 },
    Kind::Words { letters: LETTER | MARK, digits: 3 },
    Kind::CasedWords { digits: 1, contractions: false },
    Kind::CasedWords { digits: 1, contractions: true },
    Kind::CasedWords { digits: 3, contractions: false },
    Kind::CasedWords { digits: 3, contractions: true },
];

impl Kind {
    /// The pattern as the models' files write it.
    fn pattern(self) -> String {
        let number = |digits| match digits {
            1 => r"\p{N}".to_owned(),
            most => format!(r"\p{{N}}{{1,{most}}}"),
        };
        let spaces = r"\s*[\r\n]+|\s+(?!\S)|\s+";
        match self {
            Self::Gpt2 => GPT2.to_owned(),
            Self::Words { letters, digits } => {
                let number = number(digits);
                let (word, mark) =
                    if letters == LETTER { (r"\p{L}", "") } else { (r"[\p{L}\p{M}]", r"\p{M}") };
                format!(
                    r"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{word}+|{number}| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{spaces}"
                )
            }
            Self::CasedWords { digits, contractions } => {
                let number = number(digits);
                let suffix = if contractions { format!("{CONTRACTION}?") } else { String::new() };
                let (upper, lower) =
                    (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
                let before = r"[^\r\n\p{L}\p{N}]?";
                format!(
                    r"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{spaces}"
                )
            }
        }
    }
}

impl Scan {
    /// End of the word that begins at `at`, which is a boundary before the end of `text`.
    pub(super) fn end_of_word(&self, text: &str, at: usize) -> usize {
        let (class, len) = self.classes.at(text, at);
        let next = at + len;
        let word = match self.kind {
            Kind::Gpt2 => self.gpt2(text, at, class, next),
            Kind::Words { letters, digits } => self.word(text, at, class, next, letters, digits),
            Kind::CasedWords { digits, contractions } => {
                self.cased_word(text, at, class, next, digits, contractions)
            }
        };
        word.unwrap_or_else(|| self.spaces(text, at, next))
    }

    fn gpt2(&self, text: &str, at: usize, class: Class, next: usize) -> Option<usize> {
        if let Some(end) = contraction(text, at, false) {
            return Some(end);
        }
        // A space goes with what follows it, whatever that is.
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
        digits: usize,
    ) -> Option<usize> {
        if class & letters != 0 {
            return Some(self.run(text, next, letters));
        }
        if let Some(end) = contraction(text, at, true) {
            return Some(end);
        }
        if class & NUMBER != 0 {
            return Some(self.number(text, next, digits));
        }
        if class & NEWLINE == 0 && self.classes.at(text, next).0 & letters != 0 {
            return Some(self.run(text, next, letters));
        }
        self.signs(text, at, class, next, SPACE | letters | NUMBER, |byte| {
            matches!(byte, b'\r' | b'\n')
        })
    }

    fn cased_word(
        &self,
        text: &str,
        at: usize,
        class: Class,
        next: usize,
        digits: usize,
        contractions: bool,
    ) -> Option<usize> {
        if class & NUMBER != 0 {
            return Some(self.number(text, next, digits));
        }
        // The character before a word is tried first; a mark may be that and part of the word too.
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
        self.signs(text, at, class, next, SPACE | LETTER | NUMBER, |byte| {
            matches!(byte, b'\r' | b'\n' | b'/')
        })
    }

    /// `UPPER*LOWER+`
    fn ends_in_lower(&self, text: &str, at: usize) -> Option<usize> {
        // The last character of the run of UPPER that is LOWER too: there the run may end and LOWER
        // begin.
        let (mut end, mut end_of_lower) = (at, None);
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

    /// ` ?[^not]+` and a tail.
    fn signs(
        &self,
        text: &str,
        at: usize,
        class: Class,
        next: usize,
        not: Class,
        tail: impl Fn(u8) -> bool,
    ) -> Option<usize> {
        let begin = if text.as_bytes()[at] == b' ' { next } else { at };
        let first = if begin == at { class } else { self.classes.at(text, begin).0 };
        if begin == text.len() || first & not != 0 {
            return None;
        }
        let end = self.run_without(text, begin, not);
        Some(end + text.as_bytes()[end..].iter().take_while(|byte| tail(**byte)).count())
    }

    /// The end of a number, the first digit of which ends at `next`.
    fn number(&self, text: &str, next: usize, digits: usize) -> usize {
        let mut end = next;
        for _ in 1..digits {
            let (class, len) = self.classes.at(text, end);
            if class & NUMBER == 0 {
                break;
            }
            end += len;
        }
        end
    }

    /// White space, which is all that is left: up to the last line's end in it; else, before other
    /// text, without the last character, which may go with that text; else all of it.
    fn spaces(&self, text: &str, at: usize, next: usize) -> usize {
        let (mut end, mut last, mut after_newline) = (at, at, None);
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

    fn run(&self, text: &str, at: usize, of: Class) -> usize {
        let mut end = at;
        loop {
            let (class, len) = self.classes.at(text, end);
            if class & of == 0 {
                return end;
            }
            end += len;
        }
    }

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

/// End of `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d` at `at`. Without case, the long s `ſ` is an
/// s.
fn contraction(text: &str, at: usize, any_case: bool) -> Option<usize> {
    let rest = text.as_bytes()[at..].strip_prefix(b"'")?;
    let fold = |byte: u8| if any_case { byte.to_ascii_lowercase() } else { byte };
    let len = match (fold(*rest.first()?), rest.get(1).map(|byte| fold(*byte))) {
        (b's' | b't' | b'm' | b'd', _) => 1,
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => 2,
        // ſ in UTF-8.
        (0xc5, Some(0xbf)) if any_case => 2,
        _ => return None,
    };
    Some(at + 1 + len)
}

#[cfg(test)]
mod tests;
