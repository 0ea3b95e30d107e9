//! Finds the tokens of a word.

use std::collections::HashMap;

use chiasm_types::TokenId;
use tokenizers::Model;

use super::merges::{MergeRoom, Merges};
use super::word_cache::WordCache;

/// The model: symbols and merges.
pub(super) struct Words {
    pub(super) alphabet: Alphabet,
    pub(super) merges: Merges,
    /// Whether a word that is in the vocabulary is its own token, whatever the merges say.
    pub(super) ignore_merges: bool,
}

/// The tokens that merging begins with. There is one for each byte, so that no text is without
/// tokens.
pub(super) enum Alphabet {
    /// Bytes.
    Bytes { ids: Box<[u32; 256]>, letters: Box<[char; 256]> },
    /// Characters, and bytes for those that have no token.
    Characters {
        ascii: Box<[Option<u32>; 128]>,
        others: HashMap<char, u32>,
        bytes: Box<[u32; 256]>,
    },
}

/// What a thread needs while it encodes.
#[derive(Default)]
pub(super) struct WordState {
    cache: WordCache,
    symbols: Vec<u32>,
    room: MergeRoom,
}

impl Words {
    /// Appends the tokens of a word.
    #[inline]
    pub(super) fn push(
        &self,
        model: &tokenizers::Tokenizer,
        word: &str,
        state: &mut WordState,
        ids: &mut Vec<TokenId>,
    ) {
        let key = WordCache::key(word.as_bytes());
        match key.as_ref().and_then(|key| state.cache.get(key)) {
            // Most words are of one, and need no loop.
            Some(&[id]) => return ids.push(TokenId(id)),
            Some(known) => return ids.extend(known.iter().copied().map(TokenId)),
            None => {}
        }
        self.tokens(model, word, state);
        ids.extend(state.symbols.iter().copied().map(TokenId));
        if let Some(key) = &key {
            state.cache.insert(key, &state.symbols);
        }
    }

    /// Leaves the tokens in `state.symbols`.
    fn tokens(&self, model: &tokenizers::Tokenizer, word: &str, state: &mut WordState) {
        let symbols = &mut state.symbols;
        symbols.clear();
        if self.ignore_merges {
            let whole = match &self.alphabet {
                Alphabet::Bytes { letters, .. } => {
                    let spelled: String =
                        word.bytes().map(|byte| letters[usize::from(byte)]).collect();
                    model.get_model().token_to_id(&spelled)
                }
                Alphabet::Characters { .. } => model.get_model().token_to_id(word),
            };
            if let Some(id) = whole {
                symbols.push(id);
                return;
            }
        }
        match &self.alphabet {
            Alphabet::Bytes { ids, .. } => {
                symbols.extend(word.bytes().map(|byte| ids[usize::from(byte)]))
            }
            Alphabet::Characters { ascii, others, bytes } => {
                for c in word.chars() {
                    let known =
                        if c.is_ascii() { ascii[c as usize] } else { others.get(&c).copied() };
                    match known {
                        Some(id) => symbols.push(id),
                        None => symbols.extend(
                            c.encode_utf8(&mut [0; 4]).bytes().map(|byte| bytes[usize::from(byte)]),
                        ),
                    }
                }
            }
        }
        self.merges.merge(symbols, &mut state.room);
    }
}
