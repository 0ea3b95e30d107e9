//! `response_format` and `structured_outputs`: the constraint on an answer's text. The two fields
//! may give at most one constraint.

use chiasm_backend::Constraint;
use chiasm_backend::Structured;
use serde_json::{Map, Value};

use super::fields::{Fields, kind};
use super::type_errors;
use crate::error::{ApiError, excerpt};

/// The maximum nesting depth of a schema: vLLM's limit (`check_json_nesting`,
/// `vllm/sampling_params.py`).
const MAX_SCHEMA_DEPTH: usize = 64;
/// The maximum nesting depth of a structural tag: vLLM's limit.
const MAX_TAG_DEPTH: usize = 80;
/// The maximum size of a schema, a regular expression, a grammar or all choices. Engines compile
/// them, which takes time and memory.
const MAX_CONSTRAINT_BYTES: usize = 256 << 10;
/// The maximum number of choices.
const MAX_CHOICES: usize = 4096;

const FORMAT: &str = "response_format";
const SCHEMA: &str = "response_format.json_schema.schema";
const STRUCTURED: &str = "structured_outputs";

/// The kinds of `structured_outputs`, each with its path for errors.
const KINDS: [(&str, &str); 6] = [
    ("json", "structured_outputs.json"),
    ("json_object", "structured_outputs.json_object"),
    ("regex", "structured_outputs.regex"),
    ("choice", "structured_outputs.choice"),
    ("grammar", "structured_outputs.grammar"),
    ("structural_tag", "structured_outputs.structural_tag"),
];

/// Takes both fields. As in vLLM, two constraints are refused: neither field overrides the other.
pub(super) fn take(fields: &mut Fields) -> Result<Option<Structured>, ApiError> {
    let format = match fields.take::<Value>(FORMAT)? {
        Some(format) => read_format(format)?,
        None => None,
    };
    let outputs = match fields.take::<Value>(STRUCTURED)? {
        Some(outputs) => Some(read_outputs(outputs)?),
        None => None,
    };
    match (format, outputs) {
        (Some(_), Some(_)) => Err(ApiError::invalid(
            STRUCTURED,
            "only one of 'response_format' and 'structured_outputs' may have a constraint",
        )),
        (format, outputs) => Ok(format.or(outputs)),
    }
}

/// Reads `response_format`; `None` for plain text.
fn read_format(format: Value) -> Result<Option<Structured>, ApiError> {
    let mut fields = Fields::new(format.clone(), FORMAT)?;
    let kind: String =
        fields.take("type")?.ok_or_else(|| ApiError::missing("response_format.type"))?;
    let mut field = FORMAT;
    let constraint = match kind.as_str() {
        "text" => None,
        "json_object" => Some(Constraint::JsonObject),
        "json_schema" => {
            let inner = fields
                .take("json_schema")?
                .ok_or_else(|| ApiError::missing("response_format.json_schema"))?;
            let mut inner = Fields::new(inner, "response_format.json_schema")?;
            let schema = inner.take("schema")?.ok_or_else(|| ApiError::missing(SCHEMA))?;
            // The schema is always enforced.
            inner.ignore(&["name", "description", "strict"]);
            inner.finish()?;
            field = SCHEMA;
            Some(json_schema(schema, SCHEMA)?)
        }
        "structural_tag" => {
            fields.ignore(&["format", "structures", "triggers"]);
            Some(structural_tag(format, FORMAT)?)
        }
        other => {
            let other = excerpt(other);
            let known = "text, json_object, json_schema or structural_tag";
            return Err(ApiError::invalid(
                "response_format.type",
                format!("'response_format.type' must be {known}, got '{other}'"),
            ));
        }
    };
    fields.finish()?;
    Ok(constraint.map(|constraint| Structured { constraint, field }))
}

/// Reads `structured_outputs`, which must have exactly one constraint.
fn read_outputs(outputs: Value) -> Result<Structured, ApiError> {
    let mut fields = Fields::new(outputs, STRUCTURED)?;
    let mut given = Vec::new();
    for (name, field) in KINDS {
        given.extend(fields.take::<Value>(name)?.map(|value| (name, field, value)));
    }
    fields.refuse_unless("disable_any_whitespace", |value| value == false)?;
    fields.refuse_unless("disable_additional_properties", |value| value == false)?;
    fields.finish()?;
    let [(name, field, value)] = <[_; 1]>::try_from(given).map_err(|given| {
        let kinds = KINDS.map(|(name, _)| name).join(", ");
        let given = given.len();
        let message = format!("'{STRUCTURED}' must have exactly one of {kinds}, got {given}");
        ApiError::invalid(STRUCTURED, message)
    })?;
    let constraint = match name {
        "json" => json_schema(parse_json(value, field)?, field)?,
        "json_object" if value == true => Constraint::JsonObject,
        "json_object" => {
            return Err(ApiError::invalid(field, format!("'{field}' must be true")));
        }
        "regex" => regex(expect_string(value, field)?, field)?,
        "choice" => choice(value, field)?,
        "grammar" => Constraint::Grammar(check_text(expect_string(value, field)?, field)?.into()),
        _ => structural_tag(parse_json(value, field)?, field)?,
    };
    Ok(Structured { constraint, field })
}

