//! Conversations for vLLM's renderer: the messages in OpenAI's form, with media items by number.

use std::sync::Arc;

use chiasm_prompt::{ChatContent, ChatMessage, ChatPart, check_template_kwargs};
use chiasm_request::Chat;
use chiasm_request::ChatDefaults;
use chiasm_types::Modality;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use super::super::error::RequestError;

/// Converts a conversation to its messages, and the other fields that change its rendering.
///
/// # Errors
/// Returns an error if a request sets a template variable that is not allowed.
pub(crate) fn conversation(
    mut chat: Chat,
    defaults: &ChatDefaults,
) -> Result<(Box<RawValue>, Map<String, Value>), RequestError> {
    check_template_kwargs(&chat.template_kwargs)?;
    let variables = chat.take_template_variables(defaults);
    let mut items = 0..;
    let messages: Vec<Value> =
        chat.messages.into_iter().map(|message| message_to_json(message, &mut items)).collect();
    let messages =
        to_raw_value(&messages).map_err(|error| RequestError::internal(error.to_string()))?;
    let mut settings = Map::new();
    settings.insert("add_generation_prompt".to_owned(), json!(chat.add_generation_prompt));
    settings.insert("continue_final_message".to_owned(), json!(chat.continue_final_message));
    if let Some(effort) = chat.reasoning_effort {
        settings.insert("reasoning_effort".to_owned(), Value::String(effort));
    }
    if let Some(tools) = chat.tools {
        settings.insert("tools".to_owned(), Arc::unwrap_or_clone(tools));
    }
    if !variables.is_empty() {
        settings.insert("chat_template_kwargs".to_owned(), Value::Object(variables));
    }
    Ok((messages, settings))
}

fn message_to_json(message: ChatMessage, items: &mut impl Iterator<Item = usize>) -> Value {
    let ChatMessage { role, content, name, tool_call_id, tool_calls, reasoning } = message;
    let content = match content {
        None => Value::Null,
        Some(ChatContent::Text(text)) => Value::String(text),
        Some(ChatContent::Parts(parts)) => {
            parts.into_iter().map(|part| part_to_json(part, items)).collect()
        }
    };
    let optional = [
        ("name", name.map(Value::String)),
        ("tool_call_id", tool_call_id.map(Value::String)),
        ("tool_calls", tool_calls),
        ("reasoning", reasoning.map(Value::String)),
    ];
    let optional = optional.into_iter().filter_map(|(field, value)| Some((field, value?)));
    let fields = [("role", Value::String(role)), ("content", content)].into_iter().chain(optional);
    fields.map(|(field, value)| (field.to_owned(), value)).collect()
}

fn part_to_json(part: ChatPart, items: &mut impl Iterator<Item = usize>) -> Value {
    let modality = match part {
        ChatPart::Text(text) => return json!({"type": "text", "text": Value::String(text)}),
        ChatPart::Media(modality) => modality,
        ChatPart::Extended(extended) => {
            let mut value = part_to_json(extended.part, items);
            if let Some(object) = value.as_object_mut() {
                object.extend(extended.fields.clone());
            }
            return value;
        }
    };
    let kind = match &modality {
        Modality::Image => "image_url",
        Modality::Audio => "audio_url",
        Modality::Video => "video_url",
        Modality::Other(name) => name,
    };
    json!({"type": kind, (kind): null, "uuid": items.next().map(|number| number.to_string())})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_unchanged_except_for_item_numbers() {
        let calls =
            json!([{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
        let parts = |parts: Vec<ChatPart>| Some(ChatContent::Parts(parts));
        let message = |role: &str, content| ChatMessage {
            role: role.to_owned(),
            content,
            ..ChatMessage::default()
        };
        let chat = Chat {
            messages: vec![
                ChatMessage {
                    name: Some("n".to_owned()),
                    ..message(
                        "user",
                        parts(vec![
                            ChatPart::Media(Modality::Image),
                            ChatPart::Text("t".to_owned()),
                        ]),
                    )
                },
                ChatMessage {
                    tool_calls: Some(calls.clone()),
                    reasoning: Some("r".to_owned()),
                    ..message("assistant", None)
                },
                ChatMessage {
                    tool_call_id: Some("c".to_owned()),
                    ..message("tool", Some(ChatContent::Text("x".to_owned())))
                },
                message(
                    "user",
                    parts(vec![ChatPart::Media(Modality::Video), ChatPart::Media(Modality::Image)]),
                ),
            ],
            add_generation_prompt: true,
            reasoning_effort: Some("low".to_owned()),
            template_kwargs: Map::from_iter([("thinking".to_owned(), json!(true))]),
            ..Chat::default()
        };
        let template_kwargs = Map::from_iter([
            ("thinking".to_owned(), json!(false)),
            ("of_all".to_owned(), json!(1)),
        ]);
        let defaults = ChatDefaults { template_kwargs, ..ChatDefaults::default() };
        let (messages, settings) = conversation(chat, &defaults).unwrap();
        let image = |number: &str| json!({"type": "image_url", "image_url": null, "uuid": number});
        let expected = json!([
            {"role": "user", "content": [image("0"), {"type": "text", "text": "t"}], "name": "n"},
            {"role": "assistant", "content": null, "tool_calls": calls, "reasoning": "r"},
            {"role": "tool", "content": "x", "tool_call_id": "c"},
            {
                "role": "user",
                "content": [{"type": "video_url", "video_url": null, "uuid": "1"}, image("2")],
            },
        ]);
        assert_eq!(serde_json::from_str::<Value>(messages.get()).unwrap(), expected);
        let expected = json!({
            "add_generation_prompt": true,
            "continue_final_message": false,
            "reasoning_effort": "low",
            "chat_template_kwargs": {
                "thinking": true,
                "of_all": 1,
                "enable_thinking": true,
                "reasoning_effort": "low",
            },
        });
        assert_eq!(Value::Object(settings), expected);
    }

    #[test]
    fn request_can_not_set_its_own_template() {
        for name in ["chat_template", "tokenize", "tools"] {
            let template_kwargs = Map::from_iter([(name.to_owned(), json!("x"))]);
            let chat = Chat { template_kwargs, ..Chat::default() };
            assert!(conversation(chat, &ChatDefaults::default()).is_err(), "{name}");
        }
    }
}
