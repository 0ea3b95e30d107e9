//! The sampling fields that both completion endpoints share. Ranges are those of vLLM's
//! `SamplingParams`.

use chiasm_backend::Repetition;
use chiasm_request::{Chat, ClientSampling, GenerateRequest, Prompt, ThinkingBudget, ToolUse};
use chiasm_types::TokenId;
use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::nvext::ExtraFields;
use super::stream_options::StreamOptions;
use super::{harmless, structured};
use crate::error::{ApiError, excerpt};

/// The maximum number of continuations of one prompt.
const MAX_N: u32 = 128;
/// The maximum number of alternatives per token: vLLM's default for `--max-logprobs`.
pub const MAX_LOGPROBS: u32 = 20;
/// The maximum number of stop strings.
const MAX_STOPS: usize = 64;
/// The maximum length of a stop string.
const MAX_STOP_BYTES: usize = 1024;
/// The maximum number of token ids that end the text. Each prompt of a request gets a copy.
const MAX_STOP_TOKENS: usize = 4096;
/// The maximum number of tokens with a bias. Each continuation gets a copy.
const MAX_BIASES: usize = 4096;
/// The maximum number of allowed tokens. Each continuation gets a copy.
const MAX_ALLOWED_TOKENS: usize = 1 << 16;
/// The maximum number of forbidden words. vLLM has room for two token sequences per word
/// (`VLLM_MAX_NUM_BAD_WORDS`).
const MAX_BAD_WORDS: usize = 500;
/// The maximum total size of the forbidden words, which are tokenized for each prompt.
const MAX_BAD_WORD_BYTES: usize = 16 << 10;
/// The maximum number of token ids in all continuations of a request, besides their prompts.
///
/// Each continuation has its own copy of the request's ids, in memory and in a message to an
/// engine. The limit keeps a small body from becoming gigabytes.
const MAX_FAN_OUT_IDS: usize = 1 << 23;
/// The maximum length, and the maximum count, of a repeated pattern.
///
/// After each token an engine searches for each pattern length, in Python and for one request at a
/// time. A request with a thousand lengths delays all others by half a millisecond per step.
const MAX_PATTERN: u32 = 1000;
/// The maximum length of a cache salt: vLLM's limit.
const MAX_SALT_BYTES: usize = 1024;

/// The fields that both endpoints have besides the prompt.
pub struct CommonFields {
    /// The model's name, if given.
    pub model: Option<String>,
    /// The sampling settings without `max_tokens` and `logprobs`, which differ between the
    /// endpoints.
    pub sampling: ClientSampling,
    /// The salt that keeps prompts of different owners from sharing cached blocks.
    pub cache_salt: Option<String>,
    /// The priority. Engines with a priority scheduler handle lower values earlier.
    pub priority: i64,
    /// The options of a streamed answer; `None` for an answer in one piece.
    pub stream: Option<StreamOptions>,
    /// `true` if the answer includes token ids.
    pub return_token_ids: bool,
    /// The fields of `nvext` in the answer.
    pub extra_fields: ExtraFields,
}

