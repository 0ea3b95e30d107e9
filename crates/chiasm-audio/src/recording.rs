//! A recording: its sample rate and its length.

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// RIFF WAVE with uncompressed samples.
    Wav,
    /// FLAC in its own container.
    Flac,
    /// MPEG audio, layer III.
    Mp3,
    /// AAC in mp4 or QuickTime.
    Aac,
}

impl Format {
    /// Returns the format's name, such as `wav`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Wav => "wav",
            Self::Flac => "flac",
            Self::Mp3 => "mp3",
            Self::Aac => "aac",
        }
    }
}

/// A recording as vLLM's loader decodes it, before it is resampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recording {
    /// The file's format.
    pub format: Format,
    /// Samples per second and channel.
    pub rate: u32,
    /// The number of channels, which vLLM averages.
    pub channels: u32,
    /// The number of samples of each channel; at least one.
    pub samples: u64,
}

impl Recording {
    /// Returns the duration in seconds.
    pub fn seconds(&self) -> f64 {
        self.samples as f64 / f64::from(self.rate)
    }
}
