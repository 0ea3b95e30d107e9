//! `stream` and `stream_options`: streamed answers, and the usage in their chunks.

use serde_json::Value;

use super::fields::Fields;
use crate::error::ApiError;

/// The `stream_options` of a streamed answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// `true` if the stream ends with a chunk that has the usage of the whole answer.
    pub include_usage: bool,
    /// `true` if every chunk has the usage so far: vLLM's extension.
    pub continuous_usage: bool,
}

impl StreamOptions {
    /// Usage in every chunk and at the end.
    pub const ALL_USAGE: Self = Self { include_usage: true, continuous_usage: true };

    /// Takes both fields; `None` if the answer is not streamed.
    pub(super) fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let is_streamed = fields.take("stream")?.unwrap_or(false);
        let options = fields.take::<Value>("stream_options")?;
        if !is_streamed {
            return match options {
                None => Ok(None),
                Some(_) => Err(ApiError::invalid(
                    "stream_options",
                    "'stream_options' requires 'stream': true",
                )),
            };
        }
        let Some(options) = options else { return Ok(Some(Self::default())) };
        let mut options = Fields::new(options, "stream_options")?;
        let include_usage = options.take("include_usage")?.unwrap_or(false);
        // As in vLLM, this has no effect without `include_usage`.
        let continuous_usage =
            options.take("continuous_usage_stats")?.unwrap_or(false) && include_usage;
        options.ignore(&["include_obfuscation"]);
        options.finish()?;
        Ok(Some(Self { include_usage, continuous_usage }))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn taken(body: Value) -> Result<Option<StreamOptions>, String> {
        StreamOptions::take(&mut Fields::new(body, "").unwrap())
            .map_err(|error| error.param.unwrap())
    }

    #[test]
    fn options_without_stream_are_refused() {
        assert_eq!(
            taken(json!({"stream_options": {"include_usage": true}})),
            Err("stream_options".to_owned())
        );
        assert_eq!(taken(json!({})), Ok(None));
        assert_eq!(taken(json!({"stream": true})), Ok(Some(StreamOptions::default())));
    }

    #[test]
    fn continuous_usage_needs_include_usage() {
        let streamed = |options: Value| {
            taken(json!({"stream": true, "stream_options": options})).map(Option::unwrap)
        };
        let at_end = StreamOptions { include_usage: true, continuous_usage: false };
        assert_eq!(streamed(json!({"include_usage": true})), Ok(at_end));
        assert_eq!(streamed(json!({"continuous_usage_stats": true})), Ok(StreamOptions::default()));
        let both = json!({
            "include_usage": true,
            "continuous_usage_stats": true,
            "include_obfuscation": false,
        });
        assert_eq!(streamed(both), Ok(StreamOptions::ALL_USAGE));
        assert_eq!(streamed(json!({"usage": true})), Err("stream_options.usage".to_owned()));
    }
}
