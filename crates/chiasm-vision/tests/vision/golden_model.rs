//! A model of the goldens and the tokens that its family asks for.

use std::collections::BTreeMap;

use chiasm_types::TokenId;
use chiasm_vision::{Vocabulary, VocabularyError};
use serde::Deserialize;

#[derive(Deserialize)]
pub(crate) struct GoldenModel {
    vocabulary: BTreeMap<String, u32>,
    texts: BTreeMap<String, Vec<u32>>,
    pub(crate) error: Option<String>,
    #[serde(default)]
    pub(crate) device_normalizes: bool,
}

/// A tokenizer with exactly the tokens of its golden.
impl Vocabulary for GoldenModel {
    fn id(&self, token: &str) -> Option<TokenId> {
        self.vocabulary.get(token).copied().map(TokenId)
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let token = self.vocabulary.iter().map(|(text, id)| (text, std::slice::from_ref(id)));
            let words = self.texts.iter().map(|(text, ids)| (text, ids.as_slice()));
            let known = token.chain(words).filter(|(text, _)| rest.starts_with(text.as_str()));
            let (text, ids) = known
                .max_by_key(|(text, _)| text.len())
                .ok_or_else(|| VocabularyError::NoToken(rest.to_owned()))?;
            tokens.extend(ids.iter().copied().map(TokenId));
            rest = &rest[text.len()..];
        }
        Ok(tokens)
    }
}
