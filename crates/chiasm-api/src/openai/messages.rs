//! `messages` of a chat request: roles, content as a string or as parts, and the media items in
//! them.

use std::borrow::Cow;
use std::fmt;

use chiasm_media::MediaInput;
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart, ExtendedPart};
use chiasm_request::MediaRef;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::intake::{Intake, Seed};
use super::media_parts::{InputAudio, MEDIA_KINDS, MediaUrl, take_uuid};
use super::request::LargeField;
use crate::error::{ApiError, excerpt};

/// The roles of the API. A template may support others.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// A kind of part that contains text.
struct TextKind {
    /// The values of `type`.
    types: &'static [&'static str],
    /// The field with the text.
    field: &'static str,
}

/// vLLM's kinds of text parts (`TEXT_PART_TYPES` of `renderers/chat_utils.py`).
///
/// Clients of several APIs send stored conversations back in these forms.
const TEXT_KINDS: [TextKind; 3] = [
    TextKind { types: &["text", "input_text", "output_text"], field: "text" },
    TextKind { types: &["refusal"], field: "refusal" },
    TextKind { types: &["thinking"], field: "thinking" },
];

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
        let messages = read_messages(intake, &mut seq)?;
        Ok(Some(Messages { messages, media: std::mem::take(&mut intake.media) }))
    }
}

/// Reads `messages`, which must not be empty. Their media items are added to the intake's.
pub fn read_messages<'de, T, A: SeqAccess<'de>>(
    intake: &mut Intake,
    seq: &mut A,
) -> Result<Vec<T>, A::Error>
where
    for<'a> Seed<'a, T>: Visitor<'de, Value = T>,
{
    // This field replaces an earlier field of the same name, including its media items.
    intake.media.clear();
    let messages = read_list(intake, seq)?;
    if messages.is_empty() {
        let error = ApiError::invalid("messages", "'messages' must have at least one message");
        return Err(intake.refuse(error));
    }
    Ok(messages)
}

/// Reads a list. The path of each element ends with its index.
pub fn read_list<'de, T, A: SeqAccess<'de>>(
    intake: &mut Intake,
    seq: &mut A,
) -> Result<Vec<T>, A::Error>
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
        let mut message = ChatMessage::default();
        let mut role = None;
        let mut unknown = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "role" => role = intake.next_text(&mut map)?,
                "content" => {
                    // This field replaces an earlier one, including its media items.
                    intake.media.truncate(media);
                    message.content = map.next_value_seed(intake.seed())?;
                }
                "name" => message.name = intake.next_text(&mut map)?,
                "tool_call_id" => message.tool_call_id = intake.next_text(&mut map)?,
                "tool_calls" => {
                    message.tool_calls = Some(map.next_value_seed(intake.seed())?)
                        .filter(|calls: &Value| !calls.is_null());
                }
                // Clients send reasoning back under one or both names. vLLM's name has priority.
                "reasoning" => {
                    message.reasoning = take_prompt_text(intake, &mut map)?.or(message.reasoning);
                }
                "reasoning_content" => {
                    let reasoning = take_prompt_text(intake, &mut map)?;
                    message.reasoning = message.reasoning.or(reasoning);
                }
                // These do not change the prompt: additions of OpenAI and LiteLLM to answers, and
                // cache hints for Anthropic.
                "refusal" | "annotations" | "provider_specific_fields" | "cache_control" => {
                    drop(map.next_value_seed(intake.seed::<Value>())?);
                }
                _ => intake.skip_unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        let role = role.ok_or_else(|| intake.missing(".role"))?;
        check_message(intake, &role, &message)?;
        intake.refuse_unknown(unknown)?;
        Ok(ChatMessage { role, ..message })
    }
}

/// Reads a field's text, which becomes a part of the prompt; `None` for null.
fn take_prompt_text<'de, A: MapAccess<'de>>(
    intake: &mut Intake,
    map: &mut A,
) -> Result<Option<String>, A::Error> {
    intake.next_str(map)?.map(|text| intake.copy_prompt(&text)).transpose()
}

/// Checks the fields of a message against its role.
fn check_message<E: Error>(
    intake: &mut Intake,
    role: &str,
    message: &ChatMessage,
) -> Result<(), E> {
    let is_known = ROLES.contains(&role)
        || intake.template.as_ref().is_some_and(|template| template.knows_role(role));
    let error = if !is_known {
        let name = intake.child_path(".role");
        let known =
            "system, developer, user, assistant, tool or one that the model's chat template names";
        ApiError::invalid(&name, format!("'{name}' must be {known}, got '{role}'"))
    } else if role != "assistant" && message.tool_calls.as_ref().is_some_and(has_calls) {
        ApiError::invalid(
            intake.child_path(".tool_calls"),
            "only assistant messages may have tool calls",
        )
    } else if message.reasoning.is_some() && role != "assistant" {
        ApiError::invalid(
            intake.child_path(".reasoning"),
            "only assistant messages may have reasoning",
        )
    } else if message.content.is_none() && role != "assistant" {
        // An assistant message may lack content: a refusal, or reasoning that was left out. vLLM
        // requires content of no role.
        ApiError::missing(&intake.child_path(".content"))
    } else {
        return Ok(());
    };
    Err(intake.refuse(error))
}

/// Returns `true` if there are tool calls. Clients that write all fields of a message send an empty
/// list in every message.
fn has_calls(calls: &Value) -> bool {
    calls.as_array().is_none_or(|list| !list.is_empty())
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
        self.intake.copy_prompt(text).map(|text| Some(ChatContent::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        read_list(self.intake, &mut seq).map(|parts| Some(ChatContent::Parts(parts)))
    }
}

impl<'de> Visitor<'de> for Seed<'_, ChatPart> {
    type Value = ChatPart;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a string")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ChatPart, E> {
        self.intake.count_part()?;
        self.intake.copy_prompt(text).map(ChatPart::Text)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<ChatPart, A::Error> {
        self.intake.count_part()?;
        PartFields::read(self.intake, &mut map)?.into_part(self.intake)
    }
}

