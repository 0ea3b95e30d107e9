//! The sample description: the codec and its configuration.

use std::ops::Range;

use super::boxes::{Boxes, child};
use super::movie::TrackBoxes;
use crate::bytes::u32_at;
use crate::error::IndexError;
use crate::track::Codec;

/// The size of the fixed part of a visual sample entry, behind its header.
const VISUAL_ENTRY_BYTES: usize = 78;

/// The only sample description of a track.
pub(super) struct SampleEntry {
    pub(super) codec: Codec,
    /// The payload of `avcC` or `hvcC`.
    pub(super) config: Range<usize>,
    /// The `stsd`.
    pub(super) description: Range<usize>,
}

impl SampleEntry {
    pub(super) fn read(file: &[u8], video: &TrackBoxes) -> Result<Self, IndexError> {
        let stsd = child(file, video.sample_table.clone(), b"stsd").ok_or(IndexError::Malformed)?;
        if u32_at(stsd.payload(file), 4) != Some(1) {
            return Err(IndexError::SampleDescriptions);
        }
        let body = stsd.body();
        let entries = (body.start + 8).min(body.end)..body.end;
        let entry = Boxes::new(file, entries).next().ok_or(IndexError::Malformed)?;
        let (codec, config_box) = match &entry.kind {
            b"avc1" | b"avc3" => (Codec::H264, Some(b"avcC")),
            b"hvc1" | b"hev1" => (Codec::Hevc, Some(b"hvcC")),
            b"vp08" => (Codec::Vp8, None),
            b"vp09" => (Codec::Vp9, None),
            _ => return Err(IndexError::Codec),
        };
        let body = entry.body();
        let children = (body.start + VISUAL_ENTRY_BYTES).min(body.end)..body.end;
        if child(file, children.clone(), b"clap").is_some() {
            return Err(IndexError::Crop);
        }
        let config = match config_box {
            Some(name) => child(file, children, name).ok_or(IndexError::CodecHeader)?.body(),
            None => 0..0,
        };
        Ok(Self { codec, config, description: stsd.range })
    }
}
