//! Sampling settings, and the parts of a request that not every worker supports.
//!
//! Every sender of [`Sampling`] destructures it whole, so a new field does not compile until each
//! sender passes it on or refuses it: `docs/adding-a-parameter.md`.

use std::sync::Arc;

use chiasm_types::TokenId;

/// Declares [`Supports`] and the code that handles each of its fields.
macro_rules! supports {
    ($($(#[$doc:meta])* $part:ident = $field:literal,)+) => {
        /// The optional parts of a request: those that a worker supports, or those that a request
        /// has.
        ///
        /// A job with an unsupported part is refused with
        /// [`JobError::Refused`](crate::JobError::Refused). The default supports nothing.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Supports {
            $($(#[$doc])* pub $part: bool,)+
        }

        impl Supports {
            /// Every part, including parts that are added later. For backends that pass requests on
            /// unchanged and do not know their contents.
            pub const EVERYTHING: Self = Self { $($part: true,)+ };

            /// Returns the request field of the first part that is needed and not supported.
            pub fn first_missing(self, needs: Self) -> Option<&'static str> {
                $(if needs.$part && !self.$part {
                    return Some($field);
                })+
                None
            }

            /// Returns the parts that both support.
            #[must_use]
            pub fn and(self, other: Self) -> Self {
                Self { $($part: self.$part && other.$part,)+ }
            }
        }

        /// Returns each part alone, with its request field.
        #[cfg(test)]
        fn single_parts() -> Vec<(Supports, &'static str)> {
            vec![$((Supports { $part: true, ..Supports::default() }, $field),)+]
        }
    };
}

supports! {
    /// [`Sampling::bad_words`].
    bad_words = "bad_words",
    /// [`Sampling::prompt_logprobs`].
    prompt_logprobs = "prompt_logprobs",
    /// A request's settings for the processor of its media items.
    processor_kwargs = "mm_processor_kwargs",
    /// [`Sampling::logit_bias`].
    logit_bias = "logit_bias",
    /// [`Sampling::allowed_token_ids`].
    allowed_token_ids = "allowed_token_ids",
    /// [`Sampling::thinking_budget`].
    thinking_budget = "thinking_token_budget",
    /// [`Sampling::repetition`].
    repetition = "repetition_detection",
    /// [`Sampling::skip_reading_prefix_cache`].
    skip_reading_prefix_cache = "skip_reading_prefix_cache",
    /// Media items.
    media = "messages",
    /// [`Job::cache_salt`](crate::Job::cache_salt).
    cache_salt = "cache_salt",
}

impl Supports {
    /// Returns `true` if every part in `needs` is supported.
    pub fn covers(self, needs: Self) -> bool {
        self.first_missing(needs).is_none()
    }
}

/// The sampling settings and stop conditions of a job, with all defaults filled in. The ranges are
/// those of vLLM's `SamplingParams`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The number of continuations, at least 1.
    pub n: usize,
    /// The maximum number of new tokens per continuation, at least 1.
    pub max_tokens: u32,
    /// The minimum number of new tokens before a continuation may stop.
    pub min_tokens: u32,
    /// The temperature; 0 is greedy.
    pub temperature: f64,
    /// More than 0, at most 1.
    pub top_p: f64,
    /// 0 considers all tokens.
    pub top_k: i32,
    /// 0 to 1.
    pub min_p: f64,
    /// The seed that makes sampling reproducible. Continuation `i` uses `seed + i`, so that
    /// continuations differ.
    pub seed: Option<i64>,
    /// -2 to 2.
    pub presence_penalty: f64,
    /// -2 to 2.
    pub frequency_penalty: f64,
    /// More than 0; 1 means no penalty.
    pub repetition_penalty: f64,
    /// The tokens that end a continuation, without the end-of-sequence token.
    pub stop_token_ids: Vec<TokenId>,
    /// The end-of-sequence token; `None` if it does not end a continuation.
    pub eos_token: Option<TokenId>,
    /// Every token that could end a continuation. `min_tokens` suppresses them.
    pub all_stop_token_ids: Vec<TokenId>,
    /// `true` to continue after the end-of-sequence token.
    pub ignore_eos: bool,
    /// The number of alternatives with log probabilities per new token; `None` for no log
    /// probabilities.
    pub logprobs: Option<u32>,
    /// The number of alternatives with log probabilities per prompt token, without the first token;
    /// `None` for no log probabilities. They require that the whole prompt is computed.
    pub prompt_logprobs: Option<u32>,
    /// `true` to compute the whole prompt, even if a part of it is in the KV cache.
    pub skip_reading_prefix_cache: bool,
    /// The biases that are added to the logits of tokens, -100 to 100.
    pub logit_bias: Vec<(TokenId, f64)>,
    /// The only tokens that may be generated; empty for all.
    pub allowed_token_ids: Vec<TokenId>,
    /// The token sequences that are never generated: the last token of a sequence is suppressed
    /// after the others.
    pub bad_words: Vec<Vec<TokenId>>,
    /// The constraint on the text.
    pub structured: Option<Structured>,
    /// The maximum number of reasoning tokens, after which the engine ends the reasoning.
    pub thinking_budget: Option<u32>,
    /// The repetition that ends a continuation.
    pub repetition: Option<Repetition>,
}

impl Sampling {
    /// Returns the optional parts that these settings use, without the parts in the rest of a job.
    pub fn needs(&self) -> Supports {
        let Self {
            // Every worker supports these.
            n: _,
            max_tokens: _,
            min_tokens: _,
            temperature: _,
            top_p: _,
            top_k: _,
            min_p: _,
            seed: _,
            presence_penalty: _,
            frequency_penalty: _,
            repetition_penalty: _,
            stop_token_ids: _,
            eos_token: _,
            all_stop_token_ids: _,
            ignore_eos: _,
            // Backends refuse these themselves, because a server shows late that it lacks them.
            logprobs: _,
            // Whether a worker supports a constraint is only known when it gets one.
            structured: _,
            bad_words,
            prompt_logprobs,
            skip_reading_prefix_cache,
            logit_bias,
            allowed_token_ids,
            thinking_budget,
            repetition,
        } = self;
        Supports {
            bad_words: !bad_words.is_empty(),
            prompt_logprobs: prompt_logprobs.is_some(),
            logit_bias: !logit_bias.is_empty(),
            allowed_token_ids: !allowed_token_ids.is_empty(),
            thinking_budget: thinking_budget.is_some(),
            repetition: repetition.is_some(),
            skip_reading_prefix_cache: *skip_reading_prefix_cache,
            // Parts of the job outside its sampling.
            processor_kwargs: false,
            media: false,
            cache_salt: false,
        }
    }

    /// Returns greedy sampling of at most `max_tokens` tokens, with everything else off.
    #[cfg(feature = "fake")]
    pub fn greedy(max_tokens: u32) -> Self {
        Self {
            n: 1,
            max_tokens,
            min_tokens: 0,
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            stop_token_ids: Vec::new(),
            eos_token: None,
            all_stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
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

    /// Returns sampling with a distinct value in every field, for tests that a wire carries all
    /// fields.
    #[cfg(feature = "fake")]
    pub fn distinctive() -> Self {
        let constraint = Constraint::Regex("a+".into());
        Self {
            n: 2,
            max_tokens: 10,
            min_tokens: 1,
            temperature: 0.5,
            top_p: 0.25,
            top_k: 3,
            min_p: 0.125,
            seed: Some(-4),
            presence_penalty: 1.5,
            frequency_penalty: -1.5,
            repetition_penalty: 1.25,
            stop_token_ids: vec![TokenId(4)],
            eos_token: Some(TokenId(5)),
            all_stop_token_ids: vec![TokenId(4), TokenId(5)],
            ignore_eos: true,
            logprobs: Some(0),
            prompt_logprobs: Some(2),
            skip_reading_prefix_cache: true,
            logit_bias: vec![(TokenId(6), -7.5)],
            allowed_token_ids: vec![TokenId(6), TokenId(7)],
            bad_words: vec![vec![TokenId(8)], vec![TokenId(9), TokenId(10)]],
            structured: Some(Structured { constraint, field: "structured_outputs" }),
            thinking_budget: Some(11),
            repetition: Some(Repetition { max_pattern: 3, min_pattern: 2, count: 4 }),
        }
    }
}

/// A repeated pattern of tokens at the end of a continuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repetition {
    /// The maximum length of the pattern in tokens, at least 1.
    pub max_pattern: u32,
    /// The minimum length of the pattern in tokens, at most `max_pattern`; 0 means 1.
    pub min_pattern: u32,
    /// The minimum number of occurrences, at least 2.
    pub count: u32,
}

/// The constraint of an answer's text, with the request field that it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Structured {
    /// The constraint. A backend that does not support it refuses the job with
    /// [`JobError::Refused`](crate::JobError::Refused).
    pub constraint: Constraint,
    /// The request field that the constraint came from.
    pub field: &'static str,
}

/// A constraint of an answer's text, in one of the forms that engines compile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// JSON that matches this JSON schema.
    JsonSchema(Arc<str>),
    /// Any JSON object.
    JsonObject,
    /// Text that this regular expression matches completely.
    Regex(Arc<str>),
    /// Text in the language of this grammar: GBNF with the start symbol `root`.
    Grammar(Arc<str>),
    /// Text in which tags begin constrained parts: xgrammar's structural tag, as JSON.
    StructuralTag(Arc<str>),
}

impl Constraint {
    /// Returns the length of the constraint's text in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text)
            | Self::Regex(text)
            | Self::Grammar(text)
            | Self::StructuralTag(text) => text.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_part_is_named_by_its_request_field() {
        let parts = single_parts();
        assert_eq!(parts.len(), 10);
        for (supported, _) in &parts {
            for (needed, field) in &parts {
                let expected = (supported != needed).then_some(*field);
                assert_eq!(supported.first_missing(*needed), expected);
                assert_eq!(supported.covers(*needed), supported == needed);
            }
            assert!(supported.covers(Supports::default()));
            assert!(Supports::EVERYTHING.covers(*supported));
            assert!(!Supports::default().covers(*supported));
        }
    }

    #[test]
    fn only_common_parts_are_supported_by_both() {
        let parts = single_parts();
        for (one, _) in &parts {
            assert_eq!(one.and(Supports::EVERYTHING), *one);
            for (other, _) in &parts {
                let both = if one == other { *one } else { Supports::default() };
                assert_eq!(one.and(*other), both);
            }
        }
    }
}
