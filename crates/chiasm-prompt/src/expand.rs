//! Placeholder expansion: the template writes one marker per media item, and [`expand`] replaces it
//! with the item's tokens.

use chiasm_types::{Modality, Placeholder, TokenId, TokenRun};

use crate::PromptError;

/// An expanded prompt, in the form that engines take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expanded {
    /// The token ids of the expanded prompt.
    pub tokens: Vec<TokenId>,
    /// The offset and length of each item, in the order of the items. [`Placeholder::is_embed`] is
    /// `None` if every token of the item is replaced by an embedding.
    pub placeholders: Vec<Placeholder>,
}

/// The markers of media items in a tokenized prompt, and the joins of neighbouring tokens.
#[derive(Clone, Copy, Debug)]
pub struct Markers<'a> {
    /// One marker for each modality that the model supports. No two begin with the same token.
    pub by_modality: &'a [Marker<'a>],
    /// Pairs of neighbouring tokens that become one token once all items are expanded. The pairs
    /// are joined one after another, in this order.
    pub joins: &'a [([TokenId; 2], TokenId)],
}

/// The marker of one item of a modality.
#[derive(Clone, Copy, Debug)]
pub struct Marker<'a> {
    /// The modality of the item.
    pub modality: &'a Modality,
    /// The tokens of the marker, at least one.
    pub tokens: &'a [TokenId],
}

/// An item to expand.
#[derive(Clone, Copy, Debug)]
pub struct Item<'a> {
    /// The item's modality, which selects its marker.
    pub modality: &'a Modality,
    /// The tokens that replace the marker, at least one.
    pub runs: &'a [TokenRun],
}

/// Replaces the n-th marker of a modality in `tokens` with the n-th item of that modality, then
/// joins neighbouring tokens. Items of different modalities may come in another order than their
/// markers.
///
/// `tokens` must hold exactly one marker per item. A client can write the marker's text (such as
/// `<|image_pad|>`) into a message, and the tokenizer turns that text into the marker, as in vLLM.
/// Such a prompt has more markers than items and is refused: otherwise text could shift images to
/// other places.
///
/// If an item's first token was joined with the token before it, the item starts at the joined
/// token and keeps its length. Two neighbouring items may therefore share a token, as in vLLM for
/// Gemma 3.
///
/// # Errors
/// [`PromptError::MarkerCount`] if the numbers differ, [`PromptError::EmptyItem`] if an item has no
/// token.
///
/// ```
/// use chiasm_prompt::{Item, Marker, Markers, expand};
/// use chiasm_types::{Modality, TokenId, TokenRun};
///
/// let runs = [TokenRun { token: TokenId(9), count: 3, embeds: true }];
/// let image = Item { modality: &Modality::Image, runs: &runs };
/// let marker = Marker { modality: &Modality::Image, tokens: &[TokenId(9)] };
/// let markers = Markers { by_modality: &[marker], joins: &[] };
/// let expanded = expand(&[1, 9, 2].map(TokenId), markers, &[image])?;
/// assert_eq!(expanded.tokens, [1, 9, 9, 9, 2].map(TokenId));
/// assert_eq!((expanded.placeholders[0].offset, expanded.placeholders[0].length), (1, 3));
/// # Ok::<(), chiasm_prompt::PromptError>(())
/// ```
pub fn expand(
    tokens: &[TokenId],
    markers: Markers<'_>,
    items: &[Item<'_>],
) -> Result<Expanded, PromptError> {
    let found = find_markers(tokens, markers.by_modality);
    let item_indices = assign_items(&found, markers.by_modality, items)?;
    let token_count = |item: &Item<'_>| item.runs.iter().map(|run| run.count).sum::<usize>();
    if let Some(index) = items.iter().position(|item| token_count(item) == 0) {
        return Err(PromptError::EmptyItem { index });
    }
    let added = items.iter().map(token_count).sum::<usize>();
    let mut expanded = Vec::with_capacity(tokens.len() + added);
    // In the order of the prompt, which `join_pairs` relies on.
    let mut placeholders = Vec::with_capacity(items.len());
    let mut at = 0;
    for (marker, &index) in found.iter().zip(&item_indices) {
        let item = &items[index];
        expanded.extend_from_slice(&tokens[at..marker.start]);
        at = marker.start + markers.by_modality[marker.index].tokens.len();
        let offset = expanded.len();
        let length = token_count(item);
        placeholders.push(Placeholder { offset, length, is_embed: embed_mask(item.runs) });
        for run in item.runs {
            expanded.extend(std::iter::repeat_n(run.token, run.count));
        }
    }
    expanded.extend_from_slice(&tokens[at..]);
    for &(pair, joined) in markers.joins {
        join_pairs(&mut expanded, &mut placeholders, pair, joined);
    }
    let mut by_item: Vec<(usize, Placeholder)> =
        item_indices.into_iter().zip(placeholders).collect();
    by_item.sort_unstable_by_key(|(index, _)| *index);
    Ok(Expanded {
        tokens: expanded,
        placeholders: by_item.into_iter().map(|(_, placeholder)| placeholder).collect(),
    })
}

/// An occurrence of a marker in a prompt.
struct FoundMarker {
    start: usize,
    /// The index of the marker in [`Markers::by_modality`].
    index: usize,
}

/// Finds the markers of a prompt from the left, without overlaps.
fn find_markers(tokens: &[TokenId], markers: &[Marker<'_>]) -> Vec<FoundMarker> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(next) = find_first_token(&tokens[at..], markers) {
        at += next;
        let is_here = |marker: &Marker<'_>| {
            !marker.tokens.is_empty() && tokens[at..].starts_with(marker.tokens)
        };
        match markers.iter().position(is_here) {
            Some(index) => {
                found.push(FoundMarker { start: at, index });
                at += markers[index].tokens.len();
            }
            None => at += 1,
        }
    }
    found
}