impl CommonFields {
    /// Takes these fields out of a body.
    pub fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let sampling = ClientSampling {
            n: fields.take_in("n", 1..=MAX_N, "from 1 to 128")?.unwrap_or(1),
            max_tokens: None,
            min_tokens: fields.take("min_tokens")?.unwrap_or(0),
            temperature: fields.take_in("temperature", 0.0..=2.0, "from 0 to 2")?,
            top_p: fields.take_in("top_p", f64::MIN_POSITIVE..=1.0, "above 0 and at most 1")?,
            top_k: fields.take_in("top_k", -1..=i64::from(i32::MAX), "-1, 0 or more")?,
            min_p: fields.take_in("min_p", 0.0..=1.0, "from 0 to 1")?,
            seed: fields.take("seed")?,
            presence_penalty: fields.take_in("presence_penalty", -2.0..=2.0, "from -2 to 2")?,
            frequency_penalty: fields.take_in("frequency_penalty", -2.0..=2.0, "from -2 to 2")?,
            repetition_penalty: fields.take_in(
                "repetition_penalty",
                f64::MIN_POSITIVE..=1e6,
                "above 0 and at most 1000000",
            )?,
            stop: take_stops(fields, "stop")?,
            include_stop: fields.take("include_stop_str_in_output")?.unwrap_or(false),
            stop_token_ids: take_stop_tokens(fields)?,
            ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
            skip_special_tokens: fields.take("skip_special_tokens")?,
            logprobs: None,
            logprobs_of_text: false,
            prompt_logprobs: fields.take_in("prompt_logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?,
            skip_reading_prefix_cache: fields.take("skip_reading_prefix_cache")?.unwrap_or(false),
            logit_bias: take_biases(fields)?,
            allowed_token_ids: take_allowed(fields)?,
            bad_words: take_bad_words(fields)?,
            structured: structured::take(fields)?,
            thinking_budget: take_thinking_budget(fields)?,
            repetition: take_repetition(fields)?,
        };
        let common = Self {
            model: fields.take("model")?,
            sampling,
            cache_salt: take_salt(fields)?,
            priority: fields.take("priority")?.unwrap_or(0),
            stream: StreamOptions::take(fields)?,
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
            extra_fields: ExtraFields::take(fields)?,
        };
        // As in vLLM. It accepts a request without alternatives, but does not report the log
        // probabilities.
        if common.stream.is_some() && common.sampling.prompt_logprobs.is_some_and(|top| top > 0) {
            return Err(ApiError::invalid(
                "prompt_logprobs",
                "'prompt_logprobs' is not available with 'stream': true",
            ));
        }
        common.refuse_and_ignore(fields)?;
        Ok(common)
    }

    /// Returns the request for these fields and a conversation.
    pub fn chat_request(
        &self,
        chat: Chat,
        tools: Option<ToolUse>,
        without_reasoning: bool,
    ) -> GenerateRequest {
        GenerateRequest {
            prompt: Prompt::Chat(chat),
            sampling: self.sampling.clone(),
            cache_salt: self.cache_salt.clone(),
            priority: self.priority,
            tools,
            without_reasoning,
        }
    }

    /// Checks the size of the fields of which each of `choices` continuations gets a copy.
    ///
    /// # Errors
    /// Fails if all copies together are too large.
    pub fn check_fan_out(&self, choices: usize) -> Result<(), ApiError> {
        let ClientSampling {
            logit_bias,
            allowed_token_ids,
            stop_token_ids,
            bad_words,
            structured,
            // These take only a few bytes per continuation.
            n: _,
            max_tokens: _,
            min_tokens: _,
            temperature: _,
            top_p: _,
            top_k: _,
            min_p: _,
            seed: _,
            presence_penalty: _,
            frequency_penalty: _,
            repetition_penalty: _,
            ignore_eos: _,
            skip_special_tokens: _,
            logprobs: _,
            logprobs_of_text: _,
            prompt_logprobs: _,
            skip_reading_prefix_cache: _,
            thinking_budget: _,
            repetition: _,
            // These are not sent to engines.
            stop: _,
            include_stop: _,
        } = &self.sampling;
        // A word may have one token per byte, and as many other tokens after a space.
        let bad_word_ids = bad_words.iter().map(|word| 2 * word.len()).sum();
        // Four bytes of a constraint are as long as an id.
        let (constraint_field, constraint_ids) = structured
            .as_ref()
            .map_or(("", 0), |structured| (structured.field, structured.constraint.bytes() / 4));
        let copied: [(&str, usize); 5] = [
            ("allowed_token_ids", allowed_token_ids.len()),
            ("logit_bias", 3 * logit_bias.len()),
            ("stop_token_ids", stop_token_ids.len()),
            ("bad_words", bad_word_ids),
            (constraint_field, constraint_ids),
        ];
        let total: usize = copied.iter().map(|(_, ids)| ids).sum();
        if total.saturating_mul(choices) <= MAX_FAN_OUT_IDS {
            return Ok(());
        }
        let largest =
            copied.into_iter().max_by_key(|(_, ids)| *ids).map_or("n", |(field, _)| field);
        Err(ApiError::invalid(
            largest,
            format!("'{largest}' is too long for {choices} choices, each of which gets a copy"),
        ))
    }

