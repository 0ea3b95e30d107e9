//! Sampling parameters.

use std::sync::Arc;

use chiasm_backend::{Constraint, Repetition, Sampling, Supports};
use chiasm_types::TokenId;
use rmpv::Value;

use super::codec::{Wire, wire_map};
use super::error::{Problem, WireError};
use super::reader::Reader;
use super::writer::Writer;

/// `SamplingParams` of `vllm/sampling_params.py`: the parameters of text requests that the engine
/// reads.
///
/// Stop *strings* are missing on purpose: the engine never sees text, and a `stop` next to
/// `detokenize: false` makes it fail to decode the request, which kills its input thread. `n` is
/// missing too: send `n` requests.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// The presence penalty, −2 to 2; 0 is off.
    pub presence_penalty: f64,
    /// The frequency penalty, −2 to 2; 0 is off.
    pub frequency_penalty: f64,
    /// The repetition penalty, more than 0; 1 is off.
    pub repetition_penalty: f64,
    /// The temperature; 0 is greedy.
    pub temperature: f64,
    /// The total probability of the most likely tokens that are kept, in (0, 1]; 1 is off.
    pub top_p: f64,
    /// The number of most likely tokens that are kept; 0 or −1 is off.
    pub top_k: i32,
    /// The minimum probability of a token that is kept, relative to the most likely token's, in
    /// [0, 1]; 0 is off.
    pub min_p: f64,
    /// The seed, which makes sampling reproducible.
    pub seed: Option<i64>,
    /// Tokens that end generation. They must also be in `all_stop_token_ids`.
    pub stop_token_ids: Vec<TokenId>,
    /// `true` if the end-of-sequence token does not end the answer. Has no effect by itself: the
    /// engine reads `eos_token_id`, which must be `None` then.
    pub ignore_eos: bool,
    /// The maximum number of generated tokens, at least 1. vLLM's default is 16.
    pub max_tokens: u32,
    /// The number of tokens before which neither EOS nor a stop token is generated. EOS and stop
    /// tokens must be in `all_stop_token_ids`.
    pub min_tokens: u32,
    /// The number of most likely tokens, besides the chosen one, whose log probabilities are
    /// returned; −1 for the whole vocabulary.
    pub logprobs: Option<i32>,
    /// Like `logprobs`, but for each prompt token.
    pub prompt_logprobs: Option<i32>,
    /// The token that ends generation, unless EOS is ignored. On the wire `_eos_token_id`.
    pub eos_token_id: Option<TokenId>,
    /// EOS and the stop tokens together. On the wire `_all_stop_token_ids`.
    pub all_stop_token_ids: Vec<TokenId>,
    /// Values that are added to the logits of single tokens.
    pub logit_bias: Vec<(TokenId, f64)>,
    /// The only tokens that can be generated; empty for all.
    pub allowed_token_ids: Vec<TokenId>,
    /// `true` if cached blocks are not reused for this request.
    pub skip_reading_prefix_cache: Option<bool>,
    /// Token sequences that are not generated: the last token of a sequence is never generated
    /// after its other tokens. On the wire `_bad_words_token_ids`.
    pub bad_words: Vec<Vec<TokenId>>,
    /// The constraint on the text.
    pub structured_outputs: Option<StructuredOutputs>,
    /// The number of reasoning tokens after which the engine ends the reasoning. An engine without
    /// a reasoning parser ignores it.
    pub thinking_token_budget: Option<u32>,
    /// The repetition that ends generation.
    pub repetition_detection: Option<RepetitionDetection>,
    /// Parameters for the engine's connectors.
    pub extra_args: Option<ExtraArgs>,
}

/// The `extra_args` of a request that vLLM's connectors read (`Request.__init__` in
/// `vllm/v1/request.py`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExtraArgs {
    /// Parameters for the KV connector: to leave keys and values for another engine, or to get
    /// them from one.
    pub kv_transfer_params: Option<Value>,
    /// Parameters for the encoder-cache connector: embeddings that another engine has made.
    pub ec_transfer_params: Option<Value>,
}

/// `RepetitionDetectionParams` of `vllm/sampling_params.py`. Numbers out of bounds make the engine
/// fail to decode the request, which kills its input thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RepetitionDetection {
    /// The maximum length of the repeated pattern, in tokens; 0 is off.
    pub max_pattern_size: u32,
    /// The minimum length of the pattern, at most `max_pattern_size`; 0 is the same as 1.
    pub min_pattern_size: u32,
    /// The minimum number of occurrences, at least 2.
    pub min_count: u32,
}

/// `StructuredOutputsParams` of `vllm/sampling_params.py`, with exactly one constraint. None or two
/// make the engine fail to decode the request, which kills its input thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StructuredOutputs {
    /// The constraint.
    pub constraint: Constraint,
    /// The compiler of the constraint. The compiler of the first request with a constraint serves
    /// all later ones too. On the wire `_backend`.
    pub backend: String,
}

/// vLLM's default compiler.
pub const XGRAMMAR: &str = "xgrammar";

/// The optional parts of jobs that an EngineCore supports: its requests have a field for each.
pub(crate) const SUPPORTS: Supports = Supports {
    bad_words: true,
    prompt_logprobs: true,
    processor_kwargs: true,
    logit_bias: true,
    allowed_token_ids: true,
    thinking_budget: true,
    repetition: true,
    skip_reading_prefix_cache: true,
    media: true,
    cache_salt: true,
};

