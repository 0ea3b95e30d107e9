//! The tokens and tensors of a recording in a model.

use crate::error::LengthError;
use crate::resample::resampled_len;

/// A feature extractor like Whisper's (`WhisperFeatureExtractor` of `transformers`): a log-mel
/// spectrogram, padded to a fixed duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extractor {
    /// Samples per second.
    pub sampling_rate: u32,
    /// Samples between two frames of the spectrogram.
    pub hop_length: u32,
    /// The number of samples to which shorter recordings are padded.
    pub max_samples: u64,
    /// Values of a frame.
    pub features: u32,
}

/// The class of vLLM that processes a model's recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AudioFamily {
    /// Qwen2-Audio: 30 seconds at most, the rest is cut off.
    Qwen2Audio,
    /// Qwen2.5-Omni: whole recordings, padded to 30 seconds.
    Qwen25Omni,
    /// Qwen3-Omni: whole recordings, padded to whole frames.
    Qwen3Omni,
}

impl AudioFamily {
    /// Returns the family of a multimodal processor of vLLM, by the name of its class.
    pub fn from_processor_class(name: &str) -> Option<Self> {
        match name {
            "Qwen2AudioMultiModalProcessor" => Some(Self::Qwen2Audio),
            "Qwen2_5OmniThinkerMultiModalProcessor" => Some(Self::Qwen25Omni),
            "Qwen3OmniMoeThinkerMultiModalProcessor" => Some(Self::Qwen3Omni),
            _ => None,
        }
    }

    /// Returns the methods for writing items in prompts that the processor's class overrides
    /// without an effect on recordings: only for the sound of videos.
    pub fn harmless_prompt_methods(self) -> &'static [&'static str] {
        match self {
            Self::Qwen2Audio => &[],
            Self::Qwen25Omni | Self::Qwen3Omni => &["_maybe_apply_prompt_updates"],
        }
    }
}

/// The processing of recordings in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioModel {
    family: AudioFamily,
    extractor: Extractor,
}

/// The size of a recording in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioSize {
    /// The number of tokens that become embeddings.
    pub tokens: usize,
    /// The number of elements of the largest tensor.
    pub elements: u64,
}

impl AudioModel {
    /// Creates the model of a family with an extractor. Returns `None` if the extractor's settings
    /// make no sense.
    pub fn new(family: AudioFamily, extractor: Extractor) -> Option<Self> {
        let Extractor { sampling_rate, hop_length, max_samples, features } = extractor;
        let is_valid = sampling_rate > 0
            && hop_length > 0
            && features > 0
            && (u64::from(hop_length)..1 << 40).contains(&max_samples);
        is_valid.then_some(Self { family, extractor })
    }

    /// Returns the family.
    pub fn family(&self) -> AudioFamily {
        self.family
    }

    /// Returns the size of a recording of `samples` samples at `rate` samples per second.
    ///
    /// # Errors
    ///
    /// [`LengthError::Empty`] if the recording is too short for a token, which vLLM refuses, and
    /// [`LengthError::NoLength`] if it is too long for the formula.
    pub fn size(&self, samples: u64, rate: u32) -> Result<AudioSize, LengthError> {
        let Extractor { sampling_rate, hop_length, max_samples, features } = self.extractor;
        let samples = resampled_len(samples, rate, sampling_rate).ok_or(LengthError::NoLength)?;
        let hop = u64::from(hop_length);
        // The frames of the recording, of its features, and of their mask.
        let (frames, feature_frames, mask_frames) = match self.family {
            AudioFamily::Qwen2Audio => {
                let padded = max_samples / hop;
                (samples.min(max_samples).div_ceil(hop).min(padded), padded, padded)
            }
            // Padding is removed from the features, but not from their mask.
            AudioFamily::Qwen25Omni => {
                let padded = max_samples.max(samples) / hop;
                let frames = samples.div_ceil(hop).min(padded);
                (frames, frames, padded)
            }
            AudioFamily::Qwen3Omni => {
                let frames = samples.div_ceil(hop);
                (frames, frames, frames)
            }
        };
        let tokens = match self.family {
            AudioFamily::Qwen2Audio | AudioFamily::Qwen25Omni => tokens_of_frames(frames),
            AudioFamily::Qwen3Omni => chunked_tokens_of_frames(frames),
        };
        let tokens = tokens.ok_or(LengthError::Empty)?;
        let elements = feature_frames.saturating_mul(features.into()).max(mask_frames);
        let tokens = usize::try_from(tokens).map_err(|_| LengthError::NoLength)?;
        Ok(AudioSize { tokens, elements })
    }
}

