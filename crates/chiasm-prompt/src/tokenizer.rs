//! The model's tokenizer: `tokenizer.json` with the settings of `tokenizer_config.json` that
//! `transformers` applies.

mod encoder;
mod token_bytes;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use chiasm_types::TokenId;
use serde_json::Value;
use tokenizers::AddedToken;

use crate::PromptError;
use crate::special_tokens::SpecialTokens;
use encoder::{Encoder, PieceCache};
use token_bytes::ByteForm;

/// A model's tokenizer. Cheap to clone.
///
/// Encoding is CPU work: some microseconds per kilobyte for the kinds of tokenizer that `encoder`
/// knows, ten times that for others. Keep it off async threads.
///
/// `tokenizer.json` is taken as it is, like the generic class of `transformers` does. What that
/// adds is added here too: tokens of `added_tokens_decoder` and named special tokens that the file
/// lacks, and `split_special_tokens`. Padding and truncation that the file may ask for are off, as
/// in vLLM. `add_bos_token` and `add_eos_token` have no effect beside a `tokenizer.json`
/// (`transformers` 5 drops them); whether a text gets a BOS is the file's post-processor's matter.
/// Model-specific tokenizer classes that rebuild parts of the tokenizer in Python are not imitated.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
    pieces: Arc<PieceCache>,
}

/// What a tokenizer keeps of long pieces of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCacheCounts {
    /// Bytes that the pieces and their tokens take now.
    pub bytes: u64,
    /// Tokens that were found since the start.
    pub found_tokens: u64,
}

/// Tokens whose texts are remembered: those of the largest vocabularies that are in use have some
/// 260,000.
const MOST_TEXTS: u32 = 1 << 20;

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    /// The encoder for the kinds of tokenizer that it knows; the others are left to `tokenizers`.
    encoder: Option<Encoder>,
    byte_form: ByteForm,
    /// The text of each token, if it is the same wherever the token stands. It is found out when it
    /// is first asked for.
    texts: Box<[OnceLock<Option<Box<str>>>]>,
    eos: Option<TokenId>,
    max_id: Option<TokenId>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a model directory.
    ///
    /// # Errors
    /// A missing or unusable `tokenizer.json`, and unusable files beside it.
    pub fn from_model_dir(dir: &Path) -> Result<Self, PromptError> {
        let path = dir.join("tokenizer.json");
        let json = std::fs::read(&path)
            .map_err(|source| PromptError::Unreadable { path: path.clone(), source })?;
        let bad = |reason: String| PromptError::BadFile { path: path.clone(), reason };
        let mut tokenizer =
            tokenizers::Tokenizer::from_bytes(&json).map_err(|error| bad(error.to_string()))?;
        tokenizer.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        tokenizer.with_padding(None);
        let special = SpecialTokens::from_model_dir(dir)?;
        let missing = missing_tokens(&tokenizer, &special);
        tokenizer.add_tokens(missing).map_err(|error| bad(error.to_string()))?;
        tokenizer.set_encode_special_tokens(special.split);
        let eos =
            special.get("eos_token").and_then(|text| tokenizer.token_to_id(text)).map(TokenId);
        let max_id = tokenizer.get_vocab(true).into_values().max().map(TokenId);
        let byte_form = ByteForm::of(&tokenizer);
        let encoder = Encoder::of(&tokenizer, &json);
        let texts = (0..max_id.map_or(0, |max| max.0.saturating_add(1)).min(MOST_TEXTS))
            .map(|_| OnceLock::new())
            .collect();
        let inner = Inner { tokenizer, encoder, byte_form, texts, eos, max_id };
        Ok(Self { inner: Arc::new(inner), pieces: Arc::new(PieceCache::new(0)) })
    }

    /// The same tokenizer, which keeps the tokens of long pieces of text in at most `max_bytes`, 0
    /// for none, and finds them there when they come again: messages of a conversation, system
    /// prompts. Only the kinds of tokenizer that are known here do.
    #[must_use]
    pub fn with_token_cache(self, max_bytes: u64) -> Self {
        Self { pieces: Arc::new(PieceCache::new(max_bytes)), ..self }
    }

    /// What is kept of long pieces of text, and what that was good for.
    pub fn token_cache(&self) -> TokenCacheCounts {
        self.pieces.counts()
    }

    /// Bytes of text that take about a hundred microseconds to encode: more for the kinds of
    /// tokenizer that are known here.
    pub fn quick_bytes(&self) -> usize {
        if self.inner.encoder.is_some() { 6 << 10 } else { 512 }
    }

    /// Token ids of a text.
    ///
    /// `add_special_tokens`: whether the post-processor adds what it adds, such as a BOS. vLLM says
    /// no for a rendered chat, whose template writes them, and yes for a plain completion.
    ///
    /// # Errors
    /// [`PromptError::Encode`] if the tokenizer's model fails, such as on text for which it has no
    /// unknown token.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        self.encode_beside(&self.pieces, text, add_special_tokens)
    }

    /// The same without finding or keeping pieces, so that the time that it takes tells nothing of
    /// what others have sent.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_apart(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        self.encode_beside(&PieceCache::new(0), text, add_special_tokens)
    }

    fn encode_beside(
        &self,
        pieces: &PieceCache,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        let Inner { tokenizer, encoder, .. } = &*self.inner;
        let known = encoder
            .as_ref()
            .and_then(|encoder| encoder.encode(tokenizer, text, add_special_tokens, pieces));
        if let Some(ids) = known {
            return Ok(ids);
        }
        let encoding = tokenizer.encode_fast(text, add_special_tokens);
        let encoding =
            encoding.map_err(|error| PromptError::Encode { reason: error.to_string() })?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Text of the tokens. Bytes that are no UTF-8 become U+FFFD; ids beyond the vocabulary are
    /// left out.
    ///
    /// `skip_special`: whether special tokens are left out.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        self.inner.tokenizer.decode(&ids, skip_special).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot decode tokens");
            String::new()
        })
    }

    /// The id of a token by its text in the vocabulary, such as `<|im_end|>`.
    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.inner.tokenizer.token_to_id(token).map(TokenId)
    }

    /// A token as the vocabulary writes it, such as `Ġthe` or `▁the`; `None` for an id without a
    /// token.
    pub fn id_to_token(&self, token: TokenId) -> Option<String> {
        self.inner.tokenizer.id_to_token(token.0)
    }

    /// The `eos_token` of `tokenizer_config.json`, which is what vLLM stops at.
    pub fn eos_token(&self) -> Option<TokenId> {
        self.inner.eos
    }

    /// The highest id of the vocabulary. Ids above it have no text, though the model's own table
    /// may have rows for them.
    pub fn max_token_id(&self) -> Option<TokenId> {
        self.inner.max_id
    }

    /// Number of tokens, the added ones included. Ids may have gaps, so the highest may be above
    /// it.
    pub fn vocab_size(&self) -> usize {
        self.inner.tokenizer.get_vocab_size(true)
    }

    /// Whether decoding leaves the token out when special tokens are skipped.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.inner
            .tokenizer
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&token.0)
            .is_some_and(|t| t.special)
    }

    /// All special tokens, with their texts.
    pub fn special_tokens(&self) -> Vec<(TokenId, String)> {
        let added = self.inner.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, token)| (TokenId(id), token.content.clone()))
            .collect()
    }

    /// The bytes that a token stands for, which need not be whole characters. Empty for an unknown
    /// id.
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        self.inner.byte_form.bytes(&self.inner.tokenizer, token)
    }

    /// The text of a token that is whole characters wherever it stands; `None` if that can't be
    /// said of it alone.
    pub(crate) fn whole_characters(&self, token: TokenId) -> Option<&str> {
        let Inner { tokenizer, byte_form, texts, .. } = &*self.inner;
        let find = || byte_form.whole_characters(tokenizer, token).map(String::into_boxed_str);
        texts.get(token.0 as usize)?.get_or_init(find).as_deref()
    }

    pub(crate) fn raw(&self) -> &tokenizers::Tokenizer {
        &self.inner.tokenizer
    }
}

