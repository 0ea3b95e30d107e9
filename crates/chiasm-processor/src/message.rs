//! What is said between frontend, fork server and children: JSON, as `messages.py` and
//! `greeting.py` have it.

use std::collections::BTreeMap;

use chiasm_types::{Placeholder, TokenId};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::ProcessorError;

/// More tokens than any prompt has.
const MOST_TOKENS: usize = 1 << 24;

/// What the fork server says of its model's processor before anything else.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Greeting {
    /// The version of vLLM.
    pub vllm: String,
    /// How many items of each modality a prompt may have; `None` for any number. Modalities that
    /// are not named are not taken.
    pub limits: BTreeMap<String, Option<u64>>,
    /// The most embeddings that one item of each modality becomes. Engines have room for as many at
    /// once.
    pub max_tokens: BTreeMap<String, u64>,
    /// How items of each modality are written in a conversation whose content is one string: one
    /// text for all, one for each if they are numbered, or none if nothing is written.
    pub placeholders: BTreeMap<String, Vec<String>>,
    /// The name of the class of the model's video processor, after which vLLM chooses how a video
    /// is read.
    pub video_processor: Option<String>,
    /// Methods that write items in prompts in a way of the processor's own. Without any, replacing
    /// targets is all there is.
    pub own_prompts: Vec<String>,
    /// How vLLM's own frontend writes conversations, by vLLM's name.
    pub renderer: String,
    /// Whether that is code, and not the model's chat template.
    pub writes_conversations: bool,
    /// Python packages without which files that the model takes can't be read.
    pub missing: Vec<String>,
    /// Whether children lock themselves.
    pub sandbox: bool,
}

/// The fork server's first words.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum FirstWords {
    Failed { failed: String },
    Greeting(Box<Greeting>),
}

/// A child's first words.
#[derive(Deserialize)]
pub(crate) struct Ready {
    pub(crate) ready: i32,
}

#[derive(Serialize)]
#[serde(tag = "call", rename_all = "lowercase")]
pub(crate) enum Call<'a> {
    Item {
        modality: &'a str,
        length: u64,
        processor_kwargs: &'a Map<String, Value>,
        io_kwargs: &'a Map<String, Value>,
    },
    Prompt {
        token_ids: &'a [u32],
        items: &'a [KnownItem<'a>],
        processor_kwargs: &'a Map<String, Value>,
    },
    Chat(ChatCall<'a>),
}

/// A conversation to be written.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChatCall<'a> {
    /// The messages as in a request. Where an item goes stands a part of its modality without a
    /// URL, such as `{"type": "image_url", "image_url": null, "uuid": "0"}`, whose `uuid` is the
    /// item's number.
    pub messages: &'a RawValue,
    /// The items.
    pub items: &'a [KnownItem<'a>],
    /// Other fields of the request that change what is written: `add_generation_prompt`,
    /// `continue_final_message`, `chat_template_kwargs`.
    pub settings: &'a Map<String, Value>,
    /// `mm_processor_kwargs` of the request.
    pub processor_kwargs: &'a Map<String, Value>,
}

/// An item of a prompt, by what was answered when it was made.
#[derive(Clone, Debug, Serialize)]
pub struct KnownItem<'a> {
    /// Its modality, by vLLM's name.
    pub modality: &'a str,
    /// The ways to write it.
    pub updates: &'a [PromptUpdate],
}

#[derive(Deserialize)]
#[serde(tag = "reply", rename_all = "lowercase")]
pub(crate) enum Reply {
    Made { fields: Vec<SaidField>, updates: Vec<PromptUpdate> },
    Expanded(SaidPrompt),
    Refused { reason: String },
}

/// A field of an item as a child describes it.
#[derive(Deserialize)]
pub(crate) struct SaidField {
    pub(crate) name: String,
    pub(crate) kind: FieldKind,
    #[serde(default)]
    pub(crate) dim: i64,
    pub(crate) keep_on_cpu: bool,
    pub(crate) data: SaidValue,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FieldKind {
    Batched,
    Flat,
    Shared,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum SaidValue {
    Tensor { dtype: String, shape: Vec<usize>, offset: u64, length: u64 },
    Int(i64),
    Float(f64),
    List(Vec<SaidValue>),
    Other(IgnoredAny),
}

/// One way to write an item in a prompt (vLLM's `ResolvedPromptUpdate`).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PromptUpdate {
    /// Whether the target stays.
    pub mode: UpdateMode,
    /// Where it goes.
    pub target: Target,
    /// The tokens that are written, each with how often it is repeated.
    pub full: Vec<(u32, usize)>,
    /// The mask says which of them become embeddings, as runs; without one all do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_embed: Option<Vec<(bool, usize)>>,
}

/// What becomes of an update's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UpdateMode {
    /// The item is written behind it.
    Insert,
    /// The item takes its place.
    Replace,
}

/// A place in a prompt.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Target {
    /// The next place where these tokens stand.
    Tokens(Vec<u32>),
    /// `start` or `end` of the prompt.
    Named(String),
    /// The place after these tokens if the prompt begins with them, else its start.
    Prefix {
        /// The tokens.
        prefix: Vec<u32>,
    },
}

