//! Request bodies that have arrived, understood as JSON.

use bytes::Bytes;
use chiasm_media::Charge;

use crate::cpu::{CpuBudget, price};
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::openai::{Intake, RequestBody};

/// Bodies up to this size are parsed at once, in less than 200 µs. Bigger ones are parsed off the async threads.
const SMALL: usize = 512 << 10;
/// And those with many values, each of which takes as long as a hundred bytes.
const FEW_VALUES: u64 = 4096;

/// A body that has been understood.
pub(crate) struct JsonBody<T> {
    pub(crate) request: T,
    /// The request's memory, counted until this is dropped.
    pub(crate) charge: Charge,
}

/// Understands a body that has arrived.
pub(crate) async fn parse<T: RequestBody>(
    frontend: &Frontend,
    cpu: &CpuBudget,
    body: Bytes,
) -> Result<JsonBody<T>, ApiError> {
    let values = values(&body);
    let small = body.len() <= SMALL && values <= FEW_VALUES;
    let cost = price::json(body.len(), values);
    let intake = Intake::new(body, &frontend.limits, frontend.door.budget());
    let parsed = frontend.cpu.run_or_here(small, cpu, cost, move || T::parse(intake)).await;
    let (request, charge) = parsed.map_err(|error| error.at("body"))??;
    Ok(JsonBody { request, charge })
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
