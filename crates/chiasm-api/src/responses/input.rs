//! `input` of a request: a text, or items, which are converted to messages.
//!
//! The assistant's text, reasoning and calls are separate items. Items that fit into one message
//! are joined, as in vLLM (`construct_chat_messages_with_tool_call`,
//! `vllm/entrypoints/openai/responses/utils.py`).

use std::fmt;

use chiasm_prompt::{ChatContent, ChatMessage};
use chiasm_request::MediaRef;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::content::{
    Content, MESSAGE_PARTS, OUTPUT_PARTS, REASONING_PARTS, SUMMARY_PARTS, joined_text,
};
use super::custom_input;
use super::tools::flat_name;
use crate::error::{ApiError, excerpt};
use crate::openai::intake::{Intake, Seed};
use crate::openai::messages::read_list;
use crate::openai::request::LargeField;

const ASSISTANT: &str = "assistant";
const ROLES: [&str; 4] = ["system", "developer", "user", ASSISTANT];
const STATUSES: [&str; 3] = ["in_progress", "completed", "incomplete"];

/// The types of items, with the allowed fields of each besides `type`, `id` and `status`.
const KINDS: [(&str, &[&str]); 6] = [
    (MESSAGE, &["role", "content"]),
    (CALL, &["call_id", "name", "namespace", "arguments"]),
    (CALL_OUTPUT, &["call_id", "name", "namespace", "output"]),
    (CUSTOM_CALL, &["call_id", "name", "namespace", "input"]),
    (CUSTOM_CALL_OUTPUT, &["call_id", "name", "namespace", "output"]),
    (REASONING, &["content", "summary", "encrypted_content"]),
];
const MESSAGE: &str = "message";
const CALL: &str = "function_call";
const CALL_OUTPUT: &str = "function_call_output";
const CUSTOM_CALL: &str = "custom_tool_call";
const CUSTOM_CALL_OUTPUT: &str = "custom_tool_call_output";
const REASONING: &str = "reasoning";

/// The messages of a request, and their media items in order of appearance.
pub(super) struct Input {
    pub(super) messages: Vec<ChatMessage>,
    pub(super) media: Vec<MediaRef>,
    /// `true` if the last message is an incomplete message of the assistant, which the answer must
    /// continue.
    pub(super) is_open: bool,
}

impl LargeField for Input {
    const NAME: &'static str = "input";
}

impl<'de> Visitor<'de> for Seed<'_, Option<Input>> {
    type Value = Option<Input>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of items")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        let intake = self.intake;
        // This field replaces an earlier one, including its media items.
        intake.media.clear();
        intake.count_message()?;
        let content = Some(ChatContent::Text(intake.copy_prompt(text)?));
        let message = ChatMessage { role: "user".to_owned(), content, ..ChatMessage::default() };
        Ok(Some(Input { messages: vec![message], media: Vec::new(), is_open: false }))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        intake.media.clear();
        let items: Vec<Item> = read_list(intake, &mut seq)?;
        let is_open = items.last().is_some_and(|item| item.is_open);
        let mut messages = Vec::new();
        for Item { message, .. } in items {
            append_message(intake, &mut messages, message)?;
        }
        if messages.is_empty() {
            let error =
                ApiError::invalid("input", "'input' must have a message, a call or a call output");
            return Err(intake.refuse(error));
        }
        Ok(Some(Input { messages, media: std::mem::take(&mut intake.media), is_open }))
    }
}

/// Appends a message. A part of the assistant's answer is merged into the last message if that
/// message lacks such a part.
fn append_message<E: Error>(
    intake: &mut Intake,
    messages: &mut Vec<ChatMessage>,
    message: ChatMessage,
) -> Result<(), E> {
    let ChatMessage { content, tool_calls, reasoning, .. } = &message;
    let is_assistant = message.role == ASSISTANT;
    if is_assistant && content.is_none() && tool_calls.is_none() && reasoning.is_none() {
        return Ok(());
    }
    match (messages.last_mut().filter(|last| is_assistant && last.role == ASSISTANT), message) {
        (Some(last), ChatMessage { tool_calls: Some(Value::Array(more)), .. }) => {
            let calls = last.tool_calls.get_or_insert_with(|| Value::Array(Vec::new()));
            for (calls, call) in calls.as_array_mut().into_iter().zip(more) {
                intake.push(calls, call)?;
            }
            Ok(())
        }
        (Some(last), ChatMessage { content: content @ Some(_), .. }) if last.content.is_none() => {
            last.content = content;
            Ok(())
        }
        (Some(last), ChatMessage { reasoning: reasoning @ Some(_), .. })
            if last.reasoning.is_none() =>
        {
            last.reasoning = reasoning;
            Ok(())
        }
        (_, message) => intake.push(messages, message),
    }
}

