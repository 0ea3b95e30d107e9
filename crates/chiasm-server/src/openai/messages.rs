//! `messages` of a chat request: roles, content as a string or as parts, and the media items in them.

use chiasm_media::MediaName;
use chiasm_prompt::{ChatContent, ChatMessage, ChatPart};
use chiasm_types::Modality;
use serde_json::Value;

use super::fields::{Fields, kind};
use crate::error::ApiError;
use crate::pipeline::MediaRef;

/// Parses all messages; media items come out in order of appearance.
pub(super) fn parse(messages: Vec<Value>) -> Result<(Vec<ChatMessage>, Vec<MediaRef>), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "'messages' must have at least one message"));
    }
    let mut media = Vec::new();
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(i, message)| parse_message(message, format!("messages[{i}]"), &mut media))
        .collect::<Result<_, _>>()?;
    Ok((messages, media))
}

fn parse_message(message: Value, path: String, media: &mut Vec<MediaRef>) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::new(message, path.clone())?;
    let role: String = fields.require("role")?;
    if !["system", "developer", "user", "assistant", "tool"].contains(&role.as_str()) {
        let name = fields.name("role");
        return Err(ApiError::invalid(
            &name,
            format!("'{name}' must be system, developer, user, assistant or tool, got '{role}'"),
        ));
    }
    let content = match fields.take::<Value>("content")? {
        None => None,
        Some(Value::String(text)) => Some(ChatContent::Text(text)),
        Some(Value::Array(parts)) => Some(ChatContent::Parts(
            parts
                .into_iter()
                .enumerate()
                .map(|(i, part)| parse_part(part, format!("{path}.content[{i}]"), media))
                .collect::<Result<_, _>>()?,
        )),
        Some(other) => {
            return Err(ApiError::invalid(
                fields.name("content"),
                format!("expected a string or a list of parts, got {}", kind(&other)),
            ));
        }
    };
    let tool_calls = fields.take::<Value>("tool_calls")?;
    if tool_calls.is_some() && role != "assistant" {
        return Err(ApiError::invalid(fields.name("tool_calls"), "only an assistant message has tool calls"));
    }
    if content.is_none() && !(role == "assistant" && tool_calls.is_some()) {
        return Err(ApiError {
            code: "missing_field",
            ..ApiError::invalid(fields.name("content"), format!("'{}' is required", fields.name("content")))
        });
    }
    let message = ChatMessage {
        name: fields.take("name")?,
        tool_call_id: fields.take("tool_call_id")?,
        role,
        content,
        tool_calls,
    };
    fields.ignore(&["refusal", "annotations"]);
    fields.finish()?;
    Ok(message)
}

fn parse_part(part: Value, path: String, media: &mut Vec<MediaRef>) -> Result<ChatPart, ApiError> {
    if let Value::String(text) = part {
        return Ok(ChatPart::Text(text));
    }
    let mut fields = Fields::new(part, path)?;
    let kind: String = fields.require("type")?;
    let part = match kind.as_str() {
        "text" | "input_text" => ChatPart::Text(fields.require("text")?),
        "image_url" | "input_image" => {
            media.push(parse_image(&mut fields)?);
            ChatPart::Media(Modality::Image)
        }
        _ => {
            let name = fields.name("type");
            return Err(ApiError {
                code: "unsupported_part",
                ..ApiError::invalid(&name, format!("parts of type '{kind}' are not supported; use text or image_url"))
            });
        }
    };
    fields.finish()?;
    Ok(part)
}

fn parse_image(fields: &mut Fields) -> Result<MediaRef, ApiError> {
    let field = fields.name("image_url");
    let uuid = take_uuid(fields)?;
    let (url, inner) = match fields.take::<Value>("image_url")? {
        None => (None, None),
        Some(Value::String(url)) => (Some(url), None),
        Some(image) => {
            let mut image = Fields::new(image, field.clone())?;
            let url = image.take("url")?;
            // vLLM ignores it too: the model's processor alone decides on the resolution.
            image.refuse_unless("detail", |v| v.is_string())?;
            let uuid = take_uuid(&mut image)?;
            image.finish()?;
            (url, uuid)
        }
    };
    let uuid = uuid.or(inner);
    if url.is_none() && uuid.is_none() {
        let name = format!("{field}.url");
        return Err(ApiError { code: "missing_field", ..ApiError::invalid(&name, format!("'{name}' is required")) });
    }
    Ok(MediaRef { modality: Modality::Image, url, uuid, field })
}

/// A client's name for an item: for sending it once and naming it later. It is not its identity.
fn take_uuid(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let uuid: Option<String> = fields.take("uuid")?;
    if let Some(uuid) = &uuid
        && !(1..=MediaName::MAX_BYTES).contains(&uuid.len())
    {
        let name = fields.name("uuid");
        return Err(ApiError::invalid(&name, format!("'{name}' must have 1 to {} bytes", MediaName::MAX_BYTES)));
    }
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(messages: Value) -> String {
        let Value::Array(messages) = messages else { panic!("a list") };
        parse(messages).unwrap_err().param.unwrap()
    }

    #[test]
    fn images_come_out_in_order_with_the_field_they_stood_in() {
        let messages = vec![
            json!({"role": "system", "content": "s"}),
            json!({"role": "user", "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:x", "detail": "high"}, "uuid": "u"},
                {"type": "image_url", "image_url": "http://b"},
                {"type": "image_url", "image_url": null, "uuid": "v"},
                {"type": "image_url", "image_url": {"uuid": "w"}},
            ]}),
        ];
        let (messages, media) = parse(messages).unwrap();
        assert_eq!(messages.len(), 2);
        let item = |url: Option<&str>, uuid: Option<&str>, part: usize| MediaRef {
            modality: Modality::Image,
            url: url.map(str::to_owned),
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
    fn what_is_wrong_is_named() {
        assert_eq!(refused(json!([])), "messages");
        assert_eq!(refused(json!([{"role": "user"}])), "messages[0].content");
        assert_eq!(refused(json!([{"role": "king", "content": "x"}])), "messages[0].role");
        assert_eq!(refused(json!([{"role": "user", "content": 3}])), "messages[0].content");
        assert_eq!(
            refused(json!([{"role": "user", "content": [{"type": "video_url", "video_url": "x"}]}])),
            "messages[0].content[0].type"
        );
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
        let messages = vec![json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]})];
        assert!(parse(messages).unwrap().0[0].content.is_none());
    }
}
