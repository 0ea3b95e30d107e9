//! The parts of an answer that are compared.

use std::error::Error;
use std::fmt;

use serde::Deserialize;

use crate::client::Usage;

/// The text in front of a clip's digest in the simulated engine's description of a prompt, as in
/// `1 video 640x352 (1100 tokens, 9f2c1a07); …`, and the digest's length.
const BEFORE_DIGEST: &str = " tokens, ";
const DIGEST_CHARS: usize = 8;

/// The reason why a request has no answer: a refusal, or a broken connection.
#[derive(Clone, Debug)]
pub(super) struct Unanswered(pub(super) String);

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Unanswered {}

/// An answer to a request about a clip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) prompt_tokens: u64,
    /// The digest of the clip's pixels; `None` if the answer is too short for it.
    pub(super) digest: Option<String>,
}

impl Answer {
    /// Parses a completion.
    pub(super) fn parse(usage: Usage, completion: &str) -> Result<Self, Unanswered> {
        #[derive(Deserialize)]
        struct Completion {
            choices: Vec<Choice>,
        }
        #[derive(Deserialize)]
        struct Choice {
            message: Message,
        }
        #[derive(Deserialize)]
        struct Message {
            content: String,
        }
        let completion = serde_json::from_str::<Completion>(completion);
        let completion = completion.map_err(|error| Unanswered(error.to_string()))?;
        let choice = completion.choices.into_iter().next();
        let choice = choice.ok_or_else(|| Unanswered("the answer has no choice".to_owned()))?;
        let text = choice.message.content;
        Ok(Self { prompt_tokens: usage.prompt_tokens, digest: digest(&text) })
    }
}

fn digest(text: &str) -> Option<String> {
    let after = text.split_once(BEFORE_DIGEST)?.1;
    let digest = after.get(..DIGEST_CHARS).filter(|_| after[DIGEST_CHARS..].starts_with(')'))?;
    digest.chars().all(|letter| letter.is_ascii_hexdigit()).then(|| digest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_needs_its_end() {
        let found = |text| digest(text);
        let text = "1 video 640x352 (1100 tokens, 9f2c1a07); 0 of 1200 prompt tokens were cached";
        assert_eq!(found(text).as_deref(), Some("9f2c1a07"));
        assert_eq!(found("1 video 640x352 (1100 tokens, 9f2c1a07"), None);
        assert_eq!(found("1 video 640x352 (1100 tokens, 9f2c"), None);
        assert_eq!(found("0 of 9 prompt tokens, which were cached"), None);
    }
}
