//! The model's tokenizer: `tokenizer.json` with the settings of `tokenizer_config.json` that
//! `transformers` applies.

mod encoder;
mod token_bytes;

use std::panic::resume_unwind;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use chiasm_types::TokenId;
use serde_json::Value;
use tokenizers::AddedToken;

use crate::PromptError;
use crate::special_tokens::SpecialTokens;
use encoder::{Encoder, PieceCache, TokenizerMerges};
use token_bytes::ByteForm;

/// A model's tokenizer. Cheap to clone.
///
/// Encoding is CPU work: a few microseconds per kilobyte for the kinds of tokenizer that `encoder`
/// supports, ten times that for others. Keep it off async threads.
///
/// `tokenizer.json` is used unchanged, as by the generic class of `transformers`. Like that class,
/// this adds tokens of `added_tokens_decoder` and named special tokens that the file lacks, and
/// applies `split_special_tokens`. Padding and truncation settings of the file are ignored, as in
/// vLLM. `add_bos_token` and `add_eos_token` have no effect beside a `tokenizer.json`
/// (`transformers` 5 drops them): the file's post-processor decides about a BOS. Model-specific
/// tokenizer classes that rebuild parts of the tokenizer in Python are not imitated.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
    pieces: Arc<PieceCache>,
}

/// The counts of a tokenizer's cache of long text pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCacheCounts {
    /// The bytes of the cached pieces and their tokens.
    pub bytes: u64,
    /// The number of tokens taken from the cache since the start.
    pub found_tokens: u64,
}

/// The maximum number of tokens whose texts are cached. The largest vocabularies in use have some
/// 260,000 tokens.
const MAX_CACHED_TEXTS: u32 = 1 << 20;

struct Inner {
    tokenizer: tokenizers::Tokenizer,
    /// The fast encoder; `None` for a kind of tokenizer that it does not support.
    encoder: Option<Encoder>,
    byte_form: ByteForm,
    /// The context-free text of each token, if it has one. Computed on first use.
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
    /// `tokenizer.json` is missing or unusable, or a file beside it is unusable.
    pub fn from_model_dir(dir: &Path) -> Result<Self, PromptError> {
        let path = dir.join("tokenizer.json");
        let json = std::fs::read(&path)
            .map_err(|source| PromptError::Unreadable { path: path.clone(), source })?;
        let bad = |reason: String| PromptError::BadFile { path: path.clone(), reason };
        // With a large vocabulary, loading `tokenizers` and parsing the merges take most of a
        // server's start.
        let (tokenizer, merges) = std::thread::scope(|scope| {
            let merges = scope.spawn(|| TokenizerMerges::parse(&json));
            let tokenizer = tokenizers::Tokenizer::from_bytes(&json);
            (tokenizer, merges.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        let mut tokenizer = tokenizer.map_err(|error| bad(error.to_string()))?;
        tokenizer.with_truncation(None).map_err(|error| bad(error.to_string()))?;
        tokenizer.with_padding(None);
        let special = SpecialTokens::from_model_dir(dir)?;
        let missing = missing_tokens(&tokenizer, &special);
        tokenizer.add_tokens(missing).map_err(|error| bad(error.to_string()))?;
        tokenizer.set_encode_special_tokens(special.split);
        let eos =
            special.get("eos_token").and_then(|text| tokenizer.token_to_id(text)).map(TokenId);
        let max_id = tokenizer.get_vocab(true).into_values().max().map(TokenId);
        let byte_form = ByteForm::detect(&tokenizer);
        let encoder = merges.and_then(|merges| Encoder::for_tokenizer(&tokenizer, &merges));
        let texts = (0..max_id.map_or(0, |max| max.0.saturating_add(1)).min(MAX_CACHED_TEXTS))
            .map(|_| OnceLock::new())
            .collect();
        let inner = Inner { tokenizer, encoder, byte_form, texts, eos, max_id };
        Ok(Self { inner: Arc::new(inner), pieces: Arc::new(PieceCache::new(0)) })
    }

    /// Returns the tokenizer with an empty cache for the tokens of long text pieces, such as system
    /// prompts and earlier messages of a conversation.
    ///
    /// The cache takes at most `max_bytes`; 0 turns it off. Only kinds of tokenizer that `encoder`
    /// supports use it.
    #[must_use]
    pub fn with_token_cache(self, max_bytes: u64) -> Self {
        Self { pieces: Arc::new(PieceCache::new(max_bytes)), ..self }
    }

    /// Returns the counts of the cache of long text pieces.
    pub fn token_cache_counts(&self) -> TokenCacheCounts {
        self.pieces.counts()
    }

    /// Returns the bytes of text that take about 100 µs to encode. The number is higher for kinds
    /// of tokenizer that `encoder` supports.
    pub fn bytes_per_100_micros(&self) -> usize {
        if self.inner.encoder.is_some() { 6 << 10 } else { 512 }
    }

    /// Returns the token ids of a text.
    ///
    /// With `add_special_tokens` the post-processor adds its tokens, such as a BOS. vLLM sets it
    /// for a plain completion but not for a rendered chat, whose template writes such tokens
    /// itself.
    ///
    /// # Errors
    /// [`PromptError::Encode`] if the tokenizer's model fails, for example on unknown characters
    /// without an unknown token.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        self.encode_with(&self.pieces, text, add_special_tokens)
    }

    /// Returns the token ids of a text without using the cache of text pieces. The time it takes
    /// therefore reveals nothing about other clients' texts.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`].
    pub fn encode_uncached(
        &self,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        self.encode_with(&PieceCache::new(0), text, add_special_tokens)
    }

    fn encode_with(
        &self,
        pieces: &PieceCache,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, PromptError> {
        let Inner { tokenizer, encoder, .. } = &*self.inner;
        let encoded = encoder
            .as_ref()
            .and_then(|encoder| encoder.encode(tokenizer, text, add_special_tokens, pieces));
        if let Some(ids) = encoded {
            return Ok(ids);
        }
        let encoding = tokenizer.encode_fast(text, add_special_tokens);
        let encoding =
            encoding.map_err(|error| PromptError::Encode { reason: error.to_string() })?;
        Ok(encoding.get_ids().iter().copied().map(TokenId).collect())
    }

    /// Returns the text of the tokens. Invalid UTF-8 becomes U+FFFD; ids beyond the vocabulary are
    /// skipped, and with `skip_special` special tokens are too.
    pub fn decode(&self, tokens: &[TokenId], skip_special: bool) -> String {
        let ids: Vec<u32> = tokens.iter().map(|token| token.0).collect();
        self.inner.tokenizer.decode(&ids, skip_special).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot decode tokens");
            String::new()
        })
    }

    /// Returns the id of a token by its text in the vocabulary, such as `<|im_end|>`.
    pub fn token_to_id(&self, token: &str) -> Option<TokenId> {
        self.inner.tokenizer.token_to_id(token).map(TokenId)
    }

    /// Returns a token in the vocabulary's form, such as `Ġthe` or `▁the`; `None` for an id without
    /// a token.
    pub fn id_to_token(&self, token: TokenId) -> Option<String> {
        self.inner.tokenizer.id_to_token(token.0)
    }

    /// Returns the `eos_token` of `tokenizer_config.json`, at which vLLM stops.
    pub fn eos_token(&self) -> Option<TokenId> {
        self.inner.eos
    }

    /// Returns the highest id of the vocabulary. Ids above it have no text, though the model's
    /// embedding table may have rows for them.
    pub fn max_token_id(&self) -> Option<TokenId> {
        self.inner.max_id
    }

    /// Returns the number of tokens, including added tokens. Ids may have gaps, so the highest id
    /// may be larger.
    pub fn vocab_size(&self) -> usize {
        self.inner.tokenizer.get_vocab_size(true)
    }

    /// Returns `true` if the token is special: decoding can skip it.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.inner
            .tokenizer
            .get_added_vocabulary()
            .get_added_tokens_decoder()
            .get(&token.0)
            .is_some_and(|t| t.special)
    }

