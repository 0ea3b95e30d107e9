//! Message parts that stand for media items: their kinds and their fields.

use std::fmt;

use bytes::Bytes;
use chiasm_media::MediaName;
use chiasm_request::MediaKwargs;
use chiasm_types::Modality;
use serde::de::{Error, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::intake::{Intake, Seed};
use crate::error::ApiError;

/// A kind of part that stands for a media item.
pub struct MediaKind {
    /// The values of `type`.
    pub(super) types: &'static [&'static str],
    /// The field with the item.
    pub field: &'static str,
    /// The modality of the item.
    pub modality: Modality,
    /// `true` if the field contains the item itself, with the name of its format.
    pub is_inline: bool,
}

impl MediaKind {
    /// Returns the kind of an unparsed part. A part without a type is classified by its fields, as
    /// in vLLM.
    pub fn find(part: &Map<String, Value>) -> Option<&'static Self> {
        let by_type = |kind: &&Self| match part.get("type").filter(|name| !name.is_null()) {
            Some(name) => name.as_str().is_some_and(|name| kind.types.contains(&name)),
            None => part.contains_key(kind.field),
        };
        MEDIA_KINDS.iter().find(by_type)
    }
}

/// The kinds of parts that hold media items.
pub static MEDIA_KINDS: [MediaKind; 4] = [
    MediaKind {
        types: &["image_url", "input_image"],
        field: "image_url",
        modality: Modality::Image,
        is_inline: false,
    },
    MediaKind {
        types: &["video_url"],
        field: "video_url",
        modality: Modality::Video,
        is_inline: false,
    },
    MediaKind {
        types: &["audio_url"],
        field: "audio_url",
        modality: Modality::Audio,
        is_inline: false,
    },
    MediaKind {
        types: &["input_audio"],
        field: "input_audio",
        modality: Modality::Audio,
        is_inline: true,
    },
];

/// A reference to an item: a URL, the name of an item that was sent earlier, or both.
#[derive(Default)]
pub struct MediaUrl {
    /// The URL, which may be the item itself.
    pub url: Option<Bytes>,
    /// The client's name for the item.
    pub uuid: Option<String>,
}

impl<'de> Visitor<'de> for Seed<'_, Option<MediaUrl>> {
    type Value = Option<MediaUrl>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or an object")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: Error>(self, url: &str) -> Result<Self::Value, E> {
        Ok(Some(MediaUrl { url: Some(self.intake.share(url)?), uuid: None }))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let mut media = MediaUrl::default();
        let mut unknown = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                "url" => {
                    media.url =
                        intake.next_str(&mut map)?.map(|url| intake.share(&url)).transpose()?
                }
                "uuid" => media.uuid = take_uuid(intake, &mut map)?,
                // Ignored as in vLLM: only the model's processor decides on the resolution.
                "detail" => drop(intake.next_str(&mut map)?),
                _ => intake.skip_unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        intake.refuse_unknown(unknown)?;
        Ok(Some(media))
    }
}

/// A recording that the request contains.
pub(super) struct InputAudio(pub(super) MediaUrl);

impl<'de> Visitor<'de> for Seed<'_, Option<InputAudio>> {
    type Value = Option<InputAudio>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let intake = self.intake;
        let mut data = None;
        let mut uuid = None;
        let mut unknown = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(format_args!(".{name}"));
            match &*name {
                // The format is detected from the bytes.
                "format" => drop(intake.next_str(&mut map)?),
                "data" => {
                    data = intake.next_text(&mut map)?.map(|data| format!("data:;base64,{data}"))
                }
                "uuid" => uuid = take_uuid(intake, &mut map)?,
                _ => intake.skip_unknown(&mut map, &mut unknown)?,
            }
            intake.leave(outer);
        }
        intake.refuse_unknown(unknown)?;
        Ok(Some(InputAudio(MediaUrl { url: data.map(Bytes::from), uuid })))
    }
}

/// Reads a client's name for an item. Clients send an item once and refer to it by name later. The
/// name is not the item's identity.
pub(super) fn take_uuid<'de, A: MapAccess<'de>>(
    intake: &mut Intake,
    map: &mut A,
) -> Result<Option<String>, A::Error> {
    let uuid = intake.next_text(map)?;
    if uuid.as_ref().is_some_and(|uuid| !(1..=MediaName::MAX_BYTES).contains(&uuid.len())) {
        return Err(intake.refuse_here(|field| {
            ApiError::invalid(
                field,
                format!("'{field}' must have 1 to {} bytes", MediaName::MAX_BYTES),
            )
        }));
    }
    Ok(uuid)
}

/// Takes the settings for media items.
pub fn take_media_kwargs(fields: &mut Fields) -> Result<Box<MediaKwargs>, ApiError> {
    Ok(Box::new(MediaKwargs {
        processor: fields.take::<Map<_, _>>("mm_processor_kwargs")?.unwrap_or_default(),
        io: fields.take::<Map<_, _>>("media_io_kwargs")?.unwrap_or_default(),
    }))
}
