//! The messages between frontend and children: JSON, as defined by `messages.py`.

use chiasm_types::{Placeholder, TokenId};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::ProcessorError;

/// The maximum number of tokens of a prompt, larger than any model's context.
const MAX_PROMPT_TOKENS: usize = 1 << 24;

/// The first message of a child.
#[derive(Deserialize)]
pub(crate) struct Ready {
    /// The child's process id.
    pub(crate) ready: i32,
}

/// A call of a child.
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
    Frames {
        length: u64,
        samples: u64,
        positions: &'a [u64],
        width: u32,
        height: u32,
        slots: usize,
    },
    /// A frame was read, so its slot is free. It is sent during a call and has no reply.
    Taken,
}

/// A call that writes a conversation.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ChatCall<'a> {
    /// The messages in the form of a request. An item is a part of its modality without a URL, such
    /// as `{"type": "image_url", "image_url": null, "uuid": "0"}`, whose `uuid` is the item's
    /// number.
    pub messages: &'a RawValue,
    /// The items.
    pub items: &'a [KnownItem<'a>],
    /// Further fields of the request that affect the prompt: `add_generation_prompt`,
    /// `continue_final_message`, `chat_template_kwargs`.
    pub settings: &'a Map<String, Value>,
    /// `mm_processor_kwargs` of the request.
    pub processor_kwargs: &'a Map<String, Value>,
}

/// An item of a prompt that was made before.
#[derive(Clone, Debug, Serialize)]
pub struct KnownItem<'a> {
    /// The item's modality, by vLLM's name.
    pub modality: &'a str,
    /// The updates that write the item, as returned when it was made.
    pub updates: &'a [PromptUpdate],
}

/// A child's reply to a call.
#[derive(Deserialize)]
#[serde(tag = "reply", rename_all = "lowercase")]
pub(crate) enum Reply {
    Made {
        fields: Vec<WireField>,
        updates: Vec<PromptUpdate>,
    },
    Expanded(WirePrompt),
    /// A frame is in its slot. Further replies follow.
    Frame {
        position: u64,
        offset: u64,
    },
    /// All wanted frames were sent, and the file ended where it should.
    Decoded,
    /// The file decodes to other frames than the call says.
    Different {
        reason: String,
    },
    Refused {
        reason: String,
    },
}

/// A field of an item in a child's reply, not validated.
#[derive(Deserialize)]
pub(crate) struct WireField {
    pub(crate) name: String,
    pub(crate) kind: FieldKind,
    #[serde(default)]
    pub(crate) dim: i64,
    pub(crate) keep_on_cpu: bool,
    pub(crate) data: WireValue,
}

/// The way in which engines join a field of several items (vLLM's field types).
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum FieldKind {
    Batched,
    Flat,
    Shared,
}

/// A field's value in a child's reply, not validated.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum WireValue {
    Tensor { dtype: String, shape: Vec<usize>, offset: u64, length: u64 },
    Int(i64),
    Float(f64),
    List(Vec<WireValue>),
    Other(IgnoredAny),
}

/// One way to write an item in a prompt (vLLM's `ResolvedPromptUpdate`).
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PromptUpdate {
    /// Inserts after the target or replaces it.
    pub mode: UpdateMode,
    /// The position of the item.
    pub target: Target,
    /// The item's tokens as runs: a token and its repeat count.
    pub full: Vec<(u32, usize)>,
    /// The embedding mask as runs; `None` if all tokens become embeddings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_embed: Option<Vec<(bool, usize)>>,
}

/// The effect of an update on its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UpdateMode {
    /// The item is inserted after the target.
    Insert,
    /// The item replaces the target.
    Replace,
}

/// A position in a prompt.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(untagged)]
pub enum Target {
    /// The next occurrence of these tokens.
    Tokens(Vec<u32>),
    /// The `start` or the `end` of the prompt.
    Named(String),
    /// The position after these tokens if the prompt begins with them, else the prompt's start.
    Prefix {
        /// The tokens.
        prefix: Vec<u32>,
    },
}

impl PromptUpdate {
    /// Returns the number of tokens, and the number of them that become embeddings. `None` if
    /// tokens and mask differ in length or are longer than any prompt.
    pub fn token_counts(&self) -> Option<(usize, usize)> {
        let tokens = total(self.full.iter().map(|&(_, count)| count))?;
        let Some(mask) = &self.is_embed else { return Some((tokens, tokens)) };
        let embeds = total(mask.iter().filter(|(embeds, _)| *embeds).map(|&(_, count)| count))?;
        (total(mask.iter().map(|&(_, count)| count))? == tokens).then_some((tokens, embeds))
    }
}

