//! The defaults of a model where a request is silent.

use chiasm_types::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Sampling defaults and end tokens: `generation_config.json`, as vLLM's `--generation-config auto`
/// reads it.
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
    /// All end tokens that the model names.
    pub fn eos_tokens(&self) -> Vec<TokenId> {
        match &self.eos_token_id {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![TokenId(*id)],
            Some(OneOrMany::Many(ids)) => ids.iter().copied().map(TokenId).collect(),
        }
    }
}

/// How conversations are written where a request does not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatDefaults {
    /// Variables of the chat template.
    pub template_kwargs: Map<String, Value>,
    /// Functions that are not to be called are not in the prompt.
    pub excludes_uncalled_tools: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_tokens_may_be_one_or_many_and_other_keys_are_skipped() {
        let parse = |json| serde_json::from_str::<GenerationConfig>(json).unwrap();
        let qwen =
            parse(r#"{"eos_token_id": [151645, 151643], "temperature": 0.01, "do_sample": true}"#);
        assert_eq!(qwen.eos_tokens(), [TokenId(151645), TokenId(151643)]);
        assert_eq!(qwen.temperature, Some(0.01));
        assert_eq!(parse(r#"{"eos_token_id": 2}"#).eos_tokens(), [TokenId(2)]);
        assert!(parse("{}").eos_tokens().is_empty());
    }
}
