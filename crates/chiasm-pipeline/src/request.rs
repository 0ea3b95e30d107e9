//! What a client asks for, whichever endpoint it came by: parsed and in range.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_backend::{Repetition, RequestId, Structured, TraceContext};
use chiasm_media::MediaInput;
use chiasm_prompt::ChatMessage;
use chiasm_types::{Modality, TokenId};
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::observer::Entries;
use super::tried::Attempts;
use crate::cpu::CpuBudget;
use crate::model::ChatDefaults;

/// One prompt and how to continue it.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// What to continue.
    pub prompt: Prompt,
    /// How tokens are chosen and when to stop.
    pub sampling: Sampling,
    /// Keeps prompts of different owners from sharing cached blocks.
    pub cache_salt: Option<String>,
    /// Lower is handled earlier, by engines with a priority scheduler.
    pub priority: i64,
    /// The functions that the model may call.
    pub tools: Option<ToolUse>,
    /// Reasoning is left out of the answer.
    pub without_reasoning: bool,
}

/// The functions that a model may call in its answer to a conversation.
#[derive(Clone, Debug)]
pub struct ToolUse {
    /// A list of `{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates are given it.
    pub tools: Arc<Value>,
    /// Whether it has to.
    pub choice: ToolChoice,
    /// The names of those of them that it may call, if it may not call all.
    pub allowed: Option<HashSet<String>>,
    /// The names of those whose schema a forced call is held to though the function does not say that it is strict.
    pub held: HashSet<String>,
    /// It may call several at once, where it has to call any.
    pub in_parallel: bool,
}

/// Whether a model calls functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// If it likes.
    Auto,
    /// It knows of them, but what looks like a call is text.
    None,
    /// It calls one at least.
    Required,
    /// It calls this one.
    Named(String),
}

/// Who asks, as the request's headers tell, and what became of the request so far.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The request's identity: the client's `x-request-id`, or one that was made.
    pub id: RequestId,
    /// The trace that the request belongs to.
    pub trace: Option<TraceContext>,
    /// When its head had been read.
    pub arrived: Instant,
    /// The work that the request may have done.
    pub cpu: CpuBudget,
    /// Requests with the same number go to the same worker if they can.
    pub session: Option<u64>,
    /// The header with the client's key: names that clients give to media items are their own.
    pub credentials: Option<Bytes>,
    /// What the request has been through.
    pub tried: Attempts,
    /// The request's entries on the live page.
    pub entries: Entries,
}

/// What to continue.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A conversation, to be rendered by the model's chat template.
    Chat(Chat),
    /// Plain text.
    Text(String),
    /// Token ids as they are.
    Tokens(Vec<TokenId>),
}

impl Prompt {
    /// The field of the request that holds it.
    pub(super) fn field(&self) -> &'static str {
        match self {
            Self::Chat(_) => "messages",
            Self::Text(_) | Self::Tokens(_) => "prompt",
        }
    }
}

/// A conversation with its media items taken out, in order of appearance.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// The messages; each media part stands for the next of `media`.
    pub messages: Vec<ChatMessage>,
    /// The media items.
    pub media: Vec<MediaRef>,
    /// Ends the prompt with the opening of an assistant message.
    pub add_generation_prompt: bool,
    /// Leaves the last message open, to be continued.
    pub continue_final_message: bool,
    /// Extra variables of the template.
    pub template_kwargs: Map<String, Value>,
    /// How much the model is to think.
    pub reasoning_effort: Option<String>,
    /// The functions that the template writes.
    pub tools: Option<Arc<Value>>,
    /// Changes of how media are made; in a box, as few requests have any.
    pub media_kwargs: Box<MediaKwargs>,
}

impl Chat {
    /// Takes the variables of a chat template: those of all conversations, then what the effort says of thinking, then the request's
    /// own, as vLLM has them (`ChatCompletionRequest.build_chat_params`): some templates think only when they are told to.
    pub fn take_template_variables(&mut self, defaults: &ChatDefaults) -> Map<String, Value> {
        let mut variables = defaults.template_kwargs.clone();
        if let Some(effort) = &self.reasoning_effort {
            variables.insert("enable_thinking".to_owned(), Value::from(effort != "none"));
        }
        variables.append(&mut self.template_kwargs);
        if let Some(effort) = &self.reasoning_effort {
            variables.insert("reasoning_effort".to_owned(), Value::from(effort.as_str()));
        }
        variables
    }

    /// What the variables of the chat template say of thinking, for those of vLLM's parsers that ask them: `thinking` or
    /// `enable_thinking`. `None` if neither is set.
    pub(super) fn thinks(&self, defaults: &ChatDefaults) -> Option<bool> {
        self.thinking_variables(defaults).into_iter().map(|(_, value)| value).reduce(|one, other| one || other)
    }

    /// Those of the two variables that are set.
    pub(super) fn thinking_variables(&self, defaults: &ChatDefaults) -> Vec<(&'static str, bool)> {
        // vLLM takes both for "not set".
        let is_set = |value: &&Value| !value.is_null() && *value != "auto";
        let of = |variables: &'_ Map<String, Value>, name: &str| variables.get(name).filter(is_set).map(is_true);
        let of_effort = self.reasoning_effort.as_ref().map(|effort| effort != "none");
        let variable = |name: &'static str, of_effort: Option<bool>| {
            let own = of(&self.template_kwargs, name).or(of_effort);
            own.or_else(|| of(&defaults.template_kwargs, name)).map(|value| (name, value))
        };
        [variable("thinking", None), variable("enable_thinking", of_effort)].into_iter().flatten().collect()
    }
}

/// Whether Python takes a value for true.
fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
    }
}

/// What a request changes of how media are made.
#[derive(Clone, Debug, Default)]
pub struct MediaKwargs {
    /// `mm_processor_kwargs`: settings of the model's media processors.
    pub processor: Map<String, Value>,
    /// `media_io_kwargs`: by modality, how files are read.
    pub io: Map<String, Value>,
}

/// Where a media item comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaRef {
    /// What kind of thing it is, as the part's type says.
    pub modality: Modality,
    /// The text of a URL or of the item itself, which may be a part of the body; `None` for an item that was seen before.
    pub source: Option<MediaInput>,
    /// What the client calls it.
    pub uuid: Option<String>,
    /// The request field that holds it, such as `messages[0].content[1].image_url`.
    pub field: String,
}

/// Sampling as vLLM defines it; `None` leaves the choice to the model's `generation_config.json`, then to vLLM's default.
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
    /// The log probabilities are those of the text's tokens alone, without reasoning, calls and markers.
    pub logprobs_of_text: bool,
    /// Log probabilities of each prompt token and so many alternatives. The whole prompt is computed for them.
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
