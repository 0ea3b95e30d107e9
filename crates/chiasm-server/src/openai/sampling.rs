//! The sampling fields that both completion endpoints share. Ranges are those of vLLM's `SamplingParams`.

use chiasm_types::TokenId;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::fields::Fields;
use super::nvext::ExtraFields;
use super::{harmless, structured};
use crate::error::ApiError;
use crate::pipeline::Sampling;

/// Most continuations of one prompt.
const MAX_N: u32 = 128;
/// Most alternatives per token: vLLM's default `--max-logprobs`.
pub(super) const MAX_LOGPROBS: u32 = 20;
/// Most stop strings, and most bytes in one.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;
/// Most token ids that end the text. Each prompt of a request has them.
const MAX_STOP_TOKENS: usize = 4096;
/// Most tokens with a bias, and most that are allowed. Each continuation has them.
const MAX_BIASES: usize = 4096;
const MAX_ALLOWED: usize = 1 << 16;
/// Most words that must not be generated; vLLM has room for two token sequences of each (`VLLM_MAX_NUM_BAD_WORDS`).
const MAX_BAD_WORDS: usize = 500;
/// vLLM's bound.
const MAX_SALT_BYTES: usize = 1024;

/// `stop` is a string or a list of strings.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// What both endpoints have besides prompt and sampling.
pub(crate) struct Common {
    /// The model's name, when given.
    pub(crate) model: Option<String>,
    /// Sampling without `max_tokens` and `logprobs`, which the endpoints spell differently.
    pub(crate) sampling: Sampling,
    pub(crate) cache_salt: Option<String>,
    pub(crate) priority: i64,
    pub(crate) stream: Option<StreamOptions>,
    pub(crate) return_token_ids: bool,
    pub(crate) extra_fields: ExtraFields,
}

/// `stream_options` of a streamed answer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: bool,
    /// vLLM's extension: usage in every chunk.
    pub(crate) continuous_usage: bool,
}

impl Common {
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let sampling = Sampling {
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
            prompt_logprobs: fields.take_in("prompt_logprobs", 0..=MAX_LOGPROBS, "from 0 to 20")?,
            skip_reading_prefix_cache: fields.take("skip_reading_prefix_cache")?.unwrap_or(false),
            logit_bias: take_biases(fields)?,
            allowed_token_ids: take_allowed(fields)?,
            bad_words: take_bad_words(fields)?,
            structured: structured::take(fields)?,
        };
        let common = Self {
            model: fields.take("model")?,
            sampling,
            cache_salt: take_salt(fields)?,
            priority: fields.take("priority")?.unwrap_or(0),
            stream: take_stream(fields)?,
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
            extra_fields: ExtraFields::take(fields)?,
        };
        if common.stream.is_some() && common.sampling.prompt_logprobs.is_some() {
            return Err(ApiError::invalid("prompt_logprobs", "'prompt_logprobs' are not told in a stream"));
        }
        common.refuse_and_ignore(fields)?;
        Ok(common)
    }

    /// Fields of OpenAI's and vLLM's APIs that ask for nothing at their default, and those that never change the answer.
    fn refuse_and_ignore(&self, fields: &mut Fields) -> Result<(), ApiError> {
        let empty = |value: &Value| match value {
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            _ => false,
        };
        fields.refuse_unless("functions", empty)?;
        fields.refuse_unless("function_call", |v| v == "none" || v == "auto")?;
        fields.refuse_unless("verbosity", |v| v == "medium")?;
        fields.refuse_unless("use_beam_search", |v| v == false)?;
        fields.refuse_unless("length_penalty", |v| v.as_f64() == Some(1.0))?;
        fields.refuse_unless("best_of", |v| v.as_u64() == Some(u64::from(self.sampling.n)))?;
        fields.refuse_unless("modalities", |v| v == &json!(["text"]))?;
        fields.refuse_unless("spaces_between_special_tokens", |v| v == true)?;
        harmless::take(fields)
    }
}

/// Takes the strings that end the text.
pub(crate) fn take_stops(fields: &mut Fields, field: &str) -> Result<Vec<String>, ApiError> {
    let stops = match fields.take::<OneOrMany>(field)? {
        None => Vec::new(),
        Some(OneOrMany::One(stop)) => vec![stop],
        Some(OneOrMany::Many(stops)) => stops,
    };
    if stops.len() > MAX_STOPS {
        return Err(ApiError::invalid(
            field,
            format!("'{field}' has {} strings, at most {MAX_STOPS} are allowed", stops.len()),
        ));
    }
    for (i, stop) in stops.iter().enumerate() {
        if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
            return Err(ApiError::invalid(
                format!("{field}[{i}]"),
                format!("a stop string must have 1 to {MAX_STOP_BYTES} bytes, got {}", stop.len()),
            ));
        }
    }
    Ok(stops)
}

