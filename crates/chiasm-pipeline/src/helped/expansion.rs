//! Helped items in a prompt: written here where replacing tokens is all there is, else by the
//! processor itself.

use chiasm_processor::{
    ChatCall, ExpandedPrompt, KnownItem, ProcessorError, PromptUpdate, Target, UpdateMode,
};
use chiasm_prompt::{Expanded, Item, Marker, Markers, expand};
use chiasm_types::{Modality, TokenId, TokenRun};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::super::error::RequestError;
use super::{HelpedItem, HelpedSettings};

/// An item of a prompt, as whoever plans it knows it.
pub(crate) enum Written<'a> {
    /// Chiasm has planned it itself: these tokens take the place of that marker.
    Here { modality: &'a Modality, marker: &'a [TokenId], runs: &'a [TokenRun] },
    /// It was made by vLLM's processor.
    Helped(&'a HelpedItem),
}

impl<'a> Written<'a> {
    pub(crate) fn modality(&self) -> &'a Modality {
        match self {
            Self::Here { modality, .. } => modality,
            Self::Helped(item) => item.modality(),
        }
    }

    /// How many tokens it takes; the fewest, if there are several ways to write it.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Self::Here { runs, .. } => runs.iter().map(|run| run.count).sum(),
            Self::Helped(item) => item
                .updates()
                .iter()
                .filter_map(PromptUpdate::tokens)
                .map(|(tokens, _)| tokens)
                .min()
                .unwrap_or(0),
        }
    }
}

impl HelpedSettings {
    /// Writes all items of a prompt.
    ///
    /// # Errors
    /// What is wrong with the prompt, and those of the processor.
    pub(crate) async fn expand(
        &self,
        tokens: &[TokenId],
        items: &[Written<'_>],
    ) -> Result<Expanded, RequestError> {
        if self.greeting().own_prompts.is_empty()
            && let Some(expanded) = expand_here(tokens, items)
        {
            return Ok(expanded);
        }
        let updates = all_updates(items);
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        expanded(self.processor.prompt(&ids, &known(&updates), &self.processor_kwargs).await)
    }

    /// Writes a conversation with all of its items, by vLLM's code.
    ///
    /// # Errors
    /// What is wrong with the conversation, and those of the processor.
    pub(crate) async fn write(
        &self,
        messages: &RawValue,
        settings: &Map<String, Value>,
        items: &[Written<'_>],
    ) -> Result<Expanded, RequestError> {
        let updates = all_updates(items);
        let (items, processor_kwargs) = (&*known(&updates), &self.processor_kwargs);
        expanded(
            self.processor.chat(ChatCall { messages, items, settings, processor_kwargs }).await,
        )
    }
}

/// The ways to write each item.
fn all_updates<'a>(items: &[Written<'a>]) -> Vec<(&'a Modality, Vec<PromptUpdate>)> {
    let updates = |item: &Written<'a>| match *item {
        Written::Helped(item) => (item.modality(), item.updates().to_vec()),
        Written::Here { modality, marker, runs } => (modality, vec![update(marker, runs)]),
    };
    items.iter().map(updates).collect()
}

fn known<'a>(updates: &'a [(&Modality, Vec<PromptUpdate>)]) -> Vec<KnownItem<'a>> {
    updates
        .iter()
        .map(|(modality, updates)| KnownItem { modality: modality.name(), updates })
        .collect()
}

/// What the processor has answered; whatever it does not take is the conversation's fault.
fn expanded(answer: Result<ExpandedPrompt, ProcessorError>) -> Result<Expanded, RequestError> {
    let ExpandedPrompt { tokens, placeholders } = answer.map_err(|error| match error {
        ProcessorError::Refused(reason) => RequestError::invalid("messages", reason),
        error => RequestError::from(error).at("messages"),
    })?;
    Ok(Expanded { tokens, placeholders })
}

/// The prompt with its items, if each takes the place of one marker, and the prompt has as many
/// markers as items. vLLM finds other places too: targets that are no tokens of their own.
fn expand_here(tokens: &[TokenId], items: &[Written<'_>]) -> Option<Expanded> {
    let replacements: Vec<(&Modality, Vec<TokenId>, Vec<TokenRun>)> = items
        .iter()
        .map(|item| match item {
            Written::Here { modality, marker, runs } => {
                Some((*modality, marker.to_vec(), runs.to_vec()))
            }
            Written::Helped(item) => {
                item.replacement().map(|(marker, runs)| (item.modality(), marker, runs))
            }
        })
        .collect::<Option<_>>()?;
    let mut markers: Vec<Marker<'_>> = Vec::new();
    for (modality, marker, _) in &replacements {
        match markers.iter().find(|known| known.modality == *modality) {
            Some(known) if known.tokens == marker => {}
            Some(_) => return None,
            // Two markers that begin alike are for vLLM to tell apart.
            None if markers.iter().any(|known| known.tokens.first() == marker.first()) => {
                return None;
            }
            None => markers.push(Marker { modality, tokens: marker }),
        }
    }
    let placed: Vec<Item<'_>> =
        replacements.iter().map(|(modality, _, runs)| Item { modality, runs }).collect();
    expand(tokens, Markers { of: &markers, joins: &[] }, &placed).ok()
}

/// Tokens that an item takes the place of, and those that take it, if there is no other way to
/// write it.
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

/// Runs of tokens cut where their embedding begins and ends. Both lists have as many tokens.
fn runs(full: &[(u32, usize)], is_embed: Option<&[(bool, usize)]>) -> Vec<TokenRun> {
    let all = [(true, usize::MAX)];
    let mut mask = is_embed.unwrap_or(&all).iter().copied();
    let mut current = mask.next().unwrap_or((true, usize::MAX));
    let mut cut = Vec::with_capacity(full.len());
    for &(token, mut left) in full {
        while left > 0 {
            while current.1 == 0 {
                current = mask.next().unwrap_or((false, usize::MAX));
            }
            let count = left.min(current.1);
            cut.push(TokenRun { token: TokenId(token), count, embeds: current.0 });
            left -= count;
            current.1 -= count;
        }
    }
    cut
}

/// An item of Chiasm's own as vLLM's processor would have it.
fn update(marker: &[TokenId], runs: &[TokenRun]) -> PromptUpdate {
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
    fn runs_are_cut_where_embedding_begins_and_ends() {
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
    fn only_tokens_in_place_of_tokens_are_written_here() {
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
    fn a_native_item_is_written_for_the_processor_as_here() {
        let runs = [run(7, 2, true), run(8, 1, false)];
        let update = update(&[TokenId(5)], &runs);
        assert_eq!(replacement(&[update]).unwrap(), (vec![TokenId(5)], runs.to_vec()));
    }

    #[test]
    fn a_prompt_with_another_number_of_markers_is_the_processors() {
        let (marker, runs) = ([TokenId(5)], [run(9, 2, true)]);
        let item = || Written::Here { modality: &Modality::Image, marker: &marker, runs: &runs };
        let expanded = expand_here(&[1, 5, 2].map(TokenId), &[item()]).unwrap();
        assert_eq!(expanded.tokens, [1, 9, 9, 2].map(TokenId));
        assert!(expand_here(&[1, 5, 5].map(TokenId), &[item()]).is_none());
        let video = Written::Here { modality: &Modality::Video, marker: &marker, runs: &runs };
        assert!(expand_here(&[1, 5, 5].map(TokenId), &[item(), video]).is_none());
    }
}
