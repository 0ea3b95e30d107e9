//! A fast encoder for common kinds of tokenizer. Its tokens equal those of `tokenizers`.
//!
//! `tokenizers` tracks the origin of every byte and allocates for every word. A prompt needs only
//! the ids:
//!
//! 1. The text is cut at added tokens ([`added_tokens`]).
//! 2. Each long piece is looked up in a cache ([`piece_cache`]).
//! 3. Other pieces are normalized ([`normalize`]) and split into words ([`split`]).
//! 4. Each word is looked up in a cache ([`word_cache`]) or merged ([`merges`]).
//!
//! Exactness comes first, so only pure functions of the words are implemented.
//! [`Encoder::for_tokenizer`] returns `None` for unknown settings, [`Encoder::encode`] for texts
//! with unsupported cases. The caller then uses `tokenizers`. Character classes come from the regex
//! engine that `tokenizers` uses, and normalization from the same crate, so both use the same
//! version of Unicode.

mod added_tokens;
mod char_class;
mod merges;
mod normalize;
mod piece_cache;
mod pipeline;
mod split;
mod word_cache;
mod words;

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

use chiasm_types::TokenId;

use added_tokens::{AddedTokens, Piece};
use normalize::{Metaspace, Normalization};
pub(super) use piece_cache::PieceCache;
pub(super) use pipeline::TokenizerMerges;
use split::Splitter;
use words::{WordState, Words};

/// Texts on which tokenizers of these kinds have been found to differ. The encoder is used only if
/// its tokens for them equal those of `tokenizers`.
const SELF_CHECK: &[&str] = &[
    "",
    " ",
    "The quick brown fox, it's 12345.67 o'clock; WE'LL see: they'Ve 'gone'.\n\n\tfn main() \
     { x += 1; }  \r\n  end",
    "'s 'ſ 'LL'd 'r 're ''' don't ŉ ǅungla ʰ ª Ⅷ ½ ٣ ² İ ß",
    "  a   b \u{a0}c\u{2028}\u{85} \u{3000}d\u{200b}e \r\r\n \n x\t\t y   ",
    "e\u{301} é ş\u{307} \u{1112}\u{1161}\u{11ab} 한 \u{212b} \u{0344} \
     a\u{315}\u{300}\u{5ae} \u{300}x \u{958}",
    "北京欢迎你,こんにちは。안녕하세요 สวัสดี नमस्ते 👩‍👩‍👧🏽 \u{1}\u{7f}\u{fffd}\u{10ffff}",
    "ABCdefGHI ΑΒΓδ camelCaseHTTPServer /usr/bin//x ...\n!!!/\n=== <|im_start|>user\n\
     <|im_end|> <s></s>[INST]",
    "▁a ▁▁ b▁ <0x41> <unk> \
     aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

/// An encoder for one tokenizer. Threads share it.
pub(super) struct Encoder {
    added: AddedTokens,
    normalization: Normalization,
    metaspace: Option<Metaspace>,
    splitters: Vec<Splitter>,
    words: Words,
    affixes: Affixes,
    /// The states that no thread is using, the most recently used last. A thread takes a state for
    /// one text, so words need no lock.
    idle: Mutex<Vec<WordState>>,
    /// The maximum number of idle states.
    max_idle: usize,
}

/// The token ids that the post-processor puts around a text.
struct Affixes {
    before: Vec<u32>,
    after: Vec<u32>,
}

impl Encoder {
    /// Creates the encoder for a tokenizer and its `tokenizer.json`. Returns `None` if this kind of
    /// tokenizer is not supported.
    ///
    /// `file` has the merges, which `tokenizers` does not expose.
    pub(super) fn for_tokenizer(
        tokenizer: &tokenizers::Tokenizer,
        file: &TokenizerMerges<'_>,
    ) -> Option<Self> {
        let encoder = pipeline::build_encoder(tokenizer, file)?;
        for special in [false, true] {
            for text in SELF_CHECK {
                let expected = tokenizer.encode_fast(*text, special).ok()?;
                let ids = encoder.encode(tokenizer, text, special, &PieceCache::new(0));
                if ids.is_some_and(|ids| {
                    !ids.iter().map(|token| token.0).eq(expected.get_ids().iter().copied())
                }) {
                    tracing::warn!(
                        text,
                        "the fast encoder differs from tokenizers and is not used; \
                         please report this"
                    );
                    return None;
                }
            }
        }
        Some(encoder)
    }

    fn new(
        added: AddedTokens,
        normalization: Normalization,
        metaspace: Option<Metaspace>,
        splitters: Vec<Splitter>,
        words: Words,
        affixes: Affixes,
    ) -> Self {
        let max_idle = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            added,
            normalization,
            metaspace,
            splitters,
            words,
            affixes,
            idle: Mutex::default(),
            max_idle,
        }
    }

    /// Returns the token ids of a text; `None` if the text has an unsupported case. Long pieces are
    /// looked up in `pieces` and added to it. With `special` the post-processor's tokens are added.
    pub(super) fn encode(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        special: bool,
        pieces: &PieceCache,
    ) -> Option<Vec<TokenId>> {
        let mut state =
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        // Text has about four bytes per token.
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        if special {
            ids.extend(self.affixes.before.iter().copied().map(TokenId));
        }
        let supported = self.encode_text(tokenizer, text, pieces, &mut state, &mut ids);
        if special {
            ids.extend(self.affixes.after.iter().copied().map(TokenId));
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.max_idle {
            idle.push(state);
        }
        supported.then_some(ids)
    }

    /// Appends the tokens of a text. Returns `false` if the text has an unsupported case.
    fn encode_text(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        pieces: &PieceCache,
        state: &mut WordState,
        ids: &mut Vec<TokenId>,
    ) -> bool {
        let mut at_start = true;
        for piece in self.added.in_text(text) {
            match piece {
                Piece::Added(id) => {
                    ids.push(TokenId(id));
                    at_start = false;
                }
                Piece::Unsupported => return false,
                Piece::Text(text) => {
                    // At the start of a text, Metaspace may put a character before the piece, so
                    // its tokens differ there.
                    let is_cacheable = !at_start || self.metaspace.is_none();
                    if is_cacheable && pieces.append_cached(text, ids) {
                        continue;
                    }
                    let begin = ids.len();
                    if !self.encode_piece(tokenizer, text, &mut at_start, state, ids) {
                        return false;
                    }
                    if is_cacheable {
                        pieces.insert(text, &ids[begin..]);
                    }
                }
            }
        }
        true
    }

    /// Appends the tokens of a piece between added tokens of the raw text. The piece may hold added
    /// tokens that are found only after normalization. Returns `false` for an unsupported case.
    ///
    /// `at_start` is `true` if the piece begins the text. It is cleared unless the normalized piece
    /// is empty.
    fn encode_piece(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        at_start: &mut bool,
        state: &mut WordState,
        ids: &mut Vec<TokenId>,
    ) -> bool {
        let text = self.normalization.apply(text);
        for piece in self.added.in_normalized(&text) {
            match piece {
                Piece::Added(id) => ids.push(TokenId(id)),
                Piece::Unsupported => return false,
                Piece::Text(text) => {
                    let text = match &self.metaspace {
                        None => Cow::Borrowed(text),
                        Some(metaspace) => Cow::Owned(metaspace.apply(text, *at_start)),
                    };
                    split::split(&self.splitters, &text, &mut |word| {
                        self.words.push(tokenizer, word, state, ids)
                    });
                }
            }
            *at_start = false;
        }
        true
    }
}

#[cfg(test)]
mod tests;