fn take_stop_tokens(fields: &mut Fields) -> Result<Vec<TokenId>, ApiError> {
    let ids: Vec<u32> = fields.take("stop_token_ids")?.unwrap_or_default();
    if ids.len() > MAX_STOP_TOKENS {
        let message = format!("'stop_token_ids' has {} ids, at most {MAX_STOP_TOKENS} are allowed", ids.len());
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    Ok(ids.into_iter().map(TokenId).collect())
}

/// OpenAI's range. vLLM clamps what is beyond.
fn take_biases(fields: &mut Fields) -> Result<Vec<(TokenId, f64)>, ApiError> {
    const FIELD: &str = "logit_bias";
    let biases: Map<String, Value> = fields.take(FIELD)?.unwrap_or_default();
    check_length(FIELD, biases.len(), MAX_BIASES)?;
    let bias = |(token, bias): (String, Value)| {
        let field = format!("{FIELD}.{token}");
        let no_token = |_| ApiError::invalid(FIELD, format!("'{token}' is no token id"));
        let token = token.parse().map(TokenId).map_err(no_token)?;
        match bias.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => Ok((token, bias)),
            _ => Err(ApiError::invalid(field, format!("a bias must be a number from -100 to 100, got {bias}"))),
        }
    };
    biases.into_iter().map(bias).collect()
}

fn take_allowed(fields: &mut Fields) -> Result<Vec<TokenId>, ApiError> {
    const FIELD: &str = "allowed_token_ids";
    match fields.take::<Vec<u32>>(FIELD)? {
        None => Ok(Vec::new()),
        Some(ids) if ids.is_empty() => Err(ApiError::invalid(FIELD, "it must allow some token, or be left out")),
        Some(ids) => {
            check_length(FIELD, ids.len(), MAX_ALLOWED)?;
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
            let message = format!("a bad word must have 1 to {MAX_STOP_BYTES} bytes that are no spaces alone");
            return Err(ApiError::invalid(format!("{FIELD}[{i}]"), message));
        }
    }
    Ok(words)
}

fn check_length(field: &str, length: usize, most: usize) -> Result<(), ApiError> {
    match length > most {
        true => Err(ApiError::invalid(field, format!("'{field}' has {length} entries, at most {most} are allowed"))),
        false => Ok(()),
    }
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

fn take_stream(fields: &mut Fields) -> Result<Option<StreamOptions>, ApiError> {
    let stream = fields.take("stream")?.unwrap_or(false);
    let options = fields.take::<Value>("stream_options")?;
    match (stream, options) {
        (false, None) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("stream_options", "'stream_options' needs 'stream': true")),
        (true, None) => Ok(Some(StreamOptions::default())),
        (true, Some(options)) => {
            let mut options = Fields::new(options, "stream_options")?;
            let parsed = StreamOptions {
                include_usage: options.take("include_usage")?.unwrap_or(false),
                continuous_usage: options.take("continuous_usage_stats")?.unwrap_or(false),
            };
            options.ignore(&["include_obfuscation"]);
            options.finish()?;
            Ok(Some(parsed))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(body: Value) -> Result<Common, ApiError> {
        Common::take(&mut Fields::new(body, "").unwrap())
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
        ] {
            assert_eq!(refused(json!({field: value})).as_deref(), Some(field));
        }
        assert_eq!(refused(json!({"stream": true, "prompt_logprobs": 0})).as_deref(), Some("prompt_logprobs"));
        assert_eq!(refused(json!({"stop": ["a", ""]})).as_deref(), Some("stop[1]"));
        assert_eq!(refused(json!({"logit_bias": {"5": 101}})).as_deref(), Some("logit_bias.5"));
        assert_eq!(refused(json!({"bad_words": ["a", " "]})).as_deref(), Some("bad_words[1]"));
    }

    #[test]
    fn what_would_change_the_answer_is_refused() {
        for (field, value) in [("functions", json!([{"name": "f"}])), ("best_of", json!(4))] {
            assert_eq!(refused(json!({field: value})).as_deref(), Some(field));
        }
    }

    #[test]
    fn what_asks_for_nothing_is_taken() {
        let body = json!({
            "functions": [], "response_format": {"type": "text"}, "logit_bias": {},
            "best_of": 1, "user": "u", "metadata": {"a": "b"}, "stop": null, "stream": false
        });
        let mut fields = Fields::new(body, "").unwrap();
        Common::take(&mut fields).unwrap();
        fields.finish().unwrap();
    }

    #[test]
    fn stop_may_be_one_string_or_many() {
        assert_eq!(common(json!({"stop": "x"})).unwrap().sampling.stop, ["x"]);
        assert_eq!(common(json!({"stop": ["x", "y"]})).unwrap().sampling.stop, ["x", "y"]);
    }

    #[test]
    fn stream_options_need_a_stream() {
        assert_eq!(refused(json!({"stream_options": {"include_usage": true}})).as_deref(), Some("stream_options"));
        let stream = common(json!({"stream": true, "stream_options": {"include_usage": true}})).unwrap().stream;
        assert!(stream.unwrap().include_usage);
    }
}
