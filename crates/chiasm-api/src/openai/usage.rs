//! The `usage` object.

use chiasm_backend::Prefill;
use chiasm_request::{MediaTokens, RouteOutcome};
use serde::{Serialize, Serializer};

/// The token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The length of the expanded prompt.
    pub prompt_tokens: usize,
    /// The number of new tokens in all continuations.
    pub completion_tokens: usize,
    /// The prompt tokens that the engine found in its KV cache, by the engine's own count.
    pub cached_tokens: usize,
    /// The prompt tokens that the engine computed and stored in its KV cache, by the engine's own
    /// count; `None` if the engine does not report them.
    pub created_tokens: Option<usize>,
    /// The prompt tokens that stand for media items.
    pub media_tokens: MediaTokens,
    /// The new tokens that are reasoning; `None` if answers are not parsed for reasoning.
    pub reasoning_tokens: Option<usize>,
}

#[derive(Serialize)]
struct UsageBody {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    created_cache_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    multimodal_tokens: Option<MediaTokens>,
}

#[derive(Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl Usage {
    /// Returns the counts of a prompt before any new token. `reads_reasoning` means that new tokens
    /// may be reasoning.
    pub fn for_prompt(outcome: &RouteOutcome, reads_reasoning: bool) -> Self {
        let mut usage = Self {
            prompt_tokens: outcome.prompt_tokens,
            media_tokens: outcome.media_tokens,
            reasoning_tokens: reads_reasoning.then_some(0),
            ..Self::default()
        };
        usage.set_prefill(outcome.prefill);
        usage
    }

    /// Sets the counts of cached and newly stored prompt tokens.
    pub fn set_prefill(&mut self, prefill: Prefill) {
        self.cached_tokens = prefill.cached_tokens;
        self.created_tokens = prefill.created_tokens;
    }
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self {
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            created_tokens,
            media_tokens,
            reasoning_tokens,
        } = *self;
        let total_tokens = prompt_tokens + completion_tokens;
        let prompt_tokens_details = PromptDetails {
            cached_tokens,
            created_cache_tokens: created_tokens,
            multimodal_tokens: Some(media_tokens)
                .filter(|tokens| *tokens != MediaTokens::default()),
        };
        let completion_tokens_details =
            reasoning_tokens.map(|reasoning_tokens| CompletionDetails { reasoning_tokens });
        UsageBody {
            prompt_tokens,
            completion_tokens,
            total_tokens,
            prompt_tokens_details,
            completion_tokens_details,
        }
        .serialize(to)
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.cached_tokens += other.cached_tokens;
        if let Some(more) = other.created_tokens {
            *self.created_tokens.get_or_insert(0) += more;
        }
        self.media_tokens += other.media_tokens;
        if let Some(more) = other.reasoning_tokens {
            *self.reasoning_tokens.get_or_insert(0) += more;
        }
    }
}