/// The fields of a part.
#[derive(Default)]
struct PartFields {
    kind: Option<String>,
    /// The text of each of [`TEXT_KINDS`].
    texts: [Option<String>; TEXT_KINDS.len()],
    /// The item of each of [`MEDIA_KINDS`].
    media: [Option<MediaUrl>; MEDIA_KINDS.len()],
    uuid: Option<String>,
    /// `true` if the part has the field `detail`, as parts of the type `input_image` do.
    has_detail: bool,
    /// The fields that only the model's chat template reads.
    extra: Map<String, Value>,
    /// The path of the first unknown field.
    unknown: Option<String>,
}

impl PartFields {
    fn read<'de, A: MapAccess<'de>>(intake: &mut Intake, map: &mut A) -> Result<Self, A::Error> {
        let mut fields = Self::default();
        while let Some(name) = intake.next_name(map)? {
            let outer = intake.enter(format_args!(".{name}"));
            let text = TEXT_KINDS.iter().position(|kind| kind.field == name);
            let media = MEDIA_KINDS.iter().position(|kind| kind.field == name);
            match (&*name, text, media) {
                ("type", ..) => fields.kind = intake.next_str(map)?.map(Cow::into_owned),
                ("uuid", ..) => fields.uuid = take_uuid(intake, map)?,
                // Ignored, as in an `image_url`.
                ("detail", ..) => fields.has_detail = intake.next_str(map)?.is_some(),
                // A field of Anthropic's API, which LiteLLM forwards.
                ("cache_control", ..) => drop(map.next_value_seed(intake.seed::<Value>())?),
                (_, Some(index), _) => fields.texts[index] = take_prompt_text(intake, map)?,
                (_, _, Some(index)) => {
                    let url = if MEDIA_KINDS[index].is_inline {
                        map.next_value_seed(intake.seed::<Option<InputAudio>>())?
                            .map(|InputAudio(url)| url)
                    } else {
                        map.next_value_seed(intake.seed())?
                    };
                    fields.media[index] = Some(url.unwrap_or_default());
                }
                _ => intake.read_template_field(
                    map,
                    &name,
                    &mut fields.extra,
                    &mut fields.unknown,
                )?,
            }
            intake.leave(outer);
        }
        Ok(fields)
    }

    /// Builds the part according to its type.
    fn into_part<E: Error>(mut self, intake: &mut Intake) -> Result<ChatPart, E> {
        // A part with a media item may lack a type, as in vLLM.
        let Some(type_name) = self.kind.take().or_else(|| self.media_field().map(str::to_owned))
        else {
            return Err(intake.missing(".type"));
        };
        let has_type = |types: &[&str]| types.contains(&&*type_name);
        let text = TEXT_KINDS.iter().zip(&mut self.texts).find(|(kind, _)| has_type(kind.types));
        let text = text.map(|(kind, text)| (kind, text.take()));
        let media = MEDIA_KINDS.iter().zip(&mut self.media).find(|(kind, _)| has_type(kind.types));
        let media = media.map(|(kind, url)| (kind, url.take().unwrap_or_default()));
        // Fields of other part types, which would have no effect.
        let other_media = self.media_field();
        let other_text = TEXT_KINDS
            .iter()
            .zip(&self.texts)
            .find(|(_, text)| text.is_some())
            .map(|(kind, _)| kind.field);
        let uuid_of_text = (text.is_some() && self.uuid.is_some()).then_some("uuid");
        let detail = (self.has_detail && type_name != "input_image").then_some("detail");
        let other = other_media.or(other_text).or(uuid_of_text).or(detail);
        let unknown = self.unknown.or(other.map(|field| intake.child_path(&format!(".{field}"))));
        let part = if let Some((kind, text)) = text {
            ChatPart::Text(text.ok_or_else(|| intake.missing(&format!(".{}", kind.field)))?)
        } else if let Some((kind, MediaUrl { url, uuid: inner })) = media {
            let field = intake.child_path(&format!(".{}", kind.field));
            let uuid = self.uuid.or(inner);
            if url.is_none() && uuid.is_none() {
                let missing = if kind.is_inline { "data" } else { "url" };
                return Err(intake.missing(&format!(".{}.{missing}", kind.field)));
            }
            let modality = kind.modality.clone();
            let source = url.map(MediaInput::Url);
            intake.add_media(MediaRef { modality: modality.clone(), source, uuid, field })?;
            ChatPart::Media(modality)
        } else {
            let known = "text, image_url, video_url, audio_url or input_audio";
            let type_name = excerpt(&type_name);
            let message = format!("parts of type '{type_name}' are not supported; use {known}");
            let error = ApiError::invalid(intake.child_path(".type"), message);
            return Err(intake.refuse(ApiError { code: "unsupported_part", ..error }));
        };
        intake.refuse_unknown(unknown)?;
        if self.extra.is_empty() {
            return Ok(part);
        }
        Ok(ChatPart::Extended(Box::new(ExtendedPart { part, fields: self.extra })))
    }

    /// Returns the field of the first remaining media item.
    fn media_field(&self) -> Option<&'static str> {
        let mut items = MEDIA_KINDS.iter().zip(&self.media);
        items.find(|(_, url)| url.is_some()).map(|(kind, _)| kind.field)
    }
}

#[cfg(test)]
mod tests;
