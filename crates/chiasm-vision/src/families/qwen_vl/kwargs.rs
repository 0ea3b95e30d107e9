//! `mm_processor_kwargs` of a request, as vLLM 0.32 hands them to `Qwen2VLImageProcessor`.
//!
//! What vLLM ignores with a warning (an unknown key) is refused here; so is every setting that
//! would change the shape of the patches. Values that make the processor fail are refused before it
//! would.

use serde_json::{Map, Value};

use crate::VisionError;

const KNOWN: &[&str] = &["min_pixels", "max_pixels", "size.shortest_edge", "size.longest_edge"];

/// What a request asks for; what it leaves open is the model's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kwargs {
    pub(super) min_pixels: Option<u64>,
    pub(super) max_pixels: Option<u64>,
}

/// `completes_size`: whether a `size` may leave an edge open, which then is the model's.
pub(super) fn parse(
    kwargs: &Map<String, Value>,
    completes_size: bool,
) -> Result<Kwargs, VisionError> {
    let (mut min_pixels, mut max_pixels) = (None, None);
    let (mut shortest, mut longest) = (None, None);
    let mut has_size = false;
    for (key, value) in kwargs {
        match key.as_str() {
            "min_pixels" => min_pixels = Some(pixels("min_pixels", value)?),
            "max_pixels" => max_pixels = Some(pixels("max_pixels", value)?),
            "size" if value.is_null() && completes_size => {}
            "size" => {
                has_size = true;
                let size = value.as_object().ok_or_else(|| VisionError::InvalidKwarg {
                    key: "size",
                    problem: "must be an object with shortest_edge and longest_edge".into(),
                })?;
                for (key, value) in size {
                    match key.as_str() {
                        "shortest_edge" => shortest = Some(pixels("size.shortest_edge", value)?),
                        "longest_edge" => longest = Some(pixels("size.longest_edge", value)?),
                        _ => return Err(unknown(format!("size.{key}"))),
                    }
                }
            }
            _ => return Err(unknown(key.clone())),
        }
    }
    // The processor lets these two win over the edges of `size`.
    let min_pixels = min_pixels.or(shortest);
    let max_pixels = max_pixels.or(longest);
    if has_size && !completes_size && (min_pixels.is_none() || max_pixels.is_none()) {
        return Err(VisionError::InvalidKwarg {
            key: "size",
            problem: "must have both shortest_edge and longest_edge for this model".into(),
        });
    }
    Ok(Kwargs { min_pixels, max_pixels })
}

/// The edges of a `size` as `min_pixels` and `max_pixels` too, where the request does not have
/// these (`_complete_mm_processor_size_aliases` in vLLM's `qwen2_vl.py`). A `size` of null says
/// nothing if sizes are completed.
pub(super) fn add_pixels_of_edges(request: &mut Map<String, Value>, completes_size: bool) {
    if completes_size && request.get("size").is_some_and(Value::is_null) {
        request.remove("size");
    }
    for (edge, pixels) in [("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")] {
        let value = request
            .get("size")
            .and_then(|size| size.get(edge))
            .filter(|value| !value.is_null())
            .cloned();
        if let (Some(value), false) = (value, request.contains_key(pixels)) {
            request.insert(pixels.into(), value);
        }
    }
}

fn pixels(key: &'static str, value: &Value) -> Result<u64, VisionError> {
    value.as_u64().filter(|&pixels| pixels > 0).ok_or_else(|| VisionError::InvalidKwarg {
        key,
        problem: "must be an integer above 0 and below 2^64".into(),
    })
}

fn unknown(key: String) -> VisionError {
    VisionError::UnknownKwarg { key, known: KNOWN }
}