impl SamplingParams {
    /// Creates the parameters of a job's continuation `choice`. An engine request has one
    /// continuation, so a job is `n` requests.
    pub(crate) fn for_choice(sampling: &Sampling, choice: usize) -> Self {
        let Sampling {
            n: _,
            max_tokens,
            min_tokens,
            temperature,
            top_p,
            top_k,
            min_p,
            seed,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            ref stop_token_ids,
            eos_token,
            ref all_stop_token_ids,
            ignore_eos,
            logprobs,
            prompt_logprobs,
            skip_reading_prefix_cache,
            ref logit_bias,
            ref allowed_token_ids,
            ref bad_words,
            ref structured,
            thinking_budget,
            repetition,
        } = *sampling;
        Self {
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            temperature,
            top_p,
            top_k,
            min_p,
            // As in vLLM's parallel sampling: continuations differ and are reproducible.
            seed: seed.map(|seed| seed.wrapping_add(choice as i64)),
            stop_token_ids: stop_token_ids.clone(),
            ignore_eos,
            max_tokens,
            min_tokens,
            logprobs: logprobs.and_then(|top| i32::try_from(top).ok()),
            prompt_logprobs: prompt_logprobs.and_then(|top| i32::try_from(top).ok()),
            eos_token_id: eos_token,
            all_stop_token_ids: all_stop_token_ids.clone(),
            logit_bias: logit_bias.clone(),
            allowed_token_ids: allowed_token_ids.clone(),
            skip_reading_prefix_cache: skip_reading_prefix_cache.then_some(true),
            bad_words: bad_words.clone(),
            structured_outputs: structured.as_ref().map(|structured| StructuredOutputs {
                constraint: structured.constraint.clone(),
                backend: XGRAMMAR.to_owned(),
            }),
            thinking_token_budget: thinking_budget,
            repetition_detection: repetition.map(RepetitionDetection::from),
            extra_args: None,
        }
    }
}

impl From<Repetition> for RepetitionDetection {
    fn from(Repetition { max_pattern, min_pattern, count }: Repetition) -> Self {
        Self { max_pattern_size: max_pattern, min_pattern_size: min_pattern, min_count: count }
    }
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
            bad_words: Vec::new(),
            structured_outputs: None,
            thinking_token_budget: None,
            repetition_detection: None,
            extra_args: None,
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
    bad_words = "_bad_words_token_ids",
    structured_outputs = "structured_outputs",
    thinking_token_budget = "thinking_token_budget",
    repetition_detection = "repetition_detection",
    extra_args = "extra_args",
});

wire_map!(sparse ExtraArgs {
    kv_transfer_params = "kv_transfer_params",
    ec_transfer_params = "ec_transfer_params",
});

wire_map!(sparse RepetitionDetection {
    max_pattern_size = "max_pattern_size",
    min_pattern_size = "min_pattern_size",
    min_count = "min_count",
});

impl Wire for StructuredOutputs {
    fn write(&self, to: &mut Writer) {
        to.map(2);
        match &self.constraint {
            Constraint::JsonSchema(schema) => entry(to, "json", schema),
            Constraint::JsonObject => {
                to.str("json_object");
                to.bool(true);
            }
            Constraint::Regex(regex) => entry(to, "regex", regex),
            Constraint::Grammar(grammar) => entry(to, "grammar", grammar),
            Constraint::StructuralTag(tag) => entry(to, "structural_tag", tag),
        }
        entry(to, "_backend", &self.backend);
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let mut constraints = Vec::new();
        let mut backend = String::new();
        for _ in 0..from.map()? {
            let text = |from: &mut Reader<'_>| from.str().map(Arc::from);
            match from.str()? {
                "json" => constraints.push(Constraint::JsonSchema(text(from)?)),
                "json_object" if from.bool()? => constraints.push(Constraint::JsonObject),
                "regex" => constraints.push(Constraint::Regex(text(from)?)),
                "grammar" => constraints.push(Constraint::Grammar(text(from)?)),
                "structural_tag" => constraints.push(Constraint::StructuralTag(text(from)?)),
                "_backend" => backend = String::read(from)?,
                _ => from.skip()?,
            }
        }
        let [constraint] = <[_; 1]>::try_from(constraints)
            .map_err(|given| Problem::Unsupported(format!("{} constraints", given.len())).at(""))?;
        Ok(Self { constraint, backend })
    }
}

fn entry(to: &mut Writer, key: &str, value: &str) {
    to.str(key);
    to.str(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(params: &SamplingParams) -> bytes::Bytes {
        let mut to = Writer::default();
        params.write(&mut to);
        to.into_frames().remove(0)
    }

    #[test]
    fn constraint_with_compiler_round_trips() {
        for constraint in [
            Constraint::JsonSchema("{}".into()),
            Constraint::JsonObject,
            Constraint::Regex("".into()),
            Constraint::Grammar("root ::= \"a\"".into()),
            Constraint::StructuralTag("{}".into()),
        ] {
            let structured_outputs =
                Some(StructuredOutputs { constraint, backend: XGRAMMAR.to_owned() });
            let bad_words = vec![vec![TokenId(3)], vec![TokenId(4), TokenId(5)]];
            let params =
                SamplingParams { structured_outputs, bad_words, ..SamplingParams::default() };
            let frame = encoded(&params);
            assert_eq!(SamplingParams::read(&mut Reader::new(&[frame]).unwrap()).unwrap(), params);
        }
    }

    #[test]
    fn zero_or_two_constraints_are_refused() {
        for keys in [&[][..], &["regex", "grammar"]] {
            let pairs = keys.iter().map(|&key| (Value::from(key), Value::from("a"))).collect();
            let map = Value::Map(vec![(Value::from("structured_outputs"), Value::Map(pairs))]);
            let mut frame = Vec::new();
            rmpv::encode::write_value(&mut frame, &map).unwrap();
            assert!(SamplingParams::read(&mut Reader::new(&[frame.into()]).unwrap()).is_err());
        }
    }
}
