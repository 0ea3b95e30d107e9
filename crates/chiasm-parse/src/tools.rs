//! The functions that a model may call, and the types of their parameters.

use std::collections::HashMap;

use serde_json::Value;

/// Schemas within schemas that are looked at.
const DEPTH: usize = 64;

/// The functions that a request offers to the model, by name.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    functions: HashMap<String, HashMap<String, Types>>,
}

impl Tools {
    /// Reads the functions' parameters, which are JSON schemas of objects. Formats that write every value as text need them to tell a
    /// number from a text of digits.
    pub fn new<'a>(functions: impl IntoIterator<Item = (&'a str, &'a Value)>) -> Self {
        let functions = functions.into_iter().map(|(name, parameters)| {
            let properties = parameters.get("properties").and_then(Value::as_object);
            let types = properties.into_iter().flatten().map(|(key, schema)| (key.clone(), Types::of(schema, DEPTH)));
            (name.to_owned(), types.collect())
        });
        Self { functions: functions.collect() }
    }

    /// What a parameter may be, if that is known.
    pub(crate) fn types(&self, function: &str, parameter: &str) -> Option<Types> {
        self.functions.get(function)?.get(parameter).copied()
    }
}

/// Types of JSON values, as a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types(u8);

/// In the order in which a text is tried to be one of them.
const NULL: u8 = 1;
const INTEGER: u8 = 2;
const NUMBER: u8 = 4;
const BOOLEAN: u8 = 8;
const OBJECT: u8 = 16;
const ARRAY: u8 = 32;
const STRING: u8 = 64;
/// A type that JSON schemas don't know.
const OTHER: u8 = 128;

impl Types {
    pub(crate) const STRING: Self = Self(STRING);
    /// Whatever it is as JSON, or else text.
    pub(crate) const ANY: Self = Self(OBJECT | ARRAY | STRING);

    /// What vLLM reads from a schema (`extract_types_from_schema`, `vllm/tool_parsers/utils.py`): `type`, the values of `enum`, and
    /// the alternatives of `anyOf`, `oneOf` and `allOf`; text, where there is none of these.
    fn of(schema: &Value, depth: usize) -> Self {
        let mut types = 0;
        match schema.get("type") {
            Some(Value::String(name)) => types |= by_name(name),
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).for_each(|name| types |= by_name(name)),
            _ => {}
        }
        let values = schema.get("enum").and_then(Value::as_array);
        values.into_iter().flatten().for_each(|value| types |= of_value(value));
        for alternatives in ["anyOf", "oneOf", "allOf"] {
            let list = schema.get(alternatives).and_then(Value::as_array);
            for alternative in list.into_iter().flatten().filter(|_| depth > 0) {
                types |= Self::of(alternative, depth - 1).0;
            }
        }
        if types == 0 { Self::STRING } else { Self(types) }
    }

    /// Whether a value is text whatever it says, so that it can be passed on before its end is known.
    pub(crate) fn are_text(self) -> bool {
        self == Self::STRING
    }

    /// The value of [`Self::read`].
    pub(crate) fn value(self, text: &str) -> Value {
        serde_json::from_str(&self.read(text)).unwrap_or_else(|_| Value::from(text))
    }

    /// The JSON of a value that was written as text: the first type that it can be, as vLLM tries them (`coerce_to_schema_type`).
    pub(crate) fn read(self, text: &str) -> String {
        let has = |kind: u8| self.0 & kind != 0;
        let json = |text: &str| serde_json::from_str::<Value>(text).ok().map(|_| text.trim().to_owned());
        let trimmed = text.trim();
        if has(NULL) && text.eq_ignore_ascii_case("null") {
            return "null".to_owned();
        }
        if has(INTEGER | NUMBER)
            && let Some(integer) = integer(trimmed)
        {
            return integer;
        }
        if has(NUMBER)
            && let Some(number) = number(trimmed)
        {
            return number;
        }
        if has(BOOLEAN) {
            match trimmed.to_ascii_lowercase().as_str() {
                "true" | "1" => return "true".to_owned(),
                "false" | "0" => return "false".to_owned(),
                _ => {}
            }
        }
        let read = if has(OBJECT | ARRAY) || !has(STRING) { json(text) } else { None };
        read.unwrap_or_else(|| quoted(text))
    }
}

/// A JSON string of this text.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A whole number as Python reads it, as JSON writes it.
fn integer(text: &str) -> Option<String> {
    let (sign, digits) = match text.as_bytes().first()? {
        b'-' => ("-", &text[1..]),
        b'+' => ("", &text[1..]),
        _ => ("", text),
    };
    // Single underlines stand between digits.
    let is_number = digits.split('_').all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    let digits = digits.replace('_', "");
    let significant = digits.trim_start_matches('0');
    match (is_number, significant) {
        (false, _) => None,
        (true, "") => Some("0".to_owned()),
        (true, significant) => Some(format!("{sign}{significant}")),
    }
}

/// A finite number. One without a fraction is written as a whole one.
fn number(text: &str) -> Option<String> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    let number: f64 = text.parse().ok().filter(|number: &f64| plain && number.is_finite())?;
    if number == 0.0 {
        return Some("0".to_owned());
    }
    if number.fract() == 0.0 {
        return Some(format!("{number:.0}"));
    }
    serde_json::Number::from_f64(number).map(|number| number.to_string())
}

/// A type by its name in a schema, or by one of those that models' users write instead.
fn by_name(name: &str) -> u8 {
    match name.trim().to_ascii_lowercase().as_str() {
        "null" => NULL,
        "integer" | "int" | "int32" | "int64" | "uint" | "uint32" | "uint64" | "long" | "short" | "unsigned" => INTEGER,
        "number" | "float" | "float32" | "float64" | "double" => NUMBER,
        "boolean" | "bool" => BOOLEAN,
        "object" | "dict" => OBJECT,
        "array" | "arr" | "list" | "sequence" => ARRAY,
        "string" | "str" | "text" | "varchar" | "char" | "enum" => STRING,
        _ => OTHER,
    }
}

fn of_value(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(number) if number.is_f64() => NUMBER,
        Value::Number(_) => INTEGER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}