impl PromptUpdate {
    /// How many tokens are written, and how many of them become embeddings. `None` if the two runs
    /// do not fit each other, or are longer than any prompt.
    pub fn tokens(&self) -> Option<(usize, usize)> {
        let tokens = total(self.full.iter().map(|&(_, count)| count))?;
        let Some(mask) = &self.is_embed else { return Some((tokens, tokens)) };
        let embeds = total(mask.iter().filter(|(embeds, _)| *embeds).map(|&(_, count)| count))?;
        (total(mask.iter().map(|&(_, count)| count))? == tokens).then_some((tokens, embeds))
    }
}

/// The sum, unless it is more than any prompt has.
fn total(mut counts: impl Iterator<Item = usize>) -> Option<usize> {
    counts.try_fold(0_usize, |sum, count| sum.checked_add(count).filter(|&sum| sum <= MOST_TOKENS))
}

/// An expanded prompt as a child says it.
#[derive(Deserialize)]
pub(crate) struct SaidPrompt {
    token_ids: Vec<u32>,
    placeholders: Vec<SaidPlaceholder>,
}

#[derive(Deserialize)]
struct SaidPlaceholder {
    offset: usize,
    length: usize,
    #[serde(default)]
    is_embed: Option<Vec<(bool, usize)>>,
}

/// A prompt with its items written out.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpandedPrompt {
    /// All tokens.
    pub tokens: Vec<TokenId>,
    /// Where each item stands, in the order of the items. Two may share a range when no token of it
    /// is for both.
    pub placeholders: Vec<Placeholder>,
}

impl SaidPrompt {
    /// The prompt, if each of `items` has its place within it.
    pub(crate) fn checked(self, items: usize) -> Result<ExpandedPrompt, ProcessorError> {
        let Self { token_ids, placeholders } = self;
        let length = token_ids.len();
        let wrong = |what: &str| ProcessorError::Nonsense(what.to_owned());
        if length > MOST_TOKENS || placeholders.len() != items {
            return Err(wrong("a prompt with other items"));
        }
        let placed = |said: SaidPlaceholder| {
            let end = said.offset.checked_add(said.length).filter(|&end| end <= length);
            let mask = said.is_embed.map(|runs| {
                let total =
                    runs.iter().try_fold(0_usize, |sum, &(_, count)| sum.checked_add(count));
                (total == Some(said.length)).then(|| {
                    runs.into_iter()
                        .flat_map(|(embeds, count)| std::iter::repeat_n(embeds, count))
                        .collect()
                })
            });
            match (end, mask) {
                (None, _) | (_, Some(None)) => Err(wrong("an item beside its prompt")),
                (Some(_), mask) => Ok(Placeholder {
                    offset: said.offset,
                    length: said.length,
                    is_embed: mask.flatten(),
                }),
            }
        };
        let placeholders = placeholders.into_iter().map(placed).collect::<Result<_, _>>()?;
        Ok(ExpandedPrompt { tokens: token_ids.into_iter().map(TokenId).collect(), placeholders })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn update(full: Value, is_embed: Option<Value>) -> PromptUpdate {
        let mut update = json!({"mode": "replace", "target": [5], "full": full});
        if let Some(mask) = is_embed {
            update["is_embed"] = mask;
        }
        serde_json::from_value(update).unwrap()
    }

    #[test]
    fn tokens_of_an_update_are_counted_and_bounded() {
        assert_eq!(update(json!([[7, 3], [8, 1]]), None).tokens(), Some((4, 4)));
        assert_eq!(
            update(json!([[7, 3], [8, 1]]), Some(json!([[true, 3], [false, 1]]))).tokens(),
            Some((4, 3))
        );
        assert_eq!(update(json!([[7, 3]]), Some(json!([[true, 2]]))).tokens(), None);
        assert_eq!(update(json!([[7, usize::MAX], [7, 2]]), None).tokens(), None);
        assert_eq!(update(json!([[7, MOST_TOKENS + 1]]), None).tokens(), None);
    }

    #[test]
    fn places_beside_the_prompt_are_nonsense() {
        let prompt = |placeholders: Value| -> Result<ExpandedPrompt, ProcessorError> {
            let said = json!({"token_ids": [1, 2, 3], "placeholders": placeholders});
            serde_json::from_value::<SaidPrompt>(said).unwrap().checked(1)
        };
        let good = prompt(json!([{"offset": 1, "length": 2, "is_embed": [[true, 1], [false, 1]]}]))
            .unwrap();
        assert_eq!(good.placeholders[0].is_embed, Some(vec![true, false]));
        for placeholders in [
            json!([]),
            json!([{"offset": 2, "length": 2}]),
            json!([{"offset": usize::MAX, "length": 2}]),
            json!([{"offset": 0, "length": 2, "is_embed": [[true, 3]]}]),
            json!([{"offset": 0, "length": 2, "is_embed": [[true, usize::MAX], [true, 3]]}]),
        ] {
            assert!(
                matches!(prompt(placeholders.clone()), Err(ProcessorError::Nonsense(_))),
                "{placeholders}"
            );
        }
    }

    #[test]
    fn targets_of_all_kinds_are_read_and_written_the_same() {
        for target in [json!([1, 2]), json!("start"), json!({"prefix": [3]})] {
            let update = json!({"mode": "insert", "target": target, "full": [[7, 3]]});
            let read: PromptUpdate = serde_json::from_value(update.clone()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), update);
        }
    }
}
