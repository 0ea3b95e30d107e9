//! What an item says: a text, or parts.

use std::fmt;

use chiasm_media::MediaInput;
use chiasm_prompt::{ChatContent, ChatPart};
use chiasm_request::MediaRef;
use chiasm_types::Modality;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::error::ApiError;
use crate::openai::intake::{Intake, Seed};
use crate::openai::media_parts::MediaUrl;
use crate::openai::messages::elements;

const IMAGE: &str = "input_image";
/// Parts by their type, where each may be.
pub(super) const MESSAGE_PARTS: &[&str] = &["input_text", IMAGE, "output_text"];
pub(super) const OUTPUT_PARTS: &[&str] = &["input_text", IMAGE];
pub(super) const REASONING_PARTS: &[&str] = &["reasoning_text"];
pub(super) const SUMMARY_PARTS: &[&str] = &["summary_text"];

/// What an item says. Its images are among the intake's.
pub(super) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part, and its type.
pub(super) struct Part {
    kind: &'static str,
    part: ChatPart,
}

impl Content {
    /// The content of `field`, whose parts may be of these types.
    pub(super) fn of<E: Error>(
        self,
        intake: &mut Intake,
        field: &str,
        kinds: &[&str],
    ) -> Result<ChatContent, E> {
        let parts = match self {
            Self::Text(text) => return Ok(ChatContent::Text(text)),
            Self::Parts(parts) => parts,
        };
        if let Some(index) = parts.iter().position(|part| !kinds.contains(&part.kind)) {
            let field = intake.below(&format!("{field}[{index}].type"));
            return Err(intake.refuse(unsupported(field, parts[index].kind, kinds)));
        }
        Ok(ChatContent::Parts(parts.into_iter().map(|part| part.part).collect()))
    }
}

/// All text of a content, a line for each part.
pub(super) fn text(content: ChatContent) -> String {
    let parts = match content {
        ChatContent::Text(text) => return text,
        ChatContent::Parts(parts) => parts,
    };
    let texts: Vec<&str> = parts.iter().filter_map(ChatPart::text).collect();
    texts.join("\n")
}

impl<'de> Visitor<'de> for Seed<'_, Option<Content>> {
    type Value = Option<Content>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of parts")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        self.intake.own_prompt(text).map(|text| Some(Content::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        elements(self.intake, &mut seq).map(|parts| Some(Content::Parts(parts)))
    }
}

impl<'de> Visitor<'de> for Seed<'_, Part> {
    type Value = Part;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
        let intake = self.intake;
        intake.count_part()?;
        let (mut kind, mut text, mut image, mut unknown) = (None, None, None::<MediaUrl>, None);
        while let Some(name) = intake.name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "type" => kind = intake.borrowed(&mut map)?,
                "text" => {
                    text = intake
                        .borrowed(&mut map)?
                        .map(|text| intake.own_prompt(&text))
                        .transpose()?
                }
                "image_url" => image = map.next_value_seed(intake.seed())?,
                // vLLM ignores it too: the model's processor alone decides on the resolution.
                "detail" => drop(intake.borrowed(&mut map)?),
                // They come with what this server has said before, and do not change the prompt.
                "annotations" | "logprobs" => drop(map.next_value_seed(intake.seed::<Value>())?),
                _ => intake.unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        let kind = kind.ok_or_else(|| intake.missing(".type"))?;
        let known = [MESSAGE_PARTS, REASONING_PARTS, SUMMARY_PARTS].concat();
        let Some(&kind) = known.iter().find(|known| **known == kind) else {
            return Err(intake.refuse(unsupported(intake.below(".type"), &kind, MESSAGE_PARTS)));
        };
        let other =
            if kind == IMAGE { (".text", text.is_some()) } else { (".image_url", image.is_some()) };
        intake.refuse_unknown(unknown.or(other.1.then(|| intake.below(other.0))))?;
        if kind != IMAGE {
            return Ok(Part {
                kind,
                part: ChatPart::Text(text.ok_or_else(|| intake.missing(".text"))?),
            });
        }
        let MediaUrl { url, uuid } = image.unwrap_or_default();
        if url.is_none() && uuid.is_none() {
            return Err(intake.missing(".image_url"));
        }
        let field = intake.below(".image_url");
        intake.add_media(MediaRef {
            modality: Modality::Image,
            source: url.map(MediaInput::Url),
            uuid,
            field,
        })?;
        Ok(Part { kind, part: ChatPart::Media(Modality::Image) })
    }
}

fn unsupported(field: String, kind: &str, kinds: &[&str]) -> ApiError {
    let message =
        format!("parts of type '{kind}' are not supported here; use {}", kinds.join(" or "));
    ApiError { code: "unsupported_part", ..ApiError::invalid(field, message) }
}
