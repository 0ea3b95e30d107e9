//! What a request holds, token by token, as an engine's cache sees it: of messages, or of token ids
//! with files beside them.

use std::borrow::Cow;
use std::hash::{Hash, Hasher};

use chiasm_types::TokenId;
use rustc_hash::FxHasher;
use serde::Deserialize;

/// Tokens of a block.
pub(crate) const BLOCK: usize = 16;
/// What Qwen2-VL makes of a picture of 1024 × 1024 pixels.
pub(crate) const PICTURE_TOKENS: usize = 1_369;
/// The token that stands for a picture, in the model of this benchmark.
const PICTURE: TokenId = TokenId(151_655);

/// What is read of a request's body. Everything else is as it may be.
#[derive(Deserialize)]
pub(crate) struct Asked<'a> {
    #[serde(borrow, default)]
    messages: Vec<Message<'a>>,
    #[serde(default)]
    token_ids: Option<Vec<u32>>,
    #[serde(borrow, default)]
    content_parts: Vec<Part<'a>>,
    #[serde(default)]
    pub(crate) stream: bool,
    /// Whether to tell what the prompt has become.
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

/// A part of a message, or one of token mode.
#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    image_url: Option<ImageUrl<'a>>,
    /// The name of a picture, in token mode.
    uuid: Option<String>,
}

#[derive(Deserialize)]
struct ImageUrl<'a> {
    #[serde(borrow)]
    url: Cow<'a, str>,
}

/// Where a picture's tokens lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Picture {
    /// What its blocks are known by.
    pub(crate) identifier: String,
    pub(crate) offset: usize,
}

/// A prompt with its pictures' tokens in it.
#[derive(Debug, Default)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) pictures: Vec<Picture>,
}

impl Asked<'_> {
    /// The prompt; none of a request without token ids to a place that wants them.
    pub(crate) fn prompt(&self, wants_tokens: bool) -> Option<Prompt> {
        let mut prompt = Prompt::default();
        if !wants_tokens {
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
        match &message.content {
            Content::Text(text) => self.add_text(text),
            Content::Parts(parts) => {
                for part in parts {
                    if let Some(image) = &part.image_url {
                        self.add_picture(format!("{:016x}", hash(&image.url)));
                    }
                    part.text.iter().for_each(|text| self.add_text(text));
                }
            }
        }
    }

    /// Words and marks are tokens, which is what most of them are to a tokenizer.
    fn add_text(&mut self, text: &str) {
        for word in text.split_ascii_whitespace() {
            let bare = word.trim_end_matches(|mark: char| mark.is_ascii_punctuation());
            self.tokens.extend((!bare.is_empty()).then(|| token(bare)));
            self.tokens.extend(word[bare.len()..].chars().map(|mark| token(mark.encode_utf8(&mut [0; 4]))));
        }
    }

    fn add_picture(&mut self, identifier: String) {
        self.pictures.push(Picture { identifier, offset: self.tokens.len() });
        self.tokens.extend([PICTURE; PICTURE_TOKENS]);
    }

    /// The pictures that touch a block.
    pub(crate) fn touching(&self, block: usize) -> impl Iterator<Item = &Picture> {
        let (start, end) = (block * BLOCK, (block + 1) * BLOCK);
        self.pictures.iter().filter(move |it| it.offset < end && it.offset + PICTURE_TOKENS > start)
    }

    /// A name for each full block, of all that is before it too.
    pub(crate) fn blocks(&self) -> Vec<u64> {
        let mut parent = 0;
        let full = self.tokens.chunks_exact(BLOCK).enumerate();
        full.map(|(number, tokens)| {
            let mut hasher = FxHasher::default();
            (parent, tokens).hash(&mut hasher);
            for picture in self.touching(number) {
                (&*picture.identifier, picture.offset).hash(&mut hasher);
            }
            parent = hasher.finish();
            parent
        })
        .collect()
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

    fn prompt(body: &str, wants_tokens: bool) -> Option<Prompt> {
        serde_json::from_str::<Asked>(body).unwrap().prompt(wants_tokens)
    }

    #[test]
    fn words_marks_and_pictures_are_tokens() {
        let text = r#"{"messages":[{"role":"user","content":"What is \"this\", then?"}]}"#;
        // The role, four words, three marks: the quote before the word is part of it.
        assert_eq!(prompt(text, false).unwrap().tokens.len(), 1 + 4 + 3);
        let picture = |url: &str| {
            let image = format!(r#"{{"type":"image_url","image_url":{{"url":"{url}"}}}}"#);
            let body =
                format!(r#"{{"messages":[{{"role":"user","content":[{image},{{"type":"text","text":"a"}}]}}]}}"#);
            prompt(&body, false).unwrap()
        };
        let [one, again, other] = [picture("data:x"), picture("data:x"), picture("data:y")];
        assert_eq!(one.tokens.len(), 1 + PICTURE_TOKENS + 1);
        assert_eq!((one.blocks(), one.blocks().len()), (again.blocks(), one.tokens.len() / BLOCK));
        assert!(one.blocks().iter().zip(other.blocks()).all(|(one, other)| *one != other));
    }

    #[test]
    fn a_marker_becomes_its_pictures_tokens() {
        let body =
            format!(r#"{{"token_ids":[1,{},2],"content_parts":[{{"type":"image_url","uuid":"u"}}]}}"#, PICTURE.0);
        let made = prompt(&body, true).unwrap();
        assert_eq!((made.tokens.len(), made.pictures[0].offset), (2 + PICTURE_TOKENS, 1));
        assert_eq!(made.touching(0).count(), 1);
        assert!(prompt("{}", true).is_none());
    }
}
