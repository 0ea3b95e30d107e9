//! Fields of OpenAI's APIs that are ignored because they change nothing that a client receives.
//!
//! The list is reviewed field by field: `docs/api.md` says why each field is ignored, or why a
//! similar one is refused.

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::error::ApiError;

/// String fields: the user and the session, and how OpenAI bills, schedules and caches a request.
const STRING_FIELDS: [&str; 6] = [
    "user",
    "session_id",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
];
/// Object fields: metadata for OpenAI's archive, cache options, and a predicted answer, which only
/// speeds up generation.
const OBJECT_FIELDS: [&str; 3] = ["metadata", "prompt_cache_options", "prediction"];

/// Takes the ignored fields. Only their types are checked, against OpenAI's.
pub(super) fn take(fields: &mut Fields) -> Result<(), ApiError> {
    for field in STRING_FIELDS {
        fields.take::<String>(field)?;
    }
    for field in OBJECT_FIELDS {
        fields.take::<Map<String, Value>>(field)?;
    }
    // Answers are never stored.
    fields.take::<bool>("store")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn take_all(body: Value) -> Result<(), String> {
        let mut fields = Fields::new(body, "").unwrap();
        take(&mut fields).and_then(|()| fields.finish()).map_err(|error| error.param.unwrap())
    }

    #[test]
    fn harmless_fields_are_accepted() {
        let body = json!({
            "user": "u",
            "session_id": "x",
            "safety_identifier": "s",
            "service_tier": "flex",
            "prompt_cache_key": "k",
            "store": true,
            "prompt_cache_retention": "24h",
            "prompt_cache_options": {"mode": "explicit"},
            "metadata": {"a": "b"},
            "prediction": {"type": "content", "content": "x"},
        });
        assert_eq!(take_all(body), Ok(()));
        assert_eq!(take_all(json!({"user": null, "store": null, "metadata": null})), Ok(()));
        assert_eq!(take_all(json!({"moderation": {"model": "m"}})), Err("moderation".to_owned()));
    }

    #[test]
    fn wrong_type_names_field() {
        for (field, value) in [
            ("user", json!(3)),
            ("service_tier", json!(["auto"])),
            ("store", json!("yes")),
            ("metadata", json!("a=b")),
            ("prediction", json!("x")),
        ] {
            assert_eq!(take_all(json!({field: value})), Err(field.to_owned()));
        }
    }
}
