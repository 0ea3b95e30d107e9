//! The sample table: sizes, chunks, times and key frames.

use std::ops::Range;

use super::boxes::{checked_count, child, rows};
use crate::bytes::{i32_at, u32_at, u64_at};
use crate::error::IndexError;
use crate::track::{MAX_SAMPLES, Sample};

/// The samples of a track. Fragments are added later.
#[derive(Debug, Default)]
pub(super) struct SampleTable {
    pub(super) samples: Vec<Sample>,
    /// The number of samples in the table, without those of fragments.
    pub(super) table_samples: usize,
    /// Their duration in ticks.
    pub(super) table_duration: u64,
    pub(super) has_composition_times: bool,
    /// The ticks by which decoding times are early because of negative composition offsets.
    pub(super) decoding_shift: i64,
    /// Set if boxes that are not read mark further key frames.
    pub(super) has_unknown_seek_points: bool,
}

/// Reads the table in `stbl`.
pub(super) fn read(file: &[u8], stbl: &Range<usize>) -> Result<SampleTable, IndexError> {
    let find = |name| child(file, stbl.clone(), name).map(|found| found.payload(file));
    let mut sizes = Sizes::read(find(b"stsz").ok_or(IndexError::Malformed)?, file.len())?;
    let count = sizes.count;
    if count == 0 {
        return Ok(SampleTable::default());
    }
    let mut samples = Vec::with_capacity(count);
    let chunks = Chunks::read(find(b"stco"), find(b"co64"), find(b"stsc"))?;
    chunks.for_each(count, |offset, samples_per_chunk| {
        let mut offset = offset;
        for _ in 0..samples_per_chunk {
            let size = sizes.next().ok_or(IndexError::Malformed)?;
            samples.push(Sample {
                offset,
                size,
                is_sync: false,
                is_visible: true,
                pts: 0,
                seek_time: 0,
            });
            offset = offset.checked_add(size as usize).ok_or(IndexError::Malformed)?;
        }
        Ok(())
    })?;
    let table_duration = read_times(find(b"stts").ok_or(IndexError::Malformed)?, &mut samples)?;
    let (has_composition_times, decoding_shift) = match find(b"ctts") {
        Some(ctts) => read_composition_offsets(ctts, &mut samples)?,
        None => (false, 0),
    };
    match find(b"stss") {
        Some(stss) => read_sync_samples(stss, &mut samples)?,
        None => samples.iter_mut().for_each(|sample| sample.is_sync = true),
    }
    Ok(SampleTable {
        table_samples: samples.len(),
        samples,
        table_duration,
        has_composition_times,
        decoding_shift,
        has_unknown_seek_points: find(b"stps").is_some() || find(b"sbgp").is_some(),
    })
}

/// The sizes of the samples.
struct Sizes<'a> {
    count: usize,
    /// The size of all; 0 if they differ.
    common: u32,
    rows: std::slice::ChunksExact<'a, u8>,
}

impl<'a> Sizes<'a> {
    fn read(stsz: &'a [u8], file_bytes: usize) -> Result<Self, IndexError> {
        let common = u32_at(stsz, 4).ok_or(IndexError::Malformed)?;
        let count = u32_at(stsz, 8).ok_or(IndexError::Malformed)?;
        if count as usize > MAX_SAMPLES {
            return Err(IndexError::TooManySamples);
        }
        if common != 0 {
            // Each sample has a byte at least, so the file bounds the memory.
            if count as usize > file_bytes {
                return Err(IndexError::Malformed);
            }
            return Ok(Self { count: count as usize, common, rows: [].chunks_exact(4) });
        }
        let count = checked_count(stsz, count, 4, 12)?;
        Ok(Self { count, common, rows: stsz[12..12 + 4 * count].chunks_exact(4) })
    }

    fn next(&mut self) -> Option<u32> {
        if self.common != 0 { Some(self.common) } else { u32_at(self.rows.next()?, 0) }
    }
}

/// The chunks: samples that follow each other in the file.
struct Chunks<'a> {
    offsets: &'a [u8],
    offset_bytes: usize,
    runs: std::slice::ChunksExact<'a, u8>,
}

impl<'a> Chunks<'a> {
    fn read(
        stco: Option<&'a [u8]>,
        co64: Option<&'a [u8]>,
        stsc: Option<&'a [u8]>,
    ) -> Result<Self, IndexError> {
        let (body, offset_bytes) = match (stco, co64) {
            (Some(stco), _) => (stco, 4),
            (None, Some(co64)) => (co64, 8),
            (None, None) => return Err(IndexError::Malformed),
        };
        let count = rows(body, offset_bytes)?.len();
        let offsets = &body[8..8 + count * offset_bytes];
        Ok(Self { offsets, offset_bytes, runs: rows(stsc.ok_or(IndexError::Malformed)?, 12)? })
    }

