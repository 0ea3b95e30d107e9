//! The end of every stream in each API, both for answers that are written here and for those that
//! are passed on.
//!
//! | API | a whole stream ends with | a stream that breaks ends with |
//! |---|---|---|
//! | chat completions, completions | `data: [DONE]` | `data: {"error": …}`, then `data: [DONE]` as in vLLM |
//! | Responses | `response.completed` or `response.incomplete` | `response.failed`; `error` where the response is a server's |
//! | Messages | `message_stop` | `error` |
//!
//! A stream has one of these ends, and nothing follows it. Clients only get whole events, even if
//! the stream breaks.

use serde_json::json;

use crate::anthropic::{self, MESSAGES};
use crate::error::ApiError;
use crate::routes::RESPONSES;
use crate::sse;

/// An API with streams of its own form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamApi {
    /// OpenAI's completions, of chats or of texts.
    Completions,
    /// OpenAI's Responses API.
    Responses,
    /// Anthropic's Messages API.
    Messages,
}

/// The effect of an event that ends its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LastEvent {
    /// The answer is whole.
    Completes,
    /// The server reports its own failure.
    Fails,
}

impl StreamApi {
    /// Returns the API of requests to `path`.
    pub(crate) fn at(path: &str) -> Self {
        match path {
            RESPONSES => Self::Responses,
            MESSAGES => Self::Messages,
            _ => Self::Completions,
        }
    }

    /// Appends the events that end a broken stream. `sequence_number` is that of the next event, in
    /// APIs that number events.
    pub(crate) fn write_failure(self, events: &mut Vec<u8>, error: &ApiError, sequence_number: u64) {
        match self {
            Self::Completions => {
                sse::write_error(events, error);
                events.extend_from_slice(sse::DONE);
            }
            Self::Responses => {
                let ApiError { code, message, param, .. } = error;
                let body = json!({
                    "type": "error", "code": code, "message": message, "param": param, "sequence_number": sequence_number,
                });
                sse::write_named(events, "error", &body);
            }
            Self::Messages => sse::write_named(events, "error", &anthropic::error_body(error)),
        }
    }

    /// Returns the effect of an event that ends its stream; `None` for any other event.
    pub(crate) fn last_event(self, name: &[u8], data: &[u8]) -> Option<LastEvent> {
        match self {
            Self::Completions if data == b"[DONE]" => Some(LastEvent::Completes),
            Self::Completions => {
                // Some servers write `"error": null` into each chunk.
                let error = data.strip_prefix(b"{\"error\":").map(<[u8]>::trim_ascii_start);
                let is_error = name == b"error" || error.is_some_and(|error| !error.starts_with(b"null"));
                is_error.then_some(LastEvent::Fails)
            }
            Self::Responses => match name {
                b"response.completed" | b"response.incomplete" => Some(LastEvent::Completes),
                b"response.failed" | b"error" => Some(LastEvent::Fails),
                _ => None,
            },
            Self::Messages => match name {
                b"message_stop" => Some(LastEvent::Completes),
                b"error" => Some(LastEvent::Fails),
                _ => None,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::pipeline::{Cause, RequestError};

    const SIX_SECONDS: Duration = Duration::from_secs(6);
    const MESSAGE: &str = "the answer did not end within 6 s (--request-timeout)";

    fn failure(api: StreamApi) -> String {
        let mut events = Vec::new();
        let error =
            ApiError::from(RequestError::from(Cause::TimedOut { after: SIX_SECONDS, flag: "--request-timeout" }));
        api.write_failure(&mut events, &error, 7);
        String::from_utf8(events).unwrap()
    }

    #[test]
    fn failure_has_the_form_of_its_api() {
        let chat = failure(StreamApi::Completions);
        assert!(chat.starts_with("data: {\"error\":") && chat.contains("\"code\":\"timeout\""), "{chat}");
        assert!(chat.ends_with("}\n\ndata: [DONE]\n\n"), "{chat}");
        let messages = failure(StreamApi::Messages);
        assert!(messages.starts_with("event: error\ndata: {") && messages.contains("timeout_error"), "{messages}");
        let response = failure(StreamApi::Responses);
        let data = response.strip_prefix("event: error\ndata: ").unwrap().trim_end();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        let expected = json!({
            "type": "error", "code": "timeout", "message": MESSAGE, "param": null, "sequence_number": 7,
        });
        assert_eq!(data, expected);
    }

    #[test]
    fn failure_is_the_end_of_its_stream() {
        for api in [StreamApi::Completions, StreamApi::Responses, StreamApi::Messages] {
            let text = failure(api);
            let events: Vec<_> = text.split_terminator("\n\n").collect();
            let (name, data) = events[0].split_once("\ndata: ").unwrap_or(("", &events[0]["data: ".len()..]));
            let name = name.trim_start_matches("event: ").as_bytes();
            assert_eq!(api.last_event(name, data.as_bytes()), Some(LastEvent::Fails), "{text}");
        }
    }

    #[test]
    fn text_about_an_end_is_no_end() {
        assert_eq!(StreamApi::Completions.last_event(b"", br#"{"choices":[{"delta":{"content":"[DONE]"}}]}"#), None);
        assert_eq!(StreamApi::Completions.last_event(b"", br#"{"error": null,"choices":[]}"#), None);
        assert_eq!(
            StreamApi::Messages.last_event(b"content_block_delta", br#"{"delta":{"text":"message_stop"}}"#),
            None
        );
        assert_eq!(StreamApi::Responses.last_event(b"response.created", b"{}"), None);
    }
}
