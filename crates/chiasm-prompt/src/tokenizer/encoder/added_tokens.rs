//! Cuts a text at its added tokens, as `AddedVocabulary` of `tokenizers` 0.23 does.

use aho_corasick::{AhoCorasick, FindIter, MatchKind};
use tokenizers::AddedVocabulary;

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'t> {
    /// A text between added tokens, not empty.
    Text(&'t str),
    /// An added token.
    Added(u32),
    /// An added token that takes adjacent white space with it or stands only between words. Such
    /// tokens are rare and not supported.
    Unsupported,
}

/// The added tokens of a tokenizer: those matched in the raw text, and those matched after
/// normalization.
pub(super) struct AddedTokens {
    raw: Option<Finder>,
    normalized: Option<Finder>,
}

/// A search for the leftmost token, and the longest one at that position.
struct Finder {
    automaton: AhoCorasick,
    /// The piece of each pattern, by its number; `None` for a token that is handled as text
    /// (`split_special_tokens`).
    pieces: Vec<Option<Piece<'static>>>,
}

impl AddedTokens {
    /// Builds the searches for a vocabulary. Returns `None` if they cannot be built.
    pub(super) fn new(vocabulary: &AddedVocabulary) -> Option<Self> {
        let mut raw = Vec::new();
        let mut normalized = Vec::new();
        for (id, token) in vocabulary.get_added_tokens_decoder() {
            let as_text = vocabulary.get_encode_special_tokens()
                && vocabulary.is_special_token(&token.content);
            let piece = if as_text {
                None
            } else if token.single_word || token.lstrip || token.rstrip {
                Some(Piece::Unsupported)
            } else {
                Some(Piece::Added(*id))
            };
            if token.normalized {
                // For such a token this is its normalized form.
                normalized.push((vocabulary.simple_id_to_token(*id)?, piece));
            } else {
                raw.push((token.content.clone(), piece));
            }
        }
        Some(Self { raw: Finder::build(raw)?, normalized: Finder::build(normalized)? })
    }

    /// Cuts a raw text at its added tokens.
    pub(super) fn in_text<'a, 't>(&'a self, text: &'t str) -> Pieces<'a, 't> {
        Pieces::new(self.raw.as_ref(), text)
    }

    /// Cuts a normalized text at its added tokens.
    pub(super) fn in_normalized<'a, 't>(&'a self, text: &'t str) -> Pieces<'a, 't> {
        Pieces::new(self.normalized.as_ref(), text)
    }
}

impl Finder {
    /// Builds the search for `tokens`: `Some(None)` without tokens, `None` on failure.
    fn build(tokens: Vec<(String, Option<Piece<'static>>)>) -> Option<Option<Self>> {
        if tokens.is_empty() {
            return Some(None);
        }
        if tokens.iter().any(|(text, _)| text.is_empty()) {
            return None;
        }
        let (texts, pieces): (Vec<_>, Vec<_>) = tokens.into_iter().unzip();
        let automaton =
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(texts).ok()?;
        Some(Some(Self { automaton, pieces }))
    }
}

/// The pieces of a text in order.
pub(super) struct Pieces<'a, 't> {
    text: &'t str,
    matches: Option<(FindIter<'a, 't>, &'a [Option<Piece<'static>>])>,
    /// The end of the last piece.
    at: usize,
    /// The token that follows the last text piece, and the token's end.
    next: Option<(Piece<'static>, usize)>,
}

impl<'a, 't> Pieces<'a, 't> {
    fn new(finder: Option<&'a Finder>, text: &'t str) -> Self {
        let matches =
            finder.map(|finder| (finder.automaton.find_iter(text), finder.pieces.as_slice()));
        Self { text, matches, at: 0, next: None }
    }
}

impl<'t> Iterator for Pieces<'_, 't> {
    type Item = Piece<'t>;

    fn next(&mut self) -> Option<Piece<'t>> {
        if let Some((piece, end)) = self.next.take() {
            self.at = end;
            return Some(piece);
        }
        let begin = self.at;
        if let Some((matches, pieces)) = &mut self.matches {
            for found in matches {
                let Some(piece) = pieces[found.pattern().as_usize()] else { continue };
                if found.start() == begin {
                    self.at = found.end();
                    return Some(piece);
                }
                self.next = Some((piece, found.end()));
                self.at = found.start();
                return Some(Piece::Text(&self.text[begin..found.start()]));
            }
        }
        self.at = self.text.len();
        (begin < self.at).then(|| Piece::Text(&self.text[begin..]))
    }
}
