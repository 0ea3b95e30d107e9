//! Placeholder expansion: the one marker per image that the template wrote becomes as many tokens as the image takes.

use chiasm_types::{Placeholder, TokenId, TokenRun};

use crate::PromptError;

/// A prompt as the engine gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expanded {
    /// All token ids.
    pub tokens: Vec<TokenId>,
    /// Place and length of each item, in the order of the items. [`Placeholder::is_embed`] is set only for an item that has
    /// tokens which are not replaced by embeddings.
    pub placeholders: Vec<Placeholder>,
}

/// What stands for an item in a tokenized prompt, and what becomes of tokens that come to stand side by side.
#[derive(Clone, Copy, Debug)]
pub struct Markers<'a> {
    /// The tokens, in this order and at least one, that stand for one item.
    pub marker: &'a [TokenId],
    /// Pairs of neighbours that become one token once all items are in the prompt, pair by pair in this order.
    pub joins: &'a [([TokenId; 2], TokenId)],
}

/// Replaces the n-th marker in `tokens` by the n-th of `items`, then joins neighbours.
///
/// `tokens` must hold exactly one marker per item. A client can write the marker's text (such as `<|image_pad|>`) into
/// a message, and the tokenizer makes the marker of it, as it does in vLLM. Such a prompt has more markers than items
/// and is refused here: otherwise a text could move the images about.
///
/// An item whose first token was joined with the one before it starts at the joined token; its length stays, so that
/// two neighbouring items may share a token (as vLLM has it for Gemma 3).
///
/// # Errors
/// [`PromptError::MarkerCount`] if the numbers differ, [`PromptError::EmptyItem`] if an item has no token.
///
/// ```
/// use chiasm_prompt::{Markers, expand};
/// use chiasm_types::{TokenId, TokenRun};
///
/// let image = vec![TokenRun { token: TokenId(9), count: 3, embeds: true }];
/// let markers = Markers { marker: &[TokenId(9)], joins: &[] };
/// let expanded = expand(&[1, 9, 2].map(TokenId), markers, &[image])?;
/// assert_eq!(expanded.tokens, [1, 9, 9, 9, 2].map(TokenId));
/// assert_eq!((expanded.placeholders[0].offset, expanded.placeholders[0].length), (1, 3));
/// # Ok::<(), chiasm_prompt::PromptError>(())
/// ```
pub fn expand(tokens: &[TokenId], markers: Markers<'_>, items: &[Vec<TokenRun>]) -> Result<Expanded, PromptError> {
    let starts = marker_starts(tokens, markers.marker);
    if starts.len() != items.len() {
        return Err(PromptError::MarkerCount { markers: starts.len(), items: items.len() });
    }
    let lengths: Vec<usize> = items.iter().map(|runs| runs.iter().map(|run| run.count).sum()).collect();
    if let Some(index) = lengths.iter().position(|length| *length == 0) {
        return Err(PromptError::EmptyItem { index });
    }
    let mut expanded = Vec::with_capacity(tokens.len() + lengths.iter().sum::<usize>());
    let mut placeholders = Vec::with_capacity(items.len());
    let mut at = 0;
    for ((start, runs), length) in starts.into_iter().zip(items).zip(lengths) {
        expanded.extend_from_slice(&tokens[at..start]);
        at = start + markers.marker.len();
        placeholders.push(Placeholder { offset: expanded.len(), length, is_embed: embed_mask(runs) });
        for run in runs {
            expanded.extend(std::iter::repeat_n(run.token, run.count));
        }
    }
    expanded.extend_from_slice(&tokens[at..]);
    for &(pair, joined) in markers.joins {
        join(&mut expanded, &mut placeholders, pair, joined);
    }
    Ok(Expanded { tokens: expanded, placeholders })
}

/// The indices at which markers start, none overlapping another.
fn marker_starts(tokens: &[TokenId], marker: &[TokenId]) -> Vec<usize> {
    let mut starts = Vec::new();
    let mut at = 0;
    while !marker.is_empty() && at + marker.len() <= tokens.len() {
        if tokens[at..].starts_with(marker) {
            starts.push(at);
            at += marker.len();
        } else {
            at += 1;
        }
    }
    starts
}

/// Puts one token in the place of each `pair` of neighbours, from the left.
fn join(tokens: &mut Vec<TokenId>, placeholders: &mut [Placeholder], pair: [TokenId; 2], joined: TokenId) {
    let mut placeholders = placeholders.iter_mut().peekable();
    let (mut read, mut write) = (0, 0);
    while read < tokens.len() {
        let is_pair = tokens[read..].starts_with(&pair);
        let taken = if is_pair { 2 } else { 1 };
        while let Some(placeholder) = placeholders.next_if(|placeholder| placeholder.offset < read + taken) {
            placeholder.offset = write;
        }
        tokens[write] = if is_pair { joined } else { tokens[read] };
        read += taken;
        write += 1;
    }
    tokens.truncate(write);
}

