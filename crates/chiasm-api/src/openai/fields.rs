//! A JSON object whose fields are taken one by one, so that remaining fields can be refused by
//! name.

use std::fmt::Display;
use std::ops::RangeBounds;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::type_errors;
use crate::error::{ApiError, excerpt};

/// The names of fields in other APIs and in older versions of vLLM, and what to use instead.
const RENAMED: [(&str, &str); 12] = [
    ("functions", "tools"),
    ("function_call", "tool_choice"),
    ("guided_json", "structured_outputs.json"),
    ("guided_regex", "structured_outputs.regex"),
    ("guided_choice", "structured_outputs.choice"),
    ("guided_grammar", "structured_outputs.grammar"),
    ("max_tokens", "max_output_tokens"),
    ("max_output_tokens", "max_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_tokens"),
    ("stop", "stop_sequences"),
    ("stop_sequences", "stop"),
];
/// The least similarity of a name that is suggested for an unknown one, from 0 to 1.
const MIN_SIMILARITY: f64 = 0.885;

/// The remaining fields of a JSON object, and the path of the object in the request.
pub struct Fields {
    path: String,
    map: Map<String, Value>,
    /// The fields that were taken, present or not: the names to suggest for unknown ones.
    known: Vec<&'static str>,
}

impl Fields {
    /// Creates the top-level fields of a request.
    pub fn from_map(map: Map<String, Value>) -> Self {
        Self { path: String::new(), map, known: Vec::new() }
    }

    /// Creates the fields of an object at `path`, such as `messages[2]`. The path of the request
    /// itself is empty.
    ///
    /// # Errors
    /// Fails if `value` is not an object.
    pub fn new(value: Value, path: impl Into<String>) -> Result<Self, ApiError> {
        let path = path.into();
        match value {
            Value::Object(map) => Ok(Self { path, map, known: Vec::new() }),
            other => {
                let param = if path.is_empty() { "body" } else { &path };
                let message = format!("'{param}': expected an object, got {}", kind(&other));
                Err(ApiError::invalid(param, message))
            }
        }
    }

    /// Calls `take` on a request and refuses all remaining fields.
    #[cfg(test)]
    pub fn take_all<T>(
        body: Value,
        take: impl FnOnce(&mut Self) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let mut fields = Self::new(body, "")?;
        let taken = take(&mut fields)?;
        fields.finish()?;
        Ok(taken)
    }

    /// Returns the field's full name, such as `messages[2].content`.
    pub fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// Returns a remaining field; `None` if it is absent or `null`.
    pub fn get(&self, field: &str) -> Option<&Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    /// Takes a field. `null` is the same as absent, as in OpenAI's API.
    ///
    /// # Errors
    /// Fails if the value is not a `T`.
    pub fn take<T: DeserializeOwned>(
        &mut self,
        field: &'static str,
    ) -> Result<Option<T>, ApiError> {
        self.known.push(field);
        match self.map.shift_remove(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(to_integer(value)).map(Some).map_err(|error| {
                let name = self.name(field);
                let message = type_errors::reword(&error.to_string());
                ApiError::invalid(&name, format!("'{name}': {message}"))
            }),
        }
    }

    /// Takes a number and checks its range. Errors describe the range by `range_text`.
    pub fn take_in<T>(
        &mut self,
        field: &'static str,
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

    /// Takes a field that Chiasm does not implement.
    ///
    /// # Errors
    /// Fails unless the field is absent, `null`, or has a value for which `is_noop` returns `true`.
    pub fn refuse_unless(
        &mut self,
        field: &str,
        is_noop: impl Fn(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.map.shift_remove(field) {
            Some(value) if !value.is_null() && !is_noop(&value) => {
                Err(self.unsupported(field, self.renamed(field)))
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

    /// Refuses any remaining field that is not `null`.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            Some((field, _)) => {
                Err(self.unsupported(field, self.renamed(field).or_else(|| self.similar(field))))
            }
            None => Ok(()),
        }
    }

    /// Returns the error for an unsupported field, with the name of a supported one if the client
    /// may have meant that.
    fn unsupported(&self, field: &str, meant: Option<&str>) -> ApiError {
        let error = ApiError::unsupported(self.name(field));
        let Some(meant) = meant else { return error };
        let [name, meant] = [field, meant].map(|field| self.name(field));
        let message = format!("'{}' is not supported; did you mean '{meant}'?", excerpt(&name));
        ApiError { message, ..error }
    }

    /// Returns this API's name for a field of another API.
    fn renamed(&self, field: &str) -> Option<&'static str> {
        let is_known = |name: &&'static str| {
            name.split('.').next().is_some_and(|first| self.known.contains(&first))
        };
        RENAMED.iter().filter(|(old, _)| *old == field).map(|(_, new)| *new).find(is_known)
    }

