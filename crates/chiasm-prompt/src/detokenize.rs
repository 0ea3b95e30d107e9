//! Incremental detokenizer: from one token at a time to text that never holds half a character.

use chiasm_types::TokenId;
use tokenizers::step_decode_stream;

use crate::Tokenizer;

/// How far back a prompt is decoded so that the first new token gets its text right: enough for
/// every decoder, which look at the neighbouring token at most, and for characters of several
/// tokens.
const PROMPT_TOKENS: usize = 32;

/// Turns the tokens of an answer into text as they come.
///
/// A token whose bytes end within a character gives no text; the token that completes the character
/// gives both. This is the `DecodeStream` of `tokenizers`, primed with the prompt, as vLLM drives
/// it (`FastIncrementalDetokenizer`, `vllm/v1/engine/detokenizer.py`), with two differences: only
/// the prompt's end is decoded, and a prompt that ends within a character does not come out again
/// in the answer.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// Tokens that the text of the next one may depend on, and those without text so far.
    ids: Vec<u32>,
    /// Text of the first `prefix_index` of them, which has come out already.
    prefix: String,
    prefix_index: usize,
    /// Tokens whose text has not come out.
    pending: usize,
}

impl Detokenizer {
    /// A detokenizer for the answer to `prompt`.
    ///
    /// `skip_special`: whether special tokens give no text.
    pub fn new(tokenizer: Tokenizer, prompt: &[TokenId], skip_special: bool) -> Self {
        // After whole characters nothing before them matters.
        let last = prompt
            .last()
            .and_then(|last| Some((last, closed(tokenizer.whole_characters(*last)?)?)));
        if let Some((last, prefix)) = last {
            let (ids, prefix) = (vec![last.0], prefix.to_owned());
            return Self { tokenizer, skip_special, ids, prefix, prefix_index: 1, pending: 0 };
        }
        let begin = char_begin(&tokenizer, prompt, prompt.len().saturating_sub(PROMPT_TOKENS));
        let prompt = &prompt[begin..];
        let complete = prompt.len() - open_tokens(&tokenizer, prompt);
        let prefix = tokenizer.decode(&prompt[..complete], skip_special);
        let ids = prompt.iter().map(|token| token.0).collect();
        Self { tokenizer, skip_special, ids, prefix, prefix_index: complete, pending: 0 }
    }

    /// The text that `token` completes; empty while a character is incomplete.
    pub fn push(&mut self, token: TokenId) -> String {
        if let Some(text) = self.whole_characters(token) {
            return text;
        }
        let text = match self.step(token) {
            Ok(text) => text,
            // The decoder took back what it had given, so nothing can be told about what follows
            // it: begin anew with this token, as vLLM does (its issue 17448).
            Err(error) => {
                tracing::warn!(%error, %token, "cannot go on decoding; starting anew");
                self.ids.clear();
                self.prefix.clear();
                self.prefix_index = 0;
                self.step(token).unwrap_or_default()
            }
        };
        self.pending = if text.is_some() { 0 } else { self.pending + 1 };
        text.unwrap_or_default()
    }

    /// Ends the answer and returns the text that is still owed.
    ///
    /// None is: like vLLM, which drops them, we give no text for tokens whose last character is
    /// incomplete. They are [`pending`](Self::pending).
    pub fn finish(&mut self) -> String {
        String::new()
    }

    /// Number of last tokens that have given no text: special ones, and those that end within a
    /// character.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// The text of a token that is whole characters after whole characters, which is nearly every
    /// one: what `step` would come to, without decoding the last tokens twice. `None` in any other
    /// case.
    fn whole_characters(&mut self, token: TokenId) -> Option<String> {
        let begins_anew = self.prefix_index == self.ids.len() && !self.prefix.is_empty();
        if !begins_anew || self.prefix.ends_with(char::REPLACEMENT_CHARACTER) {
            return None;
        }
        let text = closed(self.tokenizer.whole_characters(token)?)?;
        self.ids.clear();
        self.ids.push(token.0);
        self.prefix.clear();
        self.prefix.push_str(text);
        self.prefix_index = 1;
        self.pending = 0;
        Some(text.to_owned())
    }

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

/// The text if there is any and it does not end like one with an incomplete character.
fn closed(text: &str) -> Option<&str> {
    (!text.is_empty() && !text.ends_with(char::REPLACEMENT_CHARACTER)).then_some(text)
}

/// The last position up to `at` where a token does not go on with a character of the tokens before
/// it.
fn char_begin(tokenizer: &Tokenizer, tokens: &[TokenId], at: usize) -> usize {
    let goes_on = |token: TokenId| {
        tokenizer.token_bytes(token).first().is_some_and(|byte| byte & 0xc0 == 0x80)
    };
    (0..=at).rev().take(PROMPT_TOKENS).find(|at| *at == 0 || !goes_on(tokens[*at])).unwrap_or(at)
}

/// How many tokens at the end hold the bytes of an incomplete character.
fn open_tokens(tokenizer: &Tokenizer, tokens: &[TokenId]) -> usize {
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
