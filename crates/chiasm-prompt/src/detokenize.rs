//! Incremental detokenizer: one token at a time to text that never ends within a character.

use chiasm_types::TokenId;
use tokenizers::step_decode_stream;

use crate::Tokenizer;

/// The number of prompt tokens that are decoded as context of the first new token. Decoders look at
/// the neighbouring token at most, and a character may span several tokens.
const PROMPT_TOKENS: usize = 32;

/// A decoder that turns the tokens of an answer into text as they arrive.
///
/// A token whose bytes end within a character yields no text; the token that completes the
/// character yields the text of both. This is the `DecodeStream` of `tokenizers`, primed with the
/// prompt as in vLLM (`FastIncrementalDetokenizer`, `vllm/v1/engine/detokenizer.py`), with two
/// differences. Only the end of the prompt is decoded. If the prompt ends within a character, the
/// prompt's text does not appear again in the answer.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The context of the next token, and the tokens that have yielded no text yet.
    ids: Vec<u32>,
    /// The text of the first `prefix_index` tokens of `ids`, which was returned already.
    prefix: String,
    prefix_index: usize,
    /// The number of tokens whose text was not returned yet.
    pending: usize,
}

impl Detokenizer {
    /// Creates a detokenizer for the answer to `prompt`.
    ///
    /// With `skip_special` special tokens yield no text.
    pub fn new(tokenizer: Tokenizer, prompt: &[TokenId], skip_special: bool) -> Self {
        // A token of whole characters is context enough.
        let last = prompt
            .last()
            .and_then(|last| Some((last, complete_text(tokenizer.context_free_text(*last)?)?)));
        if let Some((last, prefix)) = last {
            let ids = vec![last.0];
            let prefix = prefix.to_owned();
            return Self { tokenizer, skip_special, ids, prefix, prefix_index: 1, pending: 0 };
        }
        let earliest = prompt.len().saturating_sub(PROMPT_TOKENS);
        let begin = find_char_boundary(&tokenizer, prompt, earliest);
        let prompt = &prompt[begin..];
        let complete = prompt.len() - count_open_tokens(&tokenizer, prompt);
        let prefix = tokenizer.decode(&prompt[..complete], skip_special);
        let ids = prompt.iter().map(|token| token.0).collect();
        Self { tokenizer, skip_special, ids, prefix, prefix_index: complete, pending: 0 }
    }

    /// Adds a token and returns the text it completes. Empty while a character is incomplete.
    pub fn push(&mut self, token: TokenId) -> String {
        if let Some(text) = self.push_context_free(token) {
            return text;
        }
        let text = match self.step(token) {
            Ok(text) => text,
            // The decoder changed text that it had returned before. Restart with this token, as
            // vLLM does (its issue 17448).
            Err(error) => {
                tracing::warn!(%error, %token, "decoding failed; restarting with this token");
                self.ids.clear();
                self.prefix.clear();
                self.prefix_index = 0;
                self.step(token).unwrap_or_default()
            }
        };
        self.pending = if text.is_some() { 0 } else { self.pending + 1 };
        text.unwrap_or_default()
    }

    /// Ends the answer and returns the remaining text, which is always empty.
    ///
    /// Like vLLM, this drops tokens whose last character is incomplete. Their number is
    /// [`pending`](Self::pending).
    pub fn finish(&mut self) -> String {
        String::new()
    }

    /// Returns the number of latest tokens that have yielded no text: special tokens, and tokens
    /// that end within a character.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Adds a token of whole characters that follows whole characters, and returns its text.
    /// Returns `None`, and adds nothing, in any other case.
    ///
    /// Nearly every token takes this path. The text is that of [`step`](Self::step), which would
    /// decode the last tokens twice.
    fn push_context_free(&mut self, token: TokenId) -> Option<String> {
        let is_complete = self.prefix_index == self.ids.len() && !self.prefix.is_empty();
        if !is_complete || self.prefix.ends_with(char::REPLACEMENT_CHARACTER) {
            return None;
        }
        let text = complete_text(self.tokenizer.context_free_text(token)?)?;
        self.ids.clear();
        self.ids.push(token.0);
        self.prefix.clear();
        self.prefix.push_str(text);
        self.prefix_index = 1;
        self.pending = 0;
        Some(text.to_owned())
    }

    /// Adds a token to the `DecodeStream` of `tokenizers`.
    fn step(&mut self, token: TokenId) -> tokenizers::Result<Option<String>> {
        step_decode_stream(
            self.tokenizer.raw(),
            vec![token.0],
            self.skip_special,
            &mut self.ids,
            &mut self.prefix,
            &mut self.prefix_index,
        )
    }
}

/// Returns `text` unless it is empty or may end with an incomplete character.
fn complete_text(text: &str) -> Option<&str> {
    (!text.is_empty() && !text.ends_with(char::REPLACEMENT_CHARACTER)).then_some(text)
}

/// Returns the last position up to `at` whose token does not begin within a character.
fn find_char_boundary(tokenizer: &Tokenizer, tokens: &[TokenId], at: usize) -> usize {
    let is_boundary = |token: TokenId| {
        tokenizer.token_bytes(token).first().is_none_or(|byte| byte & 0xc0 != 0x80)
    };
    (0..=at).rev().take(PROMPT_TOKENS).find(|at| *at == 0 || is_boundary(tokens[*at])).unwrap_or(at)
}

/// Returns the number of trailing tokens that hold the bytes of an incomplete character.
fn count_open_tokens(tokenizer: &Tokenizer, tokens: &[TokenId]) -> usize {
    let mut bytes: Vec<u8> = Vec::new();
    // A character has at most four bytes and so spans at most four tokens.
    for (count, token) in tokens.iter().rev().take(4).enumerate() {
        bytes.splice(0..0, tokenizer.token_bytes(*token));
        let begin = bytes.iter().rposition(|byte| byte & 0xc0 != 0x80);
        if let Some(begin) = begin {
            let open = std::str::from_utf8(&bytes[begin..])
                .is_err_and(|error| error.error_len().is_none());
            return if open { count + 1 } else { 0 };
        }
    }
    0
}

#[cfg(test)]
mod tests;