    /// Takes the remaining fields of OpenAI's and vLLM's APIs. Fields with a no-op default are
    /// refused at any other value. Fields that never change the answer are ignored.
    fn refuse_and_ignore(&self, fields: &mut Fields) -> Result<(), ApiError> {
        let is_empty = |value: &Value| match value {
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        fields.refuse_unless("functions", is_empty)?;
        fields.refuse_unless("function_call", |v| v == "none" || v == "auto")?;
        fields.refuse_unless("verbosity", |v| v == "medium")?;
        fields.refuse_unless("use_beam_search", |v| v == false)?;
        fields.refuse_unless("length_penalty", |v| v.as_f64() == Some(1.0))?;
        fields.refuse_unless("best_of", |v| v.as_u64() == Some(u64::from(self.sampling.n)))?;
        fields.refuse_unless("modalities", |v| v == &json!(["text"])).map_err(|error| {
            let message = r#"'modalities': only ["text"] is supported"#.to_owned();
            ApiError { message, ..error }
        })?;
        // These spaces only separate special tokens, which answers have only on request.
        let skips_special_tokens = self.sampling.skip_special_tokens.unwrap_or(true);
        fields.refuse_unless("spaces_between_special_tokens", |v| {
            v == true || (v == false && skips_special_tokens)
        })?;
        harmless::take(fields)
    }
}

/// Takes the maximum number of tokens for thinking; -1 means no limit.
fn take_thinking_budget(fields: &mut Fields) -> Result<Option<ThinkingBudget>, ApiError> {
    const FIELD: &str = "thinking_token_budget";
    let range = -1..=i64::from(i32::MAX);
    let tokens: Option<i64> =
        fields.take_in(FIELD, range, "-1 for no limit, or 0 to 2147483647")?;
    let tokens = tokens.and_then(|tokens| u32::try_from(tokens).ok());
    Ok(tokens.map(|tokens| ThinkingBudget { tokens, field: FIELD, only_if_thinking: false }))
}

/// Takes the settings that detect repetition. The limits are those of vLLM's
/// `RepetitionDetectionParams`.
fn take_repetition(fields: &mut Fields) -> Result<Option<Repetition>, ApiError> {
    const FIELD: &str = "repetition_detection";
    const RANGE: &str = "from 0 to 1000";
    let Some(value) = fields.take::<Value>(FIELD)? else { return Ok(None) };
    let mut fields = Fields::new(value, FIELD)?;
    let max_pattern = fields.take_in("max_pattern_size", 0..=MAX_PATTERN, RANGE)?.unwrap_or(0);
    let min_pattern = fields.take_in("min_pattern_size", 0..=MAX_PATTERN, RANGE)?.unwrap_or(0);
    let count = fields.take_in("min_count", 0..=MAX_PATTERN, RANGE)?.unwrap_or(0);
    fields.finish()?;
    if min_pattern > max_pattern {
        let name = format!("{FIELD}.min_pattern_size");
        let max_name = format!("{FIELD}.max_pattern_size");
        return Err(ApiError::invalid(&name, format!("'{name}' must be at most '{max_name}'")));
    }
    if max_pattern == 0 {
        return Ok(None);
    }
    if count < 2 {
        let name = format!("{FIELD}.min_count");
        return Err(ApiError::invalid(&name, format!("'{name}' must be at least 2")));
    }
    Ok(Some(Repetition { max_pattern, min_pattern, count }))
}

/// Takes the strings that end the text.
pub fn take_stops(fields: &mut Fields, field: &'static str) -> Result<Vec<String>, ApiError> {
    let stops = match fields.take::<Value>(field)? {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => {
            let stop = |(i, stop)| structured::expect_string(stop, &format!("{field}[{i}]"));
            stops.into_iter().enumerate().map(stop).collect::<Result<_, _>>()?
        }
        Some(other) => {
            let found = other.to_string();
            let found = excerpt(&found);
            let message = format!("'{field}': expected a string or a list of strings, got {found}");
            return Err(ApiError::invalid(field, message));
        }
    };
    if stops.len() > MAX_STOPS {
        return Err(ApiError::invalid(
            field,
            format!("'{field}' has {} strings, at most {MAX_STOPS} are allowed", stops.len()),
        ));
    }
    for (i, stop) in stops.iter().enumerate() {
        if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
            let name = format!("{field}[{i}]");
            let message =
                format!("'{name}' must have 1 to {MAX_STOP_BYTES} bytes, got {}", stop.len());
            return Err(ApiError::invalid(name, message));
        }
    }
    Ok(stops)
}

