//! The reason why a continuation ended, in OpenAI's and vLLM's terms.

use chiasm_backend::Finish;
use serde::Serialize;

/// Returns OpenAI's `finish_reason`, with vLLM's additions.
pub(super) fn reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Eos | Finish::StopToken(_) | Finish::StopString(_) => "stop",
        Finish::Length => "length",
        Finish::Repetition => "repetition",
        Finish::ToolCalls => "tool_calls",
    }
}

/// vLLM's `stop_reason`: the token or the string that ended the continuation.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum StopReason<'a> {
    Token(u32),
    Text(&'a str),
}

/// Returns the stop string or token id; `None`, which is null, for every other end.
pub(super) fn stop_reason(finish: &Finish) -> Option<StopReason<'_>> {
    match finish {
        Finish::StopToken(token) => Some(StopReason::Token(token.0)),
        Finish::StopString(stop) => Some(StopReason::Text(stop)),
        Finish::Eos | Finish::Length | Finish::Repetition | Finish::ToolCalls => None,
    }
}
