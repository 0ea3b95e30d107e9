//! mp4 and QuickTime (ISO 14496-12): the video track as libavformat's `mov.c` reads it.

mod boxes;
mod edits;
mod fragments;
mod movie;
mod sample_entry;
mod sound;
mod tables;

use crate::bytes::{array_at, i32_at};
use crate::error::IndexError;
use crate::rational::{reduce, rescale};
use crate::track::{Container, CopiedBoxes, Headers, Timing, Track, check_samples};
use boxes::{Boxes, Mp4Box, child};
use movie::{Movie, TrackBoxes};
use sample_entry::SampleEntry;
pub use sound::SoundTrack;

/// Returns `true` if a file begins like an mp4 or QuickTime file.
pub fn accepts(file: &[u8]) -> bool {
    let kind: Option<[u8; 4]> = array_at(file, 4);
    kind.is_some_and(|kind| {
        [*b"ftyp", *b"moov", *b"mdat", *b"wide", *b"free", *b"skip"].contains(&kind)
    })
}

/// Reads the video track of a file.
pub(crate) fn read(file: &[u8]) -> Result<Track, IndexError> {
    let moov = child(file, 0..file.len(), b"moov").ok_or(IndexError::Truncated)?;
    let movie = Movie::read(file, &moov)?;
    let video = movie.video(file)?;
    let entry = SampleEntry::read(file, &video)?;
    let mut samples = tables::read(file, &video.sample_table)?;
    let edits = edits::read(file, video.edits.as_ref())?;
    let mvex = child(file, moov.body(), b"mvex");
    let has_fragments = mvex.is_some();
    let fragments = match mvex {
        Some(mvex) => fragments::read(file, &mvex, &movie, video.id, &mut samples)?,
        None => fragments::Fragments::default(),
    };
    if !has_fragments && Boxes::new(file, 0..file.len()).any(|found| found.kind == *b"moof") {
        return Err(IndexError::Malformed);
    }
    check_samples(&samples.samples, file.len())?;
    let edited = if has_fragments {
        // libavformat hides samples of fragments whose decoding time does not grow.
        if !samples.samples.is_sorted_by(|one, next| one.seek_time < next.seek_time) {
            return Err(IndexError::FrameCount);
        }
        // It shifts times by the edit, but hides nothing.
        let start = samples.samples.iter().map(|sample| sample.pts).min().unwrap_or_default();
        let media_time = edits.map_or(0, |edit| edit.media_time);
        let seek_origin = start.saturating_sub(media_time);
        edits::Edited { kept: 0..samples.samples.len(), start, seek_origin }
    } else {
        edits::apply(edits, &movie, &video, &mut samples)?
    };
    let timing = timing(&movie, &video, &samples, &fragments, has_fragments, &edited)?;
    Ok(Track {
        container: if has_fragments { Container::FragmentedMp4 } else { Container::Mp4 },
        codec: entry.codec,
        samples: samples.samples,
        kept: edited.kept,
        config: entry.config,
        has_composition_times: samples.has_composition_times,
        rotation: rotation(file, &movie, &video)?,
        timing,
        headers: Headers::Copied(CopiedBoxes {
            mvhd: movie.header.range.clone(),
            tkhd: video.header.range.clone(),
            mdhd: video.media_header.range.clone(),
            hdlr: video.handler.range.clone(),
            stsd: entry.description,
        }),
    })
}

/// Computes the rate and the frame count of the header.
fn timing(
    movie: &Movie,
    video: &TrackBoxes,
    samples: &tables::SampleTable,
    fragments: &fragments::Fragments,
    has_fragments: bool,
    edited: &edits::Edited,
) -> Result<Timing, IndexError> {
    let frames = samples.table_samples as u64 + fragments.samples;
    let duration = samples.table_duration.saturating_add(fragments.duration);
    if frames == 0 || duration == 0 {
        return Err(IndexError::FrameRate);
    }
    let ticks = u64::from(video.timescale).checked_mul(frames).ok_or(IndexError::FrameRate)?;
    let (numerator, denominator) = reduce(ticks, duration, i32::MAX as u64);
    if numerator == 0 || denominator == 0 {
        return Err(IndexError::FrameRate);
    }
    let fps = numerator as f64 / denominator as f64;
    let (least_us, most_us) = if has_fragments {
        fragments.duration_us
    } else {
        let duration = rescale(movie.duration, 1_000_000, movie.timescale.into());
        let duration = duration.ok_or(IndexError::Malformed)?;
        (duration, duration)
    };
    let header_frames = if samples.table_samples > 0 {
        (samples.table_samples as i64, samples.table_samples as i64)
    } else {
        let frames = |us: i64| (us as f64 / 1e6 * fps + 0.5).floor() as i64;
        (frames(least_us), frames(most_us))
    };
    Ok(Timing {
        ticks: (video.timescale, 1),
        fps,
        header_frames,
        duration_us: most_us,
        start: edited.start,
        seek_origin: edited.seek_origin,
        has_unknown_seek_points: samples.has_unknown_seek_points || fragments.has_index,
    })
}

/// Returns the rotation as OpenCV's `CAP_PROP_ORIENTATION_META` gives it.
fn rotation(file: &[u8], movie: &Movie, video: &TrackBoxes) -> Result<u16, IndexError> {
    const ONE: i32 = 1 << 16;
    let matrix = |found: &Mp4Box, at: [usize; 2]| -> Option<[i32; 4]> {
        let body = found.payload(file);
        let at = at[usize::from(*body.first()? == 1)];
        Some([
            i32_at(body, at)?,
            i32_at(body, at + 4)?,
            i32_at(body, at + 12)?,
            i32_at(body, at + 16)?,
        ])
    };
    let of_movie = matrix(&movie.header, [36, 48]).ok_or(IndexError::Malformed)?;
    if of_movie != [ONE, 0, 0, ONE] {
        return Err(IndexError::Transform);
    }
    match matrix(&video.header, [40, 52]).ok_or(IndexError::Malformed)? {
        [ONE, 0, 0, ONE] => Ok(0),
        [0, ONE, b, 0] if b == -ONE => Ok(90),
        [a, 0, 0, d] if a == -ONE && d == -ONE => Ok(180),
        [0, b, ONE, 0] if b == -ONE => Ok(270),
        _ => Err(IndexError::Transform),
    }
}