/// An item, converted to a message.
struct Item {
    message: ChatMessage,
    is_open: bool,
}

impl<'de> Visitor<'de> for Seed<'_, Item> {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Item, A::Error> {
        let intake = self.intake;
        intake.count_message()?;
        let media = intake.media.len();
        let mut fields = ItemFields::default();
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            // This field replaces an earlier one, including its media items. No item has media in
            // two fields.
            if matches!(&*name, "content" | "output") {
                intake.media.truncate(media);
            }
            fields.read_field(intake, &name, &mut map)?;
            intake.leave(outer);
        }
        fields.into_item(intake)
    }
}

/// The fields of an item of any type. The type may come last.
#[derive(Default)]
struct ItemFields {
    kind: Option<String>,
    status: Option<String>,
    role: Option<String>,
    content: Option<Content>,
    summary: Option<Content>,
    encrypted: Option<Value>,
    call_id: Option<String>,
    name: Option<String>,
    namespace: Option<String>,
    arguments: Option<String>,
    input: Option<String>,
    output: Option<Content>,
    unknown: Option<String>,
}

impl ItemFields {
    fn read_field<'de, A: MapAccess<'de>>(
        &mut self,
        intake: &mut Intake,
        name: &str,
        map: &mut A,
    ) -> Result<(), A::Error> {
        match name {
            "type" => self.kind = intake.next_text(map)?,
            "status" => self.status = intake.next_text(map)?,
            "role" => self.role = intake.next_text(map)?,
            "content" => self.content = map.next_value_seed(intake.seed())?,
            "summary" => self.summary = map.next_value_seed(intake.seed())?,
            "encrypted_content" => {
                self.encrypted = Some(map.next_value_seed(intake.seed::<Value>())?)
                    .filter(|value| !value.is_null());
            }
            "call_id" => self.call_id = intake.next_text(map)?,
            "name" => self.name = intake.next_text(map)?,
            "namespace" => self.namespace = intake.next_text(map)?,
            "arguments" => self.arguments = intake.next_text(map)?,
            "input" => self.input = intake.next_text(map)?,
            "output" => self.output = map.next_value_seed(intake.seed())?,
            // These do not change the prompt.
            "id" | "phase" => drop(intake.next_str(map)?),
            _ => intake.skip_unknown(map, &mut self.unknown)?,
        }
        Ok(())
    }

    fn into_item<E: Error>(mut self, intake: &mut Intake) -> Result<Item, E> {
        let kind = match self.kind.take() {
            Some(kind) => kind,
            None if self.role.is_some() => MESSAGE.to_owned(),
            None => return Err(intake.missing(".type")),
        };
        let Some((kind, fields)) = KINDS.into_iter().find(|(known, _)| *known == kind) else {
            return Err(intake.refuse(unsupported(&intake.child_path(".type"), &kind)));
        };
        self.check_fields(intake, fields)?;
        let is_unfinished = self.status.as_deref().is_some_and(|status| status != "completed");
        let message = match kind {
            MESSAGE => self.into_message(intake)?,
            CALL | CUSTOM_CALL => self.into_call(intake, kind == CUSTOM_CALL)?,
            CALL_OUTPUT | CUSTOM_CALL_OUTPUT => self.into_call_output(intake)?,
            _ => self.into_reasoning(intake)?,
        };
        let is_open = is_unfinished && message.role == ASSISTANT && message.content.is_some();
        Ok(Item { message, is_open })
    }

    /// Refuses unknown statuses, and fields that an item of this type can't have.
    fn check_fields<E: Error>(&mut self, intake: &mut Intake, fields: &[&str]) -> Result<(), E> {
        let given = [
            ("role", self.role.is_some()),
            ("content", self.content.is_some()),
            ("summary", self.summary.is_some()),
            ("encrypted_content", self.encrypted.is_some()),
            ("call_id", self.call_id.is_some()),
            ("name", self.name.is_some()),
            ("namespace", self.namespace.is_some()),
            ("arguments", self.arguments.is_some()),
            ("input", self.input.is_some()),
            ("output", self.output.is_some()),
        ];
        let other = given.iter().find(|(name, is_given)| *is_given && !fields.contains(name));
        let other = other.map(|(name, _)| intake.child_path(&format!(".{name}")));
        intake.refuse_unknown(self.unknown.take().or(other))?;
        match &self.status {
            Some(status) if !STATUSES.contains(&status.as_str()) => {
                let name = intake.child_path(".status");
                let message =
                    format!("'{name}' must be one of {}, got '{status}'", STATUSES.join(", "));
                Err(intake.refuse(ApiError::invalid(name, message)))
            }
            _ => Ok(()),
        }
    }

