//! A media item of any modality, as it came.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use chiasm_types::Modality;

use crate::data_uri::FRAMES;
use crate::{ContentHash, ImageHeader, MediaError, MediaLimits};

/// The media types that origins are asked for: those of the modalities in [`MediaHeader`] first.
pub(crate) const ACCEPTED_TYPES: &str = "image/*,*/*;q=0.5";

/// A media item as it came: its bytes, its identity, and what its header says. Nothing has been
/// decoded.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncodedMedia {
    /// The file.
    pub bytes: Bytes,
    /// blake3 of `bytes`.
    pub content: ContentHash,
    /// What kind of thing the file is taken for.
    pub modality: Modality,
    /// What the file is, found from its bytes; declared media types are not trusted.
    pub header: MediaHeader,
    /// Where it was had this time, if at an `http:` or `https:` URL. May hold secrets.
    pub url: Option<Arc<str>>,
}

/// What a file says of itself in front of what has to be decoded, by its modality.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MediaHeader {
    /// The file is a still image, or an animation that counts as one.
    Image(ImageHeader),
    /// The file is for a model's own processor: nothing has been looked at.
    Opaque,
}

impl MediaHeader {
    fn read(bytes: &[u8], modality: &Modality, limits: &MediaLimits) -> Result<Self, MediaError> {
        let limit = limits.max_bytes(modality);
        if bytes.len() as u64 > limit {
            return Err(MediaError::TooManyBytes { limit });
        }
        match modality {
            Modality::Image => match ImageHeader::read(bytes, &limits.image) {
                Err(MediaError::UnsupportedFormat { .. }) if limits.foreign_images => {
                    Ok(Self::Opaque)
                }
                header => header.map(Self::Image),
            },
            _ => Ok(Self::Opaque),
        }
    }
}

impl EncodedMedia {
    /// A still image.
    ///
    /// # Errors
    /// Those of [`Self::of`].
    pub fn from_bytes(bytes: Bytes, limits: &MediaLimits) -> Result<Self, MediaError> {
        Self::of(bytes, &Modality::Image, limits)
    }

    /// Reads the header, if it is one that is read here, and hashes the bytes: linear in their
    /// number, nothing is decoded.
    ///
    /// # Errors
    /// [`MediaError::UnsupportedFormat`], [`MediaError::Corrupt`],
    /// [`MediaError::UnsupportedVariant`], and [`MediaError::TooManyBytes`] or another of the
    /// modality's limits.
    pub fn of(bytes: Bytes, modality: &Modality, limits: &MediaLimits) -> Result<Self, MediaError> {
        let header = MediaHeader::read(&bytes, modality, limits)?;
        Ok(Self {
            content: ContentHash::of(&bytes),
            bytes,
            modality: modality.clone(),
            header,
            url: None,
        })
    }

    /// Returns the item as a `data:` URL, from which [`MediaDoor`](crate::MediaDoor) reads the same
    /// item again.
    pub fn to_data_url(&self) -> String {
        if self.modality == Modality::Video && self.bytes.starts_with(FRAMES) {
            return String::from_utf8_lossy(&self.bytes).into_owned();
        }
        let mut url = format!("data:{};base64,", self.media_type());
        STANDARD.encode_string(&self.bytes, &mut url);
        url
    }

    /// Returns the media type. Without a header its subtype is `unknown`: readers look at its type
    /// alone.
    fn media_type(&self) -> &'static str {
        match (&self.header, &self.modality) {
            (MediaHeader::Image(header), _) => header.format.media_type(),
            (MediaHeader::Opaque, Modality::Image) => "image/unknown",
            (MediaHeader::Opaque, Modality::Audio) => "audio/unknown",
            (MediaHeader::Opaque, _) => "video/unknown",
        }
    }

    /// The same file, taken for another kind of thing if it was taken for one.
    ///
    /// # Errors
    /// Those of [`Self::of`].
    pub(crate) fn taken_for(
        self,
        modality: &Modality,
        limits: &MediaLimits,
    ) -> Result<Self, MediaError> {
        if self.modality == *modality {
            return Ok(self);
        }
        Ok(Self {
            header: MediaHeader::read(&self.bytes, modality, limits)?,
            modality: modality.clone(),
            ..self
        })
    }
}

impl fmt::Debug for EncodedMedia {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncodedMedia")
            .field("header", &self.header)
            .field("bytes", &self.bytes.len())
            .field("content", &self.content)
            .finish()
    }
}
