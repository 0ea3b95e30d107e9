//! `messages` of a chat request: roles, content as a string or as parts, and the media items in them.

use std::fmt;

use chiasm_media::MediaInput;
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::intake::{Intake, Seed};
use super::media_parts::{InputAudio, MEDIA_KINDS, MediaUrl, take_uuid};
use super::request::LargeField;
use crate::error::ApiError;
use crate::pipeline::MediaRef;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The messages of a request, and their media items in order of appearance.
pub(super) struct Messages {
    pub(super) messages: Vec<ChatMessage>,
    pub(super) media: Vec<MediaRef>,
}

impl LargeField for Messages {
    const NAME: &'static str = "messages";
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
        let messages = message_list(intake, &mut seq)?;
        Ok(Some(Messages { messages, media: std::mem::take(&mut intake.media) }))
    }
}

/// Reads `messages`, of which there is at least one. Their media items are the intake's.
pub(crate) fn message_list<'de, T, A: SeqAccess<'de>>(intake: &mut Intake, seq: &mut A) -> Result<Vec<T>, A::Error>
where
    for<'a> Seed<'a, T>: Visitor<'de, Value = T>,
{
    // Those of an earlier field of the same name, which this one replaces.
    intake.media.clear();
    let messages = elements(intake, seq)?;
    if messages.is_empty() {
        let error = ApiError::invalid("messages", "'messages' must have at least one message");
        return Err(intake.refuse(error));
    }
    Ok(messages)
}

/// Reads a list whose elements are named by their index.
pub(crate) fn elements<'de, T, A: SeqAccess<'de>>(intake: &mut Intake, seq: &mut A) -> Result<Vec<T>, A::Error>
where
    for<'a> Seed<'a, T>: Visitor<'de, Value = T>,
{
    let mut list = Vec::new();
    loop {
        let outer = intake.enter(format_args!("[{}]", list.len()));
        let Some(element) = seq.next_element_seed(intake.seed())? else {
            intake.leave(outer);
            return Ok(list);
        };
        intake.push(&mut list, element)?;
        intake.leave(outer);
    }
}

impl<'de> Visitor<'de> for Seed<'_, ChatMessage> {
    type Value = ChatMessage;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ChatMessage, A::Error> {
        let intake = self.intake;
        intake.count_message()?;
        let media = intake.media.len();
        let (mut message, mut role, mut unknown) = (ChatMessage::default(), None, None);
        while let Some(name) = intake.name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "role" => role = intake.text(&mut map)?,
                "content" => {
                    // Those of an earlier field of the same name, which this one replaces.
                    intake.media.truncate(media);
                    message.content = map.next_value_seed(intake.seed())?;
                }
                "name" => message.name = intake.text(&mut map)?,
                "tool_call_id" => message.tool_call_id = intake.text(&mut map)?,
                "tool_calls" => {
                    message.tool_calls =
                        Some(map.next_value_seed(intake.seed())?).filter(|calls: &Value| !calls.is_null());
                }
                // An answer comes back with both of its names, or with one. vLLM's own comes first.
                "reasoning" => {
                    message.reasoning = take_prompt_text(intake, &mut map)?.or(message.reasoning);
                }
                "reasoning_content" => {
                    let reasoning = take_prompt_text(intake, &mut map)?;
                    message.reasoning = message.reasoning.or(reasoning);
                }
                // They do not change the prompt: what OpenAI and LiteLLM tell beside an answer, and what Anthropic is to cache.
                "refusal" | "annotations" | "provider_specific_fields" | "cache_control" => {
                    drop(map.next_value_seed(intake.seed::<Value>())?);
                }
                _ => intake.unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        let role = role.ok_or_else(|| intake.missing(".role"))?;
        check(intake, &role, &message)?;
        intake.refuse_unknown(unknown)?;
        Ok(ChatMessage { role, ..message })
    }
}

/// A field's text, which becomes a part of the prompt; `None` for null.
fn take_prompt_text<'de, A: MapAccess<'de>>(intake: &mut Intake, map: &mut A) -> Result<Option<String>, A::Error> {
    intake.borrowed(map)?.map(|text| intake.own_prompt(&text)).transpose()
}