fn take_stop_tokens(fields: &mut Fields) -> Result<Vec<TokenId>, ApiError> {
    let ids: Vec<u32> = fields.take("stop_token_ids")?.unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        let message = format!(
            "'stop_token_ids' has {} ids, at most {MAX_STOP_TOKENS} are allowed",
            ids.len()
        );
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    Ok(ids.into_iter().map(TokenId).collect())
}

/// Takes the biases of tokens, in OpenAI's range. vLLM clamps values outside of the range.
fn take_biases(fields: &mut Fields) -> Result<Vec<(TokenId, f64)>, ApiError> {
    const FIELD: &str = "logit_bias";
    let biases: Map<String, Value> = fields.take(FIELD)?.unwrap_or_default();
    check_length(FIELD, biases.len(), MAX_BIASES)?;
    let bias = |(token, bias): (String, Value)| {
        let field = format!("{FIELD}.{token}");
        let no_token = |_| {
            let message = format!("'{FIELD}': '{}' is not a token id", excerpt(&token));
            ApiError::invalid(FIELD, message)
        };
        let token = token.parse().map(TokenId).map_err(no_token)?;
        match bias.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((token, bias)),
            _ => {
                let bias = bias.to_string();
                let message =
                    format!("'{field}' must be a number from -100 to 100, got {}", excerpt(&bias));
                Err(ApiError::invalid(field, message))
            }
        }
    };
    biases.into_iter().map(bias).collect()
}

fn take_allowed(fields: &mut Fields) -> Result<Vec<TokenId>, ApiError> {
    const FIELD: &str = "allowed_token_ids";
    match fields.take::<Vec<u32>>(FIELD)? {
        None => Ok(Vec::new()),
        Some(ids) if ids.is_empty() => Err(ApiError::invalid(
            FIELD,
            "'allowed_token_ids' must not be empty; omit it to allow all tokens",
        )),
        Some(ids) => {
            check_length(FIELD, ids.len(), MAX_ALLOWED_TOKENS)?;
            Ok(ids.into_iter().map(TokenId).collect())
        }
    }
}

fn take_bad_words(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    const FIELD: &str = "bad_words";
    let words: Vec<String> = fields.take(FIELD)?.unwrap_or_default();
    check_length(FIELD, words.len(), MAX_BAD_WORDS)?;
    for (i, word) in words.iter().enumerate() {
        if word.trim().is_empty() || word.len() > MAX_STOP_BYTES {
            let name = format!("{FIELD}[{i}]");
            let message =
                format!("'{name}' must have 1 to {MAX_STOP_BYTES} bytes and must not be blank");
            return Err(ApiError::invalid(name, message));
        }
    }
    let bytes: usize = words.iter().map(String::len).sum();
    if bytes > MAX_BAD_WORD_BYTES {
        let message =
            format!("'{FIELD}' has {bytes} bytes, at most {MAX_BAD_WORD_BYTES} are allowed");
        return Err(ApiError::invalid(FIELD, message));
    }
    Ok(words)
}

