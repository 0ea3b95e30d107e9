//! A media item of any modality, as it came.

use std::fmt;

use bytes::Bytes;
use chiasm_types::Modality;

use crate::{ContentHash, ImageHeader, MediaError, MediaLimits};

/// The media types that origins are asked for: those of the modalities in [`MediaHeader`] first.
pub(crate) const ACCEPTED_TYPES: &str = "image/*,*/*;q=0.5";

/// A media item as it came: its bytes, its identity, and what its header says. Nothing has been decoded.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncodedMedia {
    /// The file.
    pub bytes: Bytes,
    /// blake3 of `bytes`.
    pub content: ContentHash,
    /// What the file is, found from its bytes; declared media types are not trusted.
    pub header: MediaHeader,
}

/// What a file says of itself in front of what has to be decoded, by its modality.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MediaHeader {
    /// The file is a still image, or an animation that counts as one.
    Image(ImageHeader),
}

impl MediaHeader {
    /// The modality that items with such a header have.
    pub fn modality(&self) -> Modality {
        match self {
            Self::Image(_) => Modality::Image,
        }
    }
}

impl EncodedMedia {
    /// Reads the header and hashes the bytes: linear in their number, nothing is decoded.
    ///
    /// # Errors
    /// [`MediaError::UnsupportedFormat`], [`MediaError::Corrupt`], [`MediaError::UnsupportedVariant`], and
    /// [`MediaError::TooManyBytes`] or another of the modality's limits.
    pub fn from_bytes(bytes: Bytes, limits: &MediaLimits) -> Result<Self, MediaError> {
        let header = MediaHeader::Image(ImageHeader::read(&bytes, &limits.image)?);
        Ok(Self { content: ContentHash::of(&bytes), bytes, header })
    }

    /// The modality of the item.
    pub fn modality(&self) -> Modality {
        self.header.modality()
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
