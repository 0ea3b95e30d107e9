//! The content of an item: a text, or parts.

use std::fmt;

use chiasm_media::MediaInput;
use chiasm_prompt::{ChatContent, ChatPart};
use chiasm_request::MediaRef;
use chiasm_types::Modality;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::error::{ApiError, excerpt};
use crate::openai::intake::{Intake, Seed};
use crate::openai::media_parts::MediaUrl;
use crate::openai::messages::read_list;

const IMAGE: &str = "input_image";
/// The types of parts in a message.
pub(super) const MESSAGE_PARTS: &[&str] = &["input_text", IMAGE, "output_text"];
/// The types of parts in the output of a call.
pub(super) const OUTPUT_PARTS: &[&str] = &["input_text", IMAGE];
/// The types of parts in the content of reasoning.
pub(super) const REASONING_PARTS: &[&str] = &["reasoning_text"];
/// The types of parts in the summary of reasoning.
pub(super) const SUMMARY_PARTS: &[&str] = &["summary_text"];

/// The content of an item. Its images are added to the intake's media items.
pub(super) enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part and its type.
pub(super) struct Part {
    kind: &'static str,
    part: ChatPart,
}

impl Content {
    /// Returns the content of `field` as chat content.
    ///
    /// # Errors
    /// Fails if the type of a part is not among `kinds`.
    pub(super) fn into_chat_content<E: Error>(
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
            let field = intake.child_path(&format!("{field}[{index}].type"));
            return Err(intake.refuse(unsupported(field, parts[index].kind, kinds)));
        }
        Ok(ChatContent::Parts(parts.into_iter().map(|part| part.part).collect()))
    }
}

/// Returns all text of a content, with one line per part.
pub(super) fn joined_text(content: ChatContent) -> String {
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
        self.intake.copy_prompt(text).map(|text| Some(Content::Text(text)))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        read_list(self.intake, &mut seq).map(|parts| Some(Content::Parts(parts)))
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
        let mut kind = None;
        let mut text = None;
        let mut image = None::<MediaUrl>;
        let mut unknown = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "type" => kind = intake.next_str(&mut map)?,
                "text" => {
                    text = intake
                        .next_str(&mut map)?
                        .map(|text| intake.copy_prompt(&text))
                        .transpose()?
                }
                "image_url" => image = map.next_value_seed(intake.seed())?,
                // Ignored as in vLLM: only the model's processor decides on the resolution.
                "detail" => drop(intake.next_str(&mut map)?),
                // These come back with this server's own answers and do not change the prompt.
                "annotations" | "logprobs" => drop(map.next_value_seed(intake.seed::<Value>())?),
                _ => intake.skip_unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        let kind = kind.ok_or_else(|| intake.missing(".type"))?;
        let known = [MESSAGE_PARTS, REASONING_PARTS, SUMMARY_PARTS].concat();
        let Some(&kind) = known.iter().find(|known| **known == kind) else {
            return Err(intake.refuse(unsupported(
                intake.child_path(".type"),
                &kind,
                MESSAGE_PARTS,
            )));
        };
        let (other, has_other) =
            if kind == IMAGE { (".text", text.is_some()) } else { (".image_url", image.is_some()) };
        intake.refuse_unknown(unknown.or(has_other.then(|| intake.child_path(other))))?;
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
        let field = intake.child_path(".image_url");
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
    let kind = excerpt(kind);
    let message =
        format!("parts of type '{kind}' are not supported here; use {}", kinds.join(" or "));
    ApiError { code: "unsupported_part", ..ApiError::invalid(field, message) }
}
