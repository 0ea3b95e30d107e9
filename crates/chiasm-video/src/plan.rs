//! The plan of a cut: the samples that the wanted frames depend on.

use std::collections::BTreeMap;

use crate::codec::RandomAccess;
use crate::error::CutError;
use crate::index::VideoIndex;
use crate::track::Codec;

/// Samples that are decoded from a safe start.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(crate) start: RandomAccess,
    /// The positions of the samples, in decoding order; the first is the safe start.
    pub(crate) samples: Vec<u32>,
}

/// The samples to decode.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) segments: Vec<Segment>,
    /// The wanted frames by the positions of their samples.
    pub(crate) wanted: BTreeMap<u32, u64>,
}

impl Plan {
    /// Returns the number of samples.
    pub(crate) fn samples(&self) -> usize {
        self.segments.iter().map(|segment| segment.samples.len()).sum()
    }

    /// Returns the number of segments that begin with a recovery point of H.264. Each has to begin
    /// a file of its own.
    fn own_files(&self) -> usize {
        self.segments.iter().filter(|segment| segment.start == RandomAccess::Open).count()
    }
}

/// The cost of opening one more file, in samples: 12 ms, where a picture of 720p takes 2 ms.
const FILE_COST: usize = 6;

/// Plans a cut: each wanted sample, from the last safe start before it, without droppable samples.
///
/// Uses recovery points of H.264 only if that is cheaper.
pub(crate) fn plan(index: &VideoIndex, wanted: &[u64]) -> Result<Plan, CutError> {
    let starts = starts(index, |start| start == RandomAccess::Closed);
    let all_starts = self::starts(index, |start| start != RandomAccess::No);
    if index.track.codec != Codec::H264 {
        return plan_from(index, wanted, &all_starts);
    }
    let plan = plan_from(index, wanted, &starts)?;
    if all_starts.len() == starts.len() {
        return Ok(plan);
    }
    let split = plan_from(index, wanted, &all_starts)?;
    let is_cheaper = split.samples() + FILE_COST * split.own_files() < plan.samples();
    Ok(if is_cheaper { split } else { plan })
}

/// Plans a cut with these safe starts.
fn plan_from(index: &VideoIndex, wanted: &[u64], starts: &[u32]) -> Result<Plan, CutError> {
    if wanted.is_empty() {
        return Err(CutError::NothingWanted);
    }
    if index.has_duplicate_times {
        return Err(CutError::DuplicateTimes);
    }
    if index.has_changing_sets {
        return Err(CutError::ParameterSets);
    }
    let mut frames = BTreeMap::new();
    for &frame in wanted {
        let sample = usize::try_from(frame).ok().and_then(|frame| index.order.get(frame));
        frames.insert(*sample.ok_or(CutError::BeyondIndex)?, frame);
    }
    let mut ends: BTreeMap<u32, u32> = BTreeMap::new();
    for &sample in frames.keys() {
        let start = start_for(index, starts, sample).ok_or(CutError::BeyondIndex)?;
        let end = ends.entry(start).or_insert(sample);
        *end = sample.max(*end);
    }
    let is_kept =
        |sample: &u32| frames.contains_key(sample) || !index.roles[*sample as usize].is_droppable;
    let mut segments: Vec<Segment> = Vec::new();
    let mut next = 0;
    for (start, end) in ends {
        match segments.last_mut() {
            // A picture shown before its key frame is decoded from the key frame before that.
            Some(previous) if start < next => {
                previous.samples.extend((next..=end).filter(is_kept));
            }
            _ => segments.push(Segment {
                start: index.roles[start as usize].start,
                samples: (start..=end).filter(is_kept).collect(),
            }),
        }
        next = next.max(end + 1);
    }
    for segment in &mut segments {
        drop_undecodable(index, segment);
    }
    Ok(Plan { segments, wanted: frames })
}

/// Returns the positions of the safe starts of some kinds.
fn starts(index: &VideoIndex, is_used: impl Fn(RandomAccess) -> bool) -> Vec<u32> {
    let roles = (0u32..).zip(&index.roles);
    let mut starts: Vec<u32> =
        roles.filter(|(_, role)| is_used(role.start)).map(|(position, _)| position).collect();
    let first = index.track.kept.start as u32;
    if starts.first().is_none_or(|&start| start > first) {
        // The first sample that OpenCV decodes is a safe start in any case.
        starts.insert(0, first);
    }
    starts
}

/// Returns the safe start from which a sample is decoded: the last one before it, or an earlier one
/// for a picture that is shown before an open start.
fn start_for(index: &VideoIndex, starts: &[u32], sample: u32) -> Option<u32> {
    let samples = &index.track.samples;
    let mut at = starts.partition_point(|&start| start <= sample).checked_sub(1)?;
    let is_leading = |at: usize| {
        let start = starts[at] as usize;
        index.roles[start].start == RandomAccess::Open
            && samples[sample as usize].pts < samples[start].pts
    };
    while at > 0 && is_leading(at) {
        at -= 1;
    }
    Some(starts[at])
}

/// Drops the pictures that are shown before an open start: they refer to samples that the cut
/// leaves out, and decoders skip them.
fn drop_undecodable(index: &VideoIndex, segment: &mut Segment) {
    let samples = &index.track.samples;
    let Some(&first) = segment.samples.first() else { return };
    if segment.start == RandomAccess::Open {
        let first_pts = samples[first as usize].pts;
        segment.samples.retain(|&sample| samples[sample as usize].pts >= first_pts);
    }
}
