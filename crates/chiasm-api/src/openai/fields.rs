//! A JSON object whose fields are taken one by one, so that whatever nobody took can be refused by
//! name.

use std::fmt::Display;
use std::ops::RangeBounds;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::ApiError;

/// The fields of one JSON object that have not been taken yet, and where the object is in the
/// request.
pub struct Fields {
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The fields of the request itself.
    pub fn of(map: Map<String, Value>) -> Self {
        Self { path: String::new(), map }
    }

    /// `path` is empty for the request itself, else such as `messages[2]`.
    pub fn new(value: Value, path: impl Into<String>) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => {
                let param = if path.is_empty() { "body" } else { &path };
                Err(ApiError::invalid(param, format!("expected an object, got {}", kind(&other))))
            }
        }
    }

    /// What `take` takes of a request, which must have no other fields.
    #[cfg(test)]
    pub fn all_taken<T>(
        body: Value,
        take: impl FnOnce(&mut Self) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut fields = Self::new(body, "")?;
        let taken = take(&mut fields)?;
        fields.finish()?;
        Ok(taken)
    }

    /// The field's full name, such as `messages[2].content`.
    pub fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// A field that has not been taken yet, unless it is `null`.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Takes a field; absent and `null` are the same, as in OpenAI's API.
    pub fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, ApiError> {
        match self.map.shift_remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(integer(value)).map(Some).map_err(|error| {
                let name = self.name(field);
                ApiError::invalid(&name, format!("'{name}': {error}"))
            }),
        }
    }

    /// Takes a number and checks its range; `range_text` is what an error says of it.
    pub fn take_in<T>(
        &mut self,
        field: &str,
        range: impl RangeBounds<T>,
        range_text: &str,
    ) -> Result<Option<T>, ApiError>
    where
        T: DeserializeOwned + PartialOrd + Display,
    {
        let value = self.take(field)?;
        if let Some(value) = &value
            && !range.contains(value)
        {
            let name = self.name(field);
            return Err(ApiError::invalid(
                &name,
                format!("'{name}' must be {range_text}, got {value}"),
            ));
        }
        Ok(value)
    }

    /// Takes a field that Chiasm does not implement: refused unless it has a value that asks for
    /// nothing.
    pub fn refuse_unless(
        &mut self,
        field: &str,
        asks_for_nothing: impl Fn(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.map.shift_remove(field) {
            Some(value) if !value.is_null() && !asks_for_nothing(&value) => {
                Err(ApiError::unsupported(self.name(field)))
            }
            _ => Ok(()),
        }
    }

    /// Drops fields that do not change the answer.
    pub fn ignore(&mut self, fields: &[&str]) {
        for field in fields {
            self.map.shift_remove(*field);
        }
    }

    /// Refuses whatever was not taken.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            Some((field, _)) => Err(ApiError::unsupported(self.name(field))),
            None => Ok(()),
        }
    }
}

/// A number such as `16.0` as the integer that it is: clients whose JSON has one kind of number,
/// such as Gson's maps, write all so.
fn integer(value: Value) -> Value {
    /// Those below are exact.
    const BOUND: f64 = (1_u64 << 53) as f64;
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() < BOUND => {
            Value::from(number as i64)
        }
        _ => value,
    }
}

/// The JSON type of a value, for messages.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_nobody_took_is_refused_by_its_full_name() {
        let mut fields = Fields::new(json!({"a": 1, "b": null, "c": 2}), "x[0]").unwrap();
        assert_eq!(fields.take::<u32>("a").unwrap(), Some(1));
        assert_eq!(fields.finish().unwrap_err().param.as_deref(), Some("x[0].c"));
    }

    #[test]
    fn an_integer_may_be_written_as_a_float() {
        let taken = |value: Value| {
            Fields::new(json!({"n": value}), "").unwrap().take::<u64>("n").map_err(|_| ())
        };
        assert_eq!(taken(json!(16.0)), Ok(Some(16)));
        for wrong in [json!(16.5), json!(-16.0), json!(1e300), json!("16.0"), json!([16.0])] {
            assert_eq!(taken(wrong), Err(()));
        }
        let mut fields = Fields::new(json!({"t": 1.0, "u": 0.5}), "").unwrap();
        assert_eq!(
            (fields.take::<f64>("t").unwrap(), fields.take::<f64>("u").unwrap()),
            (Some(1.0), Some(0.5))
        );
    }

    #[test]
    fn a_wrong_type_names_the_field() {
        let mut fields = Fields::new(json!({"n": "two"}), "").unwrap();
        assert_eq!(fields.take::<u32>("n").unwrap_err().param.as_deref(), Some("n"));
    }

    #[test]
    fn ranges_are_checked_and_nan_cannot_be_written_in_json() {
        let mut fields = Fields::new(json!({"t": 2.5, "u": 1.5}), "").unwrap();
        assert!(fields.take_in("t", 0.0..=2.0, "from 0 to 2").is_err());
        assert_eq!(fields.take_in("u", 0.0..=2.0, "from 0 to 2").unwrap(), Some(1.5));
    }

    #[test]
    fn a_field_that_asks_for_nothing_is_let_through() {
        let mut fields = Fields::new(json!({"tools": [], "echo": true}), "").unwrap();
        fields.refuse_unless("tools", |v| v.as_array().is_some_and(Vec::is_empty)).unwrap();
        assert!(fields.refuse_unless("echo", |v| v == &json!(false)).is_err());
    }
}