/// Returns the first position that holds the first token of a marker.
fn find_first_token(tokens: &[TokenId], markers: &[Marker<'_>]) -> Option<usize> {
    // Almost no token begins a marker. Comparing a whole chunk without an early exit is vectorized.
    const CHUNK: usize = 64;
    let begins_marker =
        |token: &TokenId| markers.iter().any(|marker| marker.tokens.first() == Some(token));
    let contains = |chunk: &[TokenId], first: TokenId| {
        chunk.iter().fold(false, |found, &token| found | (token == first))
    };
    let is_candidate = |chunk: &[TokenId]| {
        let mut first_tokens = markers.iter().filter_map(|marker| marker.tokens.first());
        first_tokens.any(|&first| contains(chunk, first))
    };
    let (index, chunk) = tokens.chunks(CHUNK).enumerate().find(|(_, chunk)| is_candidate(chunk))?;
    chunk.iter().position(begins_marker).map(|within| index * CHUNK + within)
}

/// Returns the index of the item for each found marker.
fn assign_items(
    found: &[FoundMarker],
    markers: &[Marker<'_>],
    items: &[Item<'_>],
) -> Result<Vec<usize>, PromptError> {
    let mut item_indices = vec![0; found.len()];
    for (index, marker) in markers.iter().enumerate() {
        let mut found_here = (0..found.len()).filter(|&at| found[at].index == index);
        let mut own_items =
            (0..items.len()).filter(|&item| items[item].modality == marker.modality);
        loop {
            match (found_here.next(), own_items.next()) {
                (Some(at), Some(item)) => item_indices[at] = item,
                (None, None) => break,
                _ => return Err(marker_count_error(marker.modality, found, markers, items)),
            }
        }
    }
    let has_marker =
        |item: &&Item<'_>| markers.iter().any(|marker| marker.modality == item.modality);
    match items.iter().find(|item| !has_marker(item)) {
        Some(item) => Err(marker_count_error(item.modality, found, markers, items)),
        None => Ok(item_indices),
    }
}

fn marker_count_error(
    modality: &Modality,
    found: &[FoundMarker],
    markers: &[Marker<'_>],
    items: &[Item<'_>],
) -> PromptError {
    PromptError::MarkerCount {
        modality: modality.clone(),
        markers: found.iter().filter(|marker| markers[marker.index].modality == modality).count(),
        items: items.iter().filter(|item| item.modality == modality).count(),
    }
}

/// Replaces each `pair` of neighbouring tokens with `joined`, from the left.
fn join_pairs(
    tokens: &mut Vec<TokenId>,
    placeholders: &mut [Placeholder],
    pair: [TokenId; 2],
    joined: TokenId,
) {
    let mut placeholders = placeholders.iter_mut().peekable();
    let mut read = 0;
    let mut write = 0;
    while read < tokens.len() {
        let is_pair = tokens[read..].starts_with(&pair);
        let taken = if is_pair { 2 } else { 1 };
        while let Some(placeholder) =
            placeholders.next_if(|placeholder| placeholder.offset < read + taken)
        {
            placeholder.offset = write;
        }
        tokens[write] = if is_pair { joined } else { tokens[read] };
        read += taken;
        write += 1;
    }
    tokens.truncate(write);
}

/// Returns the embedding mask of an item; `None` if every token is replaced by an embedding.
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
    const MARKERS: Markers<'_> = Markers { by_modality: &[image_marker(&[MARKER])], joins: &[] };

    const fn image_marker(tokens: &[TokenId]) -> Marker<'_> {
        Marker { modality: &Modality::Image, tokens }
    }

    /// Creates images that expand to these runs.
    fn images(items: &[Vec<TokenRun>]) -> Vec<Item<'_>> {
        items.iter().map(|runs| Item { modality: &Modality::Image, runs }).collect()
    }

    fn run(token: u32, count: usize, embeds: bool) -> TokenRun {
        TokenRun { token: TokenId(token), count, embeds }
    }

    #[test]
    fn item_with_separators_has_a_mask() {
        let item = vec![run(1, 1, false), run(7, 2, true), run(2, 1, false)];
        let expanded = expand(&[TokenId(5), MARKER], MARKERS, &images(&[item])).unwrap();
        assert_eq!(expanded.tokens, [5, 1, 7, 7, 2].map(TokenId));
        assert_eq!(
            expanded.placeholders,
            [Placeholder { offset: 1, length: 4, is_embed: Some(vec![false, true, true, false]) }]
        );
    }

    #[test]
    fn marker_written_by_the_user_is_refused() {
        let error =
            expand(&[MARKER, TokenId(1), MARKER], MARKERS, &images(&[vec![run(7, 4, true)]]))
                .unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 2, items: 1, .. }), "{error}");
        assert!(error.is_request_fault());
    }

    #[test]
    fn missing_marker_is_refused() {
        let error = expand(&[TokenId(1)], MARKERS, &images(&[vec![run(7, 4, true)]])).unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 0, items: 1, .. }), "{error}");
    }

    #[test]
    fn item_without_tokens_is_refused() {
        let error = expand(&[MARKER], MARKERS, &images(&[vec![run(7, 0, true)]])).unwrap_err();
        assert!(matches!(error, PromptError::EmptyItem { index: 0 }), "{error}");
    }

    #[test]
    fn marker_of_several_tokens_is_matched_whole() {
        let marker = image_marker(&[TokenId(1), MARKER, TokenId(2)]);
        let markers = Markers { by_modality: &[marker], joins: &[] };
        let tokens = [5, 1, 7, 2, 1, 7, 1, 7, 2, 7].map(TokenId);
        let items = [vec![run(8, 2, true)], vec![run(9, 1, true)]];
        let expanded = expand(&tokens, markers, &images(&items)).unwrap();
        assert_eq!(expanded.tokens, [5, 8, 8, 1, 7, 9, 7].map(TokenId));
        assert_eq!(
            expanded.placeholders.iter().map(|place| place.offset).collect::<Vec<_>>(),
            [1, 5]
        );
    }

    #[test]
    fn joined_neighbours_keep_placeholder_tokens() {
        // Like Gemma 3's newline tokens: token n stands for n newlines.
        let joins = [([1, 2], 3), ([2, 1], 3), ([2, 2], 4)]
            .map(|(pair, to)| (pair.map(TokenId), TokenId(to)));
        let markers = Markers { joins: &joins, ..MARKERS };
        let image = vec![run(2, 1, false), run(8, 2, true), run(2, 1, false)];
        let tokens = [5, 1, 7, 7, 1, 6, 7].map(TokenId);
        let expanded =
            expand(&tokens, markers, &images(&[image.clone(), image.clone(), image])).unwrap();
        assert_eq!(expanded.tokens, [5, 3, 8, 8, 4, 8, 8, 3, 6, 2, 8, 8, 2].map(TokenId));
        let places: Vec<_> =
            expanded.placeholders.iter().map(|place| (place.offset, place.length)).collect();
        assert_eq!(places, [(1, 4), (4, 4), (9, 4)]);
    }

    #[test]
    fn items_replace_the_markers_of_their_modality() {
        let sound = Modality::Audio;
        let markers = [
            image_marker(&[MARKER]),
            Marker { modality: &sound, tokens: &[TokenId(4), TokenId(5)] },
        ];
        let markers = Markers { by_modality: &markers, joins: &[] };
        let [first, second, long] =
            [run(8, 1, true), run(9, 2, true), run(3, 3, true)].map(|run| [run]);
        let image = |runs| Item { modality: &Modality::Image, runs };
        let items = [image(&first), image(&second), Item { modality: &sound, runs: &long }];
        let tokens = [4, 5, 7, 1, 7].map(TokenId);
        let expanded = expand(&tokens, markers, &items).unwrap();
        assert_eq!(expanded.tokens, [3, 3, 3, 8, 1, 9, 9].map(TokenId));
        let places: Vec<_> =
            expanded.placeholders.iter().map(|place| (place.offset, place.length)).collect();
        assert_eq!(places, [(3, 1), (5, 2), (0, 3)]);
        let error = expand(&tokens[2..], markers, &items).unwrap_err();
        assert!(error.to_string().contains("0 audio markers for 1 audio items"), "{error}");
        let silent = Modality::Video;
        let error = expand(
            &tokens,
            markers,
            &[&items[..], &[Item { modality: &silent, runs: &long }]].concat(),
        );
        assert!(error.unwrap_err().to_string().contains("0 video markers for 1 video items"));
    }

    proptest! {
        #[test]
        fn placeholders_can_be_cut_out_again(
            tokens in prop::collection::vec(
                prop_oneof![Just(MARKER), (0u32..20).prop_map(TokenId)],
                0..60,
            ),
            lengths in prop::collection::vec((1usize..6, any::<bool>()), 60),
        ) {
            let markers = tokens.iter().filter(|token| **token == MARKER).count();
            let items: Vec<_> = lengths[..markers]
                .iter()
                .map(|&(length, plain)| vec![run(100, 1, plain), run(7, length, true)])
                .collect();
            let expanded = expand(&tokens, MARKERS, &images(&items)).unwrap();
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
