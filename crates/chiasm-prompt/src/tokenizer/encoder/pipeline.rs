//! Decides whether the encoder takes a tokenizer on, and sets it up.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use tokenizers::{Encoding, Model, Token, Tokenizer};

use super::Encoder;
use super::added_tokens::AddedTokens;
use super::merges::Merges;
use super::normalize::{Metaspace, Normalization};
use super::split::{self, Splitter};
use super::words::{Alphabet, Words};
use crate::tokenizer::token_bytes::{byte_letters, fallback_byte};

/// Stands for a space in vocabularies made by SentencePiece.
const SPACE_SIGN: char = '▁';

/// Most characters behind which a text is not split. Gemma 3 has one; with many, little would be
/// gained.
const MAX_NOT_AFTER: usize = 8;

/// What of `tokenizer.json` can't be asked of `tokenizers`.
#[derive(Deserialize)]
struct File<'a> {
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

/// Two tokens; in older files in one string.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge<'a> {
    Pair(#[serde(borrow)] Text<'a>, Text<'a>),
    Joined(#[serde(borrow)] Text<'a>),
}

/// A string that is borrowed where it has no escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// `None` if the kind is not known.
pub(super) fn encoder(tokenizer: &Tokenizer, json: &[u8]) -> Option<Encoder> {
    let file: File<'_> = serde_json::from_slice(json).ok()?;
    let normalization = Normalization::of(&serde_json::to_value(tokenizer.get_normalizer()).ok()?)?;
    let pre_tokenizer = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
    let mut metaspace = None;
    let (mut splitters, byte_level) = if pre_tokenizer["type"] == "Metaspace" {
        let sign = metaspace.insert(Metaspace::of(&pre_tokenizer)?).sign;
        // A normaliser could move the text's beginning.
        if !normalization.is_nothing() {
            return None;
        }
        let split = pre_tokenizer["split"].as_bool()?;
        (split.then_some(Splitter::BeforeEach(sign)).into_iter().collect(), false)
    } else {
        split::steps(&pre_tokenizer, &|pattern| normalization.removes(pattern))?
    };
    let words = words(tokenizer, &file.model, byte_level)?;
    if let (Alphabet::Characters { .. }, true) = (&words.alphabet, splitters.is_empty()) {
        splitters.extend(space_splitter(tokenizer, &file.model));
    }
    let added = AddedTokens::of(tokenizer.get_added_vocabulary())?;
    Some(Encoder::new(added, normalization, metaspace, splitters, words, around(tokenizer)?))
}

fn words(tokenizer: &Tokenizer, model: &BytePairModel<'_>, byte_level: bool) -> Option<Words> {
    let affix = |affix: &Option<String>| affix.as_deref().is_some_and(|affix| !affix.is_empty());
    let plain = model.r#type == "BPE"
        && model.dropout.unwrap_or(0.0) == 0.0
        && !affix(&model.continuing_subword_prefix)
        && !affix(&model.end_of_word_suffix);
    if !plain {
        return None;
    }
    let vocabulary = tokenizer.get_vocab(false);
    let distinct: HashSet<u32> = vocabulary.values().copied().collect();
    if distinct.len() != vocabulary.len() {
        return None;
    }
    let alphabet = if byte_level {
        bytes(&vocabulary)?
    } else {
        characters(&vocabulary, model.byte_fallback)?
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
    fn parts(&self) -> Option<(&str, &str)> {
        match self {
            Self::Pair(left, right) => Some((&left.0, &right.0)),
            Self::Joined(both) => both.0.split_once(' ').filter(|(_, right)| !right.contains(' ')),
        }
    }
}

fn bytes(vocabulary: &HashMap<String, u32>) -> Option<Alphabet> {
    let letters = byte_letters();
    let ids = letters
        .iter()
        .map(|letter| vocabulary.get(letter.encode_utf8(&mut [0; 4])).copied())
        .collect::<Option<Vec<_>>>()?;
    Some(Alphabet::Bytes { ids: Box::new(ids.try_into().ok()?), letters: Box::new(letters) })
}

fn characters(vocabulary: &HashMap<String, u32>, byte_fallback: bool) -> Option<Alphabet> {
    if !byte_fallback {
        return None;
    }
    let bytes = (0..=255u8)
        .map(|byte| vocabulary.get(&format!("<0x{byte:02X}>")).copied())
        .collect::<Option<Vec<_>>>()?;
    let (mut ascii, mut others) = (Box::new([None; 128]), HashMap::new());
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

/// A text that no pre-tokenizer splits is one word to the model. It can be split before a run of
/// [`SPACE_SIGN`]s behind a character that ends the left part of no merge with a right part that
/// begins with the sign: then no token reaches over that place, and what is merged on one side
/// never depends on the other. A word that is a token as a whole would be an exception.
fn space_splitter(tokenizer: &Tokenizer, model: &BytePairModel<'_>) -> Option<Splitter> {
    tokenizer.get_model().token_to_id(SPACE_SIGN.encode_utf8(&mut [0; 4]))?;
    let mut not_after = Vec::new();
    for merge in &model.merges {
        let (left, right) = merge.parts()?;
        // A character without a token is the tokens of its bytes, whose text ends in another
        // character than it.
        if [left, right].into_iter().any(|part| fallback_byte(part).is_some()) {
            return None;
        }
        let last = left.chars().next_back()?;
        if right.starts_with(SPACE_SIGN) && last != SPACE_SIGN && !not_after.contains(&last) {
            not_after.push(last);
        }
    }
    let splits = !model.ignore_merges && not_after.len() <= MAX_NOT_AFTER;
    splits.then_some(Splitter::BeforeRuns { sign: SPACE_SIGN, not_after })
}

/// What the post-processor puts around a text of one token. No kind of it looks at the tokens
/// themselves.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    const MARK: u32 = u32::MAX;
    let mark = || Encoding::from_tokens(vec![Token::new(MARK, String::new(), (0, 0))], 0);
    let processed = |special| tokenizer.post_process(mark(), None, special).ok();
    if processed(false)?.get_ids() != [MARK] {
        return None;
    }
    let with = processed(true)?;
    let mut parts = with.get_ids().split(|id| *id == MARK);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(before), Some(behind), None) => Some((before.to_vec(), behind.to_vec())),
        _ => None,
    }
}
