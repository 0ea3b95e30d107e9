//! Placeholder expansion: the one marker per image that the template wrote becomes as many tokens as the image takes.

use chiasm_types::{Placeholder, TokenId, TokenRun};

use crate::PromptError;

/// A prompt as the engine gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expanded {
    /// All token ids.
    pub tokens: Vec<TokenId>,
    /// Where each item stands, in the order of the items. [`Placeholder::is_embed`] is set only for an item that has
    /// tokens which are not replaced by embeddings.
    pub placeholders: Vec<Placeholder>,
}

/// Replaces the n-th `marker` in `tokens` by the n-th of `items`.
///
/// `tokens` must hold exactly one marker per item. A client can write the marker's text (such as `<|image_pad|>`) into
/// a message, and the tokenizer makes the marker of it, as it does in vLLM. Such a prompt has more markers than items
/// and is refused here: otherwise a text could move the images about.
///
/// # Errors
/// [`PromptError::MarkerCount`] if the numbers differ, [`PromptError::EmptyItem`] if an item has no token.
///
/// ```
/// use chiasm_prompt::expand;
/// use chiasm_types::{TokenId, TokenRun};
///
/// let image = vec![TokenRun { token: TokenId(9), count: 3, embeds: true }];
/// let expanded = expand(&[1, 9, 2].map(TokenId), TokenId(9), &[image])?;
/// assert_eq!(expanded.tokens, [1, 9, 9, 9, 2].map(TokenId));
/// assert_eq!((expanded.placeholders[0].offset, expanded.placeholders[0].length), (1, 3));
/// # Ok::<(), chiasm_prompt::PromptError>(())
/// ```
pub fn expand(tokens: &[TokenId], marker: TokenId, items: &[Vec<TokenRun>]) -> Result<Expanded, PromptError> {
    let markers = tokens.iter().filter(|token| **token == marker).count();
    if markers != items.len() {
        return Err(PromptError::MarkerCount { markers, items: items.len() });
    }
    let lengths: Vec<usize> = items.iter().map(|runs| runs.iter().map(|run| run.count).sum()).collect();
    if let Some(index) = lengths.iter().position(|length| *length == 0) {
        return Err(PromptError::EmptyItem { index });
    }
    let mut expanded = Vec::with_capacity(tokens.len() - markers + lengths.iter().sum::<usize>());
    let mut placeholders = Vec::with_capacity(items.len());
    let mut next_item = items.iter().zip(lengths);
    for &token in tokens {
        let item = if token == marker { next_item.next() } else { None };
        match item {
            Some((runs, length)) => {
                placeholders.push(Placeholder { offset: expanded.len(), length, is_embed: embed_mask(runs) });
                for run in runs {
                    expanded.extend(std::iter::repeat_n(run.token, run.count));
                }
            }
            None => expanded.push(token),
        }
    }
    Ok(Expanded { tokens: expanded, placeholders })
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

    fn run(token: u32, count: usize, embeds: bool) -> TokenRun {
        TokenRun { token: TokenId(token), count, embeds }
    }

    #[test]
    fn an_item_with_separators_has_a_mask() {
        let item = vec![run(1, 1, false), run(7, 2, true), run(2, 1, false)];
        let expanded = expand(&[TokenId(5), MARKER], MARKER, &[item]).unwrap();
        assert_eq!(expanded.tokens, [5, 1, 7, 7, 2].map(TokenId));
        assert_eq!(
            expanded.placeholders,
            [Placeholder { offset: 1, length: 4, is_embed: Some(vec![false, true, true, false]) }]
        );
    }

    #[test]
    fn a_marker_written_by_the_user_is_refused() {
        let error = expand(&[MARKER, TokenId(1), MARKER], MARKER, &[vec![run(7, 4, true)]]).unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 2, items: 1 }), "{error}");
        assert!(error.is_request_fault());
    }

    #[test]
    fn a_missing_marker_is_refused() {
        let error = expand(&[TokenId(1)], MARKER, &[vec![run(7, 4, true)]]).unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 0, items: 1 }), "{error}");
    }

    #[test]
    fn an_item_without_tokens_is_refused() {
        let error = expand(&[MARKER], MARKER, &[vec![run(7, 0, true)]]).unwrap_err();
        assert!(matches!(error, PromptError::EmptyItem { index: 0 }), "{error}");
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
            let expanded = expand(&tokens, MARKER, &items).unwrap();
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
