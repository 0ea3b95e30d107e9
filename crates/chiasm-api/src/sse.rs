//! Server-sent events: one `data:` line per chunk, `data: [DONE]` at the end where the protocol has
//! it.

use serde::Serialize;

use crate::error::ApiError;

/// The last event of OpenAI's completion streams.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// Appends a named event.
pub fn write_named(events: &mut Vec<u8>, name: &str, body: &impl Serialize) {
    let begin = events.len();
    events.extend_from_slice(format!("event: {name}\ndata: ").as_bytes());
    match serde_json::to_writer(&mut *events, body) {
        Ok(()) => events.extend_from_slice(b"\n\n"),
        Err(error) => write_failed(events, begin, &error),
    }
}

/// Replaces the incomplete event that starts at byte `begin` with an error event.
pub fn write_failed(events: &mut Vec<u8>, begin: usize, error: &serde_json::Error) {
    events.truncate(begin);
    write_error(events, &ApiError::internal(format!("an event could not be written: {error}")));
}

/// Appends OpenAI's error body as the last chunk of a stream.
pub fn write_error(events: &mut Vec<u8>, error: &ApiError) {
    events.extend_from_slice(format!("data: {}\n\n", error.openai_body()).as_bytes());
}
