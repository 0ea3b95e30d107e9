//! The log probabilities of a response's text, as JSON.

use std::iter::Peekable;
use std::slice::Iter;

use chiasm_media::Charge;
use chiasm_prompt::Tokenizer;
use chiasm_request::TextLogprob;
use serde_json::value::RawValue;
use tracing::warn;

use crate::openai::token_json;

/// The maximum bytes of JSON that the last events of one stream repeat: some 2,500 tokens with 20
/// alternatives each, or 50,000 with none.
const MAX_REPEATED_BYTES: u64 = 4 << 20;
/// The number of copies at the end of a stream: the kept one, and one in each of four events.
const COPIES: u64 = 5;

/// The JSON of a token's log probabilities.
pub(super) type TokenJson = Box<RawValue>;

/// A writer of the log probabilities of a response's text.
pub struct LogprobWriter {
    tokenizer: Tokenizer,
    /// The length of all text so far.
    text_bytes: usize,
    /// The memory of the tokens that a stream's last events repeat; `None` for a whole response.
    kept: Option<Charge>,
    /// `true` if tokens are kept; `false` after the limit or the memory was exceeded.
    keeps: bool,
}

impl LogprobWriter {
    /// Creates a writer for a whole response. The caller accounts for the memory.
    pub fn whole(tokenizer: Tokenizer) -> Self {
        Self { tokenizer, text_bytes: 0, kept: None, keeps: true }
    }

    /// Creates a writer for a stream. `kept` is an empty charge that grows with the tokens that are
    /// kept.
    pub fn streamed(tokenizer: Tokenizer, kept: Charge) -> Self {
        Self { tokenizer, text_bytes: 0, kept: Some(kept), keeps: true }
    }

    /// Returns the JSON of the tokens that begin in `text`, which is the next part of the
    /// response's text.
    pub fn write(
        &mut self,
        text: &str,
        logprobs: &mut Peekable<Iter<'_, TextLogprob>>,
    ) -> Vec<TokenJson> {
        self.text_bytes += text.len();
        let end = self.text_bytes;
        let mut written = Vec::new();
        while let Some(token) = logprobs.next_if(|token| token.begin < end) {
            match token_json(&self.tokenizer, &token.logprob) {
                Ok(json) => written.push(json),
                Err(error) => warn!(%error, "a log probability can't be written"),
            }
        }
        written
    }

    /// Adds tokens to an item, for the last events of a stream to repeat. If they become too many,
    /// this item and the later items have none in the last events.
    pub fn keep(&mut self, item: &mut Vec<TokenJson>, written: Vec<TokenJson>) {
        if !self.keeps {
            return;
        }
        let bytes: u64 = written.iter().map(|json| json.get().len() as u64).sum();
        if let Some(kept) = &mut self.kept {
            let is_too_much = kept.bytes() / COPIES + bytes > MAX_REPEATED_BYTES;
            if is_too_much || kept.grow(COPIES * bytes).is_err() {
                warn!(
                    "a stream's last events don't repeat the log probabilities of its deltas: \
                     they are too large"
                );
                self.keeps = false;
                item.clear();
                return;
            }
        }
        item.extend(written);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use chiasm_backend::TokenLogprob;
    use chiasm_media::ByteBudget;
    use serde_json::{Value, json};

    use super::*;

    fn tokenizer() -> Tokenizer {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../chiasm/assets/model");
        Tokenizer::from_model_dir(&model).unwrap()
    }

    /// Returns the tokens of a text at byte `begin`, each with itself as its only alternative.
    fn tokens(text: &str, mut begin: usize) -> Vec<TextLogprob> {
        let tokenizer = tokenizer();
        let logprob = |token| {
            let token_begin = begin;
            begin += tokenizer.token_bytes(token).len();
            let top = vec![(token, -0.5)];
            TextLogprob { begin: token_begin, logprob: TokenLogprob { token, logprob: -0.5, top } }
        };
        tokenizer.encode(text, false).unwrap().into_iter().map(logprob).collect()
    }

    fn text(written: &[TokenJson]) -> String {
        let token =
            |json: &TokenJson| serde_json::from_str::<Value>(json.get()).unwrap()["token"].clone();
        written.iter().map(|json| token(json).as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn token_has_its_bytes_and_alternatives() {
        let tokens = tokens("Hello", 0);
        let written =
            LogprobWriter::whole(tokenizer()).write("Hello", &mut tokens[..1].iter().peekable());
        let token: Value = serde_json::from_str(written[0].get()).unwrap();
        let alternative =
            json!({"token": token["token"], "logprob": -0.5, "bytes": token["bytes"]});
        assert_eq!(token["top_logprobs"], json!([alternative]));
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        assert_eq!(token["token"].as_str().unwrap().as_bytes(), bytes);
    }

    #[test]
    fn tokens_belong_to_the_text_they_begin_in() {
        let mut writer = LogprobWriter::whole(tokenizer());
        let all = [tokens("one two", 0), tokens(" three", 7)].concat();
        let mut all = all.iter().peekable();
        assert_eq!(text(&writer.write("one two", &mut all)), "one two");
        assert_eq!(text(&writer.write(" three", &mut all)), " three");
        assert_eq!(all.next(), None);
    }

    #[test]
    fn stream_without_room_keeps_no_tokens() {
        let tokens = tokens("one two", 0);
        let kept = |limit| {
            let budget = ByteBudget::new(limit);
            let mut writer = LogprobWriter::streamed(tokenizer(), budget.empty_charge());
            let mut item = Vec::new();
            let mut all = tokens.iter().peekable();
            for text in ["one", " two"] {
                let written = writer.write(text, &mut all);
                writer.keep(&mut item, written);
            }
            (text(&item), budget.held())
        };
        let (whole, held) = kept(1 << 20);
        assert_eq!(whole, "one two");
        assert!(held > 0);
        assert_eq!(kept(held - 1).0, "");
    }
}
