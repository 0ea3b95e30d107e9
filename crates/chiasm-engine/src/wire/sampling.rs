//! How tokens are to be chosen.

use chiasm_types::TokenId;

use super::codec::wire_map;

/// `SamplingParams` of `vllm/sampling_params.py`: what a request for text carries and the engine looks at.
///
/// Stop *strings* are missing on purpose: the engine never sees text, and a `stop` next to `detokenize: false`
/// makes it fail to decode the request, which kills its input thread. `n` is missing too: send `n` requests.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// −2 to 2; 0 is off.
    pub presence_penalty: f64,
    /// −2 to 2; 0 is off.
    pub frequency_penalty: f64,
    /// More than 0; 1 is off.
    pub repetition_penalty: f64,
    /// 0 is greedy.
    pub temperature: f64,
    /// Sum of the probabilities of the most likely tokens that are kept, in (0, 1]; 1 is off.
    pub top_p: f64,
    /// Number of most likely tokens that are kept; 0 or −1 is off.
    pub top_k: i32,
    /// Least probability of a token that is kept, as a part of the most likely one's, in [0, 1]; 0 is off.
    pub min_p: f64,
    /// Makes sampling reproducible.
    pub seed: Option<i64>,
    /// Tokens that end generation. Also put them into `all_stop_token_ids`.
    pub stop_token_ids: Vec<TokenId>,
    /// Has no effect by itself: the engine looks at `eos_token_id`, which must be `None` when this is set.
    pub ignore_eos: bool,
    /// Most tokens that are generated, at least 1. vLLM's default is 16.
    pub max_tokens: u32,
    /// Tokens before which neither EOS nor a stop token is generated; they must be in `all_stop_token_ids`.
    pub min_tokens: u32,
    /// Log probabilities of this many most likely tokens besides the chosen one; −1 for the whole vocabulary.
    pub logprobs: Option<i32>,
    /// The same for each prompt token.
    pub prompt_logprobs: Option<i32>,
    /// The token that ends generation, unless EOS is ignored. On the wire `_eos_token_id`.
    pub eos_token_id: Option<TokenId>,
    /// EOS and stop tokens together. On the wire `_all_stop_token_ids`.
    pub all_stop_token_ids: Vec<TokenId>,
    /// Added to the logits of single tokens.
    pub logit_bias: Vec<(TokenId, f64)>,
    /// Only these can be generated, unless empty.
    pub allowed_token_ids: Vec<TokenId>,
    /// Do not reuse cached blocks for this request.
    pub skip_reading_prefix_cache: Option<bool>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            max_tokens: 16,
            min_tokens: 0,
            logprobs: None,
            prompt_logprobs: None,
            eos_token_id: None,
            all_stop_token_ids: Vec::new(),
            logit_bias: Vec::new(),
            allowed_token_ids: Vec::new(),
            skip_reading_prefix_cache: None,
        }
    }
}

wire_map!(sparse SamplingParams {
    presence_penalty = "presence_penalty",
    frequency_penalty = "frequency_penalty",
    repetition_penalty = "repetition_penalty",
    temperature = "temperature",
    top_p = "top_p",
    top_k = "top_k",
    min_p = "min_p",
    seed = "seed",
    stop_token_ids = "stop_token_ids",
    ignore_eos = "ignore_eos",
    max_tokens = "max_tokens",
    min_tokens = "min_tokens",
    logprobs = "logprobs",
    prompt_logprobs = "prompt_logprobs",
    eos_token_id = "_eos_token_id",
    all_stop_token_ids = "_all_stop_token_ids",
    logit_bias = "logit_bias",
    allowed_token_ids = "allowed_token_ids",
    skip_reading_prefix_cache = "skip_reading_prefix_cache",
});
