//! Edit lists: the visible part of a track, as `mov_fix_index` of libavformat computes it.

use std::ops::Range;

use super::boxes::{Mp4Box, rows};
use super::movie::{Movie, TrackBoxes};
use super::tables::SampleTable;
use crate::bytes::{i32_at, u16_at, u32_at, u64_at};
use crate::error::IndexError;
use crate::rational::rescale;
use crate::track::Sample;

/// The only edit with media.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edit {
    /// In the time scale of the movie.
    pub(super) duration: i64,
    /// In the time scale of the track.
    pub(super) media_time: i64,
}

/// Reads an edit list: at most one edit with media, behind any number of empty ones.
pub(super) fn read(file: &[u8], elst: Option<&Mp4Box>) -> Result<Option<Edit>, IndexError> {
    let Some(elst) = elst else { return Ok(None) };
    let body = elst.payload(file);
    let is_wide = body.first() == Some(&1);
    let mut edit = None;
    for row in rows(body, if is_wide { 20 } else { 12 })? {
        let (duration, media_time, speed) = if is_wide {
            let media_time = u64_at(row, 8).map(|time| time as i64);
            (u64_at(row, 0), media_time, rate(row, 16))
        } else {
            (u32_at(row, 0).map(u64::from), i32_at(row, 4).map(i64::from), rate(row, 8))
        };
        let duration = duration.and_then(|duration| i64::try_from(duration).ok());
        let (Some(duration), Some(media_time)) = (duration, media_time) else {
            return Err(IndexError::EditList);
        };
        if media_time == -1 && edit.is_none() {
            continue;
        }
        if media_time < 0 || edit.is_some() || speed != Some((1, 0)) {
            return Err(IndexError::EditList);
        }
        edit = Some(Edit { duration, media_time });
    }
    Ok(edit)
}

/// The samples of a track that libavformat keeps, and their first times.
pub(super) struct Edited {
    pub(super) kept: Range<usize>,
    /// The first time of a visible sample.
    pub(super) start: i64,
    /// The `seek_time` at which libavformat looks for `start`.
    pub(super) seek_origin: i64,
}

/// Hides the samples outside the edit. Returns those that libavformat keeps.
pub(super) fn apply(
    edit: Option<Edit>,
    movie: &Movie,
    video: &TrackBoxes,
    table: &mut SampleTable,
) -> Result<Edited, IndexError> {
    let all = 0..table.samples.len();
    let Some(Edit { duration, media_time }) = edit else {
        let start = table.samples.first().map(|sample| sample.pts).unwrap_or_default();
        let seek_origin = start - table.decoding_shift;
        return Ok(Edited { kept: all, start, seek_origin });
    };
    let duration = rescale(duration, video.timescale.into(), movie.timescale.into());
    let end = duration.and_then(|duration| media_time.checked_add(duration));
    let (Some(duration), Some(end)) = (duration, end) else { return Err(IndexError::EditList) };
    if duration == 0 {
        return Err(IndexError::EditList);
    }
    let mut start = None;
    for sample in &mut table.samples {
        sample.is_visible = (media_time..end).contains(&sample.pts);
        if sample.is_visible {
            start = Some(start.map_or(sample.pts, |start: i64| start.min(sample.pts)));
        }
    }
    let first_visible = table.samples.iter().find(|sample| sample.is_visible);
    let (Some(start), Some(first_visible)) = (start, first_visible) else {
        return Err(IndexError::EditList);
    };
    // `mov_seek_stream` subtracts `min_corrected_pts`, by which all times were shifted.
    let shift = start - (first_visible.seek_time + table.decoding_shift);
    let seek_origin = first_visible.seek_time - shift.min(0);
    let kept = kept(table, media_time, end);
    let hides_kept = table.samples.iter().any(|sample| !sample.is_visible);
    let visible_outside = table
        .samples
        .iter()
        .enumerate()
        .any(|(index, sample)| sample.is_visible && !kept.contains(&index));
    if visible_outside || hides_kept && table.has_unknown_seek_points {
        return Err(IndexError::EditList);
    }
    Ok(Edited { kept, start, seek_origin })
}

/// Returns the samples from the key frame before the edit's start to the key frame behind its end:
/// with composition times, to the second one.
fn kept(table: &SampleTable, media_time: i64, end: i64) -> Range<usize> {
    let samples = &table.samples;
    let first = last_where(samples, |sample| sample.seek_time <= media_time)
        .and_then(|last| {
            (0..=last)
                .rev()
                .find(|&index| samples[index].is_sync && samples[index].pts <= media_time)
        })
        .unwrap_or(0);
    let mut has_passed_key = !table.has_composition_times;
    for index in first..samples.len() {
        let next = samples.get(index + 1).map_or(end, |next| next.seek_time);
        let duration = next - samples[index].seek_time;
        if samples[index].pts.saturating_add(duration) >= end && samples[index].is_sync {
            if has_passed_key {
                return first..index + 1;
            }
            has_passed_key = true;
        }
    }
    first..samples.len()
}

/// Returns the 16.16 integer of an edit's speed.
fn rate(row: &[u8], at: usize) -> Option<(u16, u16)> {
    Some((u16_at(row, at)?, u16_at(row, at + 2)?))
}

/// Returns the largest index below `samples.len()` whose sample fulfils a condition that holds for
/// a prefix only.
fn last_where(samples: &[Sample], holds: impl Fn(&Sample) -> bool) -> Option<usize> {
    samples.partition_point(|sample| holds(sample)).checked_sub(1)
}
