//! Reasons to let vLLM's own processor decode a recording before the request is routed.

/// The reason why the length of a recording is not known without decoding it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum LengthError {
    /// The file is neither WAV, FLAC, MP3 nor mp4.
    #[error("the container is neither WAV, FLAC, MP3 nor mp4")]
    Container,
    /// vLLM reads such a file with a loader whose lengths are not known.
    #[error("vLLM reads the file with a loader whose lengths are not known")]
    Loader,
    /// The file ends before its last sample, or a stated size differs from the file's.
    #[error("the file is truncated")]
    Truncated,
    /// The header contradicts itself.
    #[error("the file's header is not valid")]
    Malformed,
    /// The header does not tell the length.
    #[error("the header does not tell the length")]
    NoLength,
    /// The recording has no samples.
    #[error("the recording is empty")]
    Empty,
    /// The encoding of the samples is not supported.
    #[error("the encoding of the samples is not supported")]
    Encoding,
    /// The file has chunks whose effect on the loader is not known.
    #[error("the file has unknown chunks")]
    Chunks,
    /// There are other bytes behind the samples.
    #[error("there are other bytes behind the samples")]
    TrailingBytes,
    /// A frame does not have the number, the format or the checksum that it should have.
    #[error("a frame is damaged")]
    Frames,
    /// The length that the header tells differs from that of the frames.
    #[error("the header's length differs from that of the frames")]
    OtherLength,
    /// The sound may be extended to twice its sample rate (SBR), which only a decoder sees.
    #[error("the sound may have a hidden extension")]
    Extension,
    /// The edit list is not supported.
    #[error("the edit list is not supported")]
    EditList,
    /// The mp4 has fragments.
    #[error("the mp4 has fragments")]
    Fragments,
}

impl LengthError {
    /// Returns a stable name, for metrics.
    pub fn cause(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Loader => "loader",
            Self::Truncated => "truncated",
            Self::Malformed => "malformed",
            Self::NoLength => "no_length",
            Self::Empty => "empty",
            Self::Encoding => "encoding",
            Self::Chunks => "chunks",
            Self::TrailingBytes => "trailing_bytes",
            Self::Frames => "frames",
            Self::OtherLength => "other_length",
            Self::Extension => "extension",
            Self::EditList => "edit_list",
            Self::Fragments => "fragments",
        }
    }
}