/// What a message of a role must and must not have.
fn check<E: Error>(intake: &mut Intake, role: &str, message: &ChatMessage) -> Result<(), E> {
    let error = if !ROLES.contains(&role) {
        let name = intake.below(".role");
        let known = "system, developer, user, assistant or tool";
        ApiError::invalid(&name, format!("'{name}' must be {known}, got '{role}'"))
    } else if message.tool_calls.is_some() && role != "assistant" {
        ApiError::invalid(intake.below(".tool_calls"), "only an assistant message has tool calls")
    } else if message.reasoning.is_some() && role != "assistant" {
        ApiError::invalid(intake.below(".reasoning"), "only an assistant message has reasoning")
    } else if message.content.is_none() && message.tool_calls.is_none() && message.reasoning.is_none() {
        ApiError::missing(&intake.below(".content"))
    } else {
        return Ok(());
    };
    Err(intake.refuse(error))
}

impl<'de> Visitor<'de> for Seed<'_, Option<ChatContent>> {
    type Value = Option<ChatContent>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of parts")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        self.intake.own_prompt(text).map(|text| Some(ChatContent::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        elements(self.intake, &mut seq).map(|parts| Some(ChatContent::Parts(parts)))
    }
}

impl<'de> Visitor<'de> for Seed<'_, ChatPart> {
    type Value = ChatPart;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ChatPart, E> {
        self.intake.count_part()?;
        self.intake.own_prompt(text).map(ChatPart::Text)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ChatPart, A::Error> {
        let intake = self.intake;
        intake.count_part()?;
        let (mut kind, mut text, mut unknown) = (None, None, None);
        let (mut media, mut uuid) = (MEDIA_KINDS.map(|_| None::<MediaUrl>), None);
        while let Some(name) = intake.name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "type" => kind = intake.borrowed(&mut map)?,
                "text" => text = take_prompt_text(intake, &mut map)?,
                "uuid" => uuid = take_uuid(intake, &mut map)?,
                // Anthropic's, which LiteLLM passes on.
                "cache_control" => drop(map.next_value_seed(intake.seed::<Value>())?),
                name => match MEDIA_KINDS.iter().position(|kind| kind.field == name) {
                    Some(index) => {
                        let url = match MEDIA_KINDS[index].is_inline {
                            true => {
                                map.next_value_seed(intake.seed::<Option<InputAudio>>())?.map(|InputAudio(url)| url)
                            }
                            false => map.next_value_seed(intake.seed())?,
                        };
                        media[index] = Some(url.unwrap_or_default());
                    }
                    None => intake.unknown(&mut map, &mut unknown)?,
                },
            }
            intake.leave(outer);
        }
        let taken = |step: &str, is_there: bool| is_there.then(|| intake.below(step));
        let asked = MEDIA_KINDS
            .iter()
            .zip(&mut media)
            .find(|(known, _)| kind.as_deref().is_some_and(|kind| known.types.contains(&kind)));
        let asked = asked.map(|(asked, url)| (asked, url.take().unwrap_or_default()));
        let other = MEDIA_KINDS.iter().zip(&media).find(|(_, url)| url.is_some());
        unknown = unknown.or(other.map(|(other, _)| intake.below(&format!(".{}", other.field))));
        let part = match (kind.as_deref(), asked) {
            (None, _) => return Err(intake.missing(".type")),
            (Some("text" | "input_text"), _) => {
                unknown = unknown.or(taken(".uuid", uuid.is_some()));
                ChatPart::Text(text.ok_or_else(|| intake.missing(".text"))?)
            }
            (Some(_), Some((asked, MediaUrl { url, uuid: inner }))) => {
                unknown = unknown.or(taken(".text", text.is_some()));
                let field = intake.below(&format!(".{}", asked.field));
                let uuid = uuid.or(inner);
                if url.is_none() && uuid.is_none() {
                    let missing = if asked.is_inline { "data" } else { "url" };
                    return Err(intake.missing(&format!(".{}.{missing}", asked.field)));
                }
                intake.add_media(MediaRef {
                    modality: asked.modality.clone(),
                    source: url.map(MediaInput::Url),
                    uuid,
                    field,
                })?;
                ChatPart::Media(asked.modality.clone())
            }
            (Some(kind), None) => {
                let known = "text, image_url, video_url, audio_url or input_audio";
                let message = format!("parts of type '{kind}' are not supported; use {known}");
                let error = ApiError::invalid(intake.below(".type"), message);
                return Err(intake.refuse(ApiError { code: "unsupported_part", ..error }));
            }
        };
        intake.refuse_unknown(unknown)?;
        Ok(part)
    }
}

#[cfg(test)]
mod tests;
