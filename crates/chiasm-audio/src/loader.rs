//! The loaders of vLLM (`vllm/multimodal/media/audio.py`).

/// The loader that vLLM uses, and the versions of the libraries that read files for it.
///
/// By default vLLM tries torchcodec, which needs the system's FFmpeg. Without it libsndfile reads
/// a file, and FFmpeg, by PyAV, what libsndfile does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loader {
    /// libsndfile, then PyAV.
    Sndfile {
        /// The version of libsndfile, such as `1.2.2`.
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

/// The version of libsndfile whose MP3 lengths are known. It contains mpg123.
const KNOWN_SNDFILE: &str = "1.2.2";
/// The major version of FFmpeg whose lengths of compressed sound are known.
const KNOWN_FFMPEG: u32 = 8;
/// The major version of its libavformat.
const KNOWN_AVFORMAT: u32 = 62;

impl Loader {
    /// Returns `true` if the loader's lengths of MP3 files are known.
    pub(crate) fn knows_mp3(&self) -> bool {
        match self {
            Self::Sndfile { sndfile, avformat: _ } => sndfile == KNOWN_SNDFILE,
            Self::Torchcodec { ffmpeg } => *ffmpeg == Some(KNOWN_FFMPEG),
        }
    }

    /// Returns `true` if the loader's lengths of AAC in mp4 are known.
    pub(crate) fn knows_aac(&self) -> bool {
        match self {
            Self::Sndfile { sndfile: _, avformat } => *avformat == Some(KNOWN_AVFORMAT),
            Self::Torchcodec { ffmpeg } => *ffmpeg == Some(KNOWN_FFMPEG),
        }
    }
}
