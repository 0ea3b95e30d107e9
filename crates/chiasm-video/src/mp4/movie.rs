//! The boxes of a movie and of its tracks.

use std::ops::Range;

use super::boxes::{Boxes, Mp4Box, child, descendant};
use crate::bytes::{array_at, u32_at, u64_at};
use crate::error::IndexError;

/// The boxes of a movie.
pub(super) struct Movie {
    pub(super) header: Mp4Box,
    pub(super) timescale: u32,
    pub(super) duration: i64,
    pub(super) tracks: Vec<TrackBoxes>,
    /// Set if a cover picture is in front of the first video track.
    has_cover: bool,
}

/// The maximum number of tracks.
const MAX_TRACKS: usize = 64;

impl Movie {
    pub(super) fn read(file: &[u8], moov: &Mp4Box) -> Result<Self, IndexError> {
        let header = child(file, moov.body(), b"mvhd").ok_or(IndexError::Malformed)?;
        let body = header.payload(file);
        let (timescale, duration) = times(body).ok_or(IndexError::Malformed)?;
        let duration = i64::try_from(duration).map_err(|_| IndexError::Malformed)?;
        if timescale == 0 {
            return Err(IndexError::Malformed);
        }
        let mut tracks = Vec::new();
        let mut has_cover = false;
        for found in Boxes::new(file, moov.body()) {
            if found.kind == *b"trak" {
                if tracks.len() == MAX_TRACKS {
                    return Err(IndexError::VideoTracks);
                }
                tracks.push(TrackBoxes::read(file, &found)?);
            } else if found.kind == *b"udta" && !tracks.iter().any(|track| track.is_video) {
                has_cover |= found.payload(file).windows(4).any(|name| name == b"covr");
            }
        }
        Ok(Self { header, timescale, duration, tracks, has_cover })
    }

    /// Returns the only video track.
    pub(super) fn video(&self, file: &[u8]) -> Result<TrackBoxes, IndexError> {
        // A cover picture in front of the video would be cv2's video stream.
        if self.has_cover {
            return Err(IndexError::VideoTracks);
        }
        let mut videos = self.tracks.iter().filter(|track| track.is_video);
        let (Some(video), None) = (videos.next(), videos.next()) else {
            return Err(IndexError::VideoTracks);
        };
        if self.refers_to_other_files(file, video) {
            return Err(IndexError::ExternalData);
        }
        Ok(video.clone())
    }

    /// Returns `true` if the samples of a track are in other files.
    pub(super) fn refers_to_other_files(&self, file: &[u8], track: &TrackBoxes) -> bool {
        let references = descendant(file, track.media.clone(), &[b"minf", b"dinf", b"dref"]);
        references.is_some_and(|found| {
            let first = found.start + found.header_bytes + 8;
            Boxes::new(file, first.min(found.end)..found.end).any(|entry| {
                // The flag says that the samples are in this file.
                u32_at(entry.payload(file), 0).is_none_or(|flags| flags & 1 == 0)
            })
        })
    }
}

/// Returns the time scale and the duration of an `mvhd` or `mdhd`.
fn times(body: &[u8]) -> Option<(u32, u64)> {
    if *body.first()? == 1 {
        Some((u32_at(body, 20)?, u64_at(body, 24)?))
    } else {
        Some((u32_at(body, 12)?, u32_at(body, 16)?.into()))
    }
}

/// The boxes of a track.
#[derive(Clone)]
pub(super) struct TrackBoxes {
    pub(super) id: u32,
    pub(super) is_video: bool,
    pub(super) is_sound: bool,
    pub(super) timescale: u32,
    pub(super) header: Mp4Box,
    pub(super) media: Range<usize>,
    pub(super) media_header: Mp4Box,
    pub(super) handler: Mp4Box,
    pub(super) sample_table: Range<usize>,
    pub(super) edits: Option<Mp4Box>,
    /// Set if the track has a box for edits.
    pub(super) has_edits: bool,
}

impl TrackBoxes {
    fn read(file: &[u8], trak: &Mp4Box) -> Result<Self, IndexError> {
        let find = |path: &[&[u8; 4]]| descendant(file, trak.body(), path);
        let header = find(&[b"tkhd"]).ok_or(IndexError::Malformed)?;
        let media = find(&[b"mdia"]).ok_or(IndexError::Malformed)?.body();
        let media_header = find(&[b"mdia", b"mdhd"]).ok_or(IndexError::Malformed)?;
        let handler = find(&[b"mdia", b"hdlr"]).ok_or(IndexError::Malformed)?;
        let sample_table = find(&[b"mdia", b"minf", b"stbl"]).map(|found| found.body());
        let is_wide = header.payload(file).first() == Some(&1);
        let id = u32_at(header.payload(file), if is_wide { 20 } else { 12 });
        let (timescale, _) = times(media_header.payload(file)).ok_or(IndexError::Malformed)?;
        if timescale == 0 {
            return Err(IndexError::Malformed);
        }
        Ok(Self {
            id: id.ok_or(IndexError::Malformed)?,
            is_video: array_at(handler.payload(file), 8) == Some(*b"vide"),
            is_sound: array_at(handler.payload(file), 8) == Some(*b"soun"),
            timescale,
            header,
            media,
            media_header,
            handler,
            sample_table: sample_table.unwrap_or_default(),
            edits: find(&[b"edts", b"elst"]),
            has_edits: find(&[b"edts"]).is_some(),
        })
    }
}
