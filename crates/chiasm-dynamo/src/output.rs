//! One message of an answer (`LLMEngineOutput` of Dynamo 1.6).

use chiasm_backend::{Finish, TokenLogprob};
use chiasm_types::TokenId;
use serde::Deserialize;

/// New tokens of an answer, and its end.
#[derive(Debug, Deserialize)]
pub(crate) struct EngineOutput {
    #[serde(default)]
    pub(crate) token_ids: Vec<u32>,
    log_probs: Option<Vec<f64>>,
    top_logprobs: Option<Vec<Vec<TopLogprob>>>,
    finish_reason: Option<FinishReason>,
    stop_reason: Option<StopReason>,
    completion_usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum FinishReason {
    Word(String),
    Error { error: String },
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum StopReason {
    Token(u32),
    Text(String),
}

#[derive(Debug, Deserialize)]
struct TopLogprob {
    token_id: u32,
    logprob: f64,
}

#[derive(Debug, Deserialize)]
struct Usage {
    prompt_tokens: Option<usize>,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Debug, Deserialize)]
struct PromptTokensDetails {
    cached_tokens: Option<usize>,
}

/// The end of an answer, as the worker reports it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    Finished(Finish),
    /// The worker aborted the request by itself.
    Cancelled,
    /// The engine could not execute the request, for this reason.
    Failed(String),
}

impl EngineOutput {
    /// Returns the number of prompt tokens that the engine found in its cache, if reported.
    pub(crate) fn cached_tokens(&self) -> Option<usize> {
        self.completion_usage.as_ref()?.prompt_tokens_details.as_ref()?.cached_tokens
    }

    /// Returns the number of prompt tokens, if reported.
    pub(crate) fn prompt_tokens(&self) -> Option<usize> {
        self.completion_usage.as_ref()?.prompt_tokens
    }

    /// Returns the end of the answer, if it has ended. `eos` is the end-of-sequence token.
    pub(crate) fn end(&self, eos: Option<TokenId>) -> Option<End> {
        let word = match self.finish_reason.as_ref()? {
            FinishReason::Word(word) => word.as_str(),
            FinishReason::Error { error } => return Some(End::Failed(error.clone())),
        };
        let finish = match (word, &self.stop_reason) {
            ("stop", Some(StopReason::Token(token))) if eos != Some(TokenId(*token)) => {
                Finish::StopToken(TokenId(*token))
            }
            ("stop", Some(StopReason::Text(text))) => Finish::StopString(text.clone()),
            ("stop" | "eos", _) => Finish::Eos,
            ("length", _) => Finish::Length,
            ("cancelled", _) => return Some(End::Cancelled),
            (other, _) => {
                return Some(End::Failed(
                    other.strip_prefix("error: ").unwrap_or(other).to_owned(),
                ));
            }
        };
        Some(End::Finished(finish))
    }

    /// Returns the log probabilities of the tokens, each with the first `top` candidates in the
    /// engine's order; `None` if their number differs from the number of tokens.
    pub(crate) fn logprobs(&self, top: usize) -> Option<Vec<TokenLogprob>> {
        let logprobs = self.log_probs.as_deref().unwrap_or_default();
        let candidates = self.top_logprobs.as_deref().unwrap_or_default();
        let are_complete = logprobs.len() == self.token_ids.len()
            && (top == 0 || candidates.len() == logprobs.len());
        let convert = |(at, (token, logprob)): (usize, (&u32, &f64))| TokenLogprob {
            token: TokenId(*token),
            logprob: *logprob as f32,
            top: candidates
                .get(at)
                .into_iter()
                .flatten()
                .take(top)
                .map(|candidate| (TokenId(candidate.token_id), candidate.logprob as f32))
                .collect(),
        };
        are_complete.then(|| self.token_ids.iter().zip(logprobs).enumerate().map(convert).collect())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn output(value: serde_json::Value) -> EngineOutput {
        rmp_serde::from_slice(&rmp_serde::to_vec_named(&value).unwrap()).unwrap()
    }

    #[test]
    fn finish_reason_is_converted() {
        let eos = Some(TokenId(2));
        let end = |reason: serde_json::Value, stop: serde_json::Value| {
            output(json!({"token_ids": [1], "finish_reason": reason, "stop_reason": stop})).end(eos)
        };
        let finished = |finish| Some(End::Finished(finish));
        let null = serde_json::Value::Null;
        assert_eq!(end(null.clone(), null.clone()), None);
        assert_eq!(end(json!("length"), null.clone()), finished(Finish::Length));
        assert_eq!(end(json!("stop"), null.clone()), finished(Finish::Eos));
        assert_eq!(end(json!("eos"), null.clone()), finished(Finish::Eos));
        assert_eq!(end(json!("stop"), json!(2)), finished(Finish::Eos));
        assert_eq!(end(json!("stop"), json!(7)), finished(Finish::StopToken(TokenId(7))));
        assert_eq!(
            end(json!("stop"), json!("end")),
            finished(Finish::StopString("end".to_owned()))
        );
        assert_eq!(end(json!("cancelled"), null.clone()), Some(End::Cancelled));
        assert_eq!(
            end(json!("error: out of memory"), null.clone()),
            Some(End::Failed("out of memory".to_owned()))
        );
        assert_eq!(end(json!({"error": "no"}), null), Some(End::Failed("no".to_owned())));
    }

    #[test]
    fn log_probabilities_without_one_per_token_are_none() {
        let top = json!([[
            {"rank": 1, "token_id": 4, "token": "x", "logprob": -0.5},
            {"rank": 2, "token_id": 5, "token": null, "logprob": -2.5},
        ]]);
        let one = output(json!({"token_ids": [4], "log_probs": [-0.5], "top_logprobs": top}));
        let expected =
            TokenLogprob { token: TokenId(4), logprob: -0.5, top: vec![(TokenId(4), -0.5)] };
        assert_eq!(one.logprobs(1), Some(vec![expected]));
        assert_eq!(one.logprobs(0).unwrap()[0].top, []);
        assert!(output(json!({"token_ids": [4]})).logprobs(0).is_none());
        assert!(output(json!({"token_ids": [4], "log_probs": [-0.5]})).logprobs(1).is_none());
        assert!(output(json!({"token_ids": []})).logprobs(1).is_some());
    }

    #[test]
    fn cached_tokens_come_from_the_usage() {
        let usage = json!({
            "prompt_tokens": 70, "completion_tokens": 1, "total_tokens": 71,
            "prompt_tokens_details": {"audio_tokens": null, "cached_tokens": 64},
        });
        assert_eq!(
            output(json!({"token_ids": [1], "completion_usage": usage})).cached_tokens(),
            Some(64)
        );
        assert_eq!(output(json!({"token_ids": [1]})).cached_tokens(), None);
    }
}
