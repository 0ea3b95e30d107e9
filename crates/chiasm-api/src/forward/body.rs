//! The body of a forwarded request, its fields and the position of the model's name.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_media::Charge;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::openai::{Intake, RequestBody};

/// The body of a forwarded request. Any JSON object is accepted; only the model's name is read.
#[derive(Debug)]
pub struct ForwardBody {
    /// The unmodified body.
    pub body: Bytes,
    /// The byte range of the model's name in `body`, with its quotes; `None` if the field is
    /// missing.
    pub model_range: Option<Range<usize>>,
    /// The model's name; `None` if the field is missing or not a string.
    pub model_name: Option<String>,
    /// All fields of the body.
    pub fields: Arc<Map<String, Value>>,
}

/// The field `model` of a body, borrowed; other fields are skipped.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow, default, deserialize_with = "raw_value")]
    model: Option<&'a RawValue>,
}

/// Deserializes any value, and keeps `null` as a value.
fn raw_value<'de: 'a, 'a, D: Deserializer<'de>>(
    value: D,
) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(value).map(Some)
}

impl ForwardBody {
    /// Returns the number of JSON values nested in the fields, which determines the cost of parsing
    /// the body again.
    pub fn count_values(&self) -> u64 {
        self.fields.values().map(count_nested).sum()
    }
}

impl RequestBody for ForwardBody {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let body = intake.body();
        let Value::Object(fields) = intake.read::<Value>()? else {
            return Err(ApiError::invalid("body", "the body must be a JSON object"));
        };
        let model_range = model_name_range(intake.json())?
            .map(|range| intake.body_offset(range.start)..intake.body_offset(range.end));
        let model_name = fields.get("model").and_then(Value::as_str).map(str::to_owned);
        intake.reserve_for("body", body.len() as u64)?;
        let fields = Arc::new(fields);
        Ok((Self { body, model_range, model_name, fields }, intake.into_charge()))
    }
}

/// Returns the byte range of the field `model` in a JSON object, with quotes; `None` if the field
/// is missing.
///
/// # Errors
/// Fails if the text is not a JSON object.
pub fn model_name_range(json: &[u8]) -> Result<Option<Range<usize>>, ApiError> {
    let head: Head<'_> = serde_json::from_slice(json).map_err(ApiError::invalid_json)?;
    Ok(head.model.map(|model| {
        let begin = model.get().as_ptr() as usize - json.as_ptr() as usize;
        begin..begin + model.get().len()
    }))
}

/// Returns the number of JSON values nested in `value`.
fn count_nested(value: &Value) -> u64 {
    match value {
        Value::Array(list) => list.iter().map(|value| 1 + count_nested(value)).sum(),
        Value::Object(fields) => fields.values().map(|value| 1 + count_nested(value)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use chiasm_media::ByteBudget;

    use super::*;
    use crate::openai::BodyLimits;

    fn intake(body: &str) -> Intake {
        Intake::new(body.to_owned().into(), &BodyLimits::default(), &ByteBudget::new(1 << 30))
    }

    #[test]
    fn model_name_after_long_strings_is_found() {
        let long = "A".repeat(10_000);
        for body in [
            format!(r#"{{"model": "m", "prompt": "{long}"}}"#),
            format!(r#"{{"prompt": "{long}", "stop": ["{long}", "é"], "model": "m"}}"#),
            format!("{{\"prompt\": \"{long}\",\n\"model\"\n:\"m\" , \"user\": \"{long}\"}}"),
        ] {
            let value: Value = serde_json::from_str(&body).unwrap();
            let (request, _) = ForwardBody::parse(intake(&body)).unwrap();
            assert_eq!(&request.body[request.model_range.unwrap()], b"\"m\"");
            assert_eq!(Value::Object(Arc::unwrap_or_clone(request.fields)), value);
        }
        let body = format!(r#"{{"prompt": "{long}", "model": "{long}"}}"#);
        let (request, _) = ForwardBody::parse(intake(&body)).unwrap();
        assert_eq!(&request.body[request.model_range.unwrap()], format!("\"{long}\"").as_bytes());
    }
}
