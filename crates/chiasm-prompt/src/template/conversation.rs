//! Messages as the chat template sees them: the dicts that vLLM builds
//! (`vllm/renderers/chat_utils.py`, 0.33.0).

use std::collections::BTreeMap;

use chiasm_types::Modality;
use serde_json::{Map, Value, json};

use super::{ContentFormat, MarkerText};
use crate::{ChatContent, ChatMessage, ChatPart, PromptError};

/// The first words of a line that one client puts at the head of its system message. It differs in
/// every request, so vLLM drops it for the prefix cache's sake; the tokens must be the same here.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// One JSON object per message, in the order of keys that vLLM gives them.
pub(super) fn to_dicts(
    messages: &[ChatMessage],
    format: ContentFormat,
    markers: &[MarkerText<'_>],
) -> Result<Vec<Value>, PromptError> {
    let mut numbers = BTreeMap::new();
    let dicts = messages.iter().enumerate();
    dicts.map(|(index, message)| to_dict(index, message, format, markers, &mut numbers)).collect()
}

/// How many items of each modality came before.
type Numbers<'a> = BTreeMap<&'a Modality, usize>;

fn to_dict<'a>(
    index: usize,
    message: &'a ChatMessage,
    format: ContentFormat,
    markers: &[MarkerText<'_>],
    numbers: &mut Numbers<'a>,
) -> Result<Value, PromptError> {
    let parts = parts_of(message);
    let mut content = match format {
        ContentFormat::Parts => Value::Array(parts.iter().map(part_dict).collect()),
        ContentFormat::String => Value::String(joined(index, &parts, markers, numbers)?),
    };
    let mut dict = Map::new();
    let mut extra = Vec::new();
    match message.role.as_str() {
        "assistant" => {
            extra.extend(tool_calls(index, message)?.map(|calls| ("tool_calls", calls)));
            // Templates know it by one of two names.
            let reasoning = message.reasoning.iter();
            extra.extend(reasoning.flat_map(|text| {
                ["reasoning", "reasoning_content"].map(|name| (name, json!(text)))
            }));
        }
        "tool" => {
            extra.extend(message.tool_call_id.as_ref().map(|id| ("tool_call_id", json!(id))));
            // Most templates take a tool's answer for a string, whatever they take elsewhere.
            if format == ContentFormat::Parts
                && !parts.iter().any(|part| matches!(part.says, Says::Media(_)))
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

/// A part of a message, which may be long and is not copied.
#[derive(Clone, Copy)]
struct Part<'a> {
    says: Says<'a>,
    /// What else is in its dict.
    fields: Option<&'a Map<String, Value>>,
}

#[derive(Clone, Copy)]
enum Says<'a> {
    Text(&'a str),
    Media(&'a Modality),
}

/// The content as a list of parts: a plain string is a list of one, as in vLLM.
fn parts_of(message: &ChatMessage) -> Vec<Part<'_>> {
    let mut parts = match &message.content {
        None => Vec::new(),
        Some(ChatContent::Text(text)) => vec![Part { says: Says::Text(text), fields: None }],
        Some(ChatContent::Parts(parts)) => parts.iter().map(Part::from).collect(),
    };
    if message.role == "system" {
        parts.retain_mut(|part| match &mut part.says {
            Says::Text(text) if text.starts_with(BILLING_HEADER) => {
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
            ChatPart::Text(text) => Self { says: Says::Text(text), fields: None },
            ChatPart::Media(modality) => Self { says: Says::Media(modality), fields: None },
            ChatPart::Extended(extended) => {
                Self { fields: Some(&extended.fields), ..Self::from(&extended.part) }
            }
        }
    }
}

fn part_dict(part: &Part<'_>) -> Value {
    let mut dict = match part.says {
        Says::Text(text) => json!({"type": "text", "text": text}),
        Says::Media(modality) => json!({"type": modality.name()}),
    };
    if let (Some(dict), Some(fields)) = (dict.as_object_mut(), part.fields) {
        dict.extend(fields.clone());
    }
    dict
}

fn texts<'a>(parts: &[Part<'a>]) -> Vec<&'a str> {
    let text = |part: &Part<'a>| match part.says {
        Says::Text(text) => Some(text),
        Says::Media(_) => None,
    };
    parts.iter().filter_map(text).collect()
}

/// The texts, one per line, after as many of each marker as the texts do not hold already.
fn joined<'a>(
    index: usize,
    parts: &[Part<'a>],
    markers: &[MarkerText<'_>],
    numbers: &mut Numbers<'a>,
) -> Result<String, PromptError> {
    let mut texts = texts(parts);
    // Empty parts leave no line here, though they stay in the list format.
    texts.retain(|text| !text.is_empty());
    let text = texts.join("\n");
    let mut lines = Vec::new();
    for (marker, items) in counted(parts, markers, numbers) {
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

/// The markers of a message's items, each with how often it is there: modality by modality, as they
/// come.
fn counted<'m, 'a>(
    parts: &[Part<'a>],
    markers: &[MarkerText<'m>],
    numbers: &mut Numbers<'a>,
) -> Vec<(&'m str, usize)> {
    let mut modalities: Vec<(&Modality, usize)> = Vec::new();
    for part in parts {
        let Says::Media(modality) = part.says else { continue };
        match modalities.iter_mut().find(|(known, _)| *known == modality) {
            Some((_, items)) => *items += 1,
            None => modalities.push((modality, 1)),
        }
    }
    let mut counted: Vec<(&str, usize)> = Vec::new();
    for (modality, items) in modalities {
        let next = numbers.entry(modality).or_default();
        let first = *next;
        *next += items;
        let Some(marker) = markers.iter().find(|marker| marker.modality == modality) else {
            continue;
        };
        for text in (first..first + items).filter_map(|number| marker.of(number)) {
            match counted.iter_mut().find(|(known, _)| *known == text) {
                Some((_, count)) => *count += 1,
                None => counted.push((text, 1)),
            }
        }
    }
    counted
}

/// The calls with their arguments as objects; `None` if there are no calls.
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
        // Text that is no JSON object becomes an empty one: it is part of the history, and refusing
        // it would make the conversation unusable for good.
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

/// Puts the keys in vLLM's order, which is that of its request class: templates that print whole
/// calls show it.
fn put_first(dict: &mut Map<String, Value>, keys: &[&str]) {
    let mut ordered: Map<String, Value> =
        keys.iter().filter_map(|key| dict.shift_remove_entry(*key)).collect();
    ordered.append(dict);
    *dict = ordered;
}
