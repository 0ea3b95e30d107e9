//! The functions that a model may call.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::Value;

/// The functions that a model may call in its answer to a conversation.
#[derive(Clone, Debug)]
pub struct ToolUse {
    /// A list of `{"type": "function", "function": {"name", "description", "parameters"}}`, as chat
    /// templates are given it.
    pub tools: Arc<Value>,
    /// Whether it has to.
    pub choice: ToolChoice,
    /// The names of those of them that it may call, if it may not call all.
    pub allowed: Option<HashSet<String>>,
    /// The names of those whose schema is enforced on forced calls though they are not `strict`.
    pub held: HashSet<String>,
    /// It may call several at once, where it has to call any.
    pub in_parallel: bool,
}

/// Whether a model calls functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// If it likes.
    Auto,
    /// Calls are not parsed. The functions stay in the prompt unless the frontend leaves out those
    /// that may not be called.
    None,
    /// It calls one at least.
    Required,
    /// It calls this one.
    Named(String),
}
