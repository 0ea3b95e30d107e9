//! Builds the encoder for a tokenizer, if it supports the tokenizer's settings.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use tokenizers::{Encoding, Model, Token, Tokenizer};

use super::added_tokens::AddedTokens;
use super::merges::Merges;
use super::normalize::{Metaspace, Normalization};
use super::split::{self, Splitter};
use super::words::{Alphabet, Words};
use super::{Affixes, Encoder};
use crate::tokenizer::token_bytes::{byte_letters, fallback_byte};

/// The character for a space in SentencePiece's vocabularies.
const SPACE_REPLACEMENT: char = '▁';

/// The maximum number of characters after which a text is not split. Gemma 3 has one. With many,
/// splitting would gain little.
const MAX_NOT_AFTER_CHARS: usize = 8;

/// The parts of `tokenizer.json` that `tokenizers` does not expose.
#[derive(Deserialize)]
pub(in crate::tokenizer) struct TokenizerMerges<'a> {
    #[serde(borrow)]
    model: BytePairModel<'a>,
}

#[derive(Deserialize)]
struct BytePairModel<'a> {
    r#type: String,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
}

/// The two tokens of a merge. Older files have them in one string.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge<'a> {
    Pair(#[serde(borrow)] BorrowedStr<'a>, BorrowedStr<'a>),
    Joined(#[serde(borrow)] BorrowedStr<'a>),
}

/// A string that is borrowed from the file if it has no escapes.
#[derive(Deserialize)]
struct BorrowedStr<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a> TokenizerMerges<'a> {
    /// Parses `tokenizer.json`. Returns `None` if its model has no merges.
    pub(in crate::tokenizer) fn parse(json: &'a [u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }
}

/// Builds the encoder. Returns `None` if a setting of the tokenizer is not supported.
pub(super) fn build_encoder(tokenizer: &Tokenizer, file: &TokenizerMerges<'_>) -> Option<Encoder> {
    let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
    let normalization = Normalization::from_json(&normalizer)?;
    let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
    let mut metaspace = None;
    let (mut splitters, byte_level) = if pre_tokenizer["type"] == "Metaspace" {
        let replacement = metaspace.insert(Metaspace::from_json(&pre_tokenizer)?).replacement;
        // A normalizer could change where the text begins.
        if !normalization.is_empty() {
            return None;
        }
        let split = pre_tokenizer["split"].as_bool()?;
        (split.then_some(Splitter::BeforeEach(replacement)).into_iter().collect(), false)
    } else {
        split::parse_steps(&pre_tokenizer, &|pattern| normalization.removes(pattern))?
    };
    let words = build_words(tokenizer, &file.model, byte_level)?;
    if matches!(words.alphabet, Alphabet::Characters { .. }) && splitters.is_empty() {
        splitters.extend(space_splitter(tokenizer, &file.model));
    }
    let added = AddedTokens::new(tokenizer.get_added_vocabulary())?;
    let affixes = find_affixes(tokenizer)?;
    Some(Encoder::new(added, normalization, metaspace, splitters, words, affixes))
}

fn build_words(
    tokenizer: &Tokenizer,
    model: &BytePairModel<'_>,
    byte_level: bool,
) -> Option<Words> {
    let is_set = |affix: &Option<String>| affix.as_deref().is_some_and(|affix| !affix.is_empty());
    let is_plain = model.r#type == "BPE"
        && model.dropout.unwrap_or(0.0) == 0.0
        && !is_set(&model.continuing_subword_prefix)
        && !is_set(&model.end_of_word_suffix);
    if !is_plain {
        return None;
    }
    let vocabulary = tokenizer.get_vocab(false);
    let distinct: HashSet<u32> = vocabulary.values().copied().collect();
    if distinct.len() != vocabulary.len() {
        return None;
    }
    let alphabet = if byte_level {
        byte_alphabet(&vocabulary)?
    } else {
        character_alphabet(&vocabulary, model.byte_fallback)?
    };
    let mut joined = String::new();
    let mut merges = Vec::with_capacity(model.merges.len());
    for merge in &model.merges {
        let (left, right) = merge.parts()?;
        joined.clear();
        joined.extend([left, right]);
        merges.push((*vocabulary.get(left)?, *vocabulary.get(right)?, *vocabulary.get(&joined)?));
    }
    Some(Words { alphabet, merges: Merges::new(merges), ignore_merges: model.ignore_merges })
}

impl Merge<'_> {
    /// Returns the left and the right token.
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((&left.0, &right.0)),
            Self::Joined(both) => both.0.split_once(' ').filter(|(_, right)| !right.contains(' ')),
        }
    }
}

