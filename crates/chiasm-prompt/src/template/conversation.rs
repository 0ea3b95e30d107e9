//! The message dicts passed to the chat template, equal to those that vLLM builds
//! (`vllm/renderers/chat_utils.py`, 0.33.0).

use std::collections::BTreeMap;

use chiasm_types::Modality;
use serde_json::{Map, Value, json};

use super::{ContentFormat, MarkerText};
use crate::{ChatContent, ChatMessage, ChatPart, PromptError};

/// The beginning of a line that Claude Code puts at the head of its system message. The line
/// differs in every request, so vLLM drops it for the sake of the prefix cache. It is dropped here
/// too, so that the prompt equals vLLM's.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Returns one JSON object per message, with the keys in vLLM's order.
pub(super) fn to_dicts(
    messages: &[ChatMessage],
    format: ContentFormat,
    markers: &[MarkerText<'_>],
) -> Result<Vec<Value>, PromptError> {
    let mut item_counts = BTreeMap::new();
    messages
        .iter()
        .enumerate()
        .map(|(index, message)| to_dict(index, message, format, markers, &mut item_counts))
        .collect()
}

/// The number of items of each modality in the earlier messages.
type ItemCounts<'a> = BTreeMap<&'a Modality, usize>;

fn to_dict<'a>(
    index: usize,
    message: &'a ChatMessage,
    format: ContentFormat,
    markers: &[MarkerText<'_>],
    item_counts: &mut ItemCounts<'a>,
) -> Result<Value, PromptError> {
    let parts = content_parts(message);
    let mut content = match format {
        ContentFormat::Parts => Value::Array(parts.iter().map(part_dict).collect()),
        ContentFormat::String => Value::String(join_content(index, &parts, markers, item_counts)?),
    };
    let mut dict = Map::new();
    let mut extra = Vec::new();
    match message.role.as_str() {
        "assistant" => {
            extra.extend(tool_calls(index, message)?.map(|calls| ("tool_calls", calls)));
            // Templates use one of two names for the reasoning.
            let reasoning = message.reasoning.iter();
            extra.extend(reasoning.flat_map(|text| {
                ["reasoning", "reasoning_content"].map(|name| (name, json!(text)))
            }));
        }
        "tool" => {
            extra.extend(message.tool_call_id.as_ref().map(|id| ("tool_call_id", json!(id))));
            // Most templates expect the content of a tool message to be a string, even if they take
            // parts elsewhere.
            if format == ContentFormat::Parts
                && !parts.iter().any(|part| matches!(part.content, PartContent::Media(_)))
            {
                content = Value::String(texts(&parts).join("\n"));
            }
        }
        _ => {}
    }
    dict.insert("role".into(), json!(message.role));
    dict.insert("content".into(), content);
    dict.extend(extra.into_iter().map(|(key, value)| (key.to_owned(), value)));
    dict.extend(message.name.as_ref().map(|name| ("name".to_owned(), json!(name))));
    if message.role == "developer" {
        dict.insert("tools".into(), Value::Null);
    }
    Ok(Value::Object(dict))
}

/// A part of a message, borrowed because it may be long.
#[derive(Clone, Copy)]
struct Part<'a> {
    content: PartContent<'a>,
    /// Further fields of the part's dict.
    fields: Option<&'a Map<String, Value>>,
}

#[derive(Clone, Copy)]
enum PartContent<'a> {
    Text(&'a str),
    Media(&'a Modality),
}

/// Returns the content as a list of parts. A string becomes a list of one part, as in vLLM.
fn content_parts(message: &ChatMessage) -> Vec<Part<'_>> {
    let mut parts = match &message.content {
        None => Vec::new(),
        Some(ChatContent::Text(text)) => {
            vec![Part { content: PartContent::Text(text), fields: None }]
        }
        Some(ChatContent::Parts(parts)) => parts.iter().map(Part::from).collect(),
    };
    if message.role == "system" {
        parts.retain_mut(|part| match &mut part.content {
            PartContent::Text(text) if text.starts_with(BILLING_HEADER) => {
                *text = text.split_once('\n').map_or("", |(_, rest)| rest);
                !text.is_empty()
            }
            _ => true,
        });
    }
    parts
}

impl<'a> From<&'a ChatPart> for Part<'a> {
    fn from(part: &'a ChatPart) -> Self {
        match part {
            ChatPart::Text(text) => Self { content: PartContent::Text(text), fields: None },
            ChatPart::Media(modality) => {
                Self { content: PartContent::Media(modality), fields: None }
            }
            ChatPart::Extended(extended) => {
                Self { fields: Some(&extended.fields), ..Self::from(&extended.part) }
            }
        }
    }
}

