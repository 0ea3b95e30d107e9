//! Who asks what: five cases, and the next request of each.

use std::error::Error;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use fastrand::Rng;

use crate::body::Pieces;
use crate::origin::Origin;
use crate::picture::Picture;
use crate::words::Words;

/// The name under which all sides serve the model.
pub(crate) const MODEL: &str = "door";
/// As few as make a stream of a few steps: this is about what comes before the first token.
const ANSWER_TOKENS: u32 = 4;
/// Tokens of a text prompt, with what the chat template adds.
pub(crate) const PROMPT_TOKENS: u64 = 1_000;
/// The part of it that is a system prompt, where there is one.
const SYSTEM_PART: f64 = 0.7;
/// Any.
const SEED: u64 = 20_261_122;

/// What is asked over and over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    /// One picture in every request, in the body.
    RepeatedInline,
    /// One picture in every request, by its URL.
    RepeatedUrl,
    /// A new picture in every request, in the body.
    Distinct,
    /// A new text in every request.
    Text,
    /// A new text in every request after a system prompt that all have.
    TextAfterSystem,
}

impl Case {
    pub(crate) const ALL: [Self; 5] =
        [Self::RepeatedInline, Self::RepeatedUrl, Self::Distinct, Self::Text, Self::TextAfterSystem];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::RepeatedInline => "repeated image, data URI",
            Self::RepeatedUrl => "repeated image, URL",
            Self::Distinct => "distinct images, data URI",
            Self::Text => "1k-token text",
            Self::TextAfterSystem => "1k-token text, shared system prompt",
        }
    }

    pub(crate) fn has_image(self) -> bool {
        matches!(self, Self::RepeatedInline | Self::RepeatedUrl | Self::Distinct)
    }
}

/// Makes requests, no two alike.
pub(crate) struct Workload {
    origin: Origin,
    pictures: Vec<Picture>,
    repeated: Bytes,
    words: Words,
    /// Words of a text prompt.
    length: usize,
    system: String,
    rng: Rng,
    made: u64,
}

impl Workload {
    /// With the pictures of a folder, the first of which is the repeated one.
    pub(crate) fn new(pictures: &Path, model: &Path) -> Result<Self, Box<dyn Error>> {
        let mut paths: Vec<_> =
            std::fs::read_dir(pictures)?.map(|entry| Ok(entry?.path())).collect::<Result<_, std::io::Error>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "jpg"));
        paths.sort();
        let files: Vec<Vec<u8>> = paths.iter().map(std::fs::read).collect::<Result<_, _>>()?;
        let first = files.first().ok_or("the folder has no pictures")?;
        let mut workload = Self {
            origin: Origin::start(Bytes::copy_from_slice(first))?,
            pictures: files.iter().map(|file| Picture::new(file)).collect::<Result<_, _>>()?,
            repeated: STANDARD.encode(first).into(),
            words: Words::of(model)?,
            length: 0,
            system: String::new(),
            rng: Rng::with_seed(SEED),
            made: 0,
        };
        workload.set_length(PROMPT_TOKENS as usize / 2);
        Ok(workload)
    }

    /// Makes text prompts of so many words.
    pub(crate) fn set_length(&mut self, words: usize) {
        self.length = words;
        self.system = self.words.text((words as f64 * SYSTEM_PART) as usize, &mut self.rng);
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Where the repeated picture is.
    pub(crate) fn origin(&self) -> &Origin {
        &self.origin
    }

    /// The next request, to a side that finds the repeated picture at `url`.
    pub(crate) fn next(&mut self, case: Case, url: &str) -> Pieces {
        self.made += 1;
        match case {
            Case::RepeatedInline => self.image("data:image/jpeg;base64,", [self.repeated.clone(), Bytes::new()]),
            Case::RepeatedUrl => self.image(url, [Bytes::new(), Bytes::new()]),
            Case::Distinct => {
                let picture = &self.pictures[self.made as usize % self.pictures.len()];
                self.image("data:image/jpeg;base64,", picture.numbered(self.made))
            }
            Case::Text => {
                let text = self.words.text(self.length, &mut self.rng);
                chat(&format!(r#"{{"role":"user","content":"{text}"}}"#))
            }
            Case::TextAfterSystem => {
                let own = self.length - (self.length as f64 * SYSTEM_PART) as usize;
                let (system, text) = (&self.system, self.words.text(own, &mut self.rng));
                chat(&format!(r#"{{"role":"system","content":"{system}"}},{{"role":"user","content":"{text}"}}"#))
            }
        }
    }

    /// A request with one image and a question that no other has.
    fn image(&self, url: &str, [first, second]: [Bytes; 2]) -> Pieces {
        let head = format!(
            r#"{{"model":"{MODEL}","max_tokens":{ANSWER_TOKENS},"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{url}"#
        );
        // As many digits each time, so as many tokens.
        let tail =
            format!(r#""}}}},{{"type":"text","text":"Question {:08}: what is in this picture?"}}]}}]}}"#, self.made);
        [head.into(), first, second, tail.into()].into()
    }
}

/// The messages hold nothing that JSON would want escaped.
fn chat(messages: &str) -> Pieces {
    let body = format!(r#"{{"model":"{MODEL}","max_tokens":{ANSWER_TOKENS},"messages":[{messages}]}}"#);
    [Bytes::from(body)].into()
}
