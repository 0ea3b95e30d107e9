//! The video track of a file, as its container describes it.

use std::ops::Range;

use crate::error::IndexError;

/// The maximum number of samples of an index: nine hours at 30 frames per second.
pub const MAX_SAMPLES: usize = 1 << 20;

/// A video codec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// H.264, also called AVC.
    H264,
    /// H.265, also called HEVC.
    Hevc,
    /// VP8.
    Vp8,
    /// VP9.
    Vp9,
}

impl Codec {
    /// Returns the codec's name, such as `h264`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::H264 => "h264",
            Self::Hevc => "hevc",
            Self::Vp8 => "vp8",
            Self::Vp9 => "vp9",
        }
    }
}

/// A container format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Container {
    /// mp4 or QuickTime, whole.
    Mp4,
    /// mp4 with fragments.
    FragmentedMp4,
    /// Matroska or WebM.
    Matroska,
}

impl Container {
    /// Returns the container's name, such as `mp4`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mp4 => "mp4",
            Self::FragmentedMp4 => "fragmented mp4",
            Self::Matroska => "matroska",
        }
    }
}

/// A sample: one encoded picture.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// The position in the file.
    pub(crate) offset: usize,
    pub(crate) size: u32,
    /// Set if the container calls it a key frame.
    pub(crate) is_sync: bool,
    /// Unset if an edit list hides it.
    pub(crate) is_visible: bool,
    /// The presentation time in ticks.
    pub(crate) pts: i64,
    /// The time by which libavformat seeks, in ticks.
    pub(crate) seek_time: i64,
}

impl Sample {
    /// Returns the sample's range in the file.
    pub(crate) fn range(&self) -> Range<usize> {
        self.offset..self.offset.saturating_add(self.size as usize)
    }
}

/// The boxes of an mp4 that a cut takes over, as ranges of the file.
#[derive(Clone, Debug)]
pub(crate) struct CopiedBoxes {
    pub(crate) mvhd: Range<usize>,
    pub(crate) tkhd: Range<usize>,
    pub(crate) mdhd: Range<usize>,
    pub(crate) hdlr: Range<usize>,
    pub(crate) stsd: Range<usize>,
}

/// The colours that a Matroska track states, by the code points of ISO 23091-2; 2 is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Colour {
    pub(crate) primaries: u16,
    pub(crate) transfer: u16,
    pub(crate) matrix: u16,
    pub(crate) is_full_range: bool,
}

/// The headers of a cut.
#[derive(Clone, Debug)]
pub(crate) enum Headers {
    /// Copied from the original.
    Copied(CopiedBoxes),
    /// Made from what a Matroska track states.
    Made { width: u16, height: u16, colour: Option<Colour> },
}

/// The timing of a track.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timing {
    /// Ticks per second, as a fraction.
    pub(crate) ticks: (u32, u32),
    /// OpenCV's rate.
    pub(crate) fps: f64,
    /// OpenCV's `CAP_PROP_FRAME_COUNT`: the least and the greatest that are possible.
    pub(crate) header_frames: (i64, i64),
    /// The duration of the whole file in microseconds, as libavformat computes it.
    pub(crate) duration_us: i64,
    /// The stream's start time in ticks.
    pub(crate) start: i64,
    /// The `seek_time` at which libavformat looks for the stream's start time.
    pub(crate) seek_origin: i64,
    /// Set if libavformat may know other key frames or times than the samples have.
    pub(crate) has_unknown_seek_points: bool,
}

/// A video track.
#[derive(Clone, Debug)]
pub(crate) struct Track {
    pub(crate) container: Container,
    pub(crate) codec: Codec,
    /// The samples in decoding order; at least one.
    pub(crate) samples: Vec<Sample>,
    /// The samples that libavformat keeps in its index, by position.
    pub(crate) kept: Range<usize>,
    /// The payload of `avcC` or `hvcC`; empty for VP8 and VP9.
    pub(crate) config: Range<usize>,
    /// Set if the container reorders pictures.
    pub(crate) has_composition_times: bool,
    /// Degrees, as OpenCV's `CAP_PROP_ORIENTATION_META` gives them.
    pub(crate) rotation: u16,
    pub(crate) timing: Timing,
    pub(crate) headers: Headers,
}

impl Track {
    /// Returns the bytes of the original that the headers of each part copy.
    pub(crate) fn copied_header_bytes(&self) -> usize {
        match &self.headers {
            Headers::Copied(CopiedBoxes { mvhd, tkhd, mdhd, hdlr, stsd }) => {
                [mvhd, tkhd, mdhd, hdlr, stsd].into_iter().map(|range| range.len()).sum()
            }
            Headers::Made { width: _, height: _, colour: _ } => self.config.len(),
        }
    }
}

/// Checks that all samples have bytes in a file of `length` bytes and do not overlap on the whole,
/// which bounds the time to read them.
pub(crate) fn check_samples(samples: &[Sample], length: usize) -> Result<(), IndexError> {
    let mut total = 0usize;
    for sample in samples {
        if sample.size == 0 {
            return Err(IndexError::Pictures);
        }
        if sample.range().end > length {
            return Err(IndexError::Truncated);
        }
        total = total.saturating_add(sample.size as usize);
    }
    if samples.is_empty() || total > length {
        return Err(IndexError::Malformed);
    }
    Ok(())
}