/// Returns the dict of a part.
fn part_dict(part: &Part<'_>) -> Value {
    let mut dict = match part.content {
        PartContent::Text(text) => json!({"type": "text", "text": text}),
        PartContent::Media(modality) => json!({"type": modality.name()}),
    };
    if let (Some(dict), Some(fields)) = (dict.as_object_mut(), part.fields) {
        dict.extend(fields.clone());
    }
    dict
}

/// Returns the texts of the parts.
fn texts<'a>(parts: &[Part<'a>]) -> Vec<&'a str> {
    let text = |part: &Part<'a>| match part.content {
        PartContent::Text(text) => Some(text),
        PartContent::Media(_) => None,
    };
    parts.iter().filter_map(text).collect()
}

/// Joins the content to one string: the markers of the items, then the texts, one per line. Markers
/// that the texts contain already are not added again.
fn join_content<'a>(
    index: usize,
    parts: &[Part<'a>],
    markers: &[MarkerText<'_>],
    item_counts: &mut ItemCounts<'a>,
) -> Result<String, PromptError> {
    let mut texts = texts(parts);
    // In this format, unlike in the list format, empty texts are dropped.
    texts.retain(|text| !text.is_empty());
    let text = texts.join("\n");
    let mut lines = Vec::new();
    for (marker, items) in count_markers(parts, markers, item_counts) {
        let present = text.matches(marker).count();
        let Some(missing) = items.checked_sub(present) else {
            return Err(PromptError::PlaceholderInText { index, placeholder: marker.to_owned() });
        };
        lines.extend(std::iter::repeat_n(marker, missing));
    }
    if lines.is_empty() {
        return Ok(text);
    }
    if !text.is_empty() {
        lines.push(&text);
    }
    Ok(lines.join("\n"))
}

/// Returns the markers of a message's items with their counts, ordered by the first item of each
/// modality.
fn count_markers<'m, 'a>(
    parts: &[Part<'a>],
    markers: &[MarkerText<'m>],
    item_counts: &mut ItemCounts<'a>,
) -> Vec<(&'m str, usize)> {
    let mut modalities: Vec<(&Modality, usize)> = Vec::new();
    for part in parts {
        let PartContent::Media(modality) = part.content else { continue };
        match modalities.iter_mut().find(|(known, _)| *known == modality) {
            Some((_, items)) => *items += 1,
            None => modalities.push((modality, 1)),
        }
    }
    let mut counted: Vec<(&str, usize)> = Vec::new();
    for (modality, items) in modalities {
        let count_before = item_counts.entry(modality).or_default();
        let first = *count_before;
        *count_before += items;
        let Some(marker) = markers.iter().find(|marker| marker.modality == modality) else {
            continue;
        };
        for text in (first..first + items).filter_map(|index| marker.for_item(index)) {
            match counted.iter_mut().find(|(known, _)| *known == text) {
                Some((_, count)) => *count += 1,
                None => counted.push((text, 1)),
            }
        }
    }
    counted
}

/// Returns the calls with their arguments as objects; `None` if there are no calls.
fn tool_calls(index: usize, message: &ChatMessage) -> Result<Option<Value>, PromptError> {
    let bad = || PromptError::BadToolCalls { index };
    let calls = match &message.tool_calls {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(calls)) if calls.is_empty() => return Ok(None),
        Some(Value::Array(calls)) => calls,
        Some(_) => return Err(bad()),
    };
    let mut calls = calls.clone();
    for call in &mut calls {
        let is_complete = call["type"] == "function" && call["id"].is_string();
        let function =
            call.get_mut("function").and_then(Value::as_object_mut).filter(|_| is_complete);
        let function = function
            .filter(|function| function.get("name").is_some_and(Value::is_string))
            .ok_or_else(bad)?;
        let text = function.get("arguments").and_then(Value::as_str).ok_or_else(bad)?;
        // Arguments that are not a JSON object become an empty object. They are part of the
        // history: refusing them would make the conversation permanently unusable.
        let arguments =
            serde_json::from_str(text).ok().filter(Value::is_object).unwrap_or(json!({}));
        function.insert("arguments".into(), arguments);
        put_first(function, &["arguments", "name"]);
        call.as_object_mut()
            .into_iter()
            .for_each(|call| put_first(call, &["id", "function", "type"]));
    }
    Ok(Some(Value::Array(calls)))
}

/// Moves `keys` to the front of `dict`. Templates that print whole calls expose the order of keys,
/// so it must be the order of vLLM's request class.
fn put_first(dict: &mut Map<String, Value>, keys: &[&str]) {
    let mut ordered: Map<String, Value> =
        keys.iter().filter_map(|key| dict.shift_remove_entry(*key)).collect();
    ordered.append(dict);
    *dict = ordered;
}
