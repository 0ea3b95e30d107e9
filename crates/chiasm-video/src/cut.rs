//! The cut: small mp4 files that hold the wanted frames and what they depend on.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::codec::{RandomAccess, hevc};
use crate::error::CutError;
use crate::index::VideoIndex;
use crate::plan::{Plan, Segment, plan};
use crate::track::Codec;
use crate::write;

/// The maximum size of the boxes that each part copies; real ones have less than a kilobyte. There
/// can be a part per wanted frame.
const MAX_COPIED_HEADER_BYTES: usize = 1 << 16;

impl VideoIndex {
    /// Cuts the wanted frames, by their numbers from 0, out of the file that was indexed.
    ///
    /// The result has one part, unless the file has H.264 recovery points and more parts are
    /// cheaper.
    ///
    /// # Errors
    ///
    /// Returns the reason if only the whole file gives the same frames.
    pub fn cut(&self, file: &[u8], wanted: &[u64]) -> Result<Cut, CutError> {
        self.cut_into(file, wanted, 1)
    }

    /// Cuts as [`cut`](Self::cut) does, into up to `parts` parts of similar cost, for several
    /// cores; into more if the file has H.264 recovery points.
    ///
    /// # Errors
    ///
    /// Returns the reason if only the whole file gives the same frames.
    pub fn cut_into(&self, file: &[u8], wanted: &[u64], parts: usize) -> Result<Cut, CutError> {
        let plan = plan(self, wanted)?;
        Cut::build(self, file, plan, parts.max(1))
    }
}

/// The files that replace a whole video.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The files, in presentation order; at least one.
    pub parts: Vec<CutPart>,
}

impl Cut {
    /// Returns the cost of decoding: samples times pixels, over all parts.
    pub fn decode_cost(&self) -> u64 {
        self.parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.decode_cost))
    }

    /// Writes the plan as about `parts` files.
    fn build(index: &VideoIndex, file: &[u8], plan: Plan, parts: usize) -> Result<Self, CutError> {
        if file.len() != index.file_bytes {
            return Err(CutError::OtherFile);
        }
        if index.track.copied_header_bytes() > MAX_COPIED_HEADER_BYTES {
            return Err(CutError::Headers);
        }
        let total = plan.samples();
        let parts = parts.min(plan.segments.len());
        let mut groups: Vec<Vec<Segment>> = Vec::new();
        let mut done = 0;
        for segment in plan.segments {
            let samples = segment.samples.len();
            // Groups are closed at multiples of the mean cost.
            let is_full = done * parts >= total * groups.len() && groups.len() < parts;
            // libavcodec skips the pictures behind a recovery point that does not come first.
            let is_alone = segment.start == RandomAccess::Open && index.track.codec == Codec::H264;
            match groups.last_mut() {
                Some(group) if !is_full && !is_alone => group.push(segment),
                _ => groups.push(vec![segment]),
            }
            done += samples;
        }
        let build = |group: Vec<Segment>| CutPart::build(index, file, &group, &plan.wanted);
        Ok(Self { parts: groups.into_iter().map(build).collect::<Result<_, _>>()? })
    }
}

/// A wanted frame inside a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutFrame {
    /// The number of the frame in the original.
    pub frame: u64,
    /// The number of the frame in the part.
    pub position: u32,
}

/// A piece of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// New bytes: headers, and patched NAL unit headers.
    Bytes(Vec<u8>),
    /// A range of the original file.
    File(Range<usize>),
}

/// An mp4 file with a part of the wanted frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutPart {
    /// The content, in pieces, so that it is copied only once.
    pub pieces: Vec<Piece>,
    /// The wanted frames, by position.
    pub frames: Vec<CutFrame>,
    /// The number of frames of the part. Fewer decoded frames mean a damaged file.
    pub samples: u32,
    /// Samples times pixels.
    pub decode_cost: u64,
}

impl CutPart {
    /// Returns the length of the file in bytes.
    pub fn len(&self) -> usize {
        let lengths = self.pieces.iter().map(|piece| match piece {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::File(range) => range.len(),
        });
        lengths.sum()
    }

    /// Returns `true` if the file has no bytes, which is never the case.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the file. `original` must be the file that was cut: ranges beyond its end are left
    /// out, and the result is shorter than [`len`](Self::len).
    pub fn to_vec(&self, original: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        for piece in &self.pieces {
            match piece {
                Piece::Bytes(own) => bytes.extend_from_slice(own),
                Piece::File(range) => {
                    bytes.extend_from_slice(original.get(range.clone()).unwrap_or_default());
                }
            }
        }
        bytes
    }

    fn build(
        index: &VideoIndex,
        file: &[u8],
        segments: &[Segment],
        wanted: &BTreeMap<u32, u64>,
    ) -> Result<Self, CutError> {
        let ranks = ranks(index, segments);
        let kept = || segments.iter().flat_map(|segment| &segment.samples).copied();
        let mut frames: Vec<CutFrame> = kept()
            .zip(&ranks)
            .filter_map(|(sample, &position)| {
                Some(CutFrame { frame: *wanted.get(&sample)?, position })
            })
            .collect();
        frames.sort_by_key(|frame| frame.position);
        let mut pieces = vec![Piece::Bytes(write::header(index, file, kept(), &ranks)?)];
        for (number, segment) in segments.iter().enumerate() {
            for (place, &sample) in segment.samples.iter().enumerate() {
                let range = index.track.samples[sample as usize].range();
                let is_behind_gap = number > 0 && place == 0;
                if is_behind_gap
                    && segment.start == RandomAccess::Open
                    && index.track.codec == Codec::Hevc
                {
                    push_as_bla(&mut pieces, file, range, index.length_size.into());
                } else {
                    push_range(&mut pieces, range);
                }
            }
        }
        let samples = ranks.len() as u32;
        let decode_cost = u64::from(samples).saturating_mul(index.pixels());
        Ok(Self { pieces, frames, samples, decode_cost })
    }
}

/// Returns the presentation position of each kept sample inside the part: its rank by time inside
/// the segment, behind all samples of earlier segments.
fn ranks(index: &VideoIndex, segments: &[Segment]) -> Vec<u32> {
    let mut ranks = Vec::new();
    for segment in segments {
        let base = ranks.len();
        let mut order: Vec<usize> = (0..segment.samples.len()).collect();
        order.sort_by_key(|&place| index.track.samples[segment.samples[place] as usize].pts);
        ranks.resize(base + order.len(), 0);
        for (rank, place) in order.into_iter().enumerate() {
            ranks[base + place] = (base + rank) as u32;
        }
    }
    ranks
}

/// Appends a range of the file, joined with the last one if it follows.
fn push_range(pieces: &mut Vec<Piece>, range: Range<usize>) {
    if range.is_empty() {
        return;
    }
    match pieces.last_mut() {
        Some(Piece::File(last)) if last.end == range.start => last.end = range.end,
        _ => pieces.push(Piece::File(range)),
    }
}

/// Appends a CRA as a BLA.
fn push_as_bla(pieces: &mut Vec<Piece>, file: &[u8], range: Range<usize>, length_size: usize) {
    let sample = file.get(range.clone()).unwrap_or_default();
    let mut at = range.start;
    for (place, byte) in hevc::cra_as_bla(sample, length_size) {
        push_range(pieces, at..range.start + place);
        pieces.push(Piece::Bytes(vec![byte]));
        at = range.start + place + 1;
    }
    push_range(pieces, at..range.end);
}
