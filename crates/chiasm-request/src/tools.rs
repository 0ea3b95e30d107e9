//! The functions that a model may call.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::Value;

/// The functions that a model may call in its answer to a conversation.
#[derive(Clone, Debug)]
pub struct ToolUse {
    /// The functions in the form that chat templates get: a list of
    /// `{"type": "function", "function": {"name", "description", "parameters"}}`.
    pub tools: Arc<Value>,
    /// The rule for calling functions.
    pub choice: ToolChoice,
    /// The names of the functions that the model may call; `None` for all.
    pub allowed: Option<HashSet<String>>,
    /// The names of the functions whose schema is enforced on forced calls although they are not
    /// `strict`.
    pub enforced: HashSet<String>,
    /// Allows several calls in one answer.
    pub in_parallel: bool,
}

/// The rule for calling functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// Calls are not parsed. The functions stay in the prompt, unless the frontend leaves out
    /// functions that may not be called.
    None,
    /// The model must call at least one function.
    Required,
    /// The model must call this function.
    Named(String),
}
