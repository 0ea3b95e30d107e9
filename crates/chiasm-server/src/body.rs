//! Request bodies that have arrived, understood as JSON.

use bytes::Bytes;
use chiasm_media::Charge;
use serde_json::Value;

use crate::cpu::{CpuBudget, price};
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
pub(crate) async fn parse(frontend: &Frontend, cpu: &CpuBudget, body: Bytes) -> Result<JsonBody, ApiError> {
    let budget = frontend.door.budget();
    // Many small values take many times the memory of their text.
    let values = values(&body);
    let parsed_bytes = body.len() as u64 + VALUE_BYTES * values;
    if body.len() as u64 + parsed_bytes > budget.limit() {
        let message = "the body has too many values (--max-bytes-in-flight)".to_owned();
        return Err(ApiError::large_body(message));
    }
    let charge = budget.charge(parsed_bytes)?;
    let small = body.len() <= SMALL && values <= FEW_VALUES;
    let cost = price::json(body.len(), values);
    let parse = move || serde_json::from_slice(&body);
    let parsed = frontend.cpu.run_or_here(small, cpu, cost, parse).await.map_err(|error| error.at("body"))?;
    let value = parsed.map_err(|error| ApiError {
        code: "invalid_json",
        ..ApiError::invalid("body", format!("the body is not valid JSON: {error}"))
    })?;
    Ok(JsonBody { value, charge })
}

/// An upper bound on how many values there are beside the first: each follows a comma or the bracket of its list or object.
fn values(json: &[u8]) -> u64 {
    // Both opening brackets become one.
    let precedes_value = |&byte: &u8| u8::from(byte == b',') + u8::from(byte | 0x20 == b'{');
    // In pieces whose counts fit a byte, so that compilers can count many at once.
    json.chunks(255).map(|piece| u64::from(piece.iter().map(precedes_value).sum::<u8>())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_but_the_first_is_counted() {
        let json = [b"[".to_vec(), b"0,".repeat(1000), b"{\"a\": 1, \"b\": [2, 3]}]".to_vec()].concat();
        assert_eq!(values(&json), 1 + 1000 + 1 + 1 + 1 + 1);
        for only in [b',', b'[', b'{'] {
            assert_eq!(values(&[only; 5000]), 5000);
        }
        assert_eq!(values(&[b'x'; 5000]), 0);
    }
}