/// Parses a string that contains JSON. Other values are returned unchanged.
fn parse_json(value: Value, field: &str) -> Result<Value, ApiError> {
    match value {
        Value::String(text) => serde_json::from_str(&check_text(text, field)?).map_err(|error| {
            ApiError::invalid(field, format!("'{field}' is not valid JSON: {error}"))
        }),
        other => Ok(other),
    }
}

/// Returns the constraint for a JSON schema that was in `field`.
///
/// # Errors
/// Fails if the schema is not an object, too large or too deep.
pub fn json_schema(schema: Value, field: &str) -> Result<Constraint, ApiError> {
    if !schema.is_object() {
        return Err(ApiError::invalid(
            field,
            format!("'{field}' must be an object, got {}", kind(&schema)),
        ));
    }
    Ok(Constraint::JsonSchema(serialize(&schema, MAX_SCHEMA_DEPTH, field)?.into()))
}

fn structural_tag(tag: Value, field: &str) -> Result<Constraint, ApiError> {
    let has =
        |tag: &Map<String, Value>, name: &str| tag.get(name).is_some_and(|value| !value.is_null());
    let is_valid = tag.as_object().is_some_and(|tag| {
        tag.get("type").is_some_and(|kind| kind == "structural_tag")
            && (has(tag, "format") || (has(tag, "structures") && has(tag, "triggers")))
    });
    if !is_valid {
        let message = "a structural tag must be an object with type 'structural_tag', \
             and 'format' or 'structures' and 'triggers'";
        return Err(ApiError::invalid(field, message));
    }
    Ok(Constraint::StructuralTag(serialize(&tag, MAX_TAG_DEPTH, field)?.into()))
}

fn regex(regex: String, field: &str) -> Result<Constraint, ApiError> {
    if regex.contains('\0') {
        return Err(ApiError::invalid(field, "a regular expression must not have a NUL character"));
    }
    Ok(Constraint::Regex(check_size(regex, field)?.into()))
}

/// Returns the grammar for a list of choices, because engines accept no choices.
fn choice(value: Value, field: &str) -> Result<Constraint, ApiError> {
    let choices: Vec<String> = serde_json::from_value(value).map_err(|error| {
        ApiError::invalid(field, format!("'{field}': {}", type_errors::reword(&error.to_string())))
    })?;
    if choices.is_empty() || choices.len() > MAX_CHOICES {
        let given = choices.len();
        let message = format!("'{field}' must have 1 to {MAX_CHOICES} strings, got {given}");
        return Err(ApiError::invalid(field, message));
    }
    let choices: Vec<String> =
        choices.iter().map(|choice| format!("\"{}\"", escape(choice))).collect();
    let grammar = format!("root ::= {}", choices.join(" | "));
    Ok(Constraint::Grammar(check_size(grammar, field)?.into()))
}

/// Escapes a text as a literal of xgrammar's EBNF (`choice_as_grammar`,
/// `vllm/v1/structured_output/utils.py`).
fn escape(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut escaped, char| {
        match char {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            '\0'..='\x1f' | '\x7f' => escaped.push_str(&format!("\\u{:04x}", u32::from(char))),
            other => escaped.push(other),
        }
        escaped
    })
}

pub(super) fn expect_string(value: Value, field: &str) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        other => {
            let message = format!("'{field}' must be a string, got {}", kind(&other));
            Err(ApiError::invalid(field, message))
        }
    }
}

/// Checks that a text is not blank and not too large.
fn check_text(text: String, field: &str) -> Result<String, ApiError> {
    if text.trim().is_empty() {
        return Err(ApiError::invalid(field, format!("'{field}' must not be empty")));
    }
    check_size(text, field)
}

fn check_size(text: String, field: &str) -> Result<String, ApiError> {
    if text.len() > MAX_CONSTRAINT_BYTES {
        let bytes = text.len();
        let message =
            format!("'{field}' has {bytes} bytes, at most {MAX_CONSTRAINT_BYTES} are allowed");
        return Err(ApiError::invalid(field, message));
    }
    Ok(text)
}

/// Serializes a constraint after checking its depth and size.
fn serialize(value: &Value, max_depth: usize, field: &str) -> Result<String, ApiError> {
    let depth = depth(value);
    if depth > max_depth {
        let message =
            format!("'{field}' is nested {depth} levels deep, at most {max_depth} are allowed");
        return Err(ApiError::invalid(field, message));
    }
    check_size(value.to_string(), field)
}

