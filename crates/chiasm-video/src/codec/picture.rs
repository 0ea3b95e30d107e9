//! Pictures and their sizes, as any codec describes them.

use crate::error::IndexError;

/// A sample's kind of random access point, where decoding can start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RandomAccess {
    /// It refers to earlier samples.
    #[default]
    No,
    /// No later sample refers to earlier ones.
    Closed,
    /// Later samples that are shown before it may refer to earlier ones.
    Open,
}

/// The largest side of a picture that is accepted; libavcodec's H.264 and HEVC have lower limits.
const MAX_SIDE: i64 = 1 << 15;

/// The size of the pictures, from the codec's own header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamHeader {
    pub(super) width: u32,
    pub(super) height: u32,
    /// Set if the header states that pictures are shown in another order than decoded.
    pub(super) is_reordered: bool,
}

impl StreamHeader {
    pub(super) fn new(width: i64, height: i64) -> Result<Self, IndexError> {
        if !(1..=MAX_SIDE).contains(&width) || !(1..=MAX_SIDE).contains(&height) {
            return Err(IndexError::CodecHeader);
        }
        Ok(Self { width: width as u32, height: height as u32, is_reordered: false })
    }
}

/// The picture of a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Picture {
    pub(super) start: RandomAccess,
    pub(super) is_droppable: bool,
    /// Set if a slice refers to two pictures at once, and the container has no times for that.
    pub(super) has_b_slice: bool,
    /// Set if the next picture begins a new sequence.
    pub(super) ends_sequence: bool,
}
