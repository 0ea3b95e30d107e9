//! Sources of blocks: the location of an image, or the text of a document.

use std::fmt;

use chiasm_media::MediaInput;
use serde::de::{Error, MapAccess, Visitor};

use super::result_content::{ResultContent, unsupported};
use crate::error::{ApiError, excerpt};
use crate::openai::intake::{Intake, Seed};

/// A block's `source`.
pub(super) enum Source {
    /// The location or the data of an image, or of a document that is a file.
    Media(MediaInput),
    /// The text of a document.
    Text(String),
    /// The origin of a search result.
    Origin(String),
}

impl Source {
    /// Returns the source of an image.
    ///
    /// # Errors
    /// Fails for any other source.
    pub(super) fn into_image<E: Error>(self, intake: &mut Intake) -> Result<MediaInput, E> {
        match self {
            Self::Media(source) => Ok(source),
            Self::Text(_) => {
                Err(wrong_type(intake, "the source of an image must have type base64 or url"))
            }
            Self::Origin(_) => Err(wrong_form(intake, "an object")),
        }
    }

    /// Returns the text of a document.
    ///
    /// # Errors
    /// Fails for any other source.
    pub(super) fn into_document<E: Error>(self, intake: &mut Intake) -> Result<String, E> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Media(_) => Err(wrong_type(
                intake,
                "files such as PDF are not supported; a document's source must have type text or \
                 content",
            )),
            Self::Origin(_) => Err(wrong_form(intake, "an object")),
        }
    }

    /// Returns the origin of a search result.
    ///
    /// # Errors
    /// Fails for any other source.
    pub(super) fn into_origin<E: Error>(self, intake: &mut Intake) -> Result<String, E> {
        match self {
            Self::Origin(origin) => Ok(origin),
            _ => Err(wrong_form(intake, "a string")),
        }
    }
}

fn wrong_type<E: Error>(intake: &mut Intake, message: &str) -> E {
    intake.refuse(unsupported(intake.child_path(".source.type"), message.to_owned()))
}

fn wrong_form<E: Error>(intake: &mut Intake, form: &str) -> E {
    let field = intake.child_path(".source");
    intake.refuse(ApiError::invalid(&field, format!("'{field}' must be {form}")))
}

/// A document or a search result, which is delimited from the text around it.
pub(super) struct Passage {
    pub(super) kind: &'static str,
    pub(super) source: Option<String>,
    pub(super) title: Option<String>,
    pub(super) context: Option<String>,
    pub(super) text: String,
}

impl Passage {
    /// Returns the passage as text for the prompt, in the format that Anthropic recommends for
    /// documents. The format of Anthropic's own servers is not published.
    pub(super) fn to_prompt_text(&self) -> String {
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
struct SourceFields {
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

    fn visit_str<E: Error>(self, origin: &str) -> Result<Self::Value, E> {
        self.intake.copy_prompt(origin).map(|origin| Some(Source::Origin(origin)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let mut fields = SourceFields::default();
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "type" => fields.kind = intake.next_text(&mut map)?,
                // The format is detected from the bytes.
                "media_type" => drop(intake.next_str(&mut map)?),
                "data" => {
                    fields.data =
                        intake.next_str(&mut map)?.map(|data| intake.share(&data)).transpose()?
                }
                "url" => {
                    fields.url =
                        intake.next_str(&mut map)?.map(|url| intake.share(&url)).transpose()?
                }
                "content" => {
                    fields.content = map.next_value_seed(intake.seed::<Option<ResultContent>>())?
                }
                _ => intake.skip_unknown(&mut map, &mut fields.unknown)?,
            }
            intake.leave(outer);
        }
        fields.into_source(intake).map(Some)
    }
}

impl SourceFields {
    /// Builds the source according to its type.
    fn into_source<E: Error>(mut self, intake: &mut Intake) -> Result<Source, E> {
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
                // The bytes come from a JSON string, so they are UTF-8.
                Source::Text(intake.copy_prompt(&String::from_utf8_lossy(&data))?)
            }
            "content" => {
                let content = self.content.take().ok_or_else(|| intake.missing(".content"))?;
                Source::Text(content.into_text(intake)?)
            }
            other => {
                let other = excerpt(other);
                let message = format!(
                    "sources of type '{other}' are not supported; use base64, url, text or content"
                );
                return Err(intake.refuse(unsupported(intake.child_path(".type"), message)));
            }
        };
        let given = [
            (".data", self.data.is_some()),
            (".url", self.url.is_some()),
            (".content", self.content.is_some()),
        ];
        let other = given
            .into_iter()
            .find_map(|(name, is_given)| is_given.then(|| intake.child_path(name)));
        intake.refuse_unknown(self.unknown.or(other))?;
        Ok(source)
    }
}
