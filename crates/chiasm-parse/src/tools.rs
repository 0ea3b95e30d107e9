//! The functions that a model may call, and the types of their parameters.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// The maximum nesting depth of schemas that are visited.
const MAX_DEPTH: usize = 64;

/// The maximum number of schema visits for all functions of a request. A schema is visited once per
/// reference to it. A parameter whose schema is never visited is text.
const MAX_SCHEMA_VISITS: usize = 1 << 16;

/// The maximum number of values of `enum`, and of names in `type`, that one visit reads.
const MAX_VALUES: usize = 256;

/// The maximum size of a reference, and of a type's name. Longer ones are ignored, because each
/// visit would read them.
const MAX_NAME_BYTES: usize = 256;

/// The keys of a schema under which its alternatives, or its parts, are listed.
const ALTERNATIVES: [&str; 3] = ["anyOf", "oneOf", "allOf"];

/// The functions that a request offers to the model, with the types of their parameters.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    functions: HashMap<String, HashMap<String, Types>>,
}

impl Tools {
    /// Reads the functions' names and parameters, which are JSON schemas of objects. Formats that
    /// write every value as text need the schemas to distinguish numbers from text.
    pub fn new<'a>(functions: impl IntoIterator<Item = (&'a str, &'a Value)>) -> Self {
        let mut budget = MAX_SCHEMA_VISITS;
        let functions = functions.into_iter().map(|(name, parameters)| {
            let mut schemas = Schemas { root: parameters, budget, seen: HashSet::new() };
            let mut properties = Vec::new();
            schemas.add_properties(parameters, MAX_DEPTH, &mut properties);
            let mut types: HashMap<String, Types> = HashMap::new();
            for (key, schema) in properties {
                schemas.seen.clear();
                let own = Types::from_bits(schemas.types(schema, MAX_DEPTH));
                types.entry(key.to_owned()).and_modify(|types| types.0 |= own.0).or_insert(own);
            }
            budget = schemas.budget;
            (name.to_owned(), types)
        });
        Self { functions: functions.collect() }
    }

    /// Returns the possible types of a parameter, if they are known.
    pub(crate) fn types(&self, function: &str, parameter: &str) -> Option<Types> {
        self.functions.get(function)?.get(parameter).copied()
    }
}

/// A visitor of the schemas within a function's parameters.
struct Schemas<'a> {
    /// The schema that references are relative to.
    root: &'a Value,
    /// The number of schema visits that are left.
    budget: usize,
    /// The references that were followed. Each is followed once, so recursion ends.
    seen: HashSet<&'a str>,
}

impl<'a> Schemas<'a> {
    /// Adds the properties of an object's schema to `properties`.
    fn add_properties(
        &mut self,
        schema: &'a Value,
        depth: usize,
        properties: &mut Vec<(&'a str, &'a Value)>,
    ) {
        if !self.try_visit(depth) {
            return;
        }
        let own = schema.get("properties").and_then(Value::as_object);
        properties.extend(own.into_iter().flatten().map(|(key, schema)| (key.as_str(), schema)));
        let reference = reference(schema).filter(|reference| self.seen.insert(reference));
        if let Some(target) = reference.and_then(|reference| self.target(reference)) {
            self.add_properties(target, depth - 1, properties);
        }
        for alternative in alternatives(schema) {
            self.add_properties(alternative, depth - 1, properties);
        }
    }

    /// Returns the types of a schema.
    ///
    /// They are the types that vLLM reads (`extract_types_from_schema`,
    /// `vllm/tool_parsers/utils.py`): those of `type`, of the values of `enum`, and of the
    /// alternatives of `anyOf`, `oneOf` and `allOf`. The target of `$ref` adds its own.
    fn types(&mut self, schema: &'a Value, depth: usize) -> u8 {
        if !self.try_visit(depth) {
            return 0;
        }
        let mut types = 0;
        match schema.get("type") {
            Some(Value::String(name)) => types |= type_by_name(name),
            Some(Value::Array(names)) => {
                let names = names.iter().take(MAX_VALUES).filter_map(Value::as_str);
                names.for_each(|name| types |= type_by_name(name));
            }
            _ => {}
        }
        let values = schema.get("enum").and_then(Value::as_array);
        let values = values.into_iter().flatten().take(MAX_VALUES);
        values.for_each(|value| types |= type_of_value(value));
        let reference = reference(schema);
        // The types of a target that was visited before were added then.
        let is_seen = reference.is_some_and(|reference| !self.seen.insert(reference));
        if let Some(target) =
            reference.filter(|_| !is_seen).and_then(|reference| self.target(reference))
        {
            types |= self.types(target, depth - 1);
        }
        for alternative in alternatives(schema) {
            types |= self.types(alternative, depth - 1);
        }
        if types == 0 && !is_seen { type_by_keywords(schema) } else { types }
    }

    /// Returns `true` if a schema at this depth may be visited. Takes one visit from the budget
    /// either way.
    fn try_visit(&mut self, depth: usize) -> bool {
        let is_allowed = depth > 0 && self.budget > 0;
        self.budget = self.budget.saturating_sub(1);
        is_allowed
    }

