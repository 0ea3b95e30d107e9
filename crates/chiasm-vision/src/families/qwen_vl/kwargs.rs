//! A request's `mm_processor_kwargs`, as vLLM 0.32 passes them to `Qwen2VLImageProcessor`.
//!
//! Unknown keys, which vLLM ignores with a warning, are refused here. So are settings that would
//! change the shape of the patches, and values that make the processor fail.

use serde_json::{Map, Value};

use crate::VisionError;

/// The supported keys.
const KNOWN: &[&str] = &["min_pixels", "max_pixels", "size.shortest_edge", "size.longest_edge"];

/// The bounds in a request; `None` means the model's own bound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kwargs {
    pub(crate) min_pixels: Option<u64>,
    pub(crate) max_pixels: Option<u64>,
}

/// Parses a request's kwargs.
///
/// With `completes_size`, `size` may lack an edge, which then is the model's. A `size` of null has
/// no edges.
///
/// # Errors
/// [`VisionError::UnknownKwarg`] and [`VisionError::InvalidKwarg`].
pub(crate) fn parse(
    kwargs: &Map<String, Value>,
    completes_size: bool,
) -> Result<Kwargs, VisionError> {
    let mut min_pixels = None;
    let mut max_pixels = None;
    let mut shortest_edge = None;
    let mut longest_edge = None;
    let mut has_size = false;
    for (key, value) in kwargs {
        match key.as_str() {
            "min_pixels" => min_pixels = Some(pixels("min_pixels", value)?),
            "max_pixels" => max_pixels = Some(pixels("max_pixels", value)?),
            "size" if value.is_null() => has_size = true,
            "size" => {
                has_size = true;
                let size = value.as_object().ok_or_else(|| VisionError::InvalidKwarg {
                    key: "size",
                    problem: "must be an object with shortest_edge and longest_edge".into(),
                })?;
                for (key, value) in size {
                    match key.as_str() {
                        "shortest_edge" => {
                            shortest_edge = Some(pixels("size.shortest_edge", value)?);
                        }
                        "longest_edge" => {
                            longest_edge = Some(pixels("size.longest_edge", value)?);
                        }
                        _ => return Err(unknown(format!("size.{key}"))),
                    }
                }
            }
            _ => return Err(unknown(key.clone())),
        }
    }
    // In the processor, `min_pixels` and `max_pixels` override the edges of `size`.
    let min_pixels = min_pixels.or(shortest_edge);
    let max_pixels = max_pixels.or(longest_edge);
    if has_size && !completes_size && (min_pixels.is_none() || max_pixels.is_none()) {
        return Err(VisionError::InvalidKwarg {
            key: "size",
            problem: "must have both shortest_edge and longest_edge for this model".into(),
        });
    }
    Ok(Kwargs { min_pixels, max_pixels })
}

/// Adds the edges of a request's `size` as `min_pixels` and `max_pixels`, unless it has these.
///
/// Follows `_complete_mm_processor_size_aliases` in vLLM's `qwen2_vl.py`.
pub(crate) fn add_size_aliases(request: &mut Map<String, Value>) {
    for (edge, pixels) in [("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")] {
        let value = request
            .get("size")
            .and_then(|size| size.get(edge))
            .filter(|value| !value.is_null())
            .cloned();
        if let Some(value) = value
            && !request.contains_key(pixels)
        {
            request.insert(pixels.into(), value);
        }
    }
}

/// Parses a number of pixels.
fn pixels(key: &'static str, value: &Value) -> Result<u64, VisionError> {
    value.as_u64().filter(|&pixels| pixels > 0).ok_or_else(|| VisionError::InvalidKwarg {
        key,
        problem: "must be an integer above 0 and below 2^64".into(),
    })
}

/// Creates the error for an unknown key.
fn unknown(key: String) -> VisionError {
    VisionError::UnknownKwarg { key, known: KNOWN }
}
