//! The tokens that `tokenizers` gives, in a fraction of its time, for the kinds of tokenizer that
//! are known here.
//!
//! `tokenizers` keeps for every byte where it came from, and allocates for every word. A prompt
//! needs the ids alone:
//!
//! 1. the text is cut at added tokens ([`added_tokens`]),
//! 2. each long piece is looked up ([`piece_cache`]), or
//! 3. normalised ([`normalize`]) and split into words ([`split`]), as all short ones are,
//! 4. each word is looked up ([`word_cache`]) or merged ([`merges`]).
//!
//! Exactness comes first. What is no pure function of the words is not taken on: [`Encoder::of`]
//! gives `None` for every setting it doesn't know, [`Encoder::encode`] for every text with a case
//! it leaves out, and `tokenizers` does it. The classes of characters are asked of the regex engine
//! that `tokenizers` uses, and normalisation is that of the same crate, so that no two versions of
//! Unicode can meet.

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
use split::Splitter;
use words::{WordState, Words};

/// Texts that such tokenizers have been found to disagree about. The encoder is used only if it
/// gets them right.
const SELF_CHECK: &[&str] = &[
    "",
    " ",
    "The quick brown fox, it's 12345.67 o'clock; WE'LL see: they'Ve 'gone'.\n\n\tfn main() { x += 1; }  \r\n  end",
    "'s 'ſ 'LL'd 'r 're ''' don't ŉ ǅungla ʰ ª Ⅷ ½ ٣ ² İ ß",
    "  a   b \u{a0}c\u{2028}\u{85} \u{3000}d\u{200b}e \r\r\n \n x\t\t y   ",
    "e\u{301} é ş\u{307} \u{1112}\u{1161}\u{11ab} 한 \u{212b} \u{0344} a\u{315}\u{300}\u{5ae} \u{300}x \u{958}",
    "北京欢迎你,こんにちは。안녕하세요 สวัสดี नमस्ते 👩‍👩‍👧🏽 \u{1}\u{7f}\u{fffd}\u{10ffff}",
    "ABCdefGHI ΑΒΓδ camelCaseHTTPServer /usr/bin//x ...\n!!!/\n=== <|im_start|>user\n<|im_end|> <s></s>[INST]",
    "▁a ▁▁ b▁ <0x41> <unk> aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

/// An encoder for one tokenizer, shared by threads.
pub(super) struct Encoder {
    added: AddedTokens,
    normalization: Normalization,
    metaspace: Option<Metaspace>,
    splitters: Vec<Splitter>,
    words: Words,
    /// What the post-processor puts before and behind a text.
    around: (Vec<u32>, Vec<u32>),
    /// States that no thread is using, the warmest last. A state is lent for one text, so that
    /// words need no lock.
    idle: Mutex<Vec<WordState>>,
    /// How many of them are kept.
    max_idle: usize,
}

impl Encoder {
    /// The encoder for a tokenizer and its `tokenizer.json`; `None` if its kind is not known.
    ///
    /// The file is read again for the merges, which `tokenizers` does not show.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer, json: &[u8]) -> Option<Self> {
        let encoder = pipeline::encoder(tokenizer, json)?;
        for special in [false, true] {
            for text in SELF_CHECK {
                let expected = tokenizer.encode_fast(*text, special).ok()?;
                let ids = encoder.encode(tokenizer, text, special, &PieceCache::new(0));
                if ids.is_some_and(|ids| {
                    !ids.iter().map(|token| token.0).eq(expected.get_ids().iter().copied())
                }) {
                    tracing::warn!(
                        text,
                        "the fast encoder differs from tokenizers and is not used; please report this"
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
        around: (Vec<u32>, Vec<u32>),
    ) -> Self {
        let max_idle = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            added,
            normalization,
            metaspace,
            splitters,
            words,
            around,
            idle: Mutex::default(),
            max_idle,
        }
    }

    /// Token ids of a text, or `None` if the text has a case that is left to `tokenizers`. Long
    /// pieces are looked for among the ones that are known, and added to them.
    pub(super) fn encode(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        special: bool,
        known: &PieceCache,
    ) -> Option<Vec<TokenId>> {
        let mut state =
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        // Text has about four bytes per token.
        let mut ids = Vec::with_capacity(text.len() / 3 + 8);
        if special {
            ids.extend(self.around.0.iter().copied().map(TokenId));
        }
        let done = self.encode_text(tokenizer, text, known, &mut state, &mut ids);
        if special {
            ids.extend(self.around.1.iter().copied().map(TokenId));
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.max_idle {
            idle.push(state);
        }
        done.then_some(ids)
    }

    /// False if the text has a case that is left out.
    fn encode_text(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        known: &PieceCache,
        state: &mut WordState,
        ids: &mut Vec<TokenId>,
    ) -> bool {
        // Whether nothing of the text has been passed.
        let mut first = true;
        for piece in self.added.in_text(text) {
            match piece {
                Piece::Added(id) => {
                    ids.push(TokenId(id));
                    first = false;
                }
                Piece::LeftOut => return false,
                Piece::Text(text) => {
                    // The piece that begins a text may get a sign before it, and is another one
                    // elsewhere.
                    let is_kept = !first || self.metaspace.is_none();
                    if is_kept && known.push(text, ids) {
                        continue;
                    }
                    let begin = ids.len();
                    if !self.encode_piece(tokenizer, text, &mut first, state, ids) {
                        return false;
                    }
                    if is_kept {
                        known.keep(text, &ids[begin..]);
                    }
                }
            }
        }
        true
    }

    /// Appends the tokens of a piece without added tokens, but for those that are found in what is
    /// normalised. `first`: whether it begins the text, which no longer is so behind it unless
    /// nothing was left of it. False if it has a case that is left out.
    fn encode_piece(
        &self,
        tokenizer: &tokenizers::Tokenizer,
        text: &str,
        first: &mut bool,
        state: &mut WordState,
        ids: &mut Vec<TokenId>,
    ) -> bool {
        let text = self.normalization.apply(text);
        for piece in self.added.in_normalized(&text) {
            match piece {
                Piece::Added(id) => ids.push(TokenId(id)),
                Piece::LeftOut => return false,
                Piece::Text(text) => {
                    let text = match &self.metaspace {
                        None => Cow::Borrowed(text),
                        Some(metaspace) => Cow::Owned(metaspace.apply(text, *first)),
                    };
                    split::split(&self.splitters, &text, &mut |word| {
                        self.words.push(tokenizer, word, state, ids)
                    });
                }
            }
            *first = false;
        }
        true
    }
}

#[cfg(test)]
mod tests;
