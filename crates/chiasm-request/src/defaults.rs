//! A model's defaults for fields that a request does not set.

use chiasm_types::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Sampling defaults and end-of-sequence tokens from `generation_config.json`, as vLLM's
/// `--generation-config auto` reads it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct GenerationConfig {
    /// See [`crate::ClientSampling`].
    pub temperature: Option<f64>,
    /// See [`crate::ClientSampling`].
    pub top_p: Option<f64>,
    /// See [`crate::ClientSampling`].
    pub top_k: Option<i64>,
    /// See [`crate::ClientSampling`].
    pub min_p: Option<f64>,
    /// See [`crate::ClientSampling`].
    pub presence_penalty: Option<f64>,
    /// See [`crate::ClientSampling`].
    pub frequency_penalty: Option<f64>,
    /// See [`crate::ClientSampling`].
    pub repetition_penalty: Option<f64>,
    /// See [`crate::ClientSampling`].
    pub skip_special_tokens: Option<bool>,
    /// The maximum number of new tokens of a request that sets no `max_tokens`.
    pub max_new_tokens: Option<u32>,
    eos_token_id: Option<OneOrMany>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl GenerationConfig {
    /// Returns all end-of-sequence tokens of the model.
    pub fn eos_tokens(&self) -> Vec<TokenId> {
        match &self.eos_token_id {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![TokenId(*id)],
            Some(OneOrMany::Many(ids)) => ids.iter().copied().map(TokenId).collect(),
        }
    }
}

/// The server's defaults for rendering conversations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatDefaults {
    /// Variables of the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Leaves functions that may not be called out of the prompt.
    pub excludes_uncalled_tools: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_or_multiple_end_tokens_are_parsed() {
        let parse = |json| serde_json::from_str::<GenerationConfig>(json).unwrap();
        let qwen =
            parse(r#"{"eos_token_id": [151645, 151643], "temperature": 0.01, "do_sample": true}"#);
        assert_eq!(qwen.eos_tokens(), [TokenId(151645), TokenId(151643)]);
        assert_eq!(qwen.temperature, Some(0.01));
        assert_eq!(parse(r#"{"eos_token_id": 2}"#).eos_tokens(), [TokenId(2)]);
        assert!(parse("{}").eos_tokens().is_empty());
    }
}
