//! Readers for files of a model directory.

use std::io::ErrorKind;
use std::path::Path;

use serde_json::{Map, Value};

use crate::PromptError;

/// Reads a file's text; `None` if there is no such file.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, PromptError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(PromptError::Unreadable { path: path.to_owned(), source }),
    }
}

/// Reads a file's JSON object; `None` if there is no such file.
pub(crate) fn read_object(path: &Path) -> Result<Option<Map<String, Value>>, PromptError> {
    let bad = |reason: String| PromptError::BadFile { path: path.to_owned(), reason };
    let Some(text) = read_text(path)? else { return Ok(None) };
    match serde_json::from_str(&text).map_err(|error| bad(error.to_string()))? {
        Value::Object(object) => Ok(Some(object)),
        _ => Err(bad("expected a JSON object".to_owned())),
    }
}