    /// Returns the schema at a reference within the parameters: `#/$defs/NAME`.
    fn target(&self, reference: &str) -> Option<&'a Value> {
        self.root.pointer(reference.strip_prefix('#')?)
    }
}

fn reference(schema: &Value) -> Option<&str> {
    schema.get("$ref").and_then(Value::as_str).filter(|reference| reference.len() <= MAX_NAME_BYTES)
}

fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    ALTERNATIVES
        .into_iter()
        .flat_map(|key| schema.get(key).and_then(Value::as_array).into_iter().flatten())
}

/// Returns the type of a schema without `type`: an object or a list if the schema describes the
/// parts of one, else text.
fn type_by_keywords(schema: &Value) -> u8 {
    let has = |key: &str| schema.get(key).is_some();
    if has("properties") {
        return OBJECT;
    }
    if has("items") || has("prefixItems") {
        return ARRAY;
    }
    STRING
}

/// A set of types of JSON values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types(u8);

/// The bits of [`Types`], in the order in which a text is tried as each type.
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
    /// Any JSON value, or else text.
    pub(crate) const ANY: Self = Self(OBJECT | ARRAY | STRING);

    /// Creates a set of types. Without any type, the value is text.
    fn from_bits(types: u8) -> Self {
        if types == 0 { Self::STRING } else { Self(types) }
    }

    /// Returns `true` if every value that begins with `text` is text, so that the value can be
    /// streamed.
    pub(crate) fn allow_only_text_after(self, text: &str) -> bool {
        let has = |kind: u8| self.0 & kind != 0;
        let begins = |word: &str, text: &str| {
            word.as_bytes()
                .get(..text.len())
                .is_some_and(|word| word.eq_ignore_ascii_case(text.as_bytes()))
        };
        let trimmed = text.trim();
        let may_be_null = has(NULL) && begins("null", text);
        let may_be_number = has(INTEGER | NUMBER) && trimmed.bytes().all(is_number_byte);
        let words = ["true", "false", "1", "0"];
        let may_be_boolean = has(BOOLEAN) && words.iter().any(|word| begins(word, trimmed));
        let may_be_json = (has(OBJECT | ARRAY) || !has(STRING)) && json_may_begin_with(text);
        !may_be_null && !may_be_number && !may_be_boolean && !may_be_json
    }

    /// Converts a value from text to JSON of the first type that fits, in vLLM's order
    /// (`coerce_to_schema_type`).
    pub(crate) fn to_json(self, text: &str) -> String {
        let has = |kind: u8| self.0 & kind != 0;
        let json =
            |text: &str| serde_json::from_str::<Value>(text).ok().map(|_| text.trim().to_owned());
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
        let value = if has(OBJECT | ARRAY) || !has(STRING) { json(text) } else { None };
        value.unwrap_or_else(|| quoted(text))
    }
}

/// Returns `true` if a JSON value may begin with `text`.
pub(crate) fn json_may_begin_with(text: &str) -> bool {
    match serde_json::from_str::<Value>(text) {
        Ok(_) => true,
        Err(error) => error.is_eof(),
    }
}

/// Returns `true` for a byte that may occur in a Python number.
fn is_number_byte(byte: u8) -> bool {
    byte.is_ascii_digit() || b"+-._eE".contains(&byte)
}

/// Returns `text` as a JSON string, with quotes.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Converts an integer from Python's syntax to JSON.
fn integer(text: &str) -> Option<String> {
    let (sign, digits) = match text.as_bytes().first()? {
        b'-' => ("-", &text[1..]),
        b'+' => ("", &text[1..]),
        _ => ("", text),
    };
    // Single underscores may separate digits.
    let is_integer = digits
        .split('_')
        .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    if !is_integer {
        return None;
    }
    let digits = digits.replace('_', "");
    let significant = digits.trim_start_matches('0');
    if significant.is_empty() {
        return Some("0".to_owned());
    }
    Some(format!("{sign}{significant}"))
}

/// Converts a finite number to JSON. A number without a fraction becomes an integer.
fn number(text: &str) -> Option<String> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte));
    let number: f64 = text.parse().ok().filter(|number: &f64| is_plain && number.is_finite())?;
    if number == 0.0 {
        return Some("0".to_owned());
    }
    if number.fract() == 0.0 {
        return Some(format!("{number:.0}"));
    }
    serde_json::Number::from_f64(number).map(|number| number.to_string())
}

/// Returns the type of this name: JSON schema's own, or a name that users write instead.
fn type_by_name(name: &str) -> u8 {
    if name.len() > MAX_NAME_BYTES {
        return OTHER;
    }
    match name.trim().to_ascii_lowercase().as_str() {
        "null" => NULL,
        "integer" | "int" | "int32" | "int64" | "uint" | "uint32" | "uint64" | "long" | "short"
        | "unsigned" => INTEGER,
        "number" | "float" | "float32" | "float64" | "double" => NUMBER,
        "boolean" | "bool" => BOOLEAN,
        "object" | "dict" => OBJECT,
        "array" | "arr" | "list" | "sequence" => ARRAY,
        "string" | "str" | "text" | "varchar" | "char" | "enum" => STRING,
        _ => OTHER,
    }
}

fn type_of_value(value: &Value) -> u8 {
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
