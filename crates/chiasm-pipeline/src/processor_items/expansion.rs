//! Expansion of media items in a prompt: here if replacing tokens is enough, otherwise by vLLM's
//! processor.

use chiasm_processor::{
    ChatCall, ExpandedPrompt, KnownItem, ProcessorError, PromptUpdate, Target, UpdateMode,
};
use chiasm_prompt::{Expanded, Item, Marker, Markers, expand};
use chiasm_types::{Modality, TokenId, TokenRun};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::super::error::RequestError;
use super::{ProcessorItem, ProcessorSettings};

/// A media item to expand in a prompt.
pub(crate) enum PromptItem<'a> {
    /// An item that Chiasm has planned: `runs` replace the marker.
    Native { modality: &'a Modality, marker: &'a [TokenId], runs: &'a [TokenRun] },
    /// An item that vLLM's processor has made.
    Processor(&'a ProcessorItem),
}

impl<'a> PromptItem<'a> {
    pub(crate) fn modality(&self) -> &'a Modality {
        match self {
            Self::Native { modality, .. } => modality,
            Self::Processor(item) => item.modality(),
        }
    }

    /// Returns the item's number of tokens; the minimum if there are several ways to expand it.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Self::Native { runs, .. } => runs.iter().map(|run| run.count).sum(),
            Self::Processor(item) => item
                .updates()
                .iter()
                .filter_map(PromptUpdate::token_counts)
                .map(|(tokens, _)| tokens)
                .min()
                .unwrap_or(0),
        }
    }
}

impl ProcessorSettings {
    /// Expands all items of a prompt.
    ///
    /// # Errors
    /// Returns an error if the processor refuses the prompt, or fails.
    pub(crate) async fn expand(
        &self,
        tokens: &[TokenId],
        items: &[PromptItem<'_>],
    ) -> Result<Expanded, RequestError> {
        if self.only_replaces_markers()
            && let Some(expanded) = expand_natively(tokens, items)
        {
            return Ok(expanded);
        }
        let updates = item_updates(items);
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        let items = known_items(&updates);
        to_expanded(self.processor.prompt(&ids, &items, &self.processor_kwargs).await)
    }

    /// Lets vLLM's code render a conversation and expand its items.
    ///
    /// # Errors
    /// Returns an error if the processor refuses the conversation, or fails.
    pub(crate) async fn render(
        &self,
        messages: &RawValue,
        settings: &Map<String, Value>,
        items: &[PromptItem<'_>],
    ) -> Result<Expanded, RequestError> {
        let updates = item_updates(items);
        let items = &*known_items(&updates);
        let processor_kwargs = &self.processor_kwargs;
        let call = ChatCall { messages, items, settings, processor_kwargs };
        to_expanded(self.processor.chat(call).await)
    }
}

/// Returns the alternative ways to expand each item.
fn item_updates<'a>(items: &[PromptItem<'a>]) -> Vec<(&'a Modality, Vec<PromptUpdate>)> {
    let updates = |item: &PromptItem<'a>| match *item {
        PromptItem::Processor(item) => (item.modality(), item.updates().to_vec()),
        PromptItem::Native { modality, marker, runs } => (modality, vec![to_update(marker, runs)]),
    };
    items.iter().map(updates).collect()
}

fn known_items<'a>(updates: &'a [(&Modality, Vec<PromptUpdate>)]) -> Vec<KnownItem<'a>> {
    updates
        .iter()
        .map(|(modality, updates)| KnownItem { modality: modality.name(), updates })
        .collect()
}

/// Converts the processor's reply. A refusal is the conversation's fault.
fn to_expanded(reply: Result<ExpandedPrompt, ProcessorError>) -> Result<Expanded, RequestError> {
    let ExpandedPrompt { tokens, placeholders } = reply.map_err(|error| match error {
        ProcessorError::Refused(reason) => RequestError::invalid("messages", reason),
        error => RequestError::from(error).at("messages"),
    })?;
    Ok(Expanded { tokens, placeholders })
}

