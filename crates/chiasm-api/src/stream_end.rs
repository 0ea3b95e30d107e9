//! The end of a stream in each API, for answers written here and for forwarded answers.
//!
//! | API | a whole stream ends with | a stream that breaks ends with |
//! |---|---|---|
//! | chat completions, completions | `data: [DONE]` | `data: {"error": …}`, then `data: [DONE]` as in vLLM |
//! | Responses | `response.completed` or `response.incomplete` | `response.failed`; `error` if the response is forwarded |
//! | Messages | `message_stop` | `error` |
//!
//! Exactly one of these ends a stream, and nothing follows it. Clients receive only whole events,
//! even if the stream breaks.

use memchr::memmem;
use serde_json::json;

use crate::error::ApiError;
use crate::server_failure::server_failure;
use crate::sse;

/// An API with its own stream format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamApi {
    /// OpenAI's chat completions and text completions.
    Completions,
    /// OpenAI's Responses API.
    Responses,
    /// Anthropic's Messages API.
    Messages,
}

/// The outcome of a stream that the server has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamOutcome {
    /// The answer is complete, or the server refused the request.
    Finished,
    /// The server reported its own failure. Holds its message, empty if there is none.
    Failed(String),
}

impl StreamApi {
    /// Appends the events that end a broken stream. `sequence_number` is the number of the next
    /// event, for APIs that number events.
    pub fn write_failure(self, events: &mut Vec<u8>, error: &ApiError, sequence_number: u64) {
        match self {
            Self::Completions => {
                sse::write_error(events, error);
                events.extend_from_slice(sse::DONE);
            }
            Self::Responses => {
                let ApiError { code, message, param, .. } = error;
                let body = json!({
                    "type": "error",
                    "code": code,
                    "message": message,
                    "param": param,
                    "sequence_number": sequence_number,
                });
                sse::write_named(events, "error", &body);
            }
            Self::Messages => sse::write_named(events, "error", &error.anthropic_body()),
        }
    }

    /// Returns the outcome of the stream if this event ends it.
    pub fn outcome(self, name: &[u8], data: &[u8]) -> Option<StreamOutcome> {
        let is_error = match (self, name) {
            (Self::Completions, _) if data == b"[DONE]" => return Some(StreamOutcome::Finished),
            (Self::Responses, b"response.completed" | b"response.incomplete")
            | (Self::Messages, b"message_stop") => {
                return Some(StreamOutcome::Finished);
            }
            (Self::Completions, _) => name == b"error" || has_error(data),
            (Self::Responses, _) => matches!(name, b"response.failed" | b"error"),
            (Self::Messages, _) => name == b"error",
        };
        is_error.then(|| match serde_json::from_slice(data) {
            Ok(data) => {
                server_failure(name, &data).map_or(StreamOutcome::Finished, StreamOutcome::Failed)
            }
            Err(_) => StreamOutcome::Failed(String::new()),
        })
    }
}

/// Returns `true` if a chunk has an error. Quotes inside strings are escaped, so text can't match
/// the field. Some servers write `"error": null` into each chunk.
fn has_error(chunk: &[u8]) -> bool {
    const FIELD: &[u8] = b"\"error\":";
    memmem::find_iter(chunk, FIELD)
        .any(|at| !chunk[at + FIELD.len()..].trim_ascii_start().starts_with(b"null"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    const MESSAGE: &str = "the answer did not end within 6 s (--request-timeout)";

    fn failure(api: StreamApi) -> String {
        let mut events = Vec::new();
        let error = ApiError::new(ErrorKind::TimedOut, "timeout", MESSAGE);
        api.write_failure(&mut events, &error, 7);
        String::from_utf8(events).unwrap()
    }

    #[test]
    fn failure_has_the_form_of_its_api() {
        let chat = failure(StreamApi::Completions);
        assert!(
            chat.starts_with("data: {\"error\":") && chat.contains("\"code\":\"timeout\""),
            "{chat}"
        );
        assert!(chat.ends_with("}\n\ndata: [DONE]\n\n"), "{chat}");
        let messages = failure(StreamApi::Messages);
        assert!(
            messages.starts_with("event: error\ndata: {") && messages.contains("timeout_error"),
            "{messages}"
        );
        let response = failure(StreamApi::Responses);
        let data = response.strip_prefix("event: error\ndata: ").unwrap().trim_end();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        let expected = json!({
            "type": "error",
            "code": "timeout",
            "message": MESSAGE,
            "param": null,
            "sequence_number": 7,
        });
        assert_eq!(data, expected);
    }

    #[test]
    fn failure_event_ends_its_stream() {
        for api in [StreamApi::Completions, StreamApi::Responses, StreamApi::Messages] {
            let text = failure(api);
            let events: Vec<_> = text.split_terminator("\n\n").collect();
            let (name, data) =
                events[0].split_once("\ndata: ").unwrap_or(("", &events[0]["data: ".len()..]));
            let name = name.trim_start_matches("event: ").as_bytes();
            let outcome = api.outcome(name, data.as_bytes());
            assert!(
                matches!(outcome, Some(StreamOutcome::Failed(message)) if message == MESSAGE),
                "{text}"
            );
        }
    }

    #[test]
    fn end_marker_within_text_is_ignored() {
        assert_eq!(
            StreamApi::Completions.outcome(b"", br#"{"choices":[{"delta":{"content":"[DONE]"}}]}"#),
            None
        );
        assert_eq!(StreamApi::Completions.outcome(b"", br#"{"error": null,"choices":[]}"#), None);
        assert_eq!(
            StreamApi::Messages
                .outcome(b"content_block_delta", br#"{"delta":{"text":"message_stop"}}"#),
            None
        );
        assert_eq!(StreamApi::Responses.outcome(b"response.created", b"{}"), None);
    }
}
