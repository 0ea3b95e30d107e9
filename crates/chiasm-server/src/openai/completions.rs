//! `POST /v1/completions`: plain text or token ids in, text out. A list of prompts is answered in one body.

use chiasm_prompt::Tokenizer;
use chiasm_types::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};

use super::fields::Fields;
use super::sampling::{Common, MAX_LOGPROBS};
use super::usage::Usage;
use super::{AnswerHead, logprobs};
use crate::error::ApiError;
use crate::pipeline::{Caller, ChoiceDelta, FinishedChoice, GenerateRequest, Prompt};

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;
/// Most prompts in one body.
const MAX_PROMPTS: usize = 128;

/// Most choices in one answer: prompts times `n`.
const MAX_CHOICES: usize = 512;

/// A parsed body: one request per prompt.
pub(crate) struct CompletionRequest {
    pub(crate) common: Common,
    pub(crate) generate: Vec<GenerateRequest>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl CompletionRequest {
    pub(crate) fn parse(body: Value) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body, "")?;
        let mut common = Common::take(&mut fields)?;
        common.sampling.max_tokens =
            Some(fields.take_in("max_tokens", 1.., "at least 1")?.unwrap_or(DEFAULT_MAX_TOKENS));
        common.sampling.logprobs = fields.take_in("logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?;
        let prompts = parse_prompts(fields.require("prompt")?)?;
        let choices = prompts.len() * common.sampling.n as usize;
        if choices > MAX_CHOICES {
            return Err(ApiError::invalid(
                "n",
                format!(
                    "{} prompts with 'n' {} make {choices} choices, at most {MAX_CHOICES} are allowed",
                    prompts.len(),
                    common.sampling.n
                ),
            ));
        }
        fields.refuse_unless("suffix", |v| v == "")?;
        fields.refuse_unless("add_special_tokens", |v| v == true)?;
        fields.finish()?;
        let generate = prompts
            .into_iter()
            .map(|prompt| GenerateRequest {
                prompt,
                sampling: common.sampling.clone(),
                cache_salt: common.cache_salt.clone(),
                priority: common.priority,
                caller: Caller::default(),
            })
            .collect();
        Ok(Self { common, generate })
    }
}

fn parse_prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let tokens = |ids: Vec<u32>| Prompt::Tokens(ids.into_iter().map(TokenId).collect());
    let prompts: Vec<Prompt> = match serde_json::from_value(value) {
        Ok(Prompts::Text(text)) => vec![Prompt::Text(text)],
        Ok(Prompts::Texts(texts)) => texts.into_iter().map(Prompt::Text).collect(),
        Ok(Prompts::Tokens(ids)) => vec![tokens(ids)],
        Ok(Prompts::TokenLists(lists)) => lists.into_iter().map(tokens).collect(),
        Err(_) => {
            return Err(ApiError::invalid(
                "prompt",
                "'prompt' must be a string, a list of strings, a list of token ids or a list of those",
            ));
        }
    };
    if prompts.is_empty() || prompts.len() > MAX_PROMPTS {
        return Err(ApiError::invalid(
            "prompt",
            format!("'prompt' must hold 1 to {MAX_PROMPTS} prompts, got {}", prompts.len()),
        ));
    }
    Ok(prompts)
}

/// The whole answer; `choices` are those of all prompts in order, each with its prompt's tokens when asked for.
pub(crate) fn answer(
    head: &AnswerHead,
    tokenizer: &Tokenizer,
    choices: &[(FinishedChoice, Option<Vec<TokenId>>)],
    usage: Usage,
) -> Value {
    let choices: Vec<Value> = choices
        .iter()
        .enumerate()
        .map(|(index, (choice, prompt_tokens))| {
            let mut body = json!({
                "index": index,
                "text": choice.text,
                "logprobs": choice.logprobs.as_ref().map(|tokens| logprobs::completion(tokenizer, tokens, &mut 0)),
                "finish_reason": choice.finish.reason(),
                "stop_reason": choice.finish.stop_reason(),
            });
            if let Some(prompt_tokens) = prompt_tokens {
                body["token_ids"] = super::ids(&choice.tokens);
                body["prompt_token_ids"] = super::ids(prompt_tokens);
            }
            body
        })
        .collect();
    let mut body = head.body("text_completion", choices);
    body["usage"] = usage.to_json();
    body
}

/// One chunk of a stream. `index` counts over all prompts; `offset` is the choice's text position for log
/// probabilities; `prompt_tokens` are given with a choice's first chunk when token ids are asked for.
pub(crate) fn delta_chunk(
    head: &AnswerHead,
    tokenizer: &Tokenizer,
    delta: &ChoiceDelta,
    index: usize,
    offset: &mut usize,
    with_ids: bool,
    prompt_tokens: Option<&[TokenId]>,
) -> Value {
    let mut choice = json!({
        "index": index,
        "text": delta.text,
        "logprobs": delta.logprobs.as_ref().map(|tokens| logprobs::completion(tokenizer, tokens, offset)),
        "finish_reason": delta.finish.as_ref().map(|finish| finish.reason()),
        "stop_reason": delta.finish.as_ref().map_or(Value::Null, |finish| finish.stop_reason()),
    });
    if with_ids {
        choice["token_ids"] = super::ids(&delta.tokens);
    }
    if let Some(tokens) = prompt_tokens {
        choice["prompt_token_ids"] = super::ids(tokens);
    }
    head.body("text_completion", vec![choice])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(prompt: Value) -> usize {
        CompletionRequest::parse(json!({"prompt": prompt})).map(|request| request.generate.len()).unwrap_or(0)
    }

    #[test]
    fn a_prompt_may_be_text_tokens_or_lists_of_them() {
        assert_eq!(prompts(json!("a")), 1);
        assert_eq!(prompts(json!(["a", "b"])), 2);
        assert_eq!(prompts(json!([1, 2, 3])), 1);
        assert_eq!(prompts(json!([[1], [2, 3]])), 2);
        assert_eq!(prompts(json!([])), 0);
        assert_eq!(prompts(json!({"a": 1})), 0);
    }

    #[test]
    fn prompts_times_n_is_bounded() {
        let body = |prompts: usize| json!({"prompt": vec!["a"; prompts], "n": 128});
        assert!(CompletionRequest::parse(body(4)).is_ok());
        let error = CompletionRequest::parse(body(5)).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("n"));
    }

    #[test]
    fn sixteen_tokens_are_the_default() {
        let request = CompletionRequest::parse(json!({"prompt": "a"})).unwrap();
        assert_eq!(request.generate[0].sampling.max_tokens, Some(16));
    }
}
