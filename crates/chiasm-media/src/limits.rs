//! Size limits of media items, by modality.

use chiasm_types::Modality;

use crate::ImageLimits;

/// The limits of each modality. They are enforced before memory for decoded data is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaLimits {
    /// The limits of a still image.
    pub image: ImageLimits,
    /// Accepts images in formats that this crate cannot decode as
    /// [`MediaHeader::Opaque`](crate::MediaHeader::Opaque), for the model's own processor. Default
    /// `false`.
    pub opaque_images: bool,
    /// The maximum encoded size of a video in bytes. Default 256 MiB, vLLM's limit for downloads.
    pub video_bytes: u64,
    /// The maximum encoded size of a sound recording in bytes. Default 64 MiB: three quarters of an
    /// hour of speech as uncompressed 16-bit samples.
    pub audio_bytes: u64,
}

impl Default for MediaLimits {
    fn default() -> Self {
        Self {
            image: ImageLimits::default(),
            opaque_images: false,
            video_bytes: 256 << 20,
            audio_bytes: 64 << 20,
        }
    }
}

impl MediaLimits {
    /// Returns the maximum encoded size of an item in bytes.
    pub fn max_bytes(&self, modality: &Modality) -> u64 {
        match modality {
            Modality::Image => self.image.max_bytes,
            Modality::Audio => self.audio_bytes,
            Modality::Video | Modality::Other(_) => self.video_bytes,
        }
    }
}
