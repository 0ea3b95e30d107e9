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
use crate::error::ApiError;

/// The roles of the API. A template may know others.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// A kind of part that is text.
struct TextKind {
    types: &'static [&'static str],
    /// The field with the text.
    field: &'static str,
}

/// Those of vLLM (`TEXT_PART_TYPES` of `renderers/chat_utils.py`): what clients of several APIs
/// keep of a conversation comes back so.
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
        let messages = message_list(intake, &mut seq)?;
        Ok(Some(Messages { messages, media: std::mem::take(&mut intake.media) }))
    }
}

/// Reads `messages`, of which there is at least one. Their media items are the intake's.
pub fn message_list<'de, T, A: SeqAccess<'de>>(
    intake: &mut Intake,
    seq: &mut A,
) -> Result<Vec<T>, A::Error>
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
pub fn elements<'de, T, A: SeqAccess<'de>>(
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
                    message.tool_calls = Some(map.next_value_seed(intake.seed())?)
                        .filter(|calls: &Value| !calls.is_null());
                }
                // An answer comes back with both of its names, or with one. vLLM's own comes first.
                "reasoning" => {
                    message.reasoning = take_prompt_text(intake, &mut map)?.or(message.reasoning);
                }
                "reasoning_content" => {
                    let reasoning = take_prompt_text(intake, &mut map)?;
                    message.reasoning = message.reasoning.or(reasoning);
                }
                // They do not change the prompt: what OpenAI and LiteLLM tell beside an answer, and
                // what Anthropic is to cache.
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
fn take_prompt_text<'de, A: MapAccess<'de>>(
    intake: &mut Intake,
    map: &mut A,
) -> Result<Option<String>, A::Error> {
    intake.borrowed(map)?.map(|text| intake.own_prompt(&text)).transpose()
}

/// What a message of a role must and must not have.
fn check<E: Error>(intake: &mut Intake, role: &str, message: &ChatMessage) -> Result<(), E> {
    let is_known = ROLES.contains(&role)
        || intake.template.as_ref().is_some_and(|template| template.knows_role(role));
    let error = if !is_known {
        let name = intake.below(".role");
        let known =
            "system, developer, user, assistant, tool or one that the model's chat template names";
        ApiError::invalid(&name, format!("'{name}' must be {known}, got '{role}'"))
    } else if role != "assistant" && message.tool_calls.as_ref().is_some_and(calls_something) {
        ApiError::invalid(intake.below(".tool_calls"), "only an assistant message has tool calls")
    } else if message.reasoning.is_some() && role != "assistant" {
        ApiError::invalid(intake.below(".reasoning"), "only an assistant message has reasoning")
    } else if message.content.is_none() && role != "assistant" {
        // An answer that says nothing has none: a refusal, reasoning that was left out of it. vLLM
        // asks nobody for content.
        ApiError::missing(&intake.below(".content"))
    } else {
        return Ok(());
    };
    Err(intake.refuse(error))
}

/// Whether these are tool calls. Clients that write all fields of a message have an empty list in
/// any.
fn calls_something(calls: &Value) -> bool {
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
        self.intake.count_part()?;
        PartFields::read(self.intake, &mut map)?.part(self.intake)
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
    /// Whether it says how closely to look at an image, as parts of the type `input_image` do.
    has_detail: bool,
    /// What only the model's chat template knows.
    extra: Map<String, Value>,
    /// The first field that nobody knows.
    unknown: Option<String>,
}

impl PartFields {
    fn read<'de, A: MapAccess<'de>>(intake: &mut Intake, map: &mut A) -> Result<Self, A::Error> {
        let mut fields = Self::default();
        while let Some(name) = intake.name(map)? {
            let outer = intake.enter(format_args!(".{name}"));
            let text = TEXT_KINDS.iter().position(|kind| kind.field == name);
            let media = MEDIA_KINDS.iter().position(|kind| kind.field == name);
            match (&*name, text, media) {
                ("type", ..) => fields.kind = intake.borrowed(map)?.map(Cow::into_owned),
                ("uuid", ..) => fields.uuid = take_uuid(intake, map)?,
                // Ignored as that of an `image_url`.
                ("detail", ..) => fields.has_detail = intake.borrowed(map)?.is_some(),
                // Anthropic's, which LiteLLM passes on.
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
                _ => intake.of_template(map, &name, (&mut fields.extra, &mut fields.unknown))?,
            }
            intake.leave(outer);
        }
        Ok(fields)
    }

    /// What its type makes of them.
    fn part<E: Error>(mut self, intake: &mut Intake) -> Result<ChatPart, E> {
        // An item need not say what it is, as it need not in vLLM.
        let of_item = || {
            MEDIA_KINDS
                .iter()
                .zip(&self.media)
                .find(|(_, url)| url.is_some())
                .map(|(kind, _)| kind.field)
        };
        let Some(kind) = self.kind.take().or_else(|| of_item().map(str::to_owned)) else {
            return Err(intake.missing(".type"));
        };
        let is_asked = |types: &[&str]| types.contains(&&*kind);
        let text = TEXT_KINDS.iter().zip(&mut self.texts).find(|(known, _)| is_asked(known.types));
        let text = text.map(|(asked, text)| (asked, text.take()));
        let media =
            MEDIA_KINDS.iter().zip(&mut self.media).find(|(known, _)| is_asked(known.types));
        let media = media.map(|(asked, url)| (asked, url.take().unwrap_or_default()));
        // Fields of other types, which nobody would look at.
        let other_media = MEDIA_KINDS
            .iter()
            .zip(&self.media)
            .find(|(_, url)| url.is_some())
            .map(|(kind, _)| kind.field);
        let other_text = TEXT_KINDS
            .iter()
            .zip(&self.texts)
            .find(|(_, text)| text.is_some())
            .map(|(kind, _)| kind.field);
        let uuid_of_text = (text.is_some() && self.uuid.is_some()).then_some("uuid");
        let detail = (self.has_detail && kind != "input_image").then_some("detail");
        let other = other_media.or(other_text).or(uuid_of_text).or(detail);
        let unknown = self.unknown.or(other.map(|field| intake.below(&format!(".{field}"))));
        let part = if let Some((asked, text)) = text {
            ChatPart::Text(text.ok_or_else(|| intake.missing(&format!(".{}", asked.field)))?)
        } else if let Some((asked, MediaUrl { url, uuid: inner })) = media {
            let field = intake.below(&format!(".{}", asked.field));
            let uuid = self.uuid.or(inner);
            if url.is_none() && uuid.is_none() {
                let missing = if asked.is_inline { "data" } else { "url" };
                return Err(intake.missing(&format!(".{}.{missing}", asked.field)));
            }
            let (modality, source) = (asked.modality.clone(), url.map(MediaInput::Url));
            intake.add_media(MediaRef { modality: modality.clone(), source, uuid, field })?;
            ChatPart::Media(modality)
        } else {
            let known = "text, image_url, video_url, audio_url or input_audio";
            let message = format!("parts of type '{kind}' are not supported; use {known}");
            let error = ApiError::invalid(intake.below(".type"), message);
            return Err(intake.refuse(ApiError { code: "unsupported_part", ..error }));
        };
        intake.refuse_unknown(unknown)?;
        if self.extra.is_empty() {
            return Ok(part);
        }
        Ok(ChatPart::Extended(Box::new(ExtendedPart { part, fields: self.extra })))
    }
}

#[cfg(test)]
mod tests;