    /// Returns all special tokens with their texts.
    pub fn special_tokens(&self) -> Vec<(TokenId, String)> {
        let added = self.inner.tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(&id, token)| (TokenId(id), token.content.clone()))
            .collect()
    }

    /// Returns the bytes of a token, which may begin or end within a character. Empty for an
    /// unknown id.
    pub fn token_bytes(&self, token: TokenId) -> Vec<u8> {
        self.inner.byte_form.bytes(&self.inner.tokenizer, token)
    }

    /// Returns the token's text if it is the same in every context and consists of whole
    /// characters.
    pub(crate) fn context_free_text(&self, token: TokenId) -> Option<&str> {
        let Inner { tokenizer, byte_form, texts, .. } = &*self.inner;
        let compute = || byte_form.context_free_text(tokenizer, token).map(String::into_boxed_str);
        texts.get(token.0 as usize)?.get_or_init(compute).as_deref()
    }

    /// Returns the tokenizer of the `tokenizers` crate.
    pub(crate) fn raw(&self) -> &tokenizers::Tokenizer {
        &self.inner.tokenizer
    }
}

/// Returns the tokens of the configuration that `tokenizer.json` lacks or has with other properties
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
        let is_present = present.values().chain(&missing).any(|token| token.content == text);
        if !is_present {
            missing.push(AddedToken::from(text, true));
        }
    }
    missing
}

/// Parses a token of `added_tokens_decoder`, with the defaults of the `AddedToken` class.
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

/// Compares all fields of two tokens; the type's `PartialEq` compares only the text.
fn same_properties(a: &AddedToken, b: &AddedToken) -> bool {
    let fields = |token: &AddedToken| {
        (token.single_word, token.lstrip, token.rstrip, token.normalized, token.special)
    };
    a.content == b.content && fields(a) == fields(b)
}

#[cfg(test)]
mod tests;
