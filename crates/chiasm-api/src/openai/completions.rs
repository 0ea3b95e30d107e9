//! `POST /v1/completions`: plain text or token ids in, text out. A list of prompts is answered in
//! one body.

use std::borrow::Cow;
use std::sync::Arc;

use chiasm_backend::PromptLogprobs;
use chiasm_media::Charge;
use chiasm_prompt::Tokenizer;
use chiasm_request::{AnswerEvents, ChoiceDelta, FinishedChoice, GenerateRequest, Prompt};
use chiasm_types::TokenId;
use serde::Serialize;
use serde_json::Value;

use super::body::{Body, ChunkExtras, ChunkHead, TokenIds};
use super::finish::{self, StopReason};
use super::intake::Intake;
use super::logprobs::{LogprobLists, LogprobState};
use super::prompt_logprobs::PromptLogprobsBody;
use super::prompts::Prompts;
use super::request::RequestBody;
use super::sampling::{CommonFields, MAX_LOGPROBS};
use super::usage::Usage;
use super::{AnswerHead, Nvext, request};
use crate::error::ApiError;

/// OpenAI's default for `max_tokens`.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// The maximum number of choices in one answer: prompts times `n`.
const MAX_CHOICES: usize = 512;

/// A parsed body, with one request per prompt.
pub struct CompletionRequest {
    /// The fields of both completion endpoints.
    pub common: CommonFields,
    /// One request per prompt.
    pub generate: Vec<GenerateRequest>,
    /// The prompts, if the answers start with them.
    pub echo: Option<Echo>,
}

/// The field `echo`: each answer starts with its prompt.
pub struct Echo {
    /// The text of each prompt; `None` for prompts of token ids.
    pub texts: Vec<Option<String>>,
    /// `true` if the answers show nothing but the prompts (`max_tokens: 0`).
    pub prompt_only: bool,
}

impl Echo {
    fn from_prompts(prompts: &[Prompt], prompt_only: bool) -> Self {
        let text = |prompt: &Prompt| match prompt {
            Prompt::Text(text) => Some(text.clone()),
            Prompt::Tokens(_) | Prompt::Chat(_) => None,
        };
        Self { texts: prompts.iter().map(text).collect(), prompt_only }
    }
}

/// A prompt with which its answer starts.
#[derive(Debug)]
pub struct EchoedPrompt {
    /// The prompt's text.
    pub text: String,
    /// The prompt's tokens.
    pub tokens: Arc<Vec<TokenId>>,
    /// The number of alternatives per token, if log probabilities were requested.
    pub top: Option<u32>,
    /// `true` if the answer shows nothing but the prompt.
    pub prompt_only: bool,
}

impl EchoedPrompt {
    /// Returns lists that start with the prompt's log probabilities, or empty lists if none were
    /// requested.
    pub fn logprob_lists(
        &self,
        tokenizer: &Tokenizer,
        logprobs: Option<&PromptLogprobs>,
    ) -> LogprobLists {
        let mut lists = LogprobLists::default();
        if let (Some(top), Some(logprobs)) = (self.top, logprobs) {
            lists.add_prompt(tokenizer, &self.tokens, logprobs, top);
        }
        lists
    }

    /// Returns the prompt, followed by `text` unless only the prompt is shown.
    fn prepend_to(&self, text: &str) -> String {
        let text = if self.prompt_only { "" } else { text };
        [&self.text, text].concat()
    }
}

