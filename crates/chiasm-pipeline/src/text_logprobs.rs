//! Log probabilities of the tokens of a continuation's text.
//!
//! An answer may have reasoning, calls and markers beside its text, and text may be held back until
//! a stop string or a marker can be ruled out. Tokens therefore wait here with their bytes. When
//! text is sent, it is looked up in these bytes.

use std::collections::VecDeque;

use chiasm_backend::TokenLogprob;
use chiasm_prompt::Tokenizer;
use chiasm_request::TextLogprob;

/// The tokens that may still become text.
pub(super) struct TextTokens {
    tokenizer: Tokenizer,
    waiting: VecDeque<WaitingToken>,
    /// The bytes of the waiting tokens, preceded by the rest of a token that was sent in part.
    bytes: Vec<u8>,
    /// The length of the text that was sent.
    text_bytes: usize,
}

struct WaitingToken {
    logprob: TokenLogprob,
    /// The number of bytes of the token's text.
    length: usize,
}

impl TextTokens {
    pub(super) fn new(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, waiting: VecDeque::new(), bytes: Vec::new(), text_bytes: 0 }
    }

    /// Adds a token that may become text.
    pub(super) fn push(&mut self, logprob: TokenLogprob) {
        let bytes = self.tokenizer.token_bytes(logprob.token);
        self.waiting.push_back(WaitingToken { logprob, length: bytes.len() });
        self.bytes.extend(bytes);
    }

    /// Moves the tokens of `text`, which is sent now, to `taken`. Drops the tokens before them,
    /// which are not text.
    pub(super) fn take(&mut self, text: &str, taken: &mut Vec<TextLogprob>) {
        // Text that does not occur in the bytes, such as a replacement character, takes all waiting
        // tokens.
        let found = find(&self.bytes, text.as_bytes());
        let begin = found.unwrap_or(0);
        let end = found.map_or(self.bytes.len(), |at| at + text.len());
        let waiting_bytes: usize = self.waiting.iter().map(|token| token.length).sum();
        let mut at = self.bytes.len() - waiting_bytes;
        while at < end {
            let Some(token) = self.waiting.pop_front() else { break };
            let next = at + token.length;
            if next > begin {
                let begin = self.text_bytes + at.saturating_sub(begin);
                taken.push(TextLogprob { begin, logprob: token.logprob });
            }
            at = next;
        }
        self.bytes.drain(..end);
        self.text_bytes += text.len();
    }

    /// Drops all waiting tokens, which are not text.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.bytes.clear();
    }
}

/// Returns the first offset of `text` in `bytes`.
fn find(bytes: &[u8], text: &[u8]) -> Option<usize> {
    if bytes.starts_with(text) {
        return Some(0);
    }
    bytes.windows(text.len().max(1)).position(|window| window == text)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use chiasm_types::TokenId;

    use super::*;

    fn tokens() -> TextTokens {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../chiasm/assets/model");
        TextTokens::new(Tokenizer::from_model_dir(&model).unwrap())
    }

    impl TextTokens {
        fn push_text(&mut self, text: &str) {
            for token in self.tokenizer.encode(text, false).unwrap() {
                self.push(TokenLogprob { token, logprob: -1.0, top: Vec::new() });
            }
        }

        /// Takes a text. Returns the text of its tokens, and the offset of the first token.
        fn taken(&mut self, text: &str) -> (String, Option<usize>) {
            let mut taken = Vec::new();
            self.take(text, &mut taken);
            let ids: Vec<TokenId> = taken.iter().map(|token| token.logprob.token).collect();
            (self.tokenizer.decode(&ids, false), taken.first().map(|token| token.begin))
        }
    }

    #[test]
    fn text_sent_at_once_takes_its_tokens() {
        let mut tokens = tokens();
        tokens.push_text("Hello");
        assert_eq!(tokens.taken("Hello"), ("Hello".to_owned(), Some(0)));
        tokens.push_text(" world");
        assert_eq!(tokens.taken(" world"), (" world".to_owned(), Some(5)));
        assert!(tokens.bytes.is_empty());
    }

    #[test]
    fn markers_before_text_are_dropped() {
        let mut tokens = tokens();
        tokens.push_text("</think>");
        tokens.push_text("\n\n");
        tokens.push_text("Fine");
        assert_eq!(tokens.taken("Fine"), ("Fine".to_owned(), Some(0)));
    }

    #[test]
    fn held_back_text_keeps_its_token() {
        let mut tokens = tokens();
        tokens.push_text("a");
        tokens.push_text("<");
        assert_eq!(tokens.taken("a"), ("a".to_owned(), Some(0)));
        tokens.push_text("b");
        assert_eq!(tokens.taken("<b"), ("<b".to_owned(), Some(1)));
    }

    #[test]
    fn token_across_two_texts_belongs_to_the_first() {
        let mut tokens = tokens();
        tokens.push_text("<|im_end|>");
        assert_eq!(tokens.waiting.len(), 1, "one token");
        assert_eq!(tokens.taken("<|im_"), ("<|im_end|>".to_owned(), Some(0)));
        tokens.push_text("!");
        assert_eq!(tokens.taken("end|>!"), ("!".to_owned(), Some(10)));
    }

    #[test]
    fn text_unlike_its_bytes_takes_all_tokens() {
        let mut tokens = tokens();
        tokens.push_text("x");
        assert_eq!(tokens.taken("\u{fffd}"), ("x".to_owned(), Some(0)));
    }

    #[test]
    fn cleared_tokens_become_no_text() {
        let mut tokens = tokens();
        tokens.push_text("same");
        tokens.clear();
        tokens.push_text("same");
        assert_eq!(tokens.taken("same"), ("same".to_owned(), Some(0)));
    }
}