/// Returns the number of tokens: three convolutions with a stride of 2 for each 100 frames (vLLM's
/// `_get_feat_extract_output_lengths` of `qwen3_omni_moe_thinker.py`). `None` for a single frame,
/// which is shorter than the window of the spectrogram.
fn chunked_tokens_of_frames(frames: u64) -> Option<u64> {
    const CHUNK_FRAMES: u64 = 100;
    const CHUNK_TOKENS: u64 = 13;
    let rest = (0..3).fold(frames % CHUNK_FRAMES, |frames, _| frames.div_ceil(2));
    (frames > 1).then_some(frames / CHUNK_FRAMES * CHUNK_TOKENS + rest)
}

/// Returns the number of tokens: two convolutions with a stride of 2 (vLLM's
/// `_get_feat_extract_output_lengths` of `qwen2_audio.py`). `None` if there is none.
fn tokens_of_frames(frames: u64) -> Option<u64> {
    let convolved = frames.checked_sub(1)? / 2 + 1;
    Some(convolved.checked_sub(2)? / 2 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHISPER: Extractor =
        Extractor { sampling_rate: 16_000, hop_length: 160, max_samples: 480_000, features: 128 };

    fn size(family: AudioFamily, samples: u64) -> Result<(usize, u64), LengthError> {
        let model = AudioModel::new(family, WHISPER).unwrap();
        model.size(samples, 16_000).map(|size| (size.tokens, size.elements))
    }

    #[test]
    fn qwen2_audio_is_cut_to_thirty_seconds() {
        let size = |samples| size(AudioFamily::Qwen2Audio, samples);
        assert_eq!(size(320), Err(LengthError::Empty));
        assert_eq!(size(321), Ok((1, 384_000)));
        assert_eq!(size(16_000), Ok((25, 384_000)));
        assert_eq!(size(479_999), Ok((750, 384_000)));
        assert_eq!(size(720_000), Ok((750, 384_000)));
    }

    #[test]
    fn omni_keeps_whole_recordings() {
        let size = |samples| size(AudioFamily::Qwen25Omni, samples);
        assert_eq!(size(320), Err(LengthError::Empty));
        assert_eq!(size(640), Ok((1, 3_000)));
        assert_eq!(size(16_000), Ok((25, 12_800)));
        assert_eq!(size(480_161), Ok((750, 384_128)));
        assert_eq!(size(720_000), Ok((1_125, 576_000)));
    }

    #[test]
    fn qwen3_omni_counts_chunks_of_a_second() {
        let size = |samples| size(AudioFamily::Qwen3Omni, samples);
        assert_eq!(size(160), Err(LengthError::Empty));
        assert_eq!(size(161), Ok((1, 256)));
        assert_eq!(size(16_000), Ok((13, 12_800)));
        assert_eq!(size(16_001), Ok((14, 12_928)));
        assert_eq!(size(720_000), Ok((585, 576_000)));
    }

    #[test]
    fn senseless_extractors_are_refused() {
        for extractor in [
            Extractor { hop_length: 0, ..WHISPER },
            Extractor { max_samples: 100, ..WHISPER },
            Extractor { sampling_rate: 0, ..WHISPER },
        ] {
            assert_eq!(AudioModel::new(AudioFamily::Qwen2Audio, extractor), None);
        }
    }
}
