//! How large a media item may be, by its modality.

use crate::ImageLimits;

/// Limits of each modality. They hold before memory for what is decoded is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaLimits {
    /// The limits of a still image.
    pub image: ImageLimits,
}

impl MediaLimits {
    /// Most encoded bytes of an item whose modality is not known yet: as many as the most generous modality allows.
    pub fn max_bytes(&self) -> u64 {
        let Self { image } = self;
        image.max_bytes
    }
}