impl RequestBody for CompletionRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, Prompts(prompts)) = request::read(&mut intake)?;
        let mut common = CommonFields::take(&mut fields)?;
        let echo = fields.take("echo")?.unwrap_or(false);
        let (min_tokens, range) = if echo { (0, "0 or more") } else { (1, "at least 1") };
        let max_tokens =
            fields.take_in("max_tokens", min_tokens.., range)?.unwrap_or(DEFAULT_MAX_TOKENS);
        // Engines generate at least one token. With `max_tokens: 0` it is not shown.
        common.sampling.max_tokens = Some(max_tokens.max(1));
        common.sampling.logprobs = fields.take_in("logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?;
        if echo && common.sampling.prompt_logprobs.is_none() {
            common.sampling.prompt_logprobs = common.sampling.logprobs;
        }
        let echo = echo.then(|| Echo::from_prompts(&prompts, max_tokens == 0));
        let choices = prompts.len() * common.sampling.n as usize;
        if choices > MAX_CHOICES {
            return Err(ApiError::invalid(
                "n",
                format!(
                    "{} prompts and 'n': {} make {choices} choices, at most {MAX_CHOICES} are \
                     allowed",
                    prompts.len(),
                    common.sampling.n
                ),
            ));
        }
        common.check_fan_out(choices)?;
        fields.refuse_unless("suffix", |v| v == "")?;
        for field in ["tools", "tool_choice"] {
            fields.refuse_unless(field, |v| {
                v == "none" || v == "auto" || v == &Value::Array(Vec::new())
            })?;
        }
        fields.ignore(&["parallel_tool_calls"]);
        fields.refuse_unless("add_special_tokens", |v| v == true)?;
        fields.finish()?;
        let generate = prompts
            .into_iter()
            .map(|prompt| GenerateRequest {
                prompt,
                sampling: common.sampling.clone(),
                cache_salt: common.cache_salt.clone(),
                priority: common.priority,
                tools: None,
                without_reasoning: false,
            })
            .collect();
        Ok((Self { common, generate, echo }, intake.into_charge()))
    }
}

/// A continuation, with the parts of its prompt that were requested.
pub struct CompletionChoice {
    /// The continuation.
    pub choice: FinishedChoice,
    /// The prompt's tokens, if requested.
    pub prompt_tokens: Option<Arc<Vec<TokenId>>>,
    /// The prompt, if the answer starts with it.
    pub echoed: Option<Arc<EchoedPrompt>>,
}

/// Returns the body of a whole answer. `choices` has the choices of all prompts, in order.
pub fn answer<'a>(
    head: &'a AnswerHead,
    tokenizer: &'a Tokenizer,
    choices: &'a [CompletionChoice],
    usage: Usage,
    nvext: Option<Nvext>,
) -> impl Serialize + 'a {
    let choice = |(index, choice): (usize, &'a CompletionChoice)| {
        let CompletionChoice { choice, prompt_tokens, echoed } = choice;
        Choice {
            index,
            text: shown_text(&choice.events, echoed.as_deref()),
            logprobs: choice.logprobs.as_ref().map(|tokens| {
                let mut state = LogprobState::default();
                let mut lists = echoed
                    .as_ref()
                    .map(|echoed| echoed.logprob_lists(tokenizer, choice.prompt_logprobs.as_ref()))
                    .unwrap_or_default();
                if echoed.as_ref().is_none_or(|echoed| !echoed.prompt_only) {
                    lists.add(tokenizer, tokens, &mut state);
                }
                lists.finish(&mut state)
            }),
            finish_reason: Some(finish::reason(&choice.finish)),
            stop_reason: finish::stop_reason(&choice.finish),
            token_ids: prompt_tokens.is_some().then_some(TokenIds(&choice.tokens)),
            prompt_token_ids: prompt_tokens.as_ref().map(|tokens| TokenIds(tokens)),
            prompt_logprobs: choice
                .prompt_logprobs
                .as_ref()
                .map(|logprobs| PromptLogprobsBody { tokenizer, logprobs }),
        }
    };
    let choices: Vec<_> = choices.iter().enumerate().map(choice).collect();
    Body { usage: Some(usage), nvext, ..head.body(OBJECT, choices) }
}

/// The parts of a chunk besides the delta of its choice.
pub struct ChunkOptions<'a> {
    /// The choice's index, counted over all prompts.
    pub index: usize,
    /// The state of the choice's log probabilities, which is updated.
    pub logprob_state: &'a mut LogprobState,
    /// `true` if token ids were requested.
    pub with_ids: bool,
    /// The prompt's tokens, in a choice's first chunk and if requested.
    pub prompt_tokens: Option<&'a [TokenId]>,
    /// The prompt with its log probabilities, in the first chunk of a choice that starts with the
    /// prompt.
    pub echoed: Option<(&'a EchoedPrompt, LogprobLists)>,
    /// The usage so far, if requested.
    pub usage: Option<Usage>,
    /// The extra fields, in a choice's last chunk and if requested.
    pub nvext: Option<Nvext>,
}

/// The writer of a streamed answer's chunks.
pub struct Chunks {
    head: ChunkHead,
    tokenizer: Tokenizer,
}

impl Chunks {
    /// Creates the writer of an answer's chunks.
    pub fn new(head: &AnswerHead, tokenizer: Tokenizer) -> Self {
        Self { head: ChunkHead::new(head, OBJECT), tokenizer }
    }