/// Tokens that the configuration names and `tokenizer.json` lacks, or has with other properties
/// (`TokenizersBackend.__init__`, `transformers` 5.19).
fn missing_tokens(tokenizer: &tokenizers::Tokenizer, special: &SpecialTokens) -> Vec<AddedToken> {
    let present = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
    let named: Vec<&str> = special
        .named
        .iter()
        .map(|(_, text)| text.as_str())
        .chain(special.extra.iter().map(String::as_str))
        .collect();
    let mut missing: Vec<AddedToken> = special
        .added
        .iter()
        .filter_map(added_token)
        .filter(|token| !present.values().any(|other| same_properties(other, token)))
        .collect();
    for token in &mut missing {
        token.special |= named.contains(&token.content.as_str());
    }
    for text in named {
        let known = present.values().chain(&missing).any(|token| token.content == text);
        if !known {
            missing.push(AddedToken::from(text, true));
        }
    }
    missing
}

/// A token of `added_tokens_decoder`, with the defaults of the `AddedToken` class.
fn added_token(fields: &Value) -> Option<AddedToken> {
    let flag = |name: &str| fields.get(name).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(false);
    Some(
        AddedToken::from(fields.get("content")?.as_str()?, special)
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false))
            .normalized(flag("normalized").unwrap_or(!special)),
    )
}

/// Equality of all fields; the type's own compares the text alone.
fn same_properties(a: &AddedToken, b: &AddedToken) -> bool {
    let fields = |token: &AddedToken| {
        (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)
    };
    a.content == b.content && fields(a) == fields(b)
}

#[cfg(test)]
mod tests;
