//! Request bodies that have arrived, understood as JSON.

use bytes::Bytes;
use chiasm_media::Charge;
use serde_json::Value;

use crate::error::ApiError;
use crate::frontend::Frontend;

/// Bodies up to this size are parsed at once, in less than 200 µs: an image's base64 is copied at gigabytes per second.
/// Bigger ones are parsed off the async threads.
const SMALL: usize = 512 << 10;
/// And those with many values, each of which takes as long as a hundred bytes.
const FEW_VALUES: u64 = 4096;

/// Memory that a JSON value takes beside its text, at most: an entry of an object with its key.
const VALUE_BYTES: u64 = 128;

/// A body that has been understood.
pub(crate) struct JsonBody {
    pub(crate) value: Value,
    /// Its memory, counted until this is dropped.
    pub(crate) charge: Charge,
}

/// Understands a body that has arrived.
pub(crate) async fn parse(frontend: &Frontend, body: Bytes) -> Result<JsonBody, ApiError> {
    let budget = frontend.door.budget();
    // Many small values take many times the memory of their text.
    let values = separators(&body);
    let parsed_bytes = body.len() as u64 + VALUE_BYTES * values;
    if body.len() as u64 + parsed_bytes > budget.limit() {
        let message = "the body has too many values (--max-bytes-in-flight)".to_owned();
        return Err(ApiError::large_body(message));
    }
    let charge = budget.charge(parsed_bytes)?;
    let small = body.len() <= SMALL && values <= FEW_VALUES;
    let parsed = frontend.cpu.run_or_here(small, move || serde_json::from_slice(&body)).await?;
    let value = parsed.map_err(|error| ApiError {
        code: "invalid_json",
        ..ApiError::invalid("body", format!("the body is not valid JSON: {error}"))
    })?;
    Ok(JsonBody { value, charge })
}

/// An upper bound on how many values there are beside the first.
fn separators(json: &[u8]) -> u64 {
    // In pieces whose counts fit a byte, so that compilers can count many at once.
    json.chunks(255).map(|piece| u64::from(piece.iter().map(|&byte| u8::from(byte == b',')).sum::<u8>())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_but_the_first_follows_a_separator() {
        let json = [b"[".to_vec(), b"0,".repeat(1000), b"{\"a\": 1, \"b\": [2, 3]}]".to_vec()].concat();
        assert_eq!(separators(&json), 1002);
        assert_eq!(separators(&[b','; 5000]), 5000);
    }
}
