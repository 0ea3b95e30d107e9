//! What every body and chunk of one answer repeats.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

/// Id, time and model of one answer.
#[derive(Clone, Debug)]
pub(crate) struct AnswerHead {
    /// `chatcmpl-…` or `cmpl-…`.
    pub(crate) id: String,
    created: u64,
    model: String,
}

impl AnswerHead {
    /// A new answer with a random id.
    pub(crate) fn new(prefix: &str, model: &str) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { id: format!("{prefix}-{:032x}", rand::random::<u128>()), created, model: model.to_owned() }
    }

    /// A body with these choices.
    pub(crate) fn body(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices
        })
    }
}
