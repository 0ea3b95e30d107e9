//! `stream` and `stream_options`: whether an answer is streamed, and where its stream tells usage.

use serde_json::Value;

use super::fields::Fields;
use crate::error::ApiError;

/// `stream_options` of a streamed answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Usage of the whole answer in a chunk of its own at the end.
    pub include_usage: bool,
    /// vLLM's extension: usage in every chunk.
    pub continuous_usage: bool,
}

impl StreamOptions {
    /// Usage in every chunk and at the end.
    pub const ALL_USAGE: Self = Self { include_usage: true, continuous_usage: true };

    /// Takes both fields; `None` if the answer is not streamed.
    pub(super) fn take(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let stream = fields.take("stream")?.unwrap_or(false);
        let options = fields.take::<Value>("stream_options")?;
        match (stream, options) {
            (false, None) => Ok(None),
            (false, Some(_)) => {
                Err(ApiError::invalid("stream_options", "'stream_options' needs 'stream': true"))
            }
            (true, None) => Ok(Some(Self::default())),
            (true, Some(options)) => {
                let mut options = Fields::new(options, "stream_options")?;
                let include_usage = options.take("include_usage")?.unwrap_or(false);
                // vLLM too takes this for nothing without the other.
                let continuous_usage =
                    options.take("continuous_usage_stats")?.unwrap_or(false) && include_usage;
                options.ignore(&["include_obfuscation"]);
                options.finish()?;
                Ok(Some(Self { include_usage, continuous_usage }))
            }
        }
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
    fn they_need_a_stream() {
        assert_eq!(
            taken(json!({"stream_options": {"include_usage": true}})),
            Err("stream_options".to_owned())
        );
        assert_eq!(taken(json!({})), Ok(None));
        assert_eq!(taken(json!({"stream": true})), Ok(Some(StreamOptions::default())));
    }

    #[test]
    fn usage_is_in_every_chunk_only_where_it_is_told_at_all() {
        let asked = |options: Value| {
            taken(json!({"stream": true, "stream_options": options})).map(Option::unwrap)
        };
        let at_end = StreamOptions { include_usage: true, continuous_usage: false };
        assert_eq!(asked(json!({"include_usage": true})), Ok(at_end));
        assert_eq!(asked(json!({"continuous_usage_stats": true})), Ok(StreamOptions::default()));
        let both = json!({"include_usage": true, "continuous_usage_stats": true, "include_obfuscation": false});
        assert_eq!(asked(both), Ok(StreamOptions::ALL_USAGE));
        assert_eq!(asked(json!({"usage": true})), Err("stream_options.usage".to_owned()));
    }
}