fn embed_mask(runs: &[TokenRun]) -> Option<Vec<bool>> {
    if runs.iter().all(|run| run.embeds || run.count == 0) {
        return None;
    }
    Some(runs.iter().flat_map(|run| std::iter::repeat_n(run.embeds, run.count)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MARKER: TokenId = TokenId(7);
    const MARKERS: Markers<'_> = Markers { marker: &[MARKER], joins: &[] };

    fn run(token: u32, count: usize, embeds: bool) -> TokenRun {
        TokenRun { token: TokenId(token), count, embeds }
    }

    #[test]
    fn an_item_with_separators_has_a_mask() {
        let item = vec![run(1, 1, false), run(7, 2, true), run(2, 1, false)];
        let expanded = expand(&[TokenId(5), MARKER], MARKERS, &[item]).unwrap();
        assert_eq!(expanded.tokens, [5, 1, 7, 7, 2].map(TokenId));
        assert_eq!(
            expanded.placeholders,
            [Placeholder { offset: 1, length: 4, is_embed: Some(vec![false, true, true, false]) }]
        );
    }

    #[test]
    fn a_marker_written_by_the_user_is_refused() {
        let error = expand(&[MARKER, TokenId(1), MARKER], MARKERS, &[vec![run(7, 4, true)]]).unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 2, items: 1 }), "{error}");
        assert!(error.is_request_fault());
    }

    #[test]
    fn a_missing_marker_is_refused() {
        let error = expand(&[TokenId(1)], MARKERS, &[vec![run(7, 4, true)]]).unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 0, items: 1 }), "{error}");
    }

    #[test]
    fn an_item_without_tokens_is_refused() {
        let error = expand(&[MARKER], MARKERS, &[vec![run(7, 0, true)]]).unwrap_err();
        assert!(matches!(error, PromptError::EmptyItem { index: 0 }), "{error}");
    }

    #[test]
    fn a_marker_of_several_tokens_is_found_whole() {
        let markers = Markers { marker: &[TokenId(1), MARKER, TokenId(2)], joins: &[] };
        let tokens = [5, 1, 7, 2, 1, 7, 1, 7, 2, 7].map(TokenId);
        let items = [vec![run(8, 2, true)], vec![run(9, 1, true)]];
        let expanded = expand(&tokens, markers, &items).unwrap();
        assert_eq!(expanded.tokens, [5, 8, 8, 1, 7, 9, 7].map(TokenId));
        assert_eq!(expanded.placeholders.iter().map(|found| found.offset).collect::<Vec<_>>(), [1, 5]);
    }

    #[test]
    fn neighbours_are_joined_and_placeholders_keep_their_tokens() {
        // As Gemma 3's newlines: 1 is one, 2 two, 3 three, 4 four of them.
        let joins = [([1, 2], 3), ([2, 1], 3), ([2, 2], 4)].map(|(pair, to)| (pair.map(TokenId), TokenId(to)));
        let markers = Markers { marker: &[MARKER], joins: &joins };
        let image = vec![run(2, 1, false), run(8, 2, true), run(2, 1, false)];
        let tokens = [5, 1, 7, 7, 1, 6, 7].map(TokenId);
        let expanded = expand(&tokens, markers, &[image.clone(), image.clone(), image]).unwrap();
        assert_eq!(expanded.tokens, [5, 3, 8, 8, 4, 8, 8, 3, 6, 2, 8, 8, 2].map(TokenId));
        let places: Vec<_> = expanded.placeholders.iter().map(|found| (found.offset, found.length)).collect();
        assert_eq!(places, [(1, 4), (4, 4), (9, 4)]);
    }

    proptest! {
        #[test]
        fn cutting_the_placeholders_out_gives_the_prompt_back(
            tokens in prop::collection::vec(prop_oneof![Just(MARKER), (0u32..20).prop_map(TokenId)], 0..60),
            lengths in prop::collection::vec((1usize..6, any::<bool>()), 60),
        ) {
            let markers = tokens.iter().filter(|token| **token == MARKER).count();
            let items: Vec<_> = lengths[..markers]
                .iter()
                .map(|&(length, plain)| vec![run(100, 1, plain), run(7, length, true)])
                .collect();
            let expanded = expand(&tokens, MARKERS, &items).unwrap();
            let mut back = Vec::new();
            let mut at = 0;
            for (placeholder, item) in expanded.placeholders.iter().zip(&items) {
                back.extend_from_slice(&expanded.tokens[at..placeholder.offset]);
                back.push(MARKER);
                at = placeholder.offset + placeholder.length;
                prop_assert_eq!(placeholder.length, item[1].count + 1);
                prop_assert_eq!(placeholder.is_embed.is_some(), !item[0].embeds);
                if let Some(mask) = &placeholder.is_embed {
                    prop_assert_eq!(mask.len(), placeholder.length);
                }
            }
            back.extend_from_slice(&expanded.tokens[at..]);
            prop_assert_eq!(back, tokens);
        }
    }
}