fn check_length(field: &str, length: usize, limit: usize) -> Result<(), ApiError> {
    if length > limit {
        let message = format!("'{field}' has {length} entries, at most {limit} are allowed");
        return Err(ApiError::invalid(field, message));
    }
    Ok(())
}

pub(crate) fn take_salt(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let salt = fields.take::<String>("cache_salt")?;
    match &salt {
        Some(salt) if salt.is_empty() || salt.len() > MAX_SALT_BYTES => Err(ApiError::invalid(
            "cache_salt",
            format!("'cache_salt' must have 1 to {MAX_SALT_BYTES} bytes, got {}", salt.len()),
        )),
        _ => Ok(salt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(body: Value) -> Result<CommonFields, ApiError> {
        CommonFields::take(&mut Fields::new(body, "").unwrap())
    }

    fn refused(body: Value) -> Option<String> {
        common(body).err().and_then(|error| error.param)
    }

    #[test]
    fn values_out_of_range_name_their_field() {
        for (field, value) in [
            ("temperature", json!(2.1)),
            ("temperature", json!(-0.1)),
            ("top_p", json!(0)),
            ("top_p", json!(1.01)),
            ("top_k", json!(-2)),
            ("min_p", json!(2)),
            ("n", json!(0)),
            ("n", json!(129)),
            ("min_tokens", json!(-1)),
            ("presence_penalty", json!(-3)),
            ("frequency_penalty", json!("high")),
            ("repetition_penalty", json!(0)),
            ("seed", json!(1.5)),
            ("cache_salt", json!("")),
            ("thinking_token_budget", json!(-2)),
            ("thinking_token_budget", json!(1.5)),
            ("repetition_detection", json!(3)),
            ("prompt_logprobs", json!(21)),
            ("prompt_logprobs", json!(-1)),
            ("skip_reading_prefix_cache", json!("yes")),
            ("stop_token_ids", json!([-1])),
            ("stop_token_ids", json!(vec![1; MAX_STOP_TOKENS + 1])),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"-1": 1})),
            ("logit_bias", json!([1])),
            ("allowed_token_ids", json!([])),
            ("allowed_token_ids", json!([-1])),
            ("bad_words", json!("x")),
            ("bad_words", json!(vec!["x"; MAX_BAD_WORDS + 1])),
            ("bad_words", json!(vec!["x".repeat(1024); 17])),
        ] {
            assert_eq!(refused(json!({field: value})).as_deref(), Some(field));
        }
        assert_eq!(
            refused(json!({"stream": true, "prompt_logprobs": 1})).as_deref(),
            Some("prompt_logprobs")
        );
        assert_eq!(refused(json!({"stream": true, "prompt_logprobs": 0})), None);
        assert_eq!(refused(json!({"stop": ["a", ""]})).as_deref(), Some("stop[1]"));
        assert_eq!(refused(json!({"logit_bias": {"5": 101}})).as_deref(), Some("logit_bias.5"));
        assert_eq!(refused(json!({"bad_words": ["a", " "]})).as_deref(), Some("bad_words[1]"));
    }

    #[test]
    fn fan_out_of_large_fields_is_bounded() {
        let refused = |body: Value, choices| {
            common(body).unwrap().check_fan_out(choices).err().and_then(|error| error.param)
        };
        let allowed =
            json!({"allowed_token_ids": vec![1; MAX_ALLOWED_TOKENS], "logit_bias": {"1": 1}});
        assert_eq!(refused(allowed.clone(), 127), None);
        assert_eq!(refused(allowed, 128).as_deref(), Some("allowed_token_ids"));
        let regex =
            json!({"structured_outputs": {"regex": "a".repeat(200_000)}, "stop_token_ids": [1]});
        assert_eq!(refused(regex.clone(), 128), None);
        assert_eq!(refused(regex, 512).as_deref(), Some("structured_outputs.regex"));
        assert_eq!(
            refused(json!({"bad_words": vec!["x".repeat(32); 500]}), 512).as_deref(),
            Some("bad_words")
        );
        assert_eq!(refused(json!({}), 512), None);
    }

    #[test]
    fn unsupported_value_is_refused() {
        for (field, value) in [("functions", json!([{"name": "f"}])), ("best_of", json!(4))] {
            assert_eq!(refused(json!({field: value})).as_deref(), Some(field));
        }
    }

    #[test]
    fn wrong_value_gets_the_right_one() {
        let message = |body: Value| common(body).err().map(|error| error.message).unwrap();
        assert_eq!(
            message(json!({"stop": 5})),
            "'stop': expected a string or a list of strings, got 5"
        );
        assert_eq!(message(json!({"stop": ["a", 5]})), "'stop[1]' must be a string, got a number");
        assert!(message(json!({"stop": {"x": "y".repeat(1 << 20)}})).len() < 200);
        assert_eq!(
            message(json!({"modalities": ["audio"]})),
            r#"'modalities': only ["text"] is supported"#
        );
        assert_eq!(message(json!({"seed": 1.5})), "'seed': expected a whole number, got 1.5");
    }

    #[test]
    fn noop_values_are_accepted() {
        let body = json!({
            "functions": [],
            "response_format": {"type": "text"},
            "logit_bias": {},
            "best_of": 1,
            "user": "u",
            "metadata": {"a": "b"},
            "stop": null,
            "stream": false,
            "spaces_between_special_tokens": false,
        });
        let mut fields = Fields::new(body, "").unwrap();
        CommonFields::take(&mut fields).unwrap();
        fields.finish().unwrap();
        let shown = json!({"skip_special_tokens": false, "spaces_between_special_tokens": false});
        assert_eq!(refused(shown).as_deref(), Some("spaces_between_special_tokens"));
    }

    #[test]
    fn stop_may_be_one_string_or_many() {
        assert_eq!(common(json!({"stop": "x"})).unwrap().sampling.stop, ["x"]);
        assert_eq!(common(json!({"stop": ["x", "y"]})).unwrap().sampling.stop, ["x", "y"]);
    }

    #[test]
    fn thinking_or_repetition_limits_match_vllm() {
        let taken = |extra: Value| {
            let taken = Fields::take_all(extra, CommonFields::take);
            taken.map(|common| common.sampling).map_err(|error| error.param.unwrap())
        };
        let budget =
            |tokens: i64| taken(json!({"thinking_token_budget": tokens})).unwrap().thinking_budget;
        assert_eq!(budget(-1), None);
        let none =
            ThinkingBudget { tokens: 0, field: "thinking_token_budget", only_if_thinking: false };
        assert_eq!(budget(0), Some(none));
        let repetition = |value: Value| {
            taken(json!({"repetition_detection": value})).map(|taken| taken.repetition)
        };
        assert_eq!(repetition(json!({})), Ok(None));
        assert_eq!(repetition(json!({"min_count": 1})), Ok(None));
        let expected = Repetition { max_pattern: 4, min_pattern: 0, count: 2 };
        assert_eq!(repetition(json!({"max_pattern_size": 4, "min_count": 2})), Ok(Some(expected)));
        for (value, field) in [
            (json!({"max_pattern_size": 4}), "min_count"),
            (json!({"max_pattern_size": 4, "min_count": 1}), "min_count"),
            (json!({"min_pattern_size": 1}), "min_pattern_size"),
            (
                json!({"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}),
                "min_pattern_size",
            ),
            (json!({"max_pattern_size": -1}), "max_pattern_size"),
            (json!({"max_pattern_size": 1001}), "max_pattern_size"),
            (json!({"pattern": 1}), "pattern"),
        ] {
            assert_eq!(repetition(value), Err(format!("repetition_detection.{field}")));
        }
    }
}
