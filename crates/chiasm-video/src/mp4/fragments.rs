//! Movie fragments: `moof` boxes behind the header.

use super::boxes::{Boxes, Mp4Box, child};
use super::edits;
use super::movie::Movie;
use super::tables::SampleTable;
use crate::bytes::{u32_at, u64_at};
use crate::error::IndexError;
use crate::rational::rescale;
use crate::track::{MAX_SAMPLES, Sample};

/// Flags of a `tfhd` and of a `trun`.
const TFHD_BASE_OFFSET: u32 = 0x1;
const TFHD_DEFAULT_BASE_IS_MOOF: u32 = 0x2_0000;
const TRUN_DATA_OFFSET: u32 = 0x1;
const TRUN_FIRST_FLAGS: u32 = 0x4;
const TRUN_DURATION: u32 = 0x100;
const TRUN_SIZE: u32 = 0x200;
const TRUN_FLAGS: u32 = 0x400;
const TRUN_COMPOSITION_OFFSET: u32 = 0x800;

/// Flags of a sample that is no key frame: it is not a sync sample, or depends on others.
const NOT_A_KEY_FRAME: u32 = 0x101_0000;

/// The maximum start of a fragment in ticks. Keeps sums of times far from overflow.
const MAX_TIME: u64 = 1 << 56;

/// The uncertainty of the start time of another track with an edit list: decoders of audio skip
/// their first samples.
const START_TOLERANCE_US: i64 = 60_000;

/// The time of the video's fragments, and of other tracks.
#[derive(Debug, Default)]
pub(super) struct Fragments {
    /// The number of samples of the video.
    pub(super) samples: u64,
    /// Their duration in ticks.
    pub(super) duration: u64,
    /// Set if the file has a segment index.
    pub(super) has_index: bool,
    /// The least and the greatest possible duration of the file in microseconds.
    pub(super) duration_us: (i64, i64),
}

/// The defaults of a track's samples.
#[derive(Clone, Copy, Debug, Default)]
struct Defaults {
    duration: u32,
    size: u32,
    flags: u32,
}

/// Adds the samples of all fragments to the table.
pub(super) fn read(
    file: &[u8],
    mvex: &Mp4Box,
    movie: &Movie,
    video_id: u32,
    table: &mut SampleTable,
) -> Result<Fragments, IndexError> {
    let mut fragments = Fragments::default();
    let mut tracks: Vec<TrackReader> = Vec::new();
    for track in &movie.tracks {
        let defaults = Boxes::new(file, mvex.body())
            .filter(|found| found.kind == *b"trex")
            .find(|found| u32_at(found.payload(file), 4) == Some(track.id))
            .and_then(|found| {
                let body = found.payload(file);
                let [duration, size, flags] = [12, 16, 20].map(|at| u32_at(body, at));
                Some(Defaults { duration: duration?, size: size?, flags: flags? })
            });
        let is_video = track.id == video_id;
        let edit = edits::read(file, track.edits.as_ref()).ok().flatten();
        let time = if is_video { table.table_duration as i64 } else { 0 };
        tracks.push(TrackReader {
            id: track.id,
            timescale: track.timescale,
            is_video,
            defaults: defaults.unwrap_or_default(),
            time,
            first_pts: None,
            media_time: edit.map_or(0, |edit| edit.media_time),
            has_edits: track.edits.is_some(),
            duration: 0,
            samples: 0,
        });
    }
    if tracks.iter().filter(|track| track.id == video_id).count() != 1 {
        return Err(IndexError::Malformed);
    }
    let mut unclaimed_bytes = file.len();
    let mut boxes = Boxes::new(file, 0..file.len());
    for found in boxes.by_ref() {
        match &found.kind {
            b"moof" => read_fragment(file, &found, &mut tracks, table, &mut unclaimed_bytes)?,
            b"sidx" => fragments.has_index = true,
            _ => {}
        }
    }
    if !boxes.is_at_end() {
        return Err(IndexError::Truncated);
    }
    if let Some(video) = tracks.iter().find(|track| track.is_video) {
        fragments.samples = video.samples;
        fragments.duration = video.duration;
    }
    fragments.duration_us = duration_us(&tracks).ok_or(IndexError::Malformed)?;
    Ok(fragments)
}