/// Builds the alphabet of a byte-level vocabulary. Returns `None` if a byte has no token.
fn byte_alphabet(vocabulary: &HashMap<String, u32>) -> Option<Alphabet> {
    let letters = byte_letters();
    let ids = letters
        .iter()
        .map(|letter| vocabulary.get(letter.encode_utf8(&mut [0; 4])).copied())
        .collect::<Option<Vec<_>>>()?;
    Some(Alphabet::Bytes { ids: Box::new(ids.try_into().ok()?), letters: Box::new(letters) })
}

/// Builds the alphabet of a vocabulary of characters. Returns `None` if a byte has no token.
fn character_alphabet(vocabulary: &HashMap<String, u32>, byte_fallback: bool) -> Option<Alphabet> {
    if !byte_fallback {
        return None;
    }
    let bytes = (0..=255u8)
        .map(|byte| vocabulary.get(&format!("<0x{byte:02X}>")).copied())
        .collect::<Option<Vec<_>>>()?;
    let mut ascii = Box::new([None; 128]);
    let mut others = HashMap::new();
    for (token, id) in vocabulary {
        let mut chars = token.chars();
        if let (Some(c), None) = (chars.next(), chars.next()) {
            if c.is_ascii() {
                ascii[c as usize] = Some(*id);
            } else {
                others.insert(c, *id);
            }
        }
    }
    Some(Alphabet::Characters { ascii, others, bytes: Box::new(bytes.try_into().ok()?) })
}

/// Returns a splitter for texts that no pre-tokenizer splits, if the model's merges allow one.
///
/// Such a text is one word to the model. It can be split between a character `c` and a run of
/// [`SPACE_REPLACEMENT`] if no merge has a left part that ends with `c` and a right part that
/// begins with [`SPACE_REPLACEMENT`]. Then no token spans that position, and the merges on one side
/// never depend on the other side. Words that are looked up whole (`ignore_merges`) would be an
/// exception.
fn space_splitter(tokenizer: &Tokenizer, model: &BytePairModel<'_>) -> Option<Splitter> {
    tokenizer.get_model().token_to_id(SPACE_REPLACEMENT.encode_utf8(&mut [0; 4]))?;
    let mut not_after = Vec::new();
    for merge in &model.merges {
        let (left, right) = merge.parts()?;
        // A merge of byte tokens stands for characters without a token, and the merge's text does
        // not end with such a character.
        if [left, right].into_iter().any(|part| fallback_byte(part).is_some()) {
            return None;
        }
        let last = left.chars().next_back()?;
        let spans_space = right.starts_with(SPACE_REPLACEMENT) && last != SPACE_REPLACEMENT;
        if spans_space && !not_after.contains(&last) {
            not_after.push(last);
        }
    }
    let splits = !model.ignore_merges && not_after.len() <= MAX_NOT_AFTER_CHARS;
    splits.then_some(Splitter::BeforeRuns { delimiter: SPACE_REPLACEMENT, not_after })
}

/// Finds the ids that the post-processor puts around a text, by processing a text of one token. No
/// kind of post-processor depends on the tokens of the text.
fn find_affixes(tokenizer: &Tokenizer) -> Option<Affixes> {
    const PROBE: u32 = u32::MAX;
    let probe = || Encoding::from_tokens(vec![Token::new(PROBE, String::new(), (0, 0))], 0);
    let processed = |special| tokenizer.post_process(probe(), None, special).ok();
    if processed(false)?.get_ids() != [PROBE] {
        return None;
    }
    let with_special = processed(true)?;
    let mut parts = with_special.get_ids().split(|id| *id == PROBE);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(before), Some(after), None) => {
            Some(Affixes { before: before.to_vec(), after: after.to_vec() })
        }
        _ => None,
    }
}
