//! Server-sent events: one `data:` line per chunk, `data: [DONE]` at the end where the protocol has
//! it.

use serde::Serialize;

use crate::error::ApiError;

/// The last event of OpenAI's streams.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// Appends an event with a name.
pub fn write_named(events: &mut Vec<u8>, name: &str, body: &impl Serialize) {
    let begin = events.len();
    events.extend_from_slice(format!("event: {name}\ndata: ").as_bytes());
    match serde_json::to_writer(&mut *events, body) {
        Ok(()) => events.extend_from_slice(b"\n\n"),
        Err(failed) => write_failed(events, begin, &failed),
    }
}

/// Replaces an event that could not be written, and begins at `begin`, by an error.
pub fn write_failed(events: &mut Vec<u8>, begin: usize, failed: &serde_json::Error) {
    events.truncate(begin);
    write_error(events, &ApiError::internal(format!("an event could not be written: {failed}")));
}

/// Appends an error in the middle of a stream: OpenAI's error body as its last chunk.
pub fn write_error(events: &mut Vec<u8>, error: &ApiError) {
    events.extend_from_slice(format!("data: {}\n\n", error.openai_body()).as_bytes());
}
