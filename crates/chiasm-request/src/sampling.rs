//! Sampling settings and stop conditions.

use chiasm_backend::{Repetition, Structured};
use chiasm_types::TokenId;

/// Sampling settings as vLLM defines them. `None` means the default of the model's
/// `generation_config.json`, or else vLLM's default.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientSampling {
    /// The number of continuations, at least 1.
    pub n: u32,
    /// The maximum number of new tokens; `None` fills the context.
    pub max_tokens: Option<u32>,
    /// The minimum number of new tokens before a continuation may stop.
    pub min_tokens: u32,
    /// The temperature, 0 (greedy) to 2.
    pub temperature: Option<f64>,
    /// More than 0, at most 1.
    pub top_p: Option<f64>,
    /// 0 or -1 considers all tokens.
    pub top_k: Option<i64>,
    /// 0 to 1.
    pub min_p: Option<f64>,
    /// The seed that makes sampling reproducible.
    pub seed: Option<i64>,
    /// -2 to 2.
    pub presence_penalty: Option<f64>,
    /// -2 to 2.
    pub frequency_penalty: Option<f64>,
    /// More than 0; 1 means no penalty.
    pub repetition_penalty: Option<f64>,
    /// The stop strings: the text ends before the first of them.
    pub stop: Vec<String>,
    /// Keeps the stop string in the text.
    pub include_stop: bool,
    /// The tokens that end the text.
    pub stop_token_ids: Vec<TokenId>,
    /// Continues after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Leaves special tokens out of the text, which is the default.
    pub skip_special_tokens: Option<bool>,
    /// The number of alternatives with log probabilities per new token; `None` for no log
    /// probabilities.
    pub logprobs: Option<u32>,
    /// Restricts log probabilities to the tokens of the text, without reasoning, calls and markers.
    pub logprobs_of_text: bool,
    /// The number of alternatives with log probabilities per prompt token; `None` for no log
    /// probabilities. They require that the whole prompt is computed.
    pub prompt_logprobs: Option<u32>,
    /// Computes the whole prompt, even if an engine has a part of it in its cache.
    pub skip_reading_prefix_cache: bool,
    /// The biases that are added to the logits of tokens, -100 to 100.
    pub logit_bias: Vec<(TokenId, f64)>,
    /// The only tokens that may be generated; empty for all.
    pub allowed_token_ids: Vec<TokenId>,
    /// The words that are never generated.
    pub bad_words: Vec<String>,
    /// The constraint of the text.
    pub structured: Option<Structured>,
    /// The limit of reasoning tokens.
    pub thinking_budget: Option<ThinkingBudget>,
    /// The repetition that ends the text.
    pub repetition: Option<Repetition>,
}

/// A limit of reasoning tokens, with the request field that it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// The maximum number of tokens.
    pub tokens: u32,
    /// The request field.
    pub field: &'static str,
    /// Drops the budget for a model that does not think, instead of refusing the request.
    pub only_if_thinking: bool,
}

impl ClientSampling {
    /// Returns `true` if cached blocks of the prompt save the engine work.
    pub fn reads_prefix_cache(&self) -> bool {
        !self.skip_reading_prefix_cache && self.prompt_logprobs.is_none()
    }
}

impl Default for ClientSampling {
    fn default() -> Self {
        Self {
            n: 1,
            max_tokens: None,
            min_tokens: 0,
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            seed: None,
            presence_penalty: None,
            frequency_penalty: None,
            repetition_penalty: None,
            stop: Vec::new(),
            include_stop: false,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            skip_special_tokens: None,
            logprobs: None,
            logprobs_of_text: false,
            prompt_logprobs: None,
            skip_reading_prefix_cache: false,
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            bad_words: Vec::new(),
            structured: None,
            thinking_budget: None,
            repetition: None,
        }
    }
}
