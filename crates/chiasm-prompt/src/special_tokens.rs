//! Special and added tokens of a model directory, read as `transformers` reads them.

use std::path::Path;

use serde_json::{Map, Value};

use crate::PromptError;
use crate::model_file::read_object;

/// The token names that every tokenizer may set (`SPECIAL_TOKENS_ATTRIBUTES`, `transformers` 5.19).
const STANDARD_NAMES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The tokens of `tokenizer_config.json`, or of the older `special_tokens_map.json`.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpecialTokens {
    /// Name and text, such as `eos_token` and `<|im_end|>`. Chat templates get them as variables.
    pub(crate) named: Vec<(String, String)>,
    /// The texts of further special tokens.
    pub(crate) extra: Vec<String>,
    /// The values of `added_tokens_decoder`, in the order of the token ids.
    pub(crate) added: Vec<Value>,
    /// `true` if the texts of special tokens are tokenized like any other text:
    /// `split_special_tokens`.
    pub(crate) split: bool,
}

impl SpecialTokens {
    /// Reads the tokens of a model directory.
    pub(crate) fn from_model_dir(dir: &Path) -> Result<Self, PromptError> {
        let mut config = read_object(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let added = config.remove("added_tokens_decoder");
        if added.is_none() {
            // Newer directories have the decoder, and `transformers` ignores this file there.
            config.extend(read_object(&dir.join("special_tokens_map.json"))?.unwrap_or_default());
        }
        let mut tokens = Self {
            split: config.get("split_special_tokens") == Some(&Value::Bool(true)),
            ..Self::default()
        };
        if let Some(Value::Object(added)) = added {
            let mut by_id: Vec<(u64, Value)> = added
                .into_iter()
                .filter_map(|(id, token)| Some((id.parse().ok()?, token)))
                .collect();
            by_id.sort_by_key(|(id, _)| *id);
            tokens.added = by_id.into_iter().map(|(_, token)| token).collect();
        }
        tokens.read_names(&config);
        tokens.read_extra(&config);
        Ok(tokens)
    }

    /// Returns the text of the token with this name.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.named.iter().find(|(other, _)| other == name).map(|(_, text)| text.as_str())
    }

    fn read_names(&mut self, config: &Map<String, Value>) {
        let standard =
            STANDARD_NAMES.iter().filter_map(|name| Some(((*name).to_owned(), config.get(*name)?)));
        let own = config
            .iter()
            .filter(|(name, _)| {
                name.ends_with("_token") && !STANDARD_NAMES.contains(&name.as_str())
            })
            .map(|(name, value)| (name.clone(), value));
        let mut all: Vec<_> = standard.chain(own).collect();
        if let Some(Value::Object(extra)) = config.get("extra_special_tokens") {
            all.extend(extra.iter().map(|(name, value)| (name.clone(), value)));
        }
        for (name, value) in all {
            if let Some(text) = token_text(value)
                && self.get(&name).is_none()
            {
                self.named.push((name, text.to_owned()));
            }
        }
    }

    fn read_extra(&mut self, config: &Map<String, Value>) {
        let listed =
            |key| config.get(key).and_then(Value::as_array).filter(|list| !list.is_empty());
        if let Some(list) =
            listed("extra_special_tokens").or_else(|| listed("additional_special_tokens"))
        {
            self.extra = list.iter().filter_map(token_text).map(str::to_owned).collect();
        }
    }
}

/// Returns a token's text. The value is a string, or an object with `content`.
fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(files: &[(&str, &str)]) -> SpecialTokens {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        SpecialTokens::from_model_dir(dir.path()).unwrap()
    }

    #[test]
    fn token_text_is_a_string_or_an_object() {
        let config = r#"{"eos_token": {"content": "</s>"}, "bos_token": null,
            "image_token": "<image>", "a_token": 3, "extra_special_tokens": {"boi": "<boi>"}}"#;
        let tokens = read(&[("tokenizer_config.json", config)]);
        let named: Vec<_> =
            tokens.named.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
        assert_eq!(named, [("eos_token", "</s>"), ("image_token", "<image>"), ("boi", "<boi>")]);
    }

    #[test]
    fn added_tokens_decoder_disables_the_older_file() {
        let map = ("special_tokens_map.json", r#"{"eos_token": "old"}"#);
        let tokens = read(&[("tokenizer_config.json", r#"{"eos_token": "new"}"#), map]);
        assert_eq!(tokens.get("eos_token"), Some("old"));
        let config = r#"{"eos_token": "new", "added_tokens_decoder": {}}"#;
        assert_eq!(read(&[("tokenizer_config.json", config), map]).get("eos_token"), Some("new"));
        assert_eq!(read(&[]).get("eos_token"), None);
    }
}
