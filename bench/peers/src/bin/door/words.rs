//! Texts whose words have the frequencies of natural language: few words make up most of a text,
//! and rare words keep appearing.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use fastrand::Rng;
use peers::numbers::Zipf;
use serde::Deserialize;

/// The number of words, as many as are in daily use in English.
const WORDS: usize = 20_000;
/// One in this many words is made of two, as names and compounds are. It has several tokens and
/// seldom repeats.
const COMPOUND: usize = 25;
/// The mean number of words in a sentence.
const SENTENCE: usize = 14;

#[derive(Deserialize)]
struct TokenizerFile {
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    vocab: BTreeMap<String, u32>,
}

/// A model's words, from frequent to rare.
pub(crate) struct Words {
    words: Vec<String>,
    law: Zipf,
}

impl Words {
    /// Reads the tokens that are a space and small letters, in the order of their ids: byte pair
    /// encodings learn frequent tokens first.
    pub(crate) fn read(model: &Path) -> Result<Self, Box<dyn Error>> {
        let file: TokenizerFile = serde_json::from_slice(&fs::read(model.join("tokenizer.json"))?)?;
        let word = |(text, id): (String, u32)| {
            let word = text.strip_prefix('Ġ')?;
            let is_word = word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_lowercase());
            is_word.then(|| (id, word.to_owned()))
        };
        let mut words: Vec<(u32, String)> = file.model.vocab.into_iter().filter_map(word).collect();
        words.sort();
        words.truncate(WORDS);
        let law = Zipf::new(words.len());
        Ok(Self { words: words.into_iter().map(|(_, word)| word).collect(), law })
    }

    fn word(&self, rng: &mut Rng) -> &str {
        self.words.get(self.law.draw(rng)).map_or("", String::as_str)
    }

    /// Returns a text of `words` words, in sentences.
    pub(crate) fn text(&self, words: usize, rng: &mut Rng) -> String {
        let mut text = String::new();
        let mut is_start = true;
        for _ in 0..words {
            if !text.is_empty() {
                text.push(' ');
            }
            let word = self.word(rng);
            match word.chars().next() {
                Some(first) if is_start => {
                    text.push(first.to_ascii_uppercase());
                    text.push_str(&word[1..]);
                }
                _ => text.push_str(word),
            }
            if rng.usize(..COMPOUND) == 0 {
                text.push_str(self.word(rng));
            }
            is_start = rng.usize(..SENTENCE) == 0;
            if is_start {
                text.push('.');
            } else if rng.usize(..SENTENCE) == 0 {
                text.push(',');
            }
        }
        text
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn texts_differ_with_words_by_zipf() {
        let dir = tempfile::tempdir().unwrap();
        let vocabulary = r#"{"a": 0, "Ġof": 3, "Ġthe": 1, "Ġ": 4, "ĠThe": 5, "Ġcat": 9, "Ġé": 7}"#;
        let file = format!(r#"{{"model": {{"vocab": {vocabulary}}}}}"#);
        fs::write(dir.path().join("tokenizer.json"), file).unwrap();
        let words = Words::read(dir.path()).unwrap();
        assert_eq!(words.words, ["the", "of", "cat"]);
        let mut rng = Rng::with_seed(1);
        let [text, other] = [0, 1].map(|_| words.text(1_000, &mut rng));
        assert_ne!(text, other);
        let found: Vec<&str> =
            text.split(' ').map(|word| word.trim_end_matches(['.', ','])).collect();
        assert_eq!(found.len(), 1_000);
        let count =
            |wanted: &str| found.iter().filter(|word| word.eq_ignore_ascii_case(wanted)).count();
        // 6 : 3 : 2 of 960, and 40 compounds.
        assert!((460..600).contains(&count("the")), "{}", count("the"));
        assert!((110..240).contains(&count("cat")), "{}", count("cat"));
        assert!((20..60).contains(&(1_000 - count("the") - count("of") - count("cat"))));
        assert!(text.starts_with(|first: char| first.is_ascii_uppercase()), "{text}");
    }
}
