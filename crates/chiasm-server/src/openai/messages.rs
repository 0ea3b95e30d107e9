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
                // They do not change the prompt.
                "refusal" | "annotations" => drop(map.next_value_seed(intake.seed::<Value>())?),
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

/// What a message of a role must and must not have.
fn check<E: Error>(intake: &mut Intake, role: &str, message: &ChatMessage) -> Result<(), E> {
    let error = if !ROLES.contains(&role) {
        let name = intake.below(".role");
        let known = "system, developer, user, assistant or tool";
        ApiError::invalid(&name, format!("'{name}' must be {known}, got '{role}'"))
    } else if message.tool_calls.is_some() && role != "assistant" {
        ApiError::invalid(intake.below(".tool_calls"), "only an assistant message has tool calls")
    } else if message.content.is_none() && message.tool_calls.is_none() {
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
                "text" => text = intake.borrowed(&mut map)?.map(|text| intake.own_prompt(&text)).transpose()?,
                "uuid" => uuid = take_uuid(intake, &mut map)?,
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
mod tests {
    use bytes::Bytes;
    use chiasm_media::ByteBudget;
    use chiasm_types::Modality;
    use serde_json::json;

    use super::super::request;
    use super::*;
    use crate::frontend::Limits;

    fn parse(messages: &Value) -> Result<(Vec<ChatMessage>, Vec<MediaRef>), ApiError> {
        let mut intake = Intake::of(&json!({"messages": messages}));
        request::read(&mut intake).map(|(_, Messages { messages, media })| (messages, media))
    }

    fn refused(messages: Value) -> String {
        parse(&messages).unwrap_err().param.unwrap()
    }

    #[test]
    fn images_come_out_in_order_with_the_field_they_stood_in() {
        let messages = json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}, "uuid": "u"},
                {"type": "image_url", "image_url": "http://b"},
                {"type": "image_url", "image_url": null, "uuid": "v"},
                {"type": "image_url", "image_url": {"uuid": "w"}},
            ]},
        ]);
        let (messages, media) = parse(&messages).unwrap();
        assert_eq!(messages.len(), 2);
        let item = |url: Option<&str>, uuid: Option<&str>, part: usize| MediaRef {
            modality: Modality::Image,
            source: url.map(|url| MediaInput::Url(url.to_owned().into())),
            uuid: uuid.map(str::to_owned),
            field: format!("messages[1].content[{part}].image_url"),
        };
        assert_eq!(
            media,
            [
                item(Some("data:x"), Some("u"), 1),
                item(Some("http://b"), None, 2),
                item(None, Some("v"), 3),
                item(None, Some("w"), 4),
            ]
        );
    }

    #[test]
    fn videos_and_recordings_are_items_too() {
        let messages = json!([{"role": "user", "content": [
            {"type": "video_url", "video_url": {"url": "http://a"}},
            {"type": "audio_url", "audio_url": "http://b", "uuid": "u"},
            {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
        ]}]);
        let (messages, media) = parse(&messages).unwrap();
        let items: Vec<_> = media
            .iter()
            .map(|item| (item.modality.name(), item.source.as_ref().unwrap().text(), item.field.as_str()))
            .collect();
        assert_eq!(
            items,
            [
                ("video", &b"http://a"[..], "messages[0].content[0].video_url"),
                ("audio", b"http://b", "messages[0].content[1].audio_url"),
                ("audio", b"data:;base64,QUJD", "messages[0].content[2].input_audio"),
            ]
        );
        let Some(ChatContent::Parts(parts)) = &messages[0].content else { panic!("parts") };
        assert_eq!(parts[0], ChatPart::Media(Modality::Video));
    }

    #[test]
    fn what_is_wrong_is_named() {
        assert_eq!(refused(json!([])), "messages");
        assert_eq!(refused(json!([{"role": "user"}])), "messages[0].content");
        assert_eq!(refused(json!([{"role": "king", "content": "x"}])), "messages[0].role");
        assert_eq!(refused(json!([{"role": "user", "content": 3}])), "messages[0].content");
        assert_eq!(
            refused(json!([{"role": "user", "content": [{"type": "smell_url", "smell_url": "x"}]}])),
            "messages[0].content[0].type"
        );
        for (part, field) in [
            (json!({"type": "video_url", "image_url": "x", "video_url": "x"}), ".image_url"),
            (json!({"type": "video_url", "image_url": "x"}), ".video_url.url"),
            (json!({"type": "text", "text": "x", "audio_url": "x"}), ".audio_url"),
            (json!({"type": "input_audio", "input_audio": {"format": "wav"}}), ".input_audio.data"),
            (json!({"type": "input_audio", "input_audio": "x"}), ".input_audio"),
            (json!({"type": "audio_url", "audio_url": {"data": "x"}}), ".audio_url.data"),
        ] {
            let messages = json!([{"role": "user", "content": [part]}]);
            assert_eq!(refused(messages), format!("messages[0].content[0]{field}"));
        }
        assert_eq!(
            refused(json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])),
            "messages[0].content[0].image_url.url"
        );
        assert_eq!(refused(json!([{"role": "user", "content": "x", "audio": {}}])), "messages[0].audio");
        assert_eq!(
            refused(json!([{"role": "user", "content": [{"type": "image_url", "uuid": "x".repeat(300)}]}])),
            "messages[0].content[0].uuid"
        );
    }

    #[test]
    fn an_assistant_message_may_have_tool_calls_and_no_content() {
        let messages = json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}]);
        assert!(parse(&messages).unwrap().0[0].content.is_none());
    }

    #[test]
    fn messages_and_parts_are_bounded() {
        let limits = Limits { messages: 2, content_parts: 3, ..Limits::default() };
        let outcome = |messages: &Value| {
            let body = json!({"messages": messages}).to_string();
            let mut intake = Intake::new(body.into(), &limits, &ByteBudget::new(1 << 20));
            let read = request::read::<Messages>(&mut intake);
            read.map(drop).map_err(|error| (error.status.as_u16(), error.param.unwrap()))
        };
        let message = |parts: usize| json!({"role": "user", "content": vec!["x"; parts]});
        assert_eq!(outcome(&json!([message(2), message(1)])), Ok(()));
        assert_eq!(outcome(&json!([message(2), message(2)])), Err((413, "messages[1].content[1]".to_owned())));
        assert_eq!(outcome(&json!([message(0), message(0), message(0)])), Err((413, "messages[2]".to_owned())));
    }

    #[test]
    fn a_large_url_stays_in_the_body_unless_something_in_it_is_escaped() {
        let url = |separator: &str| format!("data:image{separator}png;base64,{}", "AAAA".repeat(10_000));
        let parsed = |url: &str| {
            let message = format!(r#"{{"role": "user", "content": [{{"type": "image_url", "image_url": "{url}"}}]}}"#);
            let (body, budget) = (Bytes::from(format!(r#"{{"messages": [{message}]}}"#)), ByteBudget::new(1 << 20));
            let mut intake = Intake::new(body.clone(), &Limits::default(), &budget);
            let (_, Messages { media, .. }) = request::read(&mut intake).unwrap();
            let url = media[0].source.clone().unwrap();
            (body.as_ptr_range().contains(&url.text().as_ptr()), url, intake.into_charge().bytes())
        };
        let (in_body, plain, few) = parsed(&url("/"));
        let (copied, escaped, more) = parsed(&url("\\/"));
        assert!(in_body && !copied);
        assert_eq!((plain.text(), escaped.text()), (url("/").as_bytes(), url("/").as_bytes()));
        assert!(few < 10_000 && more > 40_000, "{few} and {more}");
    }

    #[test]
    fn the_last_of_two_fields_of_a_name_counts_with_its_images() {
        let image = |name: &str| format!(r#"{{"type": "image_url", "image_url": "http://{name}"}}"#);
        let message = |content: &str| format!(r#"{{"role": "user", {content}}}"#);
        let twice = message(&format!(r#""content": [{}], "content": [{}]"#, image("a"), image("b")));
        let body = format!(
            r#"{{"messages": [{}], "messages": [{twice}]}}"#,
            message(&format!(r#""content": [{}]"#, image("c")))
        );
        let mut intake = Intake::new(body.into(), &Limits::default(), &ByteBudget::new(1 << 20));
        let (_, Messages { media, .. }) = request::read(&mut intake).unwrap();
        assert_eq!(media.len(), 1);
        assert_eq!(media[0].source.as_ref().unwrap().text(), b"http://b");
    }

    #[test]
    fn a_wrong_type_names_the_field_and_broken_json_the_body() {
        assert_eq!(refused(json!([{"role": 3, "content": "x"}])), "messages[0].role");
        assert_eq!(refused(json!([3])), "messages[0]");
        assert_eq!(refused(json!("x")), "messages");
        let mut intake = Intake::new(
            r#"{"messages": [{"role": "user", "content": "x"#.into(),
            &Limits::default(),
            &ByteBudget::new(1 << 20),
        );
        let error = request::read::<Messages>(&mut intake).err().unwrap();
        assert_eq!((error.code, error.param.as_deref()), ("invalid_json", Some("body")));
    }
}
