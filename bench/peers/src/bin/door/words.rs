//! Text that is spread over a vocabulary as language is: few words make most of it, and rare ones
//! never end.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use fastrand::Rng;
use peers::numbers::Zipf;
use serde::Deserialize;

/// Words to draw from. English has this many in daily use.
const WORDS: usize = 20_000;
/// One in so many words is made of two, as names and compounds are: several tokens, and seldom the
/// same.
const COMPOUND: usize = 25;
/// Words of a sentence, on average.
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
    /// Shares of the text that the words make.
    law: Zipf,
}

impl Words {
    /// Takes tokens that are a space and small letters, in the order of their ids: byte pair
    /// encodings learn frequent ones first.
    pub(crate) fn of(model: &Path) -> Result<Self, Box<dyn Error>> {
        let file: TokenizerFile = serde_json::from_slice(&fs::read(model.join("tokenizer.json"))?)?;
        let mut words: Vec<(u32, String)> = file
            .model
            .vocab
            .into_iter()
            .filter_map(|(text, id)| {
                let word = text.strip_prefix('Ġ')?;
                (word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_lowercase())).then(|| (id, word.to_owned()))
            })
            .collect();
        words.sort();
        words.truncate(WORDS);
        let law = Zipf::new(words.len());
        Ok(Self { words: words.into_iter().map(|(_, word)| word).collect(), law })
    }

    fn word(&self, rng: &mut Rng) -> &str {
        self.words.get(self.law.draw(rng)).map_or("", String::as_str)
    }

    /// A text of `words` words, in sentences.
    pub(crate) fn text(&self, words: usize, rng: &mut Rng) -> String {
        let mut text = String::new();
        let mut starts = true;
        for _ in 0..words {
            if !text.is_empty() {
                text.push(' ');
            }
            let word = self.word(rng);
            match word.chars().next() {
                Some(first) if starts => {
                    text.push(first.to_ascii_uppercase());
                    text.push_str(&word[1..]);
                }
                _ => text.push_str(word),
            }
            if rng.usize(..COMPOUND) == 0 {
                text.push_str(self.word(rng));
            }
            starts = rng.usize(..SENTENCE) == 0;
            if starts {
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
    fn text_is_of_the_vocabulary_and_no_two_are_alike() {
        let dir = tempfile::tempdir().unwrap();
        let vocabulary =
            r#"{"model": {"vocab": {"a": 0, "Ġof": 3, "Ġthe": 1, "Ġ": 4, "ĠThe": 5, "Ġcat": 9, "Ġé": 7}}}"#;
        fs::write(dir.path().join("tokenizer.json"), vocabulary).unwrap();
        let words = Words::of(dir.path()).unwrap();
        assert_eq!(words.words, ["the", "of", "cat"]);
        let mut rng = Rng::with_seed(1);
        let [one, other] = [0, 1].map(|_| words.text(1_000, &mut rng));
        assert_ne!(one, other);
        let found: Vec<&str> = one.split(' ').map(|word| word.trim_end_matches(['.', ','])).collect();
        assert_eq!(found.len(), 1_000);
        let count = |wanted: &str| found.iter().filter(|word| word.eq_ignore_ascii_case(wanted)).count();
        // 6 : 3 : 2 of 960, and 40 compounds.
        assert!((460..600).contains(&count("the")), "{}", count("the"));
        assert!((110..240).contains(&count("cat")), "{}", count("cat"));
        assert!((20..60).contains(&(1_000 - count("the") - count("of") - count("cat"))));
        assert!(one.starts_with(|first: char| first.is_ascii_uppercase()), "{one}");
    }
}
