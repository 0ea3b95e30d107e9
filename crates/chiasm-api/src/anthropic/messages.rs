//! `messages` and `system`, converted to messages for chat templates.

use std::fmt;

use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_request::MediaRef;
use chiasm_types::Modality;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::blocks::Block;
use super::result_content::{ResultContent, unsupported};
use crate::error::{ApiError, excerpt};
use crate::openai::intake::{Intake, Seed};
use crate::openai::messages::{read_list, read_messages};

/// The start of a block that Claude Code adds to its system message. The block differs in every
/// request, so vLLM drops it for the sake of the prefix cache. It is dropped here too, so that the
/// prompt equals vLLM's.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// The messages of a request, and their media items in the same order. One message of the request
/// may become several.
pub struct Messages {
    pub messages: Vec<ChatMessage>,
    pub media: Vec<MediaRef>,
}

/// The text of `system`.
pub struct System(pub(super) String);

/// A message as the client sent it.
struct Turn {
    role: String,
    content: Content,
}

enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

impl<'de> Visitor<'de> for Seed<'_, Option<Messages>> {
    type Value = Option<Messages>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of messages")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let mut messages = Vec::new();
        for turn in join_turns(read_messages(intake, &mut seq)?) {
            add_turn(intake, &mut messages, turn)?;
        }
        join_messages(&mut messages);
        Ok(Some(Messages { messages, media: std::mem::take(&mut intake.media) }))
    }
}

impl<'de> Visitor<'de> for Seed<'_, Turn> {
    type Value = Turn;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Turn, A::Error> {
        let intake = self.intake;
        intake.count_message()?;
        let mut role = None;
        let mut content = None;
        let mut unknown = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "role" => role = intake.next_text(&mut map)?,
                "content" => content = map.next_value_seed(intake.seed::<Option<Content>>())?,
                _ => intake.skip_unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        let role = role.ok_or_else(|| intake.missing(".role"))?;
        let content = content.ok_or_else(|| intake.missing(".content"))?;
        check_turn(intake, &role, &content)?;
        intake.refuse_unknown(unknown)?;
        Ok(Turn { role, content })
    }
}

/// Refuses unknown roles, and blocks that don't belong to a role.
fn check_turn<E: Error>(intake: &mut Intake, role: &str, content: &Content) -> Result<(), E> {
    let kinds: &[&str] = match role {
        "user" => &["text", "image", "document", "search_result", "tool_result"],
        "assistant" => &["text", "thinking", "redacted_thinking", "tool_use"],
        "system" => &["text"],
        _ => {
            let name = intake.child_path(".role");
            let role = excerpt(role);
            let message = format!("'{name}' must be user, assistant or system, got '{role}'");
            return Err(intake.refuse(ApiError::invalid(&name, message)));
        }
    };
    let Content::Blocks(blocks) = content else { return Ok(()) };
    match blocks.iter().enumerate().find(|(_, block)| !kinds.contains(&block.kind())) {
        Some((index, block)) => {
            let message = format!(
                "a message with role '{role}' can't have blocks of type '{}'",
                block.kind()
            );
            Err(intake.refuse(unsupported(
                intake.child_path(&format!(".content[{index}].type")),
                message,
            )))
        }
        None => Ok(()),
    }
}

impl<'de> Visitor<'de> for Seed<'_, Option<Content>> {
    type Value = Option<Content>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of blocks")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        self.intake.copy_prompt(text).map(|text| Some(Content::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        read_list(self.intake, &mut seq).map(|blocks| Some(Content::Blocks(blocks)))
    }
}

impl<'de> Visitor<'de> for Seed<'_, Option<System>> {
    type Value = Option<System>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of blocks")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        self.intake.copy_prompt(text).map(|text| Some(System(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let blocks: Vec<Block> = read_list(intake, &mut seq)?;
        if let Some((index, block)) =
            blocks.iter().enumerate().find(|(_, block)| block.kind() != "text")
        {
            let message = format!("'system' accepts only text blocks, got '{}'", block.kind());
            return Err(
                intake.refuse(unsupported(intake.child_path(&format!("[{index}].type")), message))
            );
        }
        Ok(Some(System(system_text(blocks))))
    }
}

