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

use super::body::{Beside, Body, ChunkHead, Ids};
use super::finish::{self, StopReason};
use super::intake::Intake;
use super::logprobs::{Lists, Told};
use super::prompt_logprobs::PromptLogprobsBody;
use super::prompts::Prompts;
use super::request::RequestBody;
use super::sampling::{Common, MAX_LOGPROBS};
use super::usage::Usage;
use super::{AnswerHead, Nvext, request};
use crate::error::ApiError;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Most choices in one answer: prompts times `n`.
const MAX_CHOICES: usize = 512;

/// A parsed body: one request per prompt.
pub struct CompletionRequest {
    /// The fields of both completion endpoints.
    pub common: Common,
    /// A request for each prompt.
    pub generate: Vec<GenerateRequest>,
    /// The prompts, if they begin their answers.
    pub echo: Option<Echo>,
}

/// `echo`: the prompts begin their answers.
pub struct Echo {
    /// The prompts that are texts.
    pub texts: Vec<Option<String>>,
    /// They are all of the answer that is shown (`max_tokens: 0`).
    pub only: bool,
}

impl Echo {
    fn of(prompts: &[Prompt], only: bool) -> Self {
        let text = |prompt: &Prompt| match prompt {
            Prompt::Text(text) => Some(text.clone()),
            Prompt::Tokens(_) | Prompt::Chat(_) => None,
        };
        Self { texts: prompts.iter().map(text).collect(), only }
    }
}

/// A prompt that begins its answer.
#[derive(Debug)]
pub struct Echoed {
    /// The prompt's text.
    pub text: String,
    /// The prompt's tokens.
    pub tokens: Arc<Vec<TokenId>>,
    /// Alternatives to each token, if log probabilities were asked for.
    pub top: Option<u32>,
    /// It is all that is shown.
    pub only: bool,
}

impl Echoed {
    /// The lists of log probabilities that begin with the prompt's, if they were asked for.
    pub fn lists(&self, tokenizer: &Tokenizer, logprobs: Option<&PromptLogprobs>) -> Lists {
        let mut lists = Lists::default();
        if let (Some(top), Some(logprobs)) = (self.top, logprobs) {
            lists.add_prompt(tokenizer, &self.tokens, logprobs, top);
        }
        lists
    }

    fn before(&self, text: &str) -> String {
        let text = if self.only { "" } else { text };
        [&self.text, text].concat()
    }
}