    /// Calls `visit` with each chunk's offset and number of samples. Fails unless the chunks have
    /// exactly `count` samples.
    fn for_each(
        &self,
        count: usize,
        mut visit: impl FnMut(usize, usize) -> Result<(), IndexError>,
    ) -> Result<(), IndexError> {
        let mut left = count;
        let chunks = self.offsets.len() / self.offset_bytes;
        let mut runs = self.runs.clone().peekable();
        let mut expected_first = Some(1);
        while let Some(run) = runs.next() {
            let first = u32_at(run, 0).unwrap_or_default() as usize;
            let per_chunk = u32_at(run, 4).unwrap_or_default() as usize;
            let end = match runs.peek() {
                Some(next) => u32_at(next, 0).unwrap_or_default() as usize,
                None => chunks + 1,
            };
            if expected_first.take().is_some_and(|expected| first != expected)
                || first == 0
                || end < first
                || end > chunks + 1
            {
                return Err(IndexError::Malformed);
            }
            for chunk in first - 1..end - 1 {
                left = left.checked_sub(per_chunk).ok_or(IndexError::Malformed)?;
                visit(self.offset(chunk)?, per_chunk)?;
            }
        }
        if left == 0 { Ok(()) } else { Err(IndexError::Malformed) }
    }

    fn offset(&self, chunk: usize) -> Result<usize, IndexError> {
        let at = chunk * self.offset_bytes;
        let offset = if self.offset_bytes == 4 {
            u32_at(self.offsets, at).map(u64::from)
        } else {
            u64_at(self.offsets, at)
        };
        offset.and_then(|offset| usize::try_from(offset).ok()).ok_or(IndexError::Malformed)
    }
}

/// Sets decoding times. Returns the duration of all samples.
fn read_times(stts: &[u8], samples: &mut [Sample]) -> Result<u64, IndexError> {
    let mut time = 0i64;
    let mut rest = samples.iter_mut();
    for row in rows(stts, 8)? {
        let count = u32_at(row, 0).unwrap_or_default();
        // libavformat corrects durations that are negative as signed numbers.
        let duration = i32_at(row, 4).unwrap_or_default();
        if duration < 0 || count as usize > rest.len() {
            return Err(IndexError::Malformed);
        }
        for sample in rest.by_ref().take(count as usize) {
            sample.pts = time;
            sample.seek_time = time;
            time = time.checked_add(duration.into()).ok_or(IndexError::Malformed)?;
        }
    }
    if rest.next().is_some() {
        return Err(IndexError::Malformed);
    }
    Ok(time as u64)
}

/// The largest composition offset that libavformat accepts.
const MAX_COMPOSITION_OFFSET: u32 = 1 << 28;

/// Adds composition offsets. Returns `true` if any differs from another, and the ticks by which
/// decoding times are shifted.
fn read_composition_offsets(
    ctts: &[u8],
    samples: &mut [Sample],
) -> Result<(bool, i64), IndexError> {
    let mut at = 0;
    let mut least = 0;
    let rows = rows(ctts, 8)?;
    let shifting_rows = rows.len().saturating_sub(2);
    for (place, row) in rows.enumerate() {
        let count = usize::try_from(i32_at(row, 0).unwrap_or_default()).unwrap_or(0);
        if count == 0 {
            // libavformat skips such rows, and those with negative counts.
            continue;
        }
        let offset = i32_at(row, 4).unwrap_or_default();
        // libavformat drops the whole table.
        if offset.unsigned_abs() > MAX_COMPOSITION_OFFSET {
            return Err(IndexError::Malformed);
        }
        let end = at + count.min(samples.len() - at);
        for sample in &mut samples[at..end] {
            sample.pts += i64::from(offset);
        }
        // `mov_read_ctts` leaves out the last two rows.
        if place < shifting_rows {
            least = offset.min(least);
        }
        at = end;
    }
    // Negative offsets shift the decoding times, as `mov_update_dts_shift` does.
    for sample in samples.iter_mut() {
        sample.seek_time += i64::from(least);
    }
    let are_different = samples
        .windows(2)
        .any(|pair| pair[1].pts - pair[1].seek_time != pair[0].pts - pair[0].seek_time);
    Ok((are_different, -i64::from(least)))
}

fn read_sync_samples(stss: &[u8], samples: &mut [Sample]) -> Result<(), IndexError> {
    let mut last = 0;
    for row in rows(stss, 4)? {
        let number = u32_at(row, 0).unwrap_or_default() as usize;
        // libavformat finds no key frame behind one that is out of order.
        if number <= last || number > samples.len() {
            return Err(IndexError::Malformed);
        }
        samples[number - 1].is_sync = true;
        last = number;
    }
    if last == 0 {
        samples[0].is_sync = true;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the decoding shift of a `ctts` with one sample per offset.
    fn shift(offsets: &[i32]) -> Result<i64, IndexError> {
        let sample =
            Sample { offset: 0, size: 1, is_sync: true, is_visible: true, pts: 0, seek_time: 0 };
        let mut ctts = vec![0; 4];
        ctts.extend((offsets.len() as u32).to_be_bytes());
        for offset in offsets {
            ctts.extend(1u32.to_be_bytes());
            ctts.extend(offset.to_be_bytes());
        }
        let mut samples = vec![sample; offsets.len()];
        read_composition_offsets(&ctts, &mut samples).map(|(_, shift)| shift)
    }

    #[test]
    fn last_two_rows_do_not_shift_decoding_times() {
        assert_eq!(shift(&[0, -1, 0, 0]), Ok(1));
        assert_eq!(shift(&[0, -1, -2, -3]), Ok(1));
        assert_eq!(shift(&[-5, -5]), Ok(0));
    }

    #[test]
    fn huge_composition_offset_is_refused() {
        assert_eq!(shift(&[0, 1 << 28]), Ok(0));
        assert_eq!(shift(&[0, i32::MIN]), Err(IndexError::Malformed));
    }
}