    /// Appends one chunk of a stream.
    pub fn write_delta(
        &self,
        events: &mut Vec<u8>,
        delta: &ChoiceDelta,
        options: ChunkOptions<'_>,
    ) {
        let ChunkOptions { index, logprob_state, with_ids, prompt_tokens, echoed, usage, nvext } =
            options;
        let (echoed, lists) = echoed.unzip();
        let mut lists = lists.unwrap_or_default();
        let choice = Choice {
            index,
            text: shown_text(&delta.events, echoed),
            logprobs: delta.logprobs.as_ref().map(|tokens| {
                if echoed.is_none_or(|echoed| !echoed.prompt_only) {
                    lists.add(&self.tokenizer, tokens, logprob_state);
                }
                lists.finish(logprob_state)
            }),
            finish_reason: delta.finish.as_ref().map(finish::reason),
            stop_reason: delta.finish.as_ref().and_then(finish::stop_reason),
            token_ids: with_ids.then_some(TokenIds(&delta.tokens)),
            prompt_token_ids: prompt_tokens.map(TokenIds),
            prompt_logprobs: None,
        };
        self.head.write(events, &[choice], &ChunkExtras { usage, nvext, ..ChunkExtras::default() });
    }

    /// Appends the last chunk of a stream, which has no choices.
    pub fn write_usage(&self, events: &mut Vec<u8>, usage: Usage) {
        self.head.write(
            events,
            &[(); 0],
            &ChunkExtras { usage: Some(usage), ..ChunkExtras::default() },
        );
    }
}

/// Returns the text of these events, after the prompt if it is echoed.
fn shown_text<'a>(events: &'a AnswerEvents, echoed: Option<&EchoedPrompt>) -> Cow<'a, str> {
    let text = events.text();
    match echoed {
        Some(echoed) => Cow::Owned(echoed.prepend_to(&text)),
        None => text,
    }
}

const OBJECT: &str = "text_completion";

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    text: Cow<'a, str>,
    logprobs: Option<Value>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<TokenIds<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<TokenIds<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobsBody<'a>>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(body: Value) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(Intake::from_json(&body)).map(|(request, _)| request)
    }

    fn prompts(prompt: Value) -> usize {
        parse(json!({"prompt": prompt})).map(|request| request.generate.len()).unwrap_or(0)
    }

    #[test]
    fn prompt_forms_are_accepted() {
        assert_eq!(prompts(json!("a")), 1);
        assert_eq!(prompts(json!(["a", "b"])), 2);
        assert_eq!(prompts(json!([1, 2, 3])), 1);
        assert_eq!(prompts(json!([[1], [2, 3]])), 2);
        assert_eq!(prompts(json!([])), 0);
        assert_eq!(prompts(json!({"a": 1})), 0);
    }

    #[test]
    fn too_many_prompts_are_counted() {
        let error = parse(json!({"prompt": vec!["a"; 500]})).err().unwrap();
        assert_eq!(error.message, "'prompt' must have 1 to 128 prompts, got 500");
    }

    #[test]
    fn prompts_times_n_is_bounded() {
        let body = |prompts: usize| json!({"prompt": vec!["a"; prompts], "n": 128});
        assert!(parse(body(4)).is_ok());
        let error = parse(body(5)).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("n"));
    }

    #[test]
    fn zero_max_tokens_needs_echo() {
        let echo = |body: Value| {
            parse(body).map(|request| request.echo.map(|echo| (echo.texts, echo.prompt_only)))
        };
        assert_eq!(
            echo(json!({"prompt": "a", "echo": true})).unwrap(),
            Some((vec![Some("a".to_owned())], false))
        );
        assert_eq!(
            echo(json!({"prompt": [1], "echo": true, "max_tokens": 0})).unwrap(),
            Some((vec![None], true))
        );
        assert_eq!(echo(json!({"prompt": "a", "echo": false})).unwrap(), None);
        let error = parse(json!({"prompt": "a", "max_tokens": 0})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("max_tokens"));
        let request =
            parse(json!({"prompt": "a", "echo": true, "logprobs": 2, "stream": true})).unwrap();
        assert_eq!(request.generate[0].sampling.prompt_logprobs, Some(2));
    }

    #[test]
    fn max_tokens_defaults_to_sixteen() {
        let request = parse(json!({"prompt": "a"})).unwrap();
        assert_eq!(request.generate[0].sampling.max_tokens, Some(16));
    }
}
