//! Detection of a stream's first event with content. Servers send a head, a role or an empty
//! message long before their first token.

use serde_json::Value;

use crate::server_failure::server_failure;
use crate::stream_end::StreamApi;

/// The class of an event that arrives before any content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeadingEvent {
    /// The event has no content.
    Prelude,
    /// The server reports its own failure, with this message. The request is not at fault.
    Failure(String),
    /// The event has content, or refuses the request.
    Content,
}

impl StreamApi {
    /// Classifies an event by its name and its first line of data.
    pub fn classify(self, name: &[u8], data: &[u8]) -> LeadingEvent {
        if data.is_empty() {
            return LeadingEvent::Prelude;
        }
        let Ok(data) = serde_json::from_slice::<Value>(data) else { return LeadingEvent::Content };
        if let Some(message) = server_failure(name, &data) {
            return LeadingEvent::Failure(message);
        }
        let is_prelude = match self {
            Self::Completions => is_empty_chunk(&data),
            Self::Responses => match name {
                b"response.created" | b"response.queued" | b"response.in_progress" => true,
                b"response.output_item.added" => {
                    matches!(data["item"]["type"].as_str(), Some("message" | "reasoning"))
                }
                b"response.content_part.added" | b"response.reasoning_part.added" => true,
                _ => false,
            },
            Self::Messages => match name {
                b"message_start" | b"ping" => true,
                b"content_block_start" => {
                    matches!(data["content_block"]["type"].as_str(), Some("text" | "thinking"))
                }
                _ => false,
            },
        };
        if is_prelude { LeadingEvent::Prelude } else { LeadingEvent::Content }
    }
}

/// Returns `true` if a chunk has neither text nor a finish reason, only a role or data about the
/// prompt.
fn is_empty_chunk(chunk: &Value) -> bool {
    let is_empty_value = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    let is_empty_choice = |choice: &Value| {
        let mut fields =
            choice["delta"].as_object().into_iter().flatten().filter(|(name, _)| *name != "role");
        let is_empty = |name| is_empty_value(&choice[name]);
        fields.all(|(_, value)| is_empty_value(value))
            && ["text", "finish_reason", "logprobs"].into_iter().all(is_empty)
    };
    chunk["choices"].as_array().is_some_and(|choices| choices.iter().all(is_empty_choice))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn classify(api: StreamApi, name: &str, data: &Value) -> LeadingEvent {
        api.classify(name.as_bytes(), data.to_string().as_bytes())
    }

    #[test]
    fn chat_role_is_prelude() {
        let chunk =
            |choice: Value| classify(StreamApi::Completions, "", &json!({"choices": [choice]}));
        let delta = json!({"role": "assistant", "content": "", "tool_calls": []});
        let role = json!({"index": 0, "delta": delta, "finish_reason": null});
        assert_eq!(chunk(role), LeadingEvent::Prelude);
        assert_eq!(
            classify(StreamApi::Completions, "", &json!({"choices": []})),
            LeadingEvent::Prelude
        );
        assert_eq!(StreamApi::Completions.classify(b"", b""), LeadingEvent::Prelude);
        for content in [
            json!({"delta": {"content": "a"}}),
            json!({"delta": {"reasoning_content": "a"}}),
            json!({"delta": {"tool_calls": [{"index": 0}]}}),
            json!({"delta": {}, "finish_reason": "stop"}),
            json!({"text": "a"}),
        ] {
            assert_eq!(chunk(content.clone()), LeadingEvent::Content, "{content}");
        }
        assert_eq!(StreamApi::Completions.classify(b"", b"[DONE]"), LeadingEvent::Content);
    }

    #[test]
    fn empty_message_is_prelude() {
        let messages = |name, data: Value| classify(StreamApi::Messages, name, &data);
        assert_eq!(messages("message_start", json!({"message": {}})), LeadingEvent::Prelude);
        assert_eq!(
            messages("content_block_start", json!({"content_block": {"type": "text"}})),
            LeadingEvent::Prelude
        );
        assert_eq!(
            messages("content_block_start", json!({"content_block": {"type": "tool_use"}})),
            LeadingEvent::Content
        );
        assert_eq!(messages("content_block_delta", json!({"delta": {}})), LeadingEvent::Content);
        let responses = |name, data: Value| classify(StreamApi::Responses, name, &data);
        assert_eq!(
            responses("response.created", json!({"response": {"error": null}})),
            LeadingEvent::Prelude
        );
        assert_eq!(
            responses("response.output_item.added", json!({"item": {"type": "message"}})),
            LeadingEvent::Prelude
        );
        assert_eq!(
            responses("response.output_item.added", json!({"item": {"type": "function_call"}})),
            LeadingEvent::Content
        );
        assert_eq!(
            responses("response.output_text.delta", json!({"delta": "a"})),
            LeadingEvent::Content
        );
    }

    #[test]
    fn server_failure_differs_from_refusal() {
        let failed = LeadingEvent::Failure("gone".to_owned());
        let vllm = |code: u16| {
            json!({"error": {
                "message": "gone", "type": "x", "param": null, "code": code,
            }})
        };
        assert_eq!(classify(StreamApi::Completions, "", &vllm(500)), failed);
        assert_eq!(classify(StreamApi::Completions, "", &vllm(400)), LeadingEvent::Content);
        let anthropic =
            |kind: &str| json!({"type": "error", "error": {"type": kind, "message": "gone"}});
        assert_eq!(classify(StreamApi::Messages, "error", &anthropic("overloaded_error")), failed);
        assert_eq!(
            classify(StreamApi::Messages, "error", &anthropic("invalid_request_error")),
            LeadingEvent::Content
        );
        let response = json!({"response": {"error": {"code": "server_error", "message": "gone"}}});
        assert_eq!(classify(StreamApi::Responses, "response.failed", &response), failed);
    }
}
