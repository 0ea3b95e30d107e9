//! The description of a model's recordings in a greeting, as defined by `audio.py`.

use serde::Deserialize;

use crate::message::PromptUpdate;

/// The processing of recordings, as far as their tokens depend on it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct AudioDescription {
    /// The class of vLLM's multimodal processor.
    pub processor: String,
    /// The feature extractor.
    pub extractor: ExtractorDescription,
    /// The resampling before it.
    pub resampling: ResamplingDescription,
    /// The number of channels of a resampled recording; `None` to keep all.
    pub channels: Option<u32>,
    /// The loader of files; `None` if it is not known.
    pub loader: Option<AudioLoader>,
    /// vLLM's maximum size of a file, in units of 2²⁰ bytes; `None` for no limit.
    pub max_file_mib: Option<u64>,
    /// vLLM's maximum duration; `None` for no limit.
    pub max_seconds: Option<f64>,
    /// vLLM's maximum size of decoded samples; `None` for no limit.
    pub max_decoded_bytes: Option<u64>,
    /// The results for recordings of some lengths.
    pub probes: Vec<AudioProbe>,
}

/// A feature extractor.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ExtractorDescription {
    /// The class in `transformers`.
    pub kind: String,
    /// Samples per second.
    pub sampling_rate: u32,
    /// Samples between two frames of the spectrogram.
    pub hop_length: u32,
    /// The number of samples to which shorter recordings are padded.
    pub max_samples: u64,
    /// Values of a frame.
    pub features: u32,
}

/// The resampling of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ResamplingDescription {
    /// vLLM's name of the method.
    pub method: String,
    /// Samples per second afterwards.
    pub rate: u32,
}

/// A loader of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "name", rename_all = "lowercase")]
pub enum AudioLoader {
    /// libsndfile, then PyAV for formats that libsndfile does not know.
    Sndfile {
        /// The version of libsndfile.
        sndfile: String,
        /// The major version of PyAV's libavformat; `None` without PyAV.
        avformat: Option<u32>,
    },
    /// torchcodec.
    Torchcodec {
        /// The major version of FFmpeg; `None` if unknown.
        ffmpeg: Option<u32>,
    },
}

/// The result for a silent recording.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct AudioProbe {
    /// The number of samples.
    pub samples: u64,
    /// Samples per second.
    pub rate: u32,
    /// The number of elements of the largest tensor.
    pub elements: u64,
    /// The updates that write the recording.
    pub updates: Vec<PromptUpdate>,
}
