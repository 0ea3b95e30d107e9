//! Type errors in the terms of JSON, because clients don't know `u32`.

use crate::error::excerpt;

/// Rewords serde's `invalid type: string "x", expected u32` as
/// `expected a whole number of at least 0, got "x"`. Returns other messages unchanged.
pub(super) fn reword(message: &str) -> String {
    let (is_out_of_range, rest) = match message.strip_prefix("invalid type: ") {
        Some(rest) => (false, rest),
        None => (true, message.strip_prefix("invalid value: ").unwrap_or_default()),
    };
    let Some((found, expected)) = rest.rsplit_once(", expected ") else {
        return message.to_owned();
    };
    let found = match found {
        "map" => "an object",
        "sequence" => "a list",
        _ => match found.strip_prefix("string ") {
            Some(text) => text,
            // Serde has the value after its type, such as "floating point `1.5`".
            None => found.split('`').nth(1).unwrap_or(found),
        },
    };
    let is_too_large = is_out_of_range && !found.starts_with('-');
    let expected = match expected {
        "u32" if is_too_large => &format!("a whole number of at most {}", u32::MAX),
        "i64" if is_too_large => &format!("a whole number of at most {}", i64::MAX),
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of at least 0",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a map" => "an object",
        "a sequence" => "a list",
        other => other,
    };
    format!("expected {expected}, got {}", excerpt(found))
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Map, Value, json};

    use super::*;

    fn message<T: DeserializeOwned>(value: Value) -> String {
        match serde_json::from_value::<T>(value) {
            Ok(_) => "no error".to_owned(),
            Err(error) => reword(&error.to_string()),
        }
    }

    #[test]
    fn serde_types_become_json_types() {
        for (message, expected) in [
            (message::<u32>(json!("two")), r#"expected a whole number of at least 0, got "two""#),
            (message::<u64>(json!(-1)), "expected a whole number of at least 0, got -1"),
            (message::<i64>(json!(1.5)), "expected a whole number, got 1.5"),
            (message::<f64>(json!(true)), "expected a number, got true"),
            (message::<f64>(json!(null)), "expected a number, got null"),
            (message::<Map<String, Value>>(json!("x")), r#"expected an object, got "x""#),
            (message::<Vec<u32>>(json!({})), "expected a list, got an object"),
            (message::<Vec<u32>>(json!([[]])), "expected a whole number of at least 0, got a list"),
            (message::<String>(json!(5)), "expected a string, got 5"),
            (
                message::<u32>(json!(1_u64 << 32)),
                "expected a whole number of at most 4294967295, got 4294967296",
            ),
        ] {
            assert_eq!(message, expected);
        }
    }

    #[test]
    fn client_text_is_cut() {
        let message = message::<u32>(json!("x".repeat(1 << 20)));
        assert!(message.ends_with("xxx…") && message.len() < 200, "{message}");
    }

    #[test]
    fn other_messages_are_unchanged() {
        assert_eq!(reword("7 is not a token id"), "7 is not a token id");
    }
}