/// Returns the duration of the file as `update_stream_timings` of libavformat computes it.
fn duration_us(tracks: &[TrackReader]) -> Option<(i64, i64)> {
    let mut start = i64::MAX;
    let mut end = 0i64;
    let mut longest = 0;
    let mut tolerance = 0;
    for track in tracks {
        let Some(first) = track.first_pts else { continue };
        let microseconds = |ticks| rescale(ticks, 1_000_000, track.timescale.into());
        let track_start = microseconds(first.checked_sub(track.media_time)?)?;
        let duration = microseconds(track.time)?;
        start = start.min(track_start);
        end = end.max(track_start.checked_add(duration)?);
        longest = longest.max(duration);
        if !track.is_video && track.has_edits {
            tolerance = START_TOLERANCE_US;
        }
    }
    let duration = longest.max(end.saturating_sub(start));
    Some((duration.saturating_sub(tolerance), duration.saturating_add(tolerance)))
}

/// The state of a track between fragments.
struct TrackReader {
    id: u32,
    timescale: u32,
    is_video: bool,
    defaults: Defaults,
    /// The decoding time of the next sample.
    time: i64,
    /// The presentation time of the first sample.
    first_pts: Option<i64>,
    /// The time of the media at which the track begins.
    media_time: i64,
    has_edits: bool,
    duration: u64,
    samples: u64,
}

fn read_fragment(
    file: &[u8],
    moof: &Mp4Box,
    tracks: &mut [TrackReader],
    table: &mut SampleTable,
    unclaimed_bytes: &mut usize,
) -> Result<(), IndexError> {
    let mut implicit_base = moof.start;
    for traf in Boxes::new(file, moof.body()).filter(|found| found.kind == *b"traf") {
        let tfhd = child(file, traf.body(), b"tfhd").ok_or(IndexError::Malformed)?;
        let mut header = Fields::new(tfhd.payload(file))?;
        let id = header.u32().ok_or(IndexError::Malformed)?;
        let track = tracks.iter_mut().find(|track| track.id == id);
        let track = track.ok_or(IndexError::Malformed)?;
        let base = if header.flags & TFHD_BASE_OFFSET != 0 {
            let base = header.u64().and_then(|base| usize::try_from(base).ok());
            base.ok_or(IndexError::Malformed)?
        } else if header.flags & TFHD_DEFAULT_BASE_IS_MOOF != 0 {
            moof.start
        } else {
            implicit_base
        };
        header.checked(0x2)?;
        let mut defaults = track.defaults;
        for (flag, field) in
            [(0x8, &mut defaults.duration), (0x10, &mut defaults.size), (0x20, &mut defaults.flags)]
        {
            *field = header.checked(flag)?.unwrap_or(*field);
        }
        if let Some(tfdt) = child(file, traf.body(), b"tfdt") {
            let body = tfdt.payload(file);
            let time = if body.first() == Some(&1) {
                u64_at(body, 4)
            } else {
                u32_at(body, 4).map(u64::from)
            };
            let time =
                time.filter(|&time| time < MAX_TIME).and_then(|time| i64::try_from(time).ok());
            track.time = time.ok_or(IndexError::Malformed)?;
        }
        let mut position = base;
        for trun in Boxes::new(file, traf.body()).filter(|found| found.kind == *b"trun") {
            let run = Run { body: trun.payload(file), base, position };
            position = read_run(&run, &defaults, track, table, unclaimed_bytes)?;
        }
        implicit_base = position;
    }
    Ok(())
}

/// A `trun`.
struct Run<'a> {
    body: &'a [u8],
    /// The position that its data offset is relative to.
    base: usize,
    /// The position of its data without a data offset.
    position: usize,
}

