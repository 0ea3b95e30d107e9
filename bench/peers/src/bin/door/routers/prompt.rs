//! The tokens of a request as an engine's cache sees them, from messages or from token ids with
//! files.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};

use chiasm_types::TokenId;
use rustc_hash::FxHasher;
use serde::Deserialize;

/// The number of tokens of a block.
pub(crate) const BLOCK_SIZE: usize = 16;
/// The number of tokens of a picture of 1024 × 1024 pixels in Qwen2-VL.
pub(crate) const PICTURE_TOKENS: usize = 1_369;
/// The token of a picture in the model of this benchmark.
const PICTURE: TokenId = TokenId(151_655);

/// The relevant fields of a request.
#[derive(Deserialize)]
pub(crate) struct RequestBody<'a> {
    #[serde(borrow, default)]
    messages: Vec<Message<'a>>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
    #[serde(borrow, default)]
    content_parts: Vec<Part<'a>>,
    #[serde(default)]
    pub(crate) stream: bool,
    /// `true` if the answer should have the prompt's tokens.
    #[serde(default)]
    pub(crate) return_token_ids: bool,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    #[serde(borrow)]
    content: Content<'a>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content<'a> {
    #[serde(borrow)]
    Text(Cow<'a, str>),
    #[serde(borrow)]
    Parts(Vec<Part<'a>>),
}

/// A part of a message, or of a request of tokens.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    image_url: Option<ImageUrl<'a>>,
    /// The name of a picture in a request of tokens.
    uuid: Option<String>,
}

#[derive(Deserialize)]
struct ImageUrl<'a> {
    #[serde(borrow)]
    url: Cow<'a, str>,
}

/// A picture in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Picture {
    pub(crate) identifier: String,
    pub(crate) offset: usize,
}

/// A prompt with the tokens of its pictures.
#[derive(Debug, Default)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) pictures: Vec<Picture>,
}

impl RequestBody<'_> {
    /// Returns the prompt: from token ids with `has_tokens`, otherwise from messages. Returns
    /// `None` if the token ids or a picture's name are missing.
    pub(crate) fn prompt(&self, has_tokens: bool) -> Option<Prompt> {
        let mut prompt = Prompt::default();
        if !has_tokens {
            self.messages.iter().for_each(|message| prompt.add_message(message));
            return Some(prompt);
        }
        let mut parts = self.content_parts.iter();
        for &token in self.token_ids.as_ref()? {
            match TokenId(token) {
                PICTURE => prompt.add_picture(parts.next()?.uuid.clone()?),
                token => prompt.tokens.push(token),
            }
        }
        Some(prompt)
    }
}

impl Prompt {
    fn add_message(&mut self, message: &Message<'_>) {
        self.tokens.push(token(&message.role));
        let parts = match &message.content {
            Content::Text(text) => return self.add_text(text),
            Content::Parts(parts) => parts,
        };
        for part in parts {
            if let Some(image) = &part.image_url {
                self.add_picture(format!("{:016x}", hash(&image.url)));
            }
            if let Some(text) = &part.text {
                self.add_text(text);
            }
        }
    }

    /// Adds a token for each word and each mark, as most tokenizers do.
    fn add_text(&mut self, text: &str) {
        for word in text.split_ascii_whitespace() {
            let bare = word.trim_end_matches(|mark: char| mark.is_ascii_punctuation());
            self.tokens.extend((!bare.is_empty()).then(|| token(bare)));
            let marks = word[bare.len()..].chars();
            self.tokens.extend(marks.map(|mark| token(mark.encode_utf8(&mut [0; 4]))));
        }
    }

    fn add_picture(&mut self, identifier: String) {
        self.pictures.push(Picture { identifier, offset: self.tokens.len() });
        self.tokens.extend([PICTURE; PICTURE_TOKENS]);
    }

    /// Returns the pictures with tokens in a block.
    pub(crate) fn pictures_in(&self, block: usize) -> impl Iterator<Item = &Picture> {
        let start = block * BLOCK_SIZE;
        let overlaps = move |it: &&Picture| {
            it.offset < start + BLOCK_SIZE && it.offset + PICTURE_TOKENS > start
        };
        self.pictures.iter().filter(overlaps)
    }

    /// Returns a hash of each full block and everything before it.
    pub(crate) fn blocks(&self) -> Vec<u64> {
        let mut parent = 0;
        let block = |(number, tokens): (usize, &[TokenId])| {
            let mut hasher = FxHasher::default();
            (parent, tokens).hash(&mut hasher);
            for picture in self.pictures_in(number) {
                (&*picture.identifier, picture.offset).hash(&mut hasher);
            }
            parent = hasher.finish();
            parent
        };
        self.tokens.chunks_exact(BLOCK_SIZE).enumerate().map(block).collect()
    }
}

fn token(word: &str) -> TokenId {
    TokenId(hash(word) as u32)
}

fn hash(text: &str) -> u64 {
    let mut hasher = FxHasher::default();
    text.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn prompt(body: &str, has_tokens: bool) -> Option<Prompt> {
        serde_json::from_str::<RequestBody>(body).unwrap().prompt(has_tokens)
    }

    #[test]
    fn words_with_marks_or_pictures_are_tokens() {
        let text = r#"{"messages":[{"role":"user","content":"What is \"this\", then?"}]}"#;
        // The role, four words, three marks. The quote before a word is part of it.
        assert_eq!(prompt(text, false).unwrap().tokens.len(), 1 + 4 + 3);
        let picture = |url: &str| {
            let image = format!(r#"{{"type":"image_url","image_url":{{"url":"{url}"}}}}"#);
            let content = format!(r#"[{image},{{"type":"text","text":"a"}}]"#);
            let message = format!(r#"{{"role":"user","content":{content}}}"#);
            prompt(&format!(r#"{{"messages":[{message}]}}"#), false).unwrap()
        };
        let [first, same, other] = ["data:x", "data:x", "data:y"].map(picture);
        assert_eq!(first.tokens.len(), 1 + PICTURE_TOKENS + 1);
        assert_eq!(first.blocks().len(), first.tokens.len() / BLOCK_SIZE);
        assert_eq!(first.blocks(), same.blocks());
        assert!(first.blocks().iter().zip(other.blocks()).all(|(a, b)| *a != b));
    }

    #[test]
    fn picture_token_is_expanded() {
        let part = r#"{"type":"image_url","uuid":"u"}"#;
        let body = format!(r#"{{"token_ids":[1,{},2],"content_parts":[{part}]}}"#, PICTURE.0);
        let found = prompt(&body, true).unwrap();
        assert_eq!((found.tokens.len(), found.pictures[0].offset), (2 + PICTURE_TOKENS, 1));
        assert_eq!(found.pictures_in(0).count(), 1);
        assert!(prompt("{}", true).is_none());
    }
}
