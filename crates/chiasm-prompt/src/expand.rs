//! Placeholder expansion: the one marker per media item that the template wrote becomes as many
//! tokens as the item takes.

use chiasm_types::{Modality, Placeholder, TokenId, TokenRun};

use crate::PromptError;

/// A prompt as the engine gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expanded {
    /// All token ids.
    pub tokens: Vec<TokenId>,
    /// Place and length of each item, in the order of the items. [`Placeholder::is_embed`] is set
    /// only for an item that has tokens which are not replaced by embeddings.
    pub placeholders: Vec<Placeholder>,
}

/// What stands for media items in a tokenized prompt, and what becomes of tokens that come to stand
/// side by side.
#[derive(Clone, Copy, Debug)]
pub struct Markers<'a> {
    /// One for each modality that the model takes. None begins like another.
    pub of: &'a [Marker<'a>],
    /// Pairs of neighbours that become one token once all items are in the prompt, pair by pair in
    /// this order.
    pub joins: &'a [([TokenId; 2], TokenId)],
}

/// What stands for one item of a modality.
#[derive(Clone, Copy, Debug)]
pub struct Marker<'a> {
    /// What kind of item.
    pub modality: &'a Modality,
    /// The tokens, in this order and at least one.
    pub tokens: &'a [TokenId],
}

/// What an item becomes.
#[derive(Clone, Copy, Debug)]
pub struct Item<'a> {
    /// The modality whose markers are for it.
    pub modality: &'a Modality,
    /// The tokens that take its marker's place; at least one.
    pub runs: &'a [TokenRun],
}