/// Returns the nesting depth of a value. The parser has bounded the depth, by a higher limit than
/// vLLM's.
fn depth(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn taken(body: Value) -> Result<Option<Structured>, ApiError> {
        take(&mut Fields::new(body, "").unwrap())
    }

    fn constraint(body: Value) -> Constraint {
        taken(body).unwrap().unwrap().constraint
    }

    fn refused(body: Value) -> String {
        taken(body).unwrap_err().param.unwrap()
    }

    #[test]
    fn formats_of_both_apis_become_one_constraint() {
        let properties = json!({"z": {"type": "integer"}, "a": {"enum": ["ä"]}});
        let schema = json!({"type": "object", "properties": properties});
        let written = Constraint::JsonSchema(schema.to_string().into());
        let named = json!({"name": "n", "strict": true, "schema": schema});
        let format = json!({"type": "json_schema", "json_schema": named});
        assert_eq!(constraint(json!({"response_format": format})), written);
        assert_eq!(constraint(json!({"structured_outputs": {"json": schema}})), written);
        assert_eq!(
            constraint(json!({"structured_outputs": {"json": schema.to_string(), "regex": null}})),
            written
        );
        assert_eq!(
            constraint(json!({"response_format": {"type": "json_object"}})),
            Constraint::JsonObject
        );
        assert_eq!(
            constraint(json!({"structured_outputs": {"json_object": true}})),
            Constraint::JsonObject
        );
        assert_eq!(
            constraint(json!({"structured_outputs": {"regex": ""}})),
            Constraint::Regex("".into())
        );
        let tag = json!({"type": "structural_tag", "format": {"type": "any_text"}});
        assert_eq!(
            constraint(json!({"response_format": tag})),
            Constraint::StructuralTag(tag.to_string().into())
        );
        assert_eq!(
            constraint(json!({"structured_outputs": {"structural_tag": tag.to_string()}})),
            Constraint::StructuralTag(tag.to_string().into())
        );
        assert!(taken(json!({"response_format": {"type": "text"}})).unwrap().is_none());
        assert!(taken(json!({})).unwrap().is_none());
    }

    #[test]
    fn choices_become_grammar() {
        let choice = constraint(
            json!({"structured_outputs": {"choice": ["a\"b", "c\\\n\u{1}\u{7f}ä", ""]}}),
        );
        assert_eq!(
            choice,
            Constraint::Grammar(r#"root ::= "a\"b" | "c\\\n\u0001\u007fä" | """#.into())
        );
    }

    #[test]
    fn invalid_constraint_names_field() {
        let nested = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!({"a": inner}));
        for (outputs, field) in [
            (json!({}), "structured_outputs"),
            (json!({"json": {}, "regex": "a"}), "structured_outputs"),
            (json!([]), "structured_outputs"),
            (json!({"json": ""}), "structured_outputs.json"),
            (json!({"json": "{"}), "structured_outputs.json"),
            (json!({"json": 3}), "structured_outputs.json"),
            (json!({"json": nested(65)}), "structured_outputs.json"),
            (json!({"json_object": false}), "structured_outputs.json_object"),
            (json!({"regex": 3}), "structured_outputs.regex"),
            (json!({"regex": "\0"}), "structured_outputs.regex"),
            (json!({"regex": "a".repeat(MAX_CONSTRAINT_BYTES + 1)}), "structured_outputs.regex"),
            (json!({"choice": []}), "structured_outputs.choice"),
            (json!({"choice": [1]}), "structured_outputs.choice"),
            (json!({"choice": vec!["a"; MAX_CHOICES + 1]}), "structured_outputs.choice"),
            (json!({"grammar": " \n"}), "structured_outputs.grammar"),
            (json!({"structural_tag": "{}"}), "structured_outputs.structural_tag"),
            (
                json!({"json_object": true, "whitespace_pattern": " "}),
                "structured_outputs.whitespace_pattern",
            ),
            (json!({"json_object": true, "_backend": "x"}), "structured_outputs._backend"),
        ] {
            assert_eq!(refused(json!({"structured_outputs": outputs})), field);
        }
        assert!(taken(json!({"structured_outputs": {"json": nested(64)}})).is_ok());
        for (format, field) in [
            (json!("json"), "response_format"),
            (json!({}), "response_format.type"),
            (json!({"type": "yaml"}), "response_format.type"),
            (json!({"type": "json_schema"}), "response_format.json_schema"),
            (
                json!({"type": "json_schema", "json_schema": {"name": "n"}}),
                "response_format.json_schema.schema",
            ),
            (
                json!({"type": "json_schema", "json_schema": {"schema": true}}),
                "response_format.json_schema.schema",
            ),
            (json!({"type": "structural_tag", "structures": []}), "response_format"),
            (json!({"type": "json_object", "schema": {}}), "response_format.schema"),
        ] {
            assert_eq!(refused(json!({"response_format": format})), field);
        }
        let both = json!({
            "response_format": {"type": "json_object"},
            "structured_outputs": {"regex": "a"},
        });
        assert_eq!(refused(both), "structured_outputs");
    }
}