    /// Returns the known field whose name is most similar, if one is similar.
    fn similar(&self, field: &str) -> Option<&'static str> {
        let field = excerpt(field);
        let similarity = |known: &&'static str| (strsim::jaro(known, &field), *known);
        let nearest = self.known.iter().map(similarity).max_by(|(a, _), (b, _)| a.total_cmp(b));
        nearest.filter(|(similarity, _)| *similarity >= MIN_SIMILARITY).map(|(_, known)| known)
    }
}

/// Converts a number such as `16.0` to an integer. Clients whose JSON has one kind of number, such
/// as Gson's maps, write all integers like this.
fn to_integer(value: Value) -> Value {
    /// The bound below which floats represent integers exactly.
    const EXACT_BOUND: f64 = (1_u64 << 53) as f64;
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && number.abs() < EXACT_BOUND => {
            Value::from(number as i64)
        }
        _ => value,
    }
}

/// Returns the JSON type of a value, for error messages.
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
    fn remaining_field_is_refused_by_full_name() {
        let mut fields = Fields::new(json!({"a": 1, "b": null, "c": 2}), "x[0]").unwrap();
        assert_eq!(fields.take::<u32>("a").unwrap(), Some(1));
        assert_eq!(fields.finish().unwrap_err().param.as_deref(), Some("x[0].c"));
    }

    #[test]
    fn intended_field_is_suggested() {
        let message = |field: &str| {
            let mut fields = Fields::new(json!({field: 1}), "").unwrap();
            for known in ["max_output_tokens", "temperature", "tools", "structured_outputs"] {
                fields.take::<Value>(known).unwrap();
            }
            let used = fields.refuse_unless("functions", |_| false);
            used.and_then(|()| fields.finish()).unwrap_err().message
        };
        for (field, meant) in [
            ("temprature", "temperature"),
            ("max_tokens", "max_output_tokens"),
            ("functions", "tools"),
            ("guided_json", "structured_outputs.json"),
        ] {
            let expected = format!("'{field}' is not supported; did you mean '{meant}'?");
            assert_eq!(message(field), expected);
        }
        // Nothing is similar, or the endpoint lacks the field of that name.
        for field in ["moderation", "stop"] {
            let expected = format!("'{field}' is not supported; remove it from the request");
            assert_eq!(message(field), expected);
        }
    }

    #[test]
    fn integer_written_as_float_is_accepted() {
        let take_integer = |value: Value| {
            Fields::new(json!({"n": value}), "").unwrap().take::<u64>("n").map_err(|_| ())
        };
        assert_eq!(take_integer(json!(16.0)), Ok(Some(16)));
        for wrong in [json!(16.5), json!(-16.0), json!(1e300), json!("16.0"), json!([16.0])] {
            assert_eq!(take_integer(wrong), Err(()));
        }
        let mut fields = Fields::new(json!({"t": 1.0, "u": 0.5}), "").unwrap();
        assert_eq!(
            (fields.take::<f64>("t").unwrap(), fields.take::<f64>("u").unwrap()),
            (Some(1.0), Some(0.5))
        );
    }

    #[test]
    fn wrong_type_names_field() {
        let mut fields = Fields::new(json!({"n": "two"}), "").unwrap();
        let error = fields.take::<u32>("n").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
        assert_eq!(error.message, r#"'n': expected a whole number of at least 0, got "two""#);
        let error = Fields::new(json!("x"), "stream_options").err().unwrap();
        assert_eq!(error.message, "'stream_options': expected an object, got a string");
    }

    #[test]
    fn number_out_of_range_is_refused() {
        let mut fields = Fields::new(json!({"t": 2.5, "u": 1.5}), "").unwrap();
        assert!(fields.take_in("t", 0.0..=2.0, "from 0 to 2").is_err());
        assert_eq!(fields.take_in("u", 0.0..=2.0, "from 0 to 2").unwrap(), Some(1.5));
    }

    #[test]
    fn noop_value_of_unsupported_field_is_accepted() {
        let mut fields = Fields::new(json!({"tools": [], "echo": true}), "").unwrap();
        fields.refuse_unless("tools", |v| v.as_array().is_some_and(Vec::is_empty)).unwrap();
        assert!(fields.refuse_unless("echo", |v| v == &json!(false)).is_err());
    }
}
