//! Encoded media items of any modality.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use chiasm_types::Modality;

use crate::data_uri::FRAMES;
use crate::{ContentHash, ImageHeader, MediaError, MediaLimits};

/// The `Accept` header of fetches. Types of the modalities in [`MediaHeader`] are preferred.
pub(crate) const ACCEPTED_TYPES: &str = "image/*,*/*;q=0.5";

/// An encoded media item: its bytes, its identity and its header. Nothing has been decoded.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncodedMedia {
    /// The encoded file.
    pub bytes: Bytes,
    /// The blake3 hash of `bytes`.
    pub content: ContentHash,
    /// The modality that the file is interpreted as.
    pub modality: Modality,
    /// The header, read from the bytes; declared media types are not trusted.
    pub header: MediaHeader,
    /// The `http:` or `https:` URL that this copy was requested by. May hold secrets.
    pub url: Option<Arc<str>>,
}

/// The header of a media file, by modality: the facts that are known without decoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MediaHeader {
    /// The header of a still image, or of an animation that counts as one.
    Image(ImageHeader),
    /// No header: the file is for a model's own processor and has not been parsed.
    Opaque,
}

impl MediaHeader {
    fn read(bytes: &[u8], modality: &Modality, limits: &MediaLimits) -> Result<Self, MediaError> {
        let limit = limits.max_bytes(modality);
        if bytes.len() as u64 > limit {
            return Err(MediaError::TooManyBytes { limit });
        }
        if *modality != Modality::Image {
            return Ok(Self::Opaque);
        }
        match ImageHeader::read(bytes, &limits.image) {
            Err(MediaError::UnsupportedFormat { .. }) if limits.opaque_images => Ok(Self::Opaque),
            header => header.map(Self::Image),
        }
    }
}

impl EncodedMedia {
    /// Parses a still image.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub fn from_bytes(bytes: Bytes, limits: &MediaLimits) -> Result<Self, MediaError> {
        Self::new(bytes, &Modality::Image, limits)
    }

    /// Hashes a file and reads its header, if the format is one that this crate parses.
    ///
    /// Takes time linear in the size of the file. Nothing is decoded.
    ///
    /// # Errors
    /// [`MediaError::UnsupportedFormat`], [`MediaError::Corrupt`],
    /// [`MediaError::UnsupportedVariant`], and [`MediaError::TooManyBytes`] or another of the
    /// modality's limits.
    pub fn new(
        bytes: Bytes,
        modality: &Modality,
        limits: &MediaLimits,
    ) -> Result<Self, MediaError> {
        let header = MediaHeader::read(&bytes, modality, limits)?;
        Ok(Self {
            content: ContentHash::digest(&bytes),
            bytes,
            modality: modality.clone(),
            header,
            url: None,
        })
    }

    /// Returns the item as a `data:` URL. [`MediaLoader`](crate::MediaLoader) reads the same item
    /// from this URL.
    pub fn to_data_url(&self) -> String {
        if self.modality == Modality::Video && self.bytes.starts_with(FRAMES) {
            return String::from_utf8_lossy(&self.bytes).into_owned();
        }
        let mut url = format!("data:{};base64,", self.media_type());
        STANDARD.encode_string(&self.bytes, &mut url);
        url
    }

    /// Returns the media type. Without a header the subtype is `unknown`, because readers look only
    /// at the type.
    fn media_type(&self) -> &'static str {
        match (&self.header, &self.modality) {
            (MediaHeader::Image(header), _) => header.format.media_type(),
            (MediaHeader::Opaque, Modality::Image) => "image/unknown",
            (MediaHeader::Opaque, Modality::Audio) => "audio/unknown",
            (MediaHeader::Opaque, _) => "video/unknown",
        }
    }

    /// Interprets the file as `modality`. Reads the header again if the modality changes.
    ///
    /// # Errors
    /// The errors of [`Self::new`].
    pub(crate) fn into_modality(
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