/// Replaces the n-th marker of a modality in `tokens` by the n-th item of that modality, then joins
/// neighbours. Items of different modalities may come in another order than their markers.
///
/// `tokens` must hold exactly one marker per item. A client can write the marker's text (such as
/// `<|image_pad|>`) into a message, and the tokenizer makes the marker of it, as it does in vLLM.
/// Such a prompt has more markers than items and is refused here: otherwise a text could move the
/// items about.
///
/// An item whose first token was joined with the one before it starts at the joined token; its
/// length stays, so that two neighbouring items may share a token (as vLLM has it for Gemma 3).
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
/// let expanded = expand(&[1, 9, 2].map(TokenId), Markers { of: &[marker], joins: &[] }, &[image])?;
/// assert_eq!(expanded.tokens, [1, 9, 9, 9, 2].map(TokenId));
/// assert_eq!((expanded.placeholders[0].offset, expanded.placeholders[0].length), (1, 3));
/// # Ok::<(), chiasm_prompt::PromptError>(())
/// ```
pub fn expand(
    tokens: &[TokenId],
    markers: Markers<'_>,
    items: &[Item<'_>],
) -> Result<Expanded, PromptError> {
    let places = marker_places(tokens, markers.of);
    let item_of = assign(&places, markers.of, items)?;
    let length = |item: &Item<'_>| item.runs.iter().map(|run| run.count).sum::<usize>();
    if let Some(index) = items.iter().position(|item| length(item) == 0) {
        return Err(PromptError::EmptyItem { index });
    }
    let mut expanded = Vec::with_capacity(tokens.len() + items.iter().map(length).sum::<usize>());
    // They are in the order of the prompt, as joining goes through it from the left.
    let mut placeholders = Vec::with_capacity(items.len());
    let mut at = 0;
    for (place, &index) in places.iter().zip(&item_of) {
        let item = &items[index];
        expanded.extend_from_slice(&tokens[at..place.start]);
        at = place.start + markers.of[place.marker].tokens.len();
        let (offset, length) = (expanded.len(), length(item));
        placeholders.push(Placeholder { offset, length, is_embed: embed_mask(item.runs) });
        for run in item.runs {
            expanded.extend(std::iter::repeat_n(run.token, run.count));
        }
    }
    expanded.extend_from_slice(&tokens[at..]);
    for &(pair, joined) in markers.joins {
        join(&mut expanded, &mut placeholders, pair, joined);
    }
    let mut placed: Vec<(usize, Placeholder)> = item_of.into_iter().zip(placeholders).collect();
    placed.sort_unstable_by_key(|(index, _)| *index);
    Ok(Expanded {
        tokens: expanded,
        placeholders: placed.into_iter().map(|(_, placeholder)| placeholder).collect(),
    })
}

/// A marker in a prompt.
struct Place {
    start: usize,
    /// The index of the marker that it is.
    marker: usize,
}

/// The markers in a prompt from the left, none overlapping another.
fn marker_places(tokens: &[TokenId], markers: &[Marker<'_>]) -> Vec<Place> {
    let mut places = Vec::new();
    let mut at = 0;
    while let Some(next) = next_begin(&tokens[at..], markers) {
        at += next;
        let is_here = |marker: &Marker<'_>| {
            !marker.tokens.is_empty() && tokens[at..].starts_with(marker.tokens)
        };
        match markers.iter().position(is_here) {
            Some(marker) => {
                places.push(Place { start: at, marker });
                at += markers[marker].tokens.len();
            }
            None => at += 1,
        }
    }
    places
}

/// Where the first token of a marker is first found.
fn next_begin(tokens: &[TokenId], markers: &[Marker<'_>]) -> Option<usize> {
    // Nearly all tokens begin no marker, and a chunk that is looked at to its end is compared many
    // tokens at once.
    const CHUNK: usize = 64;
    let begins =
        |token: &TokenId| markers.iter().any(|marker| marker.tokens.first() == Some(token));
    let holds = |chunk: &[TokenId], first: TokenId| {
        chunk.iter().fold(false, |found, &token| found | (token == first))
    };
    let is_worth_a_look = |chunk: &[TokenId]| {
        markers.iter().filter_map(|marker| marker.tokens.first()).any(|&first| holds(chunk, first))
    };
    let (index, chunk) =
        tokens.chunks(CHUNK).enumerate().find(|(_, chunk)| is_worth_a_look(chunk))?;
    chunk.iter().position(begins).map(|within| index * CHUNK + within)
}

/// The index of the item at each place.
fn assign(
    places: &[Place],
    markers: &[Marker<'_>],
    items: &[Item<'_>],
) -> Result<Vec<usize>, PromptError> {
    let mut item_of = vec![0; places.len()];
    for (index, marker) in markers.iter().enumerate() {
        let mut found = (0..places.len()).filter(|&place| places[place].marker == index);
        let mut own = (0..items.len()).filter(|&item| items[item].modality == marker.modality);
        loop {
            match (found.next(), own.next()) {
                (Some(place), Some(item)) => item_of[place] = item,
                (None, None) => break,
                _ => return Err(miscount(marker.modality, places, markers, items)),
            }
        }
    }
    // An item of a modality without a marker has no place.
    match items.iter().find(|item| markers.iter().all(|marker| marker.modality != item.modality)) {
        Some(item) => Err(miscount(item.modality, places, markers, items)),
        None => Ok(item_of),
    }
}

fn miscount(
    modality: &Modality,
    places: &[Place],
    markers: &[Marker<'_>],
    items: &[Item<'_>],
) -> PromptError {
    PromptError::MarkerCount {
        modality: modality.clone(),
        markers: places.iter().filter(|place| markers[place.marker].modality == modality).count(),
        items: items.iter().filter(|item| item.modality == modality).count(),
    }
}

/// Puts one token in the place of each `pair` of neighbours, from the left.
fn join(
    tokens: &mut Vec<TokenId>,
    placeholders: &mut [Placeholder],
    pair: [TokenId; 2],
    joined: TokenId,
) {
    let mut placeholders = placeholders.iter_mut().peekable();
    let (mut read, mut write) = (0, 0);
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
    const MARKERS: Markers<'_> = Markers { of: &[image_marker(&[MARKER])], joins: &[] };

    const fn image_marker(tokens: &[TokenId]) -> Marker<'_> {
        Marker { modality: &Modality::Image, tokens }
    }

    /// Images that become these runs.
    fn images(items: &[Vec<TokenRun>]) -> Vec<Item<'_>> {
        items.iter().map(|runs| Item { modality: &Modality::Image, runs }).collect()
    }

    fn run(token: u32, count: usize, embeds: bool) -> TokenRun {
        TokenRun { token: TokenId(token), count, embeds }
    }

    #[test]
    fn an_item_with_separators_has_a_mask() {
        let item = vec![run(1, 1, false), run(7, 2, true), run(2, 1, false)];
        let expanded = expand(&[TokenId(5), MARKER], MARKERS, &images(&[item])).unwrap();
        assert_eq!(expanded.tokens, [5, 1, 7, 7, 2].map(TokenId));
        assert_eq!(
            expanded.placeholders,
            [Placeholder { offset: 1, length: 4, is_embed: Some(vec![false, true, true, false]) }]
        );
    }

    #[test]
    fn a_marker_written_by_the_user_is_refused() {
        let error =
            expand(&[MARKER, TokenId(1), MARKER], MARKERS, &images(&[vec![run(7, 4, true)]]))
                .unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 2, items: 1, .. }), "{error}");
        assert!(error.is_request_fault());
    }

    #[test]
    fn a_missing_marker_is_refused() {
        let error = expand(&[TokenId(1)], MARKERS, &images(&[vec![run(7, 4, true)]])).unwrap_err();
        assert!(matches!(error, PromptError::MarkerCount { markers: 0, items: 1, .. }), "{error}");
    }

    #[test]
    fn an_item_without_tokens_is_refused() {
        let error = expand(&[MARKER], MARKERS, &images(&[vec![run(7, 0, true)]])).unwrap_err();
        assert!(matches!(error, PromptError::EmptyItem { index: 0 }), "{error}");
    }

    #[test]
    fn a_marker_of_several_tokens_is_found_whole() {
        let markers =
            Markers { of: &[image_marker(&[TokenId(1), MARKER, TokenId(2)])], joins: &[] };
        let tokens = [5, 1, 7, 2, 1, 7, 1, 7, 2, 7].map(TokenId);
        let items = [vec![run(8, 2, true)], vec![run(9, 1, true)]];
        let expanded = expand(&tokens, markers, &images(&items)).unwrap();
        assert_eq!(expanded.tokens, [5, 8, 8, 1, 7, 9, 7].map(TokenId));
        assert_eq!(
            expanded.placeholders.iter().map(|found| found.offset).collect::<Vec<_>>(),
            [1, 5]
        );
    }

    #[test]
    fn neighbours_are_joined_and_placeholders_keep_their_tokens() {
        // As Gemma 3's newlines: 1 is one, 2 two, 3 three, 4 four of them.
        let joins = [([1, 2], 3), ([2, 1], 3), ([2, 2], 4)]
            .map(|(pair, to)| (pair.map(TokenId), TokenId(to)));
        let markers = Markers { joins: &joins, ..MARKERS };
        let image = vec![run(2, 1, false), run(8, 2, true), run(2, 1, false)];
        let tokens = [5, 1, 7, 7, 1, 6, 7].map(TokenId);
        let expanded =
            expand(&tokens, markers, &images(&[image.clone(), image.clone(), image])).unwrap();
        assert_eq!(expanded.tokens, [5, 3, 8, 8, 4, 8, 8, 3, 6, 2, 8, 8, 2].map(TokenId));
        let places: Vec<_> =
            expanded.placeholders.iter().map(|found| (found.offset, found.length)).collect();
        assert_eq!(places, [(1, 4), (4, 4), (9, 4)]);
    }

    #[test]
    fn each_modality_has_markers_of_its_own_and_items_keep_their_order() {
        let sound = Modality::Audio;
        let markers = [
            image_marker(&[MARKER]),
            Marker { modality: &sound, tokens: &[TokenId(4), TokenId(5)] },
        ];
        let markers = Markers { of: &markers, joins: &[] };
        let [first, second, long] =
            [run(8, 1, true), run(9, 2, true), run(3, 3, true)].map(|run| [run]);
        let image = |runs| Item { modality: &Modality::Image, runs };
        let items = [image(&first), image(&second), Item { modality: &sound, runs: &long }];
        let tokens = [4, 5, 7, 1, 7].map(TokenId);
        let expanded = expand(&tokens, markers, &items).unwrap();
        assert_eq!(expanded.tokens, [3, 3, 3, 8, 1, 9, 9].map(TokenId));
        let places: Vec<_> =
            expanded.placeholders.iter().map(|found| (found.offset, found.length)).collect();
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
        fn cutting_the_placeholders_out_gives_the_prompt_back(
            tokens in prop::collection::vec(prop_oneof![Just(MARKER), (0u32..20).prop_map(TokenId)], 0..60),
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
