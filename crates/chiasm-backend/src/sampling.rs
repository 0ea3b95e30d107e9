//! Sampling settings, and the parts of a request that not every worker supports.
//!
//! Every sender of [`Sampling`] destructures it whole, so a new field does not compile until each
//! sender passes it on or refuses it: `docs/adding-a-parameter.md`.

use std::sync::Arc;

use chiasm_types::TokenId;

/// Declares [`Supports`] and everything that has to know each of its fields.
macro_rules! supports {
    ($($(#[$doc:meta])* $part:ident = $field:literal,)+) => {
        /// The optional parts of a request that a worker supports, or those that a request has. A
        /// job with another part is refused with [`JobError::Refused`](crate::JobError::Refused).
        /// The default supports nothing.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Supports {
            $($(#[$doc])* pub $part: bool,)+
        }

        impl Supports {
            /// Every part, also those that are added later: for backends that pass on requests as
            /// they come, and do not know what is in them.
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

        /// One part each, with its request field.
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
    /// Settings of a request for the processor of its media items.
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
    /// Returns `true` if every part that is needed is supported.
    pub fn covers(self, needs: Self) -> bool {
        self.first_missing(needs).is_none()
    }
}

/// How tokens are chosen and when to stop, with all defaults filled in. Ranges are those of vLLM's
/// `SamplingParams`.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Number of continuations, 1 or more.
    pub n: usize,
    /// Most new tokens of each continuation, at least 1.
    pub max_tokens: u32,
    /// No stop before so many new tokens.
    pub min_tokens: u32,
    /// 0 is greedy.
    pub temperature: f64,
    /// Above 0, to 1.
    pub top_p: f64,
    /// 0 considers all tokens.
    pub top_k: i32,
    /// 0 to 1.
    pub min_p: f64,
    /// Makes sampling repeatable. Continuation `i` uses `seed + i`, so that they differ.
    pub seed: Option<i64>,
    /// -2 to 2.
    pub presence_penalty: f64,
    /// -2 to 2.
    pub frequency_penalty: f64,
    /// Above 0; 1 is none.
    pub repetition_penalty: f64,
    /// Tokens that end a continuation, without the end-of-sequence token.
    pub stop_token_ids: Vec<TokenId>,
    /// The end-of-sequence token; `None` if it does not end a continuation.
    pub eos_token: Option<TokenId>,
    /// All tokens that could end a continuation: what `min_tokens` holds back.
    pub all_stop_token_ids: Vec<TokenId>,
    /// Goes on after the end-of-sequence token.
    pub ignore_eos: bool,
    /// Log probabilities of each new token and so many alternatives.
    pub logprobs: Option<u32>,
    /// Log probabilities of each prompt token but the first, and of so many alternatives. The whole
    /// prompt is computed for them.
    pub prompt_logprobs: Option<u32>,
    /// Computes the whole prompt, whatever of it is in the KV cache.
    pub skip_reading_prefix_cache: bool,
    /// Added to the logits of single tokens, -100 to 100.
    pub logit_bias: Vec<(TokenId, f64)>,
    /// Only these can be generated, unless empty.
    pub allowed_token_ids: Vec<TokenId>,
    /// The last token of none of these sequences is generated behind the others.
    pub bad_words: Vec<Vec<TokenId>>,
    /// What the text has to be.
    pub structured: Option<Structured>,
    /// At most so many tokens of reasoning: then it is ended.
    pub thinking_budget: Option<u32>,
    /// What counts as going round in circles, which ends a continuation.
    pub repetition: Option<Repetition>,
}

impl Sampling {
    /// Returns the optional parts that these settings have. Parts of the rest of a job are left
    /// out.
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
            // Backends refuse them themselves: it shows late which servers lack them.
            logprobs: _,
            // Which constraints a worker knows shows when it has one.
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
            // Parts of the job beside its sampling.
            processor_kwargs: false,
            media: false,
            cache_salt: false,
        }
    }

    /// Greedy sampling of at most `max_tokens` tokens, with everything else off.
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

    /// Sampling in which every field has a value of its own, which shows whether a wire carries it.
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

/// A pattern of tokens that is repeated at the end of a continuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repetition {
    /// Most tokens of the pattern, at least 1.
    pub max_pattern: u32,
    /// Fewest tokens of the pattern, at most `max_pattern`; 0 is as good as 1.
    pub min_pattern: u32,
    /// How often it has to be there, at least 2.
    pub count: u32,
}

/// What the text of an answer has to be, and where the client said so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Structured {
    /// The constraint. A backend that does not take it refuses the job with
    /// [`JobError::Refused`](crate::JobError::Refused).
    pub constraint: Constraint,
    /// The field of the request that it came from.
    pub field: &'static str,
}

/// Exactly one constraint of an answer's text, in the forms that engines compile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// JSON of this schema, which is JSON too.
    JsonSchema(Arc<str>),
    /// Any JSON object.
    JsonObject,
    /// Text that this regular expression matches as a whole.
    Regex(Arc<str>),
    /// A word of this grammar: GBNF with the start symbol `root`.
    Grammar(Arc<str>),
    /// Text in which some tags begin parts of a form of their own: xgrammar's structural tag, as
    /// JSON.
    StructuralTag(Arc<str>),
}

impl Constraint {
    /// Bytes of its text.
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