    fn into_message<E: Error>(self, intake: &mut Intake) -> Result<ChatMessage, E> {
        let role = self.role.ok_or_else(|| intake.missing(".role"))?;
        if !ROLES.contains(&role.as_str()) {
            let name = intake.child_path(".role");
            let message = format!("'{name}' must be one of {}, got '{role}'", ROLES.join(", "));
            return Err(intake.refuse(ApiError::invalid(name, message)));
        }
        let content = self.content.ok_or_else(|| intake.missing(".content"))?;
        let content = Some(content.into_chat_content(intake, ".content", MESSAGE_PARTS)?);
        Ok(ChatMessage { role, content, ..ChatMessage::default() })
    }

    fn into_call<E: Error>(self, intake: &mut Intake, is_custom: bool) -> Result<ChatMessage, E> {
        let id = self.call_id.ok_or_else(|| intake.missing(".call_id"))?;
        let name = self.name.ok_or_else(|| intake.missing(".name"))?;
        let name = match self.namespace {
            Some(namespace) => {
                intake.reserve((namespace.len() + name.len()) as u64)?;
                flat_name(&namespace, &name)
            }
            None => name,
        };
        let arguments = if is_custom {
            let input = self.input.ok_or_else(|| intake.missing(".input"))?;
            // Escaping may make the text up to six times longer.
            intake.reserve(6 * input.len() as u64)?;
            custom_input::arguments(&input)
        } else {
            self.arguments.ok_or_else(|| intake.missing(".arguments"))?
        };
        let mut function = Map::new();
        intake.insert(&mut function, "name", Value::String(name))?;
        intake.insert(&mut function, "arguments", Value::String(arguments))?;
        let mut call = Map::new();
        intake.insert(&mut call, "id", Value::String(id))?;
        intake.insert(&mut call, "type", Value::String("function".to_owned()))?;
        intake.insert(&mut call, "function", Value::Object(function))?;
        let mut calls = Vec::new();
        intake.push(&mut calls, Value::Object(call))?;
        let role = ASSISTANT.to_owned();
        Ok(ChatMessage { role, tool_calls: Some(Value::Array(calls)), ..ChatMessage::default() })
    }

    fn into_call_output<E: Error>(self, intake: &mut Intake) -> Result<ChatMessage, E> {
        let id = self.call_id.ok_or_else(|| intake.missing(".call_id"))?;
        let output = self.output.ok_or_else(|| intake.missing(".output"))?;
        let content = Some(output.into_chat_content(intake, ".output", OUTPUT_PARTS)?);
        Ok(ChatMessage {
            role: "tool".to_owned(),
            content,
            tool_call_id: Some(id),
            ..ChatMessage::default()
        })
    }

    /// Returns a message with the reasoning, or with the summary that another server has made of
    /// it.
    fn into_reasoning<E: Error>(self, intake: &mut Intake) -> Result<ChatMessage, E> {
        if self.encrypted.is_some() {
            let name = intake.child_path(".encrypted_content");
            let message =
                format!("'{name}' is not supported; send the reasoning as 'content' or 'summary'");
            return Err(intake.refuse(ApiError::invalid(name, message)));
        }
        let content = self
            .content
            .map(|content| content.into_chat_content(intake, ".content", REASONING_PARTS))
            .transpose()?;
        let summary = self
            .summary
            .map(|summary| summary.into_chat_content(intake, ".summary", SUMMARY_PARTS))
            .transpose()?;
        let texts = [content, summary].into_iter().flatten().map(joined_text);
        let reasoning = texts.into_iter().find(|text| !text.is_empty());
        Ok(ChatMessage { role: ASSISTANT.to_owned(), reasoning, ..ChatMessage::default() })
    }
}

fn unsupported(field: &str, kind: &str) -> ApiError {
    let message = match kind {
        "item_reference" => {
            "item references are not supported: this server stores no items; send the item itself"
                .to_owned()
        }
        _ => {
            let known: Vec<_> = KINDS.iter().map(|(kind, _)| *kind).collect();
            let kind = excerpt(kind);
            format!("items of type '{kind}' are not supported; use {}", known.join(", "))
        }
    };
    ApiError { code: "unsupported_item", ..ApiError::invalid(field, message) }
}

#[cfg(test)]
mod tests;