/// Expands a prompt if each item replaces one marker, and the prompt has as many markers as items.
///
/// Returns `None` otherwise. vLLM also supports targets that are not tokens of their own.
fn expand_natively(tokens: &[TokenId], items: &[PromptItem<'_>]) -> Option<Expanded> {
    let replacements: Vec<(&Modality, Vec<TokenId>, Vec<TokenRun>)> = items
        .iter()
        .map(|item| match item {
            PromptItem::Native { modality, marker, runs } => {
                Some((*modality, marker.to_vec(), runs.to_vec()))
            }
            PromptItem::Processor(item) => {
                item.replacement().map(|(marker, runs)| (item.modality(), marker, runs))
            }
        })
        .collect::<Option<_>>()?;
    let mut markers: Vec<Marker<'_>> = Vec::new();
    for (modality, marker, _) in &replacements {
        match markers.iter().find(|known| known.modality == *modality) {
            Some(known) if known.tokens == marker => {}
            Some(_) => return None,
            // vLLM distinguishes markers that begin with the same token.
            None if markers.iter().any(|known| known.tokens.first() == marker.first()) => {
                return None;
            }
            None => markers.push(Marker { modality, tokens: marker }),
        }
    }
    let placed: Vec<Item<'_>> =
        replacements.iter().map(|(modality, _, runs)| Item { modality, runs }).collect();
    expand(tokens, Markers { by_modality: &markers, joins: &[] }, &placed).ok()
}

/// Returns the marker tokens and their replacement, if that is the only way to expand the item.
pub(crate) fn replacement(updates: &[PromptUpdate]) -> Option<(Vec<TokenId>, Vec<TokenRun>)> {
    let [
        PromptUpdate { mode: UpdateMode::Replace, target: Target::Tokens(target), full, is_embed },
    ] = updates
    else {
        return None;
    };
    if target.is_empty() {
        return None;
    }
    let runs = runs(full, is_embed.as_deref());
    Some((target.iter().copied().map(TokenId).collect(), runs))
}

/// Splits runs of tokens where the embedding mask changes. Both lists cover the same number of
/// tokens.
fn runs(full: &[(u32, usize)], is_embed: Option<&[(bool, usize)]>) -> Vec<TokenRun> {
    let all_embed = [(true, usize::MAX)];
    let mut mask = is_embed.unwrap_or(&all_embed).iter().copied();
    let (mut embeds, mut mask_left) = mask.next().unwrap_or((true, usize::MAX));
    let mut runs = Vec::with_capacity(full.len());
    for &(token, mut left) in full {
        while left > 0 {
            while mask_left == 0 {
                (embeds, mask_left) = mask.next().unwrap_or((false, usize::MAX));
            }
            let count = left.min(mask_left);
            runs.push(TokenRun { token: TokenId(token), count, embeds });
            left -= count;
            mask_left -= count;
        }
    }
    runs
}

/// Converts an item that Chiasm has planned to the form of vLLM's processor.
fn to_update(marker: &[TokenId], runs: &[TokenRun]) -> PromptUpdate {
    let all_embed = runs.iter().all(|run| run.embeds);
    PromptUpdate {
        mode: UpdateMode::Replace,
        target: Target::Tokens(marker.iter().map(|token| token.0).collect()),
        full: runs.iter().map(|run| (run.token.0, run.count)).collect(),
        is_embed: (!all_embed).then(|| runs.iter().map(|run| (run.embeds, run.count)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(token: u32, count: usize, embeds: bool) -> TokenRun {
        TokenRun { token: TokenId(token), count, embeds }
    }

    #[test]
    fn runs_are_split_where_mask_changes() {
        let full = [(7, 2), (8, 3), (7, 1)];
        assert_eq!(runs(&full, None), [run(7, 2, true), run(8, 3, true), run(7, 1, true)]);
        let mask = [(false, 1), (true, 3), (false, 0), (false, 2)];
        let expected = [
            run(7, 1, false),
            run(7, 1, true),
            run(8, 2, true),
            run(8, 1, false),
            run(7, 1, false),
        ];
        assert_eq!(runs(&full, Some(&mask)), expected);
    }

    #[test]
    fn only_single_token_replacement_is_native() {
        let update =
            |mode, target| PromptUpdate { mode, target, full: vec![(9, 2)], is_embed: None };
        let good = update(UpdateMode::Replace, Target::Tokens(vec![5]));
        assert_eq!(
            replacement(std::slice::from_ref(&good)),
            Some((vec![TokenId(5)], vec![run(9, 2, true)]))
        );
        for other in [
            update(UpdateMode::Insert, Target::Tokens(vec![5])),
            update(UpdateMode::Replace, Target::Tokens(vec![])),
            update(UpdateMode::Replace, Target::Named("start".to_owned())),
        ] {
            assert_eq!(replacement(&[other]), None);
        }
        assert_eq!(replacement(&[good.clone(), good]), None);
    }

    #[test]
    fn native_item_survives_conversion_to_update() {
        let runs = [run(7, 2, true), run(8, 1, false)];
        let update = to_update(&[TokenId(5)], &runs);
        assert_eq!(replacement(&[update]).unwrap(), (vec![TokenId(5)], runs.to_vec()));
    }

    #[test]
    fn marker_count_mismatch_is_left_to_processor() {
        let marker = [TokenId(5)];
        let runs = [run(9, 2, true)];
        let item =
            || PromptItem::Native { modality: &Modality::Image, marker: &marker, runs: &runs };
        let expanded = expand_natively(&[1, 5, 2].map(TokenId), &[item()]).unwrap();
        assert_eq!(expanded.tokens, [1, 9, 9, 2].map(TokenId));
        assert!(expand_natively(&[1, 5, 5].map(TokenId), &[item()]).is_none());
        let video = PromptItem::Native { modality: &Modality::Video, marker: &marker, runs: &runs };
        assert!(expand_natively(&[1, 5, 5].map(TokenId), &[item(), video]).is_none());
    }
}
