//! The `usage` object.

use serde::{Serialize, Serializer};

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Length of the expanded prompt.
    pub(crate) prompt_tokens: usize,
    /// New tokens of all continuations.
    pub(crate) completion_tokens: usize,
    /// Prompt tokens that the engine found in its KV cache: its own count.
    pub(crate) cached_tokens: usize,
    /// New tokens that are reasoning; `None` where nothing is taken for it.
    pub(crate) reasoning_tokens: Option<usize>,
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
}

#[derive(Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let Self { prompt_tokens, completion_tokens, cached_tokens, reasoning_tokens } = *self;
        let total_tokens = prompt_tokens + completion_tokens;
        let prompt_tokens_details = PromptDetails { cached_tokens };
        let completion_tokens_details = reasoning_tokens.map(|reasoning_tokens| CompletionDetails { reasoning_tokens });
        UsageBody { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details, completion_tokens_details }
            .serialize(to)
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        self.cached_tokens += other.cached_tokens;
        if let Some(more) = other.reasoning_tokens {
            *self.reasoning_tokens.get_or_insert(0) += more;
        }
    }
}
