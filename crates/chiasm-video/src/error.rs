//! Reasons to hand a whole file to vLLM's own processor.

/// The reason why a file has no index: its frame count, rate or size cannot be vouched for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The file is neither mp4, mov, Matroska nor WebM.
    #[error("the container is neither mp4 nor Matroska")]
    Container,
    /// The file has no header, or ends before its last sample.
    #[error("the file is truncated")]
    Truncated,
    /// The header contradicts itself.
    #[error("the container's header is not valid")]
    Malformed,
    /// The file has more samples than [`MAX_SAMPLES`](crate::MAX_SAMPLES).
    #[error("the file has too many samples")]
    TooManySamples,
    /// The file has no video track, or several.
    #[error("the file has other than one video track")]
    VideoTracks,
    /// The codec is not supported, or the track is encrypted.
    #[error("the codec is not supported")]
    Codec,
    /// The track has several sample descriptions.
    #[error("the track has other than one sample description")]
    SampleDescriptions,
    /// The samples are in other files.
    #[error("the samples are in other files")]
    ExternalData,
    /// The edit list has several edits, an edit without a duration, or another speed than 1.
    #[error("the edit list is not supported")]
    EditList,
    /// The track is mirrored, scaled, or rotated by other than a multiple of 90 degrees.
    #[error("the transformation of the picture is not supported")]
    Transform,
    /// The container crops or projects the picture.
    #[error("the container crops or projects the picture")]
    Crop,
    /// The container does not tell the frame rate.
    #[error("the container does not tell the frame rate")]
    FrameRate,
    /// The frame count that vLLM determines by seeking cannot be predicted.
    #[error("the frame count cannot be predicted")]
    FrameCount,
    /// A Matroska block has several frames.
    #[error("the track uses lacing")]
    Lacing,
    /// A Matroska track is compressed or encrypted.
    #[error("the track has a content encoding")]
    ContentEncoding,
    /// A Matroska track scales or delays its times.
    #[error("the track scales or delays its times")]
    TrackTimes,
    /// The codec's header is missing or not supported.
    #[error("the codec's header is not supported")]
    CodecHeader,
    /// The pictures are interlaced.
    #[error("the pictures are interlaced")]
    Interlaced,
    /// A sample's content does not add up, or a sample has other than one shown picture.
    #[error("a sample's pictures are not supported")]
    Pictures,
    /// The first sample cannot be decoded on its own, or pictures are shown before it.
    #[error("the first sample is not a safe start")]
    FirstSample,
    /// Pictures are reordered, but the container has no times for that.
    #[error("the container does not tell the order of the pictures")]
    Order,
}

impl IndexError {
    /// Returns a stable name, for metrics.
    pub fn cause(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Truncated => "truncated",
            Self::Malformed => "malformed",
            Self::TooManySamples => "too_many_samples",
            Self::VideoTracks => "video_tracks",
            Self::Codec => "codec",
            Self::SampleDescriptions => "sample_descriptions",
            Self::ExternalData => "external_data",
            Self::EditList => "edit_list",
            Self::Transform => "transform",
            Self::Crop => "crop",
            Self::FrameRate => "frame_rate",
            Self::FrameCount => "frame_count",
            Self::Lacing => "lacing",
            Self::ContentEncoding => "content_encoding",
            Self::TrackTimes => "track_times",
            Self::CodecHeader => "codec_header",
            Self::Interlaced => "interlaced",
            Self::Pictures => "pictures",
            Self::FirstSample => "first_sample",
            Self::Order => "order",
        }
    }
}

/// The reason why an indexed file cannot be cut for some wanted frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum CutError {
    /// No frame is wanted.
    #[error("no frame is wanted")]
    NothingWanted,
    /// A wanted frame is not among the visible samples.
    #[error("a wanted frame is beyond the index")]
    BeyondIndex,
    /// Two samples have the same presentation time, so the order of frames is unknown.
    #[error("two samples have the same time")]
    DuplicateTimes,
    /// Parameter sets change inside the stream.
    #[error("parameter sets change inside the stream")]
    ParameterSets,
    /// The file is not the one that was indexed.
    #[error("the file is not the indexed one")]
    OtherFile,
    /// The headers that each part copies are large.
    #[error("the headers are too large to copy")]
    Headers,
    /// The cut would be as large as an mp4 with 32-bit offsets can be.
    #[error("the cut is too large")]
    TooLarge,
}

impl CutError {
    /// Returns a stable name, for metrics.
    pub fn cause(self) -> &'static str {
        match self {
            Self::NothingWanted => "nothing_wanted",
            Self::BeyondIndex => "beyond_index",
            Self::DuplicateTimes => "duplicate_times",
            Self::ParameterSets => "parameter_sets",
            Self::OtherFile => "other_file",
            Self::Headers => "headers",
            Self::TooLarge => "too_large",
        }
    }
}

/// The reason why the sound of an mp4 is not known without decoding it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum SoundError {
    /// The file has no header, or ends before its last packet.
    #[error("the file is truncated")]
    Truncated,
    /// The header contradicts itself, or has unusual times.
    #[error("the container's header is not valid")]
    Malformed,
    /// The file has no sound track, or one of another codec than MPEG-4 audio.
    #[error("the codec is not supported")]
    Codec,
    /// The edit list has several edits or an edit without a duration, or iTunes' data takes its
    /// place.
    #[error("the edit list is not supported")]
    EditList,
    /// The file has fragments.
    #[error("the file has fragments")]
    Fragments,
}

impl From<IndexError> for SoundError {
    fn from(error: IndexError) -> Self {
        match error {
            IndexError::Truncated => Self::Truncated,
            IndexError::EditList => Self::EditList,
            _ => Self::Malformed,
        }
    }
}
