//! Sources of blocks: where an image is, and what a document says.

use std::fmt;

use chiasm_media::MediaInput;
use serde::de::{Error, MapAccess, Visitor};

use super::result_content::{ResultContent, unsupported};
use crate::error::ApiError;
use crate::openai::intake::{Intake, Seed};

/// A block's `source`.
pub(super) enum Source {
    /// An image, or a document that is a file, is there.
    Media(MediaInput),
    /// This is the text of a document.
    Text(String),
    /// A search result was found there.
    Place(String),
}

impl Source {
    pub(super) fn of_image<E: Error>(self, intake: &mut Intake) -> Result<MediaInput, E> {
        match self {
            Self::Media(source) => Ok(source),
            Self::Text(_) => {
                Err(wrong_type(intake, "the source of an image must be of the type base64 or url"))
            }
            Self::Place(_) => Err(wrong_form(intake, "an object")),
        }
    }

    pub(super) fn of_document<E: Error>(self, intake: &mut Intake) -> Result<String, E> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Media(_) => Err(wrong_type(
                intake,
                "files such as PDF are not read here; a document's source must be text or content",
            )),
            Self::Place(_) => Err(wrong_form(intake, "an object")),
        }
    }

    pub(super) fn of_search_result<E: Error>(self, intake: &mut Intake) -> Result<String, E> {
        match self {
            Self::Place(place) => Ok(place),
            _ => Err(wrong_form(intake, "a string")),
        }
    }
}

fn wrong_type<E: Error>(intake: &mut Intake, message: &str) -> E {
    intake.refuse(unsupported(intake.below(".source.type"), message.to_owned()))
}

fn wrong_form<E: Error>(intake: &mut Intake, form: &str) -> E {
    let field = intake.below(".source");
    intake.refuse(ApiError::invalid(&field, format!("'{field}' must be {form}")))
}

/// A text that is told apart from what is said around it.
pub(super) struct Passage {
    pub(super) kind: &'static str,
    pub(super) source: Option<String>,
    pub(super) title: Option<String>,
    pub(super) context: Option<String>,
    pub(super) text: String,
}

impl Passage {
    /// As Anthropic advises to write documents in prompts; how its own servers write these blocks
    /// is not published.
    pub(super) fn written(&self) -> String {
        let Self { kind, source, title, context, text } = self;
        let mut written = format!("<{kind}>\n");
        for (name, value) in [("source", source), ("title", title), ("context", context)] {
            if let Some(value) = value {
                written.push_str(&format!("<{name}>{value}</{name}>\n"));
            }
        }
        written + &format!("<{kind}_content>\n{text}\n</{kind}_content>\n</{kind}>\n")
    }
}

/// The fields of a source that is an object.
#[derive(Default)]
struct Given {
    kind: Option<String>,
    data: Option<bytes::Bytes>,
    url: Option<bytes::Bytes>,
    content: Option<ResultContent>,
    unknown: Option<String>,
}

impl<'de> Visitor<'de> for Seed<'_, Option<Source>> {
    type Value = Option<Source>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object or a string")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, place: &str) -> Result<Self::Value, E> {
        self.intake.own_prompt(place).map(|place| Some(Source::Place(place)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let mut given = Given::default();
        while let Some(name) = intake.name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "type" => given.kind = intake.text(&mut map)?,
                // The format is found from the bytes.
                "media_type" => drop(intake.borrowed(&mut map)?),
                "data" => {
                    given.data =
                        intake.borrowed(&mut map)?.map(|data| intake.share(&data)).transpose()?
                }
                "url" => {
                    given.url =
                        intake.borrowed(&mut map)?.map(|url| intake.share(&url)).transpose()?
                }
                "content" => {
                    given.content = map.next_value_seed(intake.seed::<Option<ResultContent>>())?
                }
                _ => intake.unknown(&mut map, &mut given.unknown)?,
            }
            intake.leave(outer);
        }
        given.source(intake).map(Some)
    }
}

impl Given {
    fn source<E: Error>(mut self, intake: &mut Intake) -> Result<Source, E> {
        let kind = self.kind.take().ok_or_else(|| intake.missing(".type"))?;
        let source = match kind.as_str() {
            "base64" => Source::Media(MediaInput::Base64(
                self.data.take().ok_or_else(|| intake.missing(".data"))?,
            )),
            "url" => Source::Media(MediaInput::Url(
                self.url.take().ok_or_else(|| intake.missing(".url"))?,
            )),
            "text" => {
                let data = self.data.take().ok_or_else(|| intake.missing(".data"))?;
                // It was a string of JSON, and so is UTF-8.
                Source::Text(intake.own_prompt(&String::from_utf8_lossy(&data))?)
            }
            "content" => {
                let content = self.content.take().ok_or_else(|| intake.missing(".content"))?;
                Source::Text(content.text_alone(intake)?)
            }
            other => {
                let message = format!(
                    "sources of type '{other}' are not supported; use base64, url, text or content"
                );
                return Err(intake.refuse(unsupported(intake.below(".type"), message)));
            }
        };
        let given = [
            (".data", self.data.is_some()),
            (".url", self.url.is_some()),
            (".content", self.content.is_some()),
        ];
        let other =
            given.into_iter().find_map(|(name, is_given)| is_given.then(|| intake.below(name)));
        intake.refuse_unknown(self.unknown.or(other))?;
        Ok(source)
    }
}