/// Returns the joined texts of a system message, without billing headers.
fn system_text(blocks: Vec<Block>) -> String {
    let text = |block| match block {
        Block::Text(text) if !text.starts_with(BILLING_HEADER) => Some(text),
        _ => None,
    };
    blocks.into_iter().filter_map(text).collect()
}

/// Creates a message whose content is a text.
pub(crate) fn message(role: &str, text: String) -> ChatMessage {
    ChatMessage {
        role: role.to_owned(),
        content: Some(ChatContent::Text(text)),
        ..ChatMessage::default()
    }
}

/// Joins consecutive turns of the user, and of the assistant, as Anthropic does. System turns are
/// not joined.
fn join_turns(mut turns: Vec<Turn>) -> Vec<Turn> {
    turns.retain(|turn| !turn.is_empty_system());
    turns.dedup_by(|next, last| {
        let is_joined = next.role == last.role && next.role != "system";
        if is_joined {
            let mut blocks = last.content.take_blocks();
            blocks.append(&mut next.content.take_blocks());
            last.content = Content::Blocks(blocks);
        }
        is_joined
    });
    turns
}

impl Turn {
    /// Returns `true` for a system message that adds nothing to the prompt.
    fn is_empty_system(&self) -> bool {
        let is_ignored = |text: &str| text.is_empty() || text.starts_with(BILLING_HEADER);
        self.role == "system"
            && match &self.content {
                Content::Text(text) => is_ignored(text),
                Content::Blocks(blocks) => blocks.iter().all(|block| match block {
                    Block::Text(text) => is_ignored(text),
                    _ => false,
                }),
            }
    }
}

impl Content {
    /// Takes the blocks and leaves the content empty. A text becomes one block.
    fn take_blocks(&mut self) -> Vec<Block> {
        match std::mem::replace(self, Self::Blocks(Vec::new())) {
            Self::Text(text) => vec![Block::Text(text)],
            Self::Blocks(blocks) => blocks,
        }
    }
}

/// Joins consecutive messages of the user, and of the assistant. They occur if a tool's result has
/// images, or if a system message between them was moved.
fn join_messages(messages: &mut Vec<ChatMessage>) {
    messages.dedup_by(|next, last| {
        let is_joined =
            next.role == last.role && matches!(next.role.as_str(), "user" | "assistant");
        if is_joined {
            append_message(last, std::mem::take(next));
        }
        is_joined
    });
}

/// Appends a user message that follows a tool's result to that result, for templates that expect an
/// assistant message between the two. Media items keep their order.
pub fn append_user_to_results(messages: &mut Vec<ChatMessage>) {
    messages.dedup_by(|next, last| {
        let is_joined = next.role == "user" && last.role == "tool";
        if is_joined {
            append_message(last, std::mem::take(next));
        }
        is_joined
    });
}

/// Appends a message to the previous message.
fn append_message(last: &mut ChatMessage, next: ChatMessage) {
    let ChatMessage { role: _, content, name: _, tool_call_id: _, tool_calls, reasoning } = next;
    last.content = match (last.content.take(), content) {
        (Some(first), Some(more)) => {
            let mut parts = into_parts(first);
            parts.append(&mut into_parts(more));
            Some(ChatContent::Parts(parts))
        }
        (first, more) => first.or(more),
    };
    match (&mut last.tool_calls, tool_calls) {
        (Some(Value::Array(calls)), Some(Value::Array(mut more))) => calls.append(&mut more),
        (calls, more) => *calls = calls.take().or(more),
    }
    match (&mut last.reasoning, reasoning) {
        (Some(reasoning), Some(more)) => reasoning.push_str(&more),
        (reasoning, more) => *reasoning = reasoning.take().or(more),
    }
}

