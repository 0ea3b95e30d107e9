//! How large a media item may be, by its modality.

use chiasm_types::Modality;

use crate::ImageLimits;

/// Limits of each modality. They hold before memory for what is decoded is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaLimits {
    /// The limits of a still image.
    pub image: ImageLimits,
    /// Images of other formats than those that are decoded here are taken for what a model's own
    /// processor may read, as [`MediaHeader::Opaque`](crate::MediaHeader::Opaque).
    pub foreign_images: bool,
    /// Most encoded bytes of a video. Default 256 MiB, which is the most that vLLM downloads.
    pub video_bytes: u64,
    /// Most encoded bytes of a sound recording. Default 64 MiB: three quarters of an hour of speech
    /// as uncompressed 16-bit samples.
    pub audio_bytes: u64,
}

impl Default for MediaLimits {
    fn default() -> Self {
        Self {
            image: ImageLimits::default(),
            foreign_images: false,
            video_bytes: 256 << 20,
            audio_bytes: 64 << 20,
        }
    }
}

impl MediaLimits {
    /// Most encoded bytes of an item.
    pub fn max_bytes(&self, modality: &Modality) -> u64 {
        match modality {
            Modality::Image => self.image.max_bytes,
            Modality::Audio => self.audio_bytes,
            Modality::Video | Modality::Other(_) => self.video_bytes,
        }
    }
}
