//! The sound of an mp4: the packets of its first sound track that libavformat reads.

use super::boxes::{Boxes, Mp4Box, child, descendant, rows};
use super::edits;
use super::movie::{Movie, TrackBoxes};
use super::tables;
use crate::bytes::{array_at, u16_at, u32_at};
use crate::error::SoundError;
use crate::rational::rescale;
use crate::track::{Sample, check_samples};

/// The size of the fixed part of a sound sample entry, behind its header.
const SOUND_ENTRY_BYTES: usize = 28;
/// The name of iTunes' data about encoder delays, which libavformat applies.
const ITUNES_DELAYS: &[u8] = b"iTunSMPB";

/// The first sound track of an mp4 or QuickTime file whose sound is MPEG-4 audio.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SoundTrack {
    /// The payload of `esds`: the decoder's configuration.
    pub descriptor: Vec<u8>,
    /// Ticks per second.
    pub timescale: u32,
    /// The duration of each packet but the last, in ticks.
    pub packet_ticks: u32,
    /// The number of packets that libavformat reads: those that begin before the edit list's end.
    pub packets: u64,
    /// The ticks that the edit list hides at the beginning.
    pub hidden_ticks: u64,
}

impl SoundTrack {
    /// Reads the first sound track of a file. Decodes nothing.
    ///
    /// # Errors
    ///
    /// Returns the reason if the packets that libavformat reads cannot be vouched for.
    pub fn read(file: &[u8]) -> Result<Self, SoundError> {
        let moov = child(file, 0..file.len(), b"moov").ok_or(SoundError::Truncated)?;
        let has_fragments = child(file, moov.body(), b"mvex").is_some()
            || child(file, 0..file.len(), b"moof").is_some();
        if has_fragments {
            return Err(SoundError::Fragments);
        }
        if moov.payload(file).windows(ITUNES_DELAYS.len()).any(|name| name == ITUNES_DELAYS) {
            return Err(SoundError::EditList);
        }
        let movie = Movie::read(file, &moov)?;
        let sound = movie.tracks.iter().find(|track| track.is_sound).ok_or(SoundError::Codec)?;
        if movie.refers_to_other_files(file, sound) {
            return Err(SoundError::Codec);
        }
        let descriptor = read_descriptor(file, sound)?;
        let table = tables::read(file, &sound.sample_table)?;
        check_samples(&table.samples, file.len())?;
        let has_other_times = [b"ctts", b"stss", b"stps"]
            .into_iter()
            .any(|name| child(file, sound.sample_table.clone(), name).is_some());
        if has_other_times {
            return Err(SoundError::Malformed);
        }
        let packet_ticks = packet_ticks(&table.samples, table.table_duration)?;
        let (packets, hidden_ticks) = match sound.edits.as_ref() {
            None if sound.has_edits => return Err(SoundError::EditList),
            None => (table.samples.len(), 0),
            Some(elst) => apply_edit(file, elst, &movie, sound, &table.samples)?,
        };
        Ok(Self {
            descriptor,
            timescale: sound.timescale,
            packet_ticks,
            packets: packets as u64,
            hidden_ticks,
        })
    }
}

/// Returns the payload of `esds` of the only sample entry.
fn read_descriptor(file: &[u8], sound: &TrackBoxes) -> Result<Vec<u8>, SoundError> {
    let stsd = child(file, sound.sample_table.clone(), b"stsd").ok_or(SoundError::Malformed)?;
    if u32_at(stsd.payload(file), 4) != Some(1) {
        return Err(SoundError::Codec);
    }
    let body = stsd.body();
    let entries = (body.start + 8).min(body.end)..body.end;
    let entry = Boxes::new(file, entries).next().ok_or(SoundError::Malformed)?;
    // QuickTime's later versions have further fields.
    let version = u16_at(entry.payload(file), 8);
    if entry.kind != *b"mp4a" || version != Some(0) {
        return Err(SoundError::Codec);
    }
    let body = entry.body();
    let children = (body.start + SOUND_ENTRY_BYTES).min(body.end)..body.end;
    let esds = descendant(file, children, &[b"esds"]).ok_or(SoundError::Codec)?;
    Ok(esds.payload(file).to_vec())
}

/// Returns the duration of each packet, which only the last one may fall short of.
fn packet_ticks(samples: &[Sample], duration: u64) -> Result<u32, SoundError> {
    let (Some(last), Some(second)) = (samples.last(), samples.get(1)) else {
        // A single packet: its duration is that of the table.
        return u32::try_from(duration).map_err(|_| SoundError::Malformed);
    };
    let ticks = second.pts;
    let are_equal =
        (0..).zip(samples).all(|(index, sample)| ticks.checked_mul(index) == Some(sample.pts));
    let last_ticks = duration.checked_sub(last.pts as u64);
    let ticks = u32::try_from(ticks).map_err(|_| SoundError::Malformed)?;
    let is_last_short = last_ticks.is_some_and(|last| last <= u64::from(ticks));
    if ticks > 0 && are_equal && is_last_short { Ok(ticks) } else { Err(SoundError::Malformed) }
}

/// Returns the number of packets that libavformat reads, and the hidden ticks in front.
fn apply_edit(
    file: &[u8],
    elst: &Mp4Box,
    movie: &Movie,
    sound: &TrackBoxes,
    samples: &[Sample],
) -> Result<(usize, u64), SoundError> {
    let body = elst.payload(file);
    let entry_bytes = if array_at(body, 0) == Some([1]) { 20 } else { 12 };
    // An empty edit delays the sound.
    if rows(body, entry_bytes)?.len() != 1 {
        return Err(SoundError::EditList);
    }
    let edit = edits::read(file, Some(elst))?.ok_or(SoundError::EditList)?;
    let duration = rescale(edit.duration, sound.timescale.into(), movie.timescale.into());
    let end = duration.and_then(|duration| edit.media_time.checked_add(duration));
    let (Some(1..), Some(end)) = (duration, end) else { return Err(SoundError::EditList) };
    let packets = samples.partition_point(|sample| sample.pts < end);
    let hidden = u64::try_from(edit.media_time).map_err(|_| SoundError::EditList)?;
    Ok((packets, hidden))
}