/// Returns the sum; `None` if it exceeds [`MAX_PROMPT_TOKENS`].
fn total(mut counts: impl Iterator<Item = usize>) -> Option<usize> {
    counts.try_fold(0_usize, |sum, count| {
        sum.checked_add(count).filter(|&sum| sum <= MAX_PROMPT_TOKENS)
    })
}

/// An expanded prompt in a child's reply, not validated.
#[derive(Deserialize)]
pub(crate) struct WirePrompt {
    token_ids: Vec<u32>,
    placeholders: Vec<WirePlaceholder>,
}

/// A placeholder in a child's reply, not validated.
#[derive(Deserialize)]
struct WirePlaceholder {
    offset: usize,
    length: usize,
    #[serde(default)]
    is_embed: Option<Vec<(bool, usize)>>,
}

/// A prompt with its items expanded.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpandedPrompt {
    /// The token ids of the expanded prompt.
    pub tokens: Vec<TokenId>,
    /// The placeholder of each item, in the order of the items. Two items may share a range if no
    /// token of the range belongs to both.
    pub placeholders: Vec<Placeholder>,
}

impl WirePrompt {
    /// Validates the prompt: it must have `items` placeholders, all of them within the prompt.
    pub(crate) fn validate(self, items: usize) -> Result<ExpandedPrompt, ProcessorError> {
        let Self { token_ids, placeholders } = self;
        let length = token_ids.len();
        let invalid = |reason: &str| ProcessorError::InvalidReply(reason.to_owned());
        if length > MAX_PROMPT_TOKENS || placeholders.len() != items {
            return Err(invalid("a prompt that is too long or has another number of items"));
        }
        let validate = |wire: WirePlaceholder| {
            let end = wire.offset.checked_add(wire.length).filter(|&end| end <= length);
            let mask = wire.is_embed.map(|runs| {
                let total =
                    runs.iter().try_fold(0_usize, |sum, &(_, count)| sum.checked_add(count));
                (total == Some(wire.length)).then(|| {
                    runs.into_iter()
                        .flat_map(|(embeds, count)| std::iter::repeat_n(embeds, count))
                        .collect()
                })
            });
            match (end, mask) {
                (None, _) | (_, Some(None)) => {
                    Err(invalid("an item outside of its prompt, or with a mask of another length"))
                }
                (Some(_), mask) => Ok(Placeholder {
                    offset: wire.offset,
                    length: wire.length,
                    is_embed: mask.flatten(),
                }),
            }
        };
        let placeholders = placeholders.into_iter().map(validate).collect::<Result<_, _>>()?;
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
    fn update_token_counts_are_bounded() {
        assert_eq!(update(json!([[7, 3], [8, 1]]), None).token_counts(), Some((4, 4)));
        assert_eq!(
            update(json!([[7, 3], [8, 1]]), Some(json!([[true, 3], [false, 1]]))).token_counts(),
            Some((4, 3))
        );
        assert_eq!(update(json!([[7, 3]]), Some(json!([[true, 2]]))).token_counts(), None);
        assert_eq!(update(json!([[7, usize::MAX], [7, 2]]), None).token_counts(), None);
        assert_eq!(update(json!([[7, MAX_PROMPT_TOKENS + 1]]), None).token_counts(), None);
    }

    #[test]
    fn placeholders_outside_the_prompt_are_invalid() {
        let prompt = |placeholders: Value| -> Result<ExpandedPrompt, ProcessorError> {
            let prompt = json!({"token_ids": [1, 2, 3], "placeholders": placeholders});
            serde_json::from_value::<WirePrompt>(prompt).unwrap().validate(1)
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
                matches!(prompt(placeholders.clone()), Err(ProcessorError::InvalidReply(_))),
                "{placeholders}"
            );
        }
    }

    #[test]
    fn targets_survive_the_round_trip() {
        for target in [json!([1, 2]), json!("start"), json!({"prefix": [3]})] {
            let update = json!({"mode": "insert", "target": target, "full": [[7, 3]]});
            let read: PromptUpdate = serde_json::from_value(update.clone()).unwrap();
            assert_eq!(serde_json::to_value(read).unwrap(), update);
        }
    }
}
