//! Finds the first event of a stream that has content. Servers send a head, a role or an empty
//! message long before their first token.

use serde_json::Value;

use crate::server_failure::server_failure;
use crate::stream_end::StreamApi;

/// The meaning of an event before any content has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// The event has no content.
    Prelude,
    /// The server reports its own failure, with this message. The client is not at fault.
    Failure(String),
    /// The event has content, or refuses the request.
    Content,
}

impl StreamApi {
    /// Classifies an event by its name and its first line of data.
    pub fn begins(self, name: &[u8], data: &[u8]) -> Beginning {
        if data.is_empty() {
            return Beginning::Prelude;
        }
        let Ok(data) = serde_json::from_slice::<Value>(data) else { return Beginning::Content };
        if let Some(words) = server_failure(name, &data) {
            return Beginning::Failure(words);
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
        if is_prelude { Beginning::Prelude } else { Beginning::Content }
    }
}

/// Returns `true` if a chunk has neither text nor a finish reason: it has a role, or data about the
/// prompt.
fn is_empty_chunk(chunk: &Value) -> bool {
    let is_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    };
    let says_nothing = |choice: &Value| {
        let mut fields =
            choice["delta"].as_object().into_iter().flatten().filter(|(name, _)| *name != "role");
        let is_empty = |name| is_nothing(&choice[name]);
        fields.all(|(_, value)| is_nothing(value))
            && ["text", "finish_reason", "logprobs"].into_iter().all(is_empty)
    };
    chunk["choices"].as_array().is_some_and(|choices| choices.iter().all(says_nothing))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn begins(api: StreamApi, name: &str, data: &Value) -> Beginning {
        api.begins(name.as_bytes(), data.to_string().as_bytes())
    }

    #[test]
    fn role_of_a_chat_is_no_content() {
        let chunk =
            |choice: Value| begins(StreamApi::Completions, "", &json!({"choices": [choice]}));
        let role = json!({"index": 0, "delta": {"role": "assistant", "content": "", "tool_calls": []}, "finish_reason": null});
        assert_eq!(chunk(role), Beginning::Prelude);
        assert_eq!(begins(StreamApi::Completions, "", &json!({"choices": []})), Beginning::Prelude);
        assert_eq!(StreamApi::Completions.begins(b"", b""), Beginning::Prelude);
        for content in [
            json!({"delta": {"content": "a"}}),
            json!({"delta": {"reasoning_content": "a"}}),
            json!({"delta": {"tool_calls": [{"index": 0}]}}),
            json!({"delta": {}, "finish_reason": "stop"}),
            json!({"text": "a"}),
        ] {
            assert_eq!(chunk(content.clone()), Beginning::Content, "{content}");
        }
        assert_eq!(StreamApi::Completions.begins(b"", b"[DONE]"), Beginning::Content);
    }

    #[test]
    fn empty_message_is_no_content() {
        let messages = |name, data: Value| begins(StreamApi::Messages, name, &data);
        assert_eq!(messages("message_start", json!({"message": {}})), Beginning::Prelude);
        assert_eq!(
            messages("content_block_start", json!({"content_block": {"type": "text"}})),
            Beginning::Prelude
        );
        assert_eq!(
            messages("content_block_start", json!({"content_block": {"type": "tool_use"}})),
            Beginning::Content
        );
        assert_eq!(messages("content_block_delta", json!({"delta": {}})), Beginning::Content);
        let responses = |name, data: Value| begins(StreamApi::Responses, name, &data);
        assert_eq!(
            responses("response.created", json!({"response": {"error": null}})),
            Beginning::Prelude
        );
        assert_eq!(
            responses("response.output_item.added", json!({"item": {"type": "message"}})),
            Beginning::Prelude
        );
        assert_eq!(
            responses("response.output_item.added", json!({"item": {"type": "function_call"}})),
            Beginning::Content
        );
        assert_eq!(
            responses("response.output_text.delta", json!({"delta": "a"})),
            Beginning::Content
        );
    }

    #[test]
    fn failure_of_a_server_is_no_refusal() {
        let failed = Beginning::Failure("gone".to_owned());
        let vllm = |code: u16| json!({"error": {"message": "gone", "type": "x", "param": null, "code": code}});
        assert_eq!(begins(StreamApi::Completions, "", &vllm(500)), failed);
        assert_eq!(begins(StreamApi::Completions, "", &vllm(400)), Beginning::Content);
        let anthropic =
            |kind: &str| json!({"type": "error", "error": {"type": kind, "message": "gone"}});
        assert_eq!(begins(StreamApi::Messages, "error", &anthropic("overloaded_error")), failed);
        assert_eq!(
            begins(StreamApi::Messages, "error", &anthropic("invalid_request_error")),
            Beginning::Content
        );
        let response = json!({"response": {"error": {"code": "server_error", "message": "gone"}}});
        assert_eq!(begins(StreamApi::Responses, "response.failed", &response), failed);
    }
}
