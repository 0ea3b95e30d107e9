//! Sampling defaults and end tokens of a model: `generation_config.json`, as vLLM's `--generation-config auto` reads it.

use std::path::Path;

use chiasm_types::TokenId;
use serde::Deserialize;

use crate::model::ModelError;

/// What a model asks for where a request is silent.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub struct GenerationConfig {
    /// See [`crate::Sampling`].
    pub temperature: Option<f64>,
    /// See [`crate::Sampling`].
    pub top_p: Option<f64>,
    /// See [`crate::Sampling`].
    pub top_k: Option<i64>,
    /// See [`crate::Sampling`].
    pub min_p: Option<f64>,
    /// See [`crate::Sampling`].
    pub presence_penalty: Option<f64>,
    /// See [`crate::Sampling`].
    pub frequency_penalty: Option<f64>,
    /// See [`crate::Sampling`].
    pub repetition_penalty: Option<f64>,
    /// See [`crate::Sampling`].
    pub skip_special_tokens: Option<bool>,
    /// Most new tokens of a request that sets no `max_tokens`.
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
    /// Reads `generation_config.json`; a model without one has no wishes.
    pub fn from_model_dir(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("generation_config.json");
        match std::fs::read(&path) {
            Ok(json) => serde_json::from_slice(&json).map_err(|source| ModelError::Config { path, source }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(ModelError::Read { path, source }),
        }
    }

    /// All end tokens that the model names.
    pub fn eos_tokens(&self) -> Vec<TokenId> {
        match &self.eos_token_id {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![TokenId(*id)],
            Some(OneOrMany::Many(ids)) => ids.iter().copied().map(TokenId).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_tokens_may_be_one_or_many_and_other_keys_are_skipped() {
        let parse = |json| serde_json::from_str::<GenerationConfig>(json).unwrap();
        let qwen = parse(r#"{"eos_token_id": [151645, 151643], "temperature": 0.01, "do_sample": true}"#);
        assert_eq!(qwen.eos_tokens(), [TokenId(151645), TokenId(151643)]);
        assert_eq!(qwen.temperature, Some(0.01));
        assert_eq!(parse(r#"{"eos_token_id": 2}"#).eos_tokens(), [TokenId(2)]);
        assert!(parse("{}").eos_tokens().is_empty());
    }
}
