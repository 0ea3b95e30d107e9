//! Computes the tokens of a word.

use std::collections::HashMap;

use chiasm_types::TokenId;
use tokenizers::Model;

use super::merges::{MergeBuffers, Merges};
use super::word_cache::WordCache;

/// The BPE model: its alphabet and merges.
pub(super) struct Words {
    pub(super) alphabet: Alphabet,
    pub(super) merges: Merges,
    /// `true` if a word of the vocabulary is one token, regardless of the merges.
    pub(super) ignore_merges: bool,
}

/// The tokens that merging begins with. Every byte has one, so every text has tokens.
pub(super) enum Alphabet {
    /// One token per byte.
    Bytes { ids: Box<[u32; 256]>, letters: Box<[char; 256]> },
    /// One token per character, and byte tokens for characters without one.
    Characters {
        ascii: Box<[Option<u32>; 128]>,
        others: HashMap<char, u32>,
        bytes: Box<[u32; 256]>,
    },
}

/// The cache and the buffers of a thread while it encodes.
#[derive(Default)]
pub(super) struct WordState {
    cache: WordCache,
    symbols: Vec<u32>,
    buffers: MergeBuffers,
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
            // Most words have one token and need no loop.
            Some(&[id]) => return ids.push(TokenId(id)),
            Some(cached) => return ids.extend(cached.iter().copied().map(TokenId)),
            None => {}
        }
        self.tokenize(model, word, state);
        ids.extend(state.symbols.iter().copied().map(TokenId));
        if let Some(key) = &key {
            state.cache.insert(key, &state.symbols);
        }
    }

    /// Computes the tokens of a word and leaves them in `state.symbols`.
    fn tokenize(&self, model: &tokenizers::Tokenizer, word: &str, state: &mut WordState) {
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
                    let id = if c.is_ascii() { ascii[c as usize] } else { others.get(&c).copied() };
                    match id {
                        Some(id) => symbols.push(id),
                        None => symbols.extend(
                            c.encode_utf8(&mut [0; 4]).bytes().map(|byte| bytes[usize::from(byte)]),
                        ),
                    }
                }
            }
        }
        self.merges.merge(symbols, &mut state.buffers);
    }
}
