//! The choice of tokens, and the end of the answer.

use chiasm_backend::{Repetition, Structured};
use chiasm_types::TokenId;

/// Sampling as vLLM defines it; `None` leaves the choice to the model's `generation_config.json`,
/// then to vLLM's default.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Number of continuations, 1 or more.
    pub n: u32,
    /// At most so many new tokens; `None` fills the context.
    pub max_tokens: Option<u32>,
    /// No stop before so many new tokens.
    pub min_tokens: u32,
    /// 0 (greedy) to 2.
    pub temperature: Option<f64>,
    /// Above 0, to 1.
    pub top_p: Option<f64>,
    /// 0 or -1 considers all tokens.
    pub top_k: Option<i64>,
    /// 0 to 1.
    pub min_p: Option<f64>,
    /// Makes sampling repeatable.
    pub seed: Option<i64>,
    /// -2 to 2.
    pub presence_penalty: Option<f64>,
    /// -2 to 2.
    pub frequency_penalty: Option<f64>,
    /// Above 0; 1 is none.
    pub repetition_penalty: Option<f64>,
    /// Ends the text before the first of these.
    pub stop: Vec<String>,
    /// Keeps the stop string in the text.
    pub include_stop: bool,
    /// Tokens that end the text.
    pub stop_token_ids: Vec<TokenId>,
    /// Goes on after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Leaves special tokens out of the text, as is the default.
    pub skip_special_tokens: Option<bool>,
    /// Log probabilities of each new token and so many alternatives.
    pub logprobs: Option<u32>,
    /// The log probabilities are those of the text's tokens alone, without reasoning, calls and
    /// markers.
    pub logprobs_of_text: bool,
    /// Log probabilities of each prompt token and so many alternatives. The whole prompt is
    /// computed for them.
    pub prompt_logprobs: Option<u32>,
    /// The whole prompt is computed, whatever of it an engine holds.
    pub skip_reading_prefix_cache: bool,
    /// Added to the logits of single tokens, -100 to 100.
    pub logit_bias: Vec<(TokenId, f64)>,
    /// Only these can be generated, unless empty.
    pub allowed_token_ids: Vec<TokenId>,
    /// None of these is generated.
    pub bad_words: Vec<String>,
    /// What the text has to be.
    pub structured: Option<Structured>,
    /// Most tokens of reasoning.
    pub thinking_budget: Option<ThinkingBudget>,
    /// What counts as going round in circles, which ends the text.
    pub repetition: Option<Repetition>,
}

/// Most tokens of reasoning, and where the client said so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// The tokens.
    pub tokens: u32,
    /// The field of the request.
    pub field: &'static str,
    /// For a model that does not think the budget is dropped, instead of refusing the request.
    pub only_if_thinking: bool,
}

impl Sampling {
    /// Whether what an engine holds of the prompt spares it work.
    pub fn reads_prefix_cache(&self) -> bool {
        !self.skip_reading_prefix_cache && self.prompt_logprobs.is_none()
    }
}

impl Default for Sampling {
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