fn into_parts(content: ChatContent) -> Vec<ChatPart> {
    match content {
        ChatContent::Text(text) if text.is_empty() => Vec::new(),
        ChatContent::Text(text) => vec![ChatPart::Text(text)],
        ChatContent::Parts(parts) => parts,
    }
}

/// Merges all system messages into one at the start, as vLLM does for templates that accept no
/// later system messages.
pub fn put_system_first(messages: &mut Vec<ChatMessage>) {
    let mut system = String::new();
    messages.retain_mut(|message| match &mut message.content {
        Some(ChatContent::Text(text)) if message.role == "system" => {
            system.push_str(text);
            false
        }
        _ => true,
    });
    if !system.is_empty() {
        messages.insert(0, message("system", system));
    }
    join_messages(messages);
}

/// Appends the messages of a turn. Tool results become separate messages, before the turn's other
/// content.
fn add_turn<E: Error>(
    intake: &mut Intake,
    messages: &mut Vec<ChatMessage>,
    turn: Turn,
) -> Result<(), E> {
    let Turn { role, content } = turn;
    if role == "system" {
        let text = match content {
            Content::Text(text) if text.starts_with(BILLING_HEADER) => String::new(),
            Content::Text(text) => text,
            Content::Blocks(blocks) => system_text(blocks),
        };
        return if text.is_empty() { Ok(()) } else { intake.push(messages, message(&role, text)) };
    }
    let blocks = match content {
        Content::Text(text) => return intake.push(messages, message(&role, text)),
        Content::Blocks(blocks) => blocks,
    };
    let mut parts = Vec::new();
    let mut images = Vec::new();
    let mut calls = Vec::new();
    let mut reasoning: Option<String> = None;
    for block in blocks {
        match block {
            Block::Text(text) if text.is_empty() => {}
            Block::Text(text) | Block::Passage(_, text) => {
                intake.push(&mut parts, ChatPart::Text(text))?
            }
            Block::Image(image) => {
                intake.push(&mut parts, ChatPart::Media(Modality::Image))?;
                intake.push(&mut images, image)?;
            }
            Block::Thinking(text) => reasoning.get_or_insert_default().push_str(&text),
            Block::RedactedThinking => {}
            Block::ToolUse(call) => intake.push(&mut calls, call)?,
            Block::ToolResult { id, content } => add_result(intake, messages, id, content)?,
        }
    }
    let is_single = matches!(parts[..], [ChatPart::Text(_)]);
    let content = match parts.pop() {
        None => None,
        Some(ChatPart::Text(text)) if is_single => Some(ChatContent::Text(text)),
        Some(last) => {
            parts.push(last);
            Some(ChatContent::Parts(parts))
        }
    };
    if content.is_none() && role == "user" {
        return Ok(());
    }
    images.into_iter().try_for_each(|image| intake.add_media(image))?;
    let tool_calls = (!calls.is_empty()).then_some(Value::Array(calls));
    intake.push(
        messages,
        ChatMessage { role, content, tool_calls, reasoning, ..ChatMessage::default() },
    )
}

/// Appends the result of a tool. Its images become a user message, because templates accept no
/// images from tools.
fn add_result<E: Error>(
    intake: &mut Intake,
    messages: &mut Vec<ChatMessage>,
    id: String,
    content: ResultContent,
) -> Result<(), E> {
    let ResultContent { text, images } = content;
    intake.push(messages, ChatMessage { tool_call_id: Some(id), ..message("tool", text) })?;
    if images.is_empty() {
        return Ok(());
    }
    let parts = vec![ChatPart::Media(Modality::Image); images.len()];
    images.into_iter().try_for_each(|image| intake.add_media(image))?;
    let content = Some(ChatContent::Parts(parts));
    intake
        .push(messages, ChatMessage { role: "user".to_owned(), content, ..ChatMessage::default() })
}

#[cfg(test)]
mod tests;
