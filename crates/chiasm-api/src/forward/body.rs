//! A body that is passed on: what it says, and where the model's name is in it.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_media::Charge;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::openai::{Intake, RequestBody};

/// A body that is passed on. Only the model's name is read; any JSON object is taken.
#[derive(Debug)]
pub struct ForwardBody {
    /// The body as it came.
    pub body: Bytes,
    /// The place of the model's name in `body`, with its quotes; `None` if there is no such field.
    pub model: Option<Range<usize>>,
    /// The model's name; `None` if it is no string.
    pub name: Option<String>,
    /// All fields of the body.
    pub fields: Arc<Map<String, Value>>,
}

/// Finds a field without reading the others.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow, default, deserialize_with = "as_it_is")]
    model: Option<&'a RawValue>,
}

/// Null is a value here.
fn as_it_is<'de: 'a, 'a, D: Deserializer<'de>>(value: D) -> Result<Option<&'a RawValue>, D::Error> {
    <&RawValue>::deserialize(value).map(Some)
}

impl ForwardBody {
    /// The number of JSON values within the fields, which parsing the body again depends on.
    pub fn values(&self) -> u64 {
        self.fields.values().map(values).sum()
    }
}

impl RequestBody for ForwardBody {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let body = intake.body();
        let Value::Object(fields) = intake.read::<Value>()? else {
            return Err(ApiError::invalid("body", "must be a JSON object"));
        };
        let model = place_of_model(intake.json())?
            .map(|place| intake.in_body(place.start)..intake.in_body(place.end));
        let name = fields.get("model").and_then(Value::as_str).map(str::to_owned);
        intake.take_for("body", body.len() as u64)?;
        Ok((Self { body, model, name, fields: Arc::new(fields) }, intake.into_charge()))
    }
}

/// Returns the place of the field `model` in a JSON object, with quotes; `None` if there is none.
///
/// # Errors
/// The text is no JSON object.
pub fn place_of_model(json: &[u8]) -> Result<Option<Range<usize>>, ApiError> {
    let head: Head<'_> = serde_json::from_slice(json).map_err(ApiError::invalid_json)?;
    Ok(head.model.map(|model| {
        let begin = model.get().as_ptr() as usize - json.as_ptr() as usize;
        begin..begin + model.get().len()
    }))
}

/// The JSON values below one.
fn values(value: &Value) -> u64 {
    match value {
        Value::Array(list) => list.iter().map(|value| 1 + values(value)).sum(),
        Value::Object(fields) => fields.values().map(|value| 1 + values(value)).sum(),
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
    fn the_models_name_is_found_behind_long_strings() {
        let long = "A".repeat(10_000);
        for body in [
            format!(r#"{{"model": "m", "prompt": "{long}"}}"#),
            format!(r#"{{"prompt": "{long}", "stop": ["{long}", "é"], "model": "m"}}"#),
            format!("{{\"prompt\": \"{long}\",\n\"model\"\n:\"m\" , \"user\": \"{long}\"}}"),
        ] {
            let value: Value = serde_json::from_str(&body).unwrap();
            let (request, _) = ForwardBody::parse(intake(&body)).unwrap();
            assert_eq!(&request.body[request.model.unwrap()], b"\"m\"");
            assert_eq!(Value::Object(Arc::unwrap_or_clone(request.fields)), value);
        }
        let body = format!(r#"{{"prompt": "{long}", "model": "{long}"}}"#);
        let (request, _) = ForwardBody::parse(intake(&body)).unwrap();
        assert_eq!(&request.body[request.model.unwrap()], format!("\"{long}\"").as_bytes());
    }
}