/// Reads a run of samples. Returns the position behind its data.
///
/// Takes the samples' sizes from `unclaimed_bytes`, so that the size of the file bounds the number
/// of samples of all tracks.
fn read_run(
    source: &Run<'_>,
    defaults: &Defaults,
    track: &mut TrackReader,
    table: &mut SampleTable,
    unclaimed_bytes: &mut usize,
) -> Result<usize, IndexError> {
    let mut run = Fields::new(source.body)?;
    let count = run.u32().ok_or(IndexError::Malformed)?;
    let mut position = source.position;
    if let Some(offset) = run.checked(TRUN_DATA_OFFSET)? {
        let start = source.base.checked_add_signed(offset as i32 as isize);
        position = start.ok_or(IndexError::Malformed)?;
    }
    let mut first_flags = run.checked(TRUN_FIRST_FLAGS)?;
    if count as usize > MAX_SAMPLES || track.samples as usize + count as usize > MAX_SAMPLES {
        return Err(IndexError::TooManySamples);
    }
    for _ in 0..count {
        let duration = run.checked(TRUN_DURATION)?.unwrap_or(defaults.duration);
        let size = run.checked(TRUN_SIZE)?.unwrap_or(defaults.size);
        let own_flags = run.checked(TRUN_FLAGS)?;
        let offset = run.checked(TRUN_COMPOSITION_OFFSET)?.unwrap_or_default() as i32;
        let flags = own_flags.or(first_flags.take()).unwrap_or(defaults.flags);
        if size == 0 {
            return Err(IndexError::Pictures);
        }
        let left = unclaimed_bytes.checked_sub(size as usize);
        *unclaimed_bytes = left.ok_or(IndexError::Truncated)?;
        let pts = track.time.checked_add(offset.into()).ok_or(IndexError::Malformed)?;
        track.first_pts.get_or_insert(pts);
        if track.is_video {
            if table.samples.len() == MAX_SAMPLES {
                return Err(IndexError::TooManySamples);
            }
            table.has_composition_times |= offset != 0;
            table.samples.push(Sample {
                offset: position,
                size,
                is_sync: flags & NOT_A_KEY_FRAME == 0,
                is_visible: true,
                pts,
                seek_time: track.time,
            });
        }
        position = position.checked_add(size as usize).ok_or(IndexError::Malformed)?;
        track.time = track.time.checked_add(duration.into()).ok_or(IndexError::Malformed)?;
        track.duration = track.duration.saturating_add(duration.into());
        track.samples += 1;
    }
    Ok(position)
}

/// The fields of a full box, some of which are only present if a flag is set.
struct Fields<'a> {
    flags: u32,
    body: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    fn new(body: &'a [u8]) -> Result<Self, IndexError> {
        let flags = u32_at(body, 0).ok_or(IndexError::Malformed)? & 0xff_ffff;
        Ok(Self { flags, body, at: 4 })
    }

    fn u32(&mut self) -> Option<u32> {
        let value = u32_at(self.body, self.at)?;
        self.at += 4;
        Some(value)
    }

    fn u64(&mut self) -> Option<u64> {
        let value = u64_at(self.body, self.at)?;
        self.at += 8;
        Some(value)
    }

    /// Reads a field if its flag is set. Fails if it is missing.
    fn checked(&mut self, flag: u32) -> Result<Option<u32>, IndexError> {
        if self.flags & flag == 0 {
            return Ok(None);
        }
        self.u32().map(Some).ok_or(IndexError::Malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_field_is_an_error() {
        let mut fields = Fields::new(&[0, 0, 1, 0, 0, 0, 0, 7]).unwrap();
        assert_eq!(fields.checked(TRUN_DURATION), Ok(Some(7)));
        assert_eq!(fields.checked(TRUN_SIZE), Ok(None));
        assert_eq!(fields.checked(TRUN_DURATION), Err(IndexError::Malformed));
    }

    fn track() -> TrackReader {
        TrackReader {
            id: 1,
            timescale: 1000,
            is_video: true,
            defaults: Defaults::default(),
            time: 0,
            first_pts: None,
            media_time: 0,
            has_edits: false,
            duration: 0,
            samples: 0,
        }
    }

    #[test]
    fn samples_beyond_the_file_end_the_run() {
        let body = [[0, 0, 0, 0], (1u32 << 20).to_be_bytes()].concat();
        let run = Run { body: &body, base: 0, position: 0 };
        let defaults = Defaults { duration: 1, size: 1, flags: 0 };
        let mut table = SampleTable::default();
        let read = read_run(&run, &defaults, &mut track(), &mut table, &mut 100);
        assert_eq!((read, table.samples.len()), (Err(IndexError::Truncated), 100));
    }

    #[test]
    fn own_flags_of_the_first_sample_win() {
        let flags = (TRUN_FIRST_FLAGS | TRUN_FLAGS).to_be_bytes();
        let body = [flags, 1u32.to_be_bytes(), [0; 4], NOT_A_KEY_FRAME.to_be_bytes()].concat();
        let run = Run { body: &body, base: 0, position: 0 };
        let defaults = Defaults { duration: 1, size: 1, flags: 0 };
        let mut table = SampleTable::default();
        read_run(&run, &defaults, &mut track(), &mut table, &mut 100).unwrap();
        assert!(!table.samples[0].is_sync);
    }
}
