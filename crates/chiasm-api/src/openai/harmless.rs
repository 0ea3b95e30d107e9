//! Fields of OpenAI's APIs whose being ignored changes nothing of what a client gets. The list is
//! reviewed field by field: `docs/serving.md` says of each why it is here, or why a similar one is
//! refused.

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::error::ApiError;

/// Who asks, in which session, and how OpenAI bills, schedules and caches it: strings.
const TEXTS: [&str; 6] = [
    "user",
    "session_id",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
];
/// What OpenAI files an answer under, how it caches the prompt, and what the answer may look like,
/// which only makes it come sooner: objects.
const OBJECTS: [&str; 3] = ["metadata", "prompt_cache_options", "prediction"];

/// Takes them. Their values have the types that OpenAI asks for, and are looked at no further.
pub(super) fn take(fields: &mut Fields) -> Result<(), ApiError> {
    for field in TEXTS {
        fields.take::<String>(field)?;
    }
    for field in OBJECTS {
        fields.take::<Map<String, Value>>(field)?;
    }
    // Nothing is kept in any case.
    fields.take::<bool>("store")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn left(body: Value) -> Result<(), String> {
        let mut fields = Fields::new(body, "").unwrap();
        take(&mut fields).and_then(|()| fields.finish()).map_err(|error| error.param.unwrap())
    }

    #[test]
    fn what_changes_nothing_is_taken() {
        let body = json!({
            "user": "u", "session_id": "x", "safety_identifier": "s", "service_tier": "flex", "prompt_cache_key": "k", "store": true,
            "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}, "metadata": {"a": "b"},
            "prediction": {"type": "content", "content": "x"},
        });
        assert_eq!(left(body), Ok(()));
        assert_eq!(left(json!({"user": null, "store": null, "metadata": null})), Ok(()));
        assert_eq!(left(json!({"moderation": {"model": "m"}})), Err("moderation".to_owned()));
    }

    #[test]
    fn a_wrong_type_is_named() {
        for (field, value) in [
            ("user", json!(3)),
            ("service_tier", json!(["auto"])),
            ("store", json!("yes")),
            ("metadata", json!("a=b")),
            ("prediction", json!("x")),
        ] {
            assert_eq!(left(json!({field: value})), Err(field.to_owned()));
        }
    }
}