impl RequestBody for CompletionRequest {
    fn parse(mut intake: Intake) -> Result<(Self, Charge), ApiError> {
        let (mut fields, Prompts(prompts)) = request::read(&mut intake)?;
        let mut common = Common::take(&mut fields)?;
        let echo = fields.take("echo")?.unwrap_or(false);
        let (least, range) = if echo { (0, "0 or more") } else { (1, "at least 1") };
        let max_tokens =
            fields.take_in("max_tokens", least.., range)?.unwrap_or(DEFAULT_MAX_TOKENS);
        // An engine makes one token at least, which is not shown then.
        common.sampling.max_tokens = Some(max_tokens.max(1));
        common.sampling.logprobs = fields.take_in("logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?;
        if echo && common.sampling.prompt_logprobs.is_none() {
            common.sampling.prompt_logprobs = common.sampling.logprobs;
        }
        let echo = echo.then(|| Echo::of(&prompts, max_tokens == 0));
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
        common.check_given(choices)?;
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

/// A continuation.
pub struct ShownChoice {
    /// The continuation.
    pub choice: FinishedChoice,
    /// Its prompt's tokens when they were asked for.
    pub prompt_tokens: Option<Arc<Vec<TokenId>>>,
    /// Its prompt, if that is to begin it.
    pub echoed: Option<Arc<Echoed>>,
}

/// The whole answer; `choices` are those of all prompts in order.
pub fn answer<'a>(
    head: &'a AnswerHead,
    tokenizer: &'a Tokenizer,
    choices: &'a [ShownChoice],
    usage: Usage,
    nvext: Option<Nvext>,
) -> impl Serialize + 'a {
    let choice =
        |(index, ShownChoice { choice, prompt_tokens, echoed }): (usize, &'a ShownChoice)| Choice {
            index,
            text: shown_text(&choice.events, echoed.as_deref()),
            logprobs: choice.logprobs.as_ref().map(|tokens| {
                let (of_prompt, mut told) = (choice.prompt_logprobs.as_ref(), Told::default());
                let mut lists = echoed
                    .as_ref()
                    .map(|echoed| echoed.lists(tokenizer, of_prompt))
                    .unwrap_or_default();
                if echoed.as_ref().is_none_or(|echoed| !echoed.only) {
                    lists.add(tokenizer, tokens, &mut told);
                }
                lists.finish(&mut told)
            }),
            finish_reason: Some(finish::reason(&choice.finish)),
            stop_reason: finish::stop_reason(&choice.finish),
            token_ids: prompt_tokens.is_some().then_some(Ids(&choice.tokens)),
            prompt_token_ids: prompt_tokens.as_ref().map(|tokens| Ids(tokens)),
            prompt_logprobs: choice
                .prompt_logprobs
                .as_ref()
                .map(|logprobs| PromptLogprobsBody { tokenizer, logprobs }),
        };
    let choices: Vec<_> = choices.iter().enumerate().map(choice).collect();
    Body { usage: Some(usage), nvext, ..head.body(OBJECT, choices) }
}

/// The parts of a chunk beside the delta of its choice.
pub struct Shown<'a> {
    /// The choice's index, counted over all prompts.
    pub index: usize,
    /// The state of the log probabilities that were shown of the choice; it is updated.
    pub told: &'a mut Told,
    /// Token ids were asked for.
    pub with_ids: bool,
    /// The prompt's tokens, in a choice's first chunk if they were asked for.
    pub prompt_tokens: Option<&'a [TokenId]>,
    /// The prompt, and the lists of its log probabilities, in the first chunk of a choice that
    /// begins with it.
    pub echoed: Option<(&'a Echoed, Lists)>,
    /// The usage so far, if it was asked for.
    pub usage: Option<Usage>,
    /// The other fields that were asked for, in a choice's last chunk.
    pub nvext: Option<Nvext>,
}

/// The common parts of all chunks of a streamed answer.
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
    pub fn write_delta(&self, events: &mut Vec<u8>, delta: &ChoiceDelta, shown: Shown<'_>) {
        let Shown { index, told, with_ids, prompt_tokens, echoed, usage, nvext } = shown;
        let (echoed, mut lists) =
            echoed.map_or((None, Lists::default()), |(echoed, lists)| (Some(echoed), lists));
        let choice = Choice {
            index,
            text: shown_text(&delta.events, echoed),
            logprobs: delta.logprobs.as_ref().map(|tokens| {
                if echoed.is_none_or(|echoed| !echoed.only) {
                    lists.add(&self.tokenizer, tokens, told);
                }
                lists.finish(told)
            }),
            finish_reason: delta.finish.as_ref().map(finish::reason),
            stop_reason: delta.finish.as_ref().and_then(finish::stop_reason),
            token_ids: with_ids.then_some(Ids(&delta.tokens)),
            prompt_token_ids: prompt_tokens.map(Ids),
            prompt_logprobs: None,
        };
        self.head.write(events, &[choice], &Beside { usage, nvext, ..Beside::default() });
    }

    /// Appends the last chunk of a stream, which has no choices.
    pub fn write_usage(&self, events: &mut Vec<u8>, usage: Usage) {
        self.head.write(events, &[(); 0], &Beside { usage: Some(usage), ..Beside::default() });
    }
}

/// Returns the text of these events, after the prompt if that is echoed.
fn shown_text<'a>(events: &'a AnswerEvents, echoed: Option<&Echoed>) -> Cow<'a, str> {
    let text = events.text();
    match echoed {
        Some(echoed) => Cow::Owned(echoed.before(&text)),
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
    token_ids: Option<Ids<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Ids<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobsBody<'a>>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(body: Value) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(Intake::of(&body)).map(|(request, _)| request)
    }

    fn prompts(prompt: Value) -> usize {
        parse(json!({"prompt": prompt})).map(|request| request.generate.len()).unwrap_or(0)
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
        assert!(parse(body(4)).is_ok());
        let error = parse(body(5)).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("n"));
    }

    #[test]
    fn none_but_the_prompt_may_be_asked_for_with_echo_alone() {
        let echo = |body: Value| {
            parse(body).map(|request| request.echo.map(|echo| (echo.texts, echo.only)))
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
        let asked =
            parse(json!({"prompt": "a", "echo": true, "logprobs": 2, "stream": true})).unwrap();
        assert_eq!(asked.generate[0].sampling.prompt_logprobs, Some(2));
    }

    #[test]
    fn sixteen_tokens_are_the_default() {
        let request = parse(json!({"prompt": "a"})).unwrap();
        assert_eq!(request.generate[0].sampling.max_tokens, Some(16));
    }
}
