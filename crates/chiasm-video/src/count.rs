//! The number of frames as vLLM determines it.
//!
//! vLLM (`multimodal/video_decoders/opencv.py`) takes OpenCV's `CAP_PROP_FRAME_COUNT`, seeks to the
//! end, and corrects the count if OpenCV reports a lower position there and the stream really ends.
//! OpenCV's position is the time of the frame where the seek landed, times the average rate, plus
//! the frames read since. With a variable rate this is not the number of frames before, so the
//! correction can be wrong; it is predicted here with its errors.

use crate::track::{Container, Sample, Timing, Track};

/// The distance in frames from its target at which OpenCV tries to land first.
const FIRST_DISTANCE: i64 = 16;

/// The visible frames in presentation order, and the places where a seek can land.
pub(crate) struct FrameCounter<'a> {
    track: &'a Track,
    /// The samples in libavformat's index, by position.
    entries: Vec<u32>,
    /// The places in `entries` of visible samples.
    visible_entries: Vec<u32>,
    /// The visible samples' times, sorted.
    times: &'a [i64],
    fps: f64,
    seconds_per_tick: f64,
}

impl<'a> FrameCounter<'a> {
    /// Creates a counter. `times` are the sorted times of the visible samples.
    pub(crate) fn new(track: &'a Track, times: &'a [i64]) -> Self {
        let Timing { ticks: (numerator, denominator), fps, .. } = track.timing;
        // The index of a Matroska file has only key frames.
        let is_indexed = |sample: &Sample| track.container != Container::Matroska || sample.is_sync;
        let positions = track.kept.start as u32..track.kept.end as u32;
        let entries: Vec<u32> =
            positions.filter(|&at| is_indexed(&track.samples[at as usize])).collect();
        let visible_entries = (0u32..)
            .zip(&entries)
            .filter(|&(_, &at)| track.samples[at as usize].is_visible)
            .map(|(place, _)| place)
            .collect();
        let seconds_per_tick = f64::from(denominator) / f64::from(numerator);
        Self { track, entries, visible_entries, times, fps, seconds_per_tick }
    }

    /// Returns vLLM's frame count, or `None` if it cannot be predicted.
    pub(crate) fn frames(&self) -> Option<u64> {
        let timing = &self.track.timing;
        let (least, most) = timing.header_frames;
        let frames = self.corrected(least)?;
        if self.corrected(most)? != frames
            || timing.has_unknown_seek_points && !self.has_constant_rate()
        {
            return None;
        }
        u64::try_from(frames).ok()
    }

    /// Returns `true` if the time of each frame gives its number.
    fn has_constant_rate(&self) -> bool {
        self.times.iter().zip(0..).all(|(&time, number)| self.number(time) == number)
    }

    /// Corrects the header's number of frames as vLLM does.
    fn corrected(&self, header_frames: i64) -> Option<i64> {
        if header_frames <= 0 {
            return None;
        }
        let (position, is_at_end) = self.seek_to_end(header_frames);
        let is_corrected = is_at_end && position > 0 && position < header_frames - 1;
        Some(if is_corrected { position } else { header_frames })
    }

    /// Returns OpenCV's number of a frame: `dts_to_frame_number`.
    fn number(&self, time: i64) -> i64 {
        let seconds = (time - self.track.timing.start) as f64 * self.seconds_per_tick;
        (self.fps * seconds + 0.5) as i64
    }

    /// Returns OpenCV's position after a seek to the end, and `true` if no frame is left:
    /// `CvCapture_FFMPEG::seek`.
    fn seek_to_end(&self, header_frames: i64) -> (i64, bool) {
        // OpenCV takes the duration in microseconds for a number of frames.
        let target = self.track.timing.duration_us.min(header_frames);
        if target <= 1 {
            // The first frame is read, and perhaps the only one.
            return (target, target == 1 && self.times.len() == 1);
        }
        let mut distance = FIRST_DISTANCE;
        loop {
            let wanted = (target - distance).max(0);
            // Behind the last visible frame there is nothing to read, and no time.
            let landed = self.landing(wanted);
            let number = landed.map_or(-1, |landed| self.number(self.times[landed]));
            let left = landed.map_or(0, |landed| (self.times.len() - 1 - landed) as i64);
            if (0..target).contains(&number) {
                let read = left.min(target - 1 - number);
                return (number + read + 1, left == read);
            }
            if wanted == 0 {
                return (number, left == 0);
            }
            distance = distance.saturating_mul(3) / 2;
        }
    }

    /// Returns the number of the first frame behind a seek to `wanted`, if there is one.
    fn landing(&self, wanted: i64) -> Option<usize> {
        let seconds = wanted as f64 / self.fps;
        let ticks = (seconds / self.seconds_per_tick + 0.5) as i64;
        let time = self.track.timing.seek_origin.saturating_add(ticks);
        let last = self.search(time)?;
        let key = (0..=last).rev().map(|place| self.entry(place)).find(|entry| entry.is_sync);
        // Frames that are shown before the key frame are not decoded after a seek.
        let key = key.unwrap_or(self.entry(0));
        let landed = self.times.partition_point(|&time| time < key.pts);
        (landed < self.times.len()).then_some(landed)
    }

    fn entry(&self, place: usize) -> &Sample {
        &self.track.samples[self.entries[place] as usize]
    }

    /// Returns the place of the last entry at or before `time`, or of the first entry.
    ///
    /// Follows `ff_index_search_timestamp`, which hidden entries mislead.
    fn search(&self, time: i64) -> Option<usize> {
        let count = self.entries.len();
        let last = count.checked_sub(1)?;
        let mut lower = if self.entry(last).seek_time < time { Some(last) } else { None };
        let mut upper = count;
        while upper - lower.map_or(0, |lower| lower.min(upper)) > usize::from(lower.is_some()) {
            let middle = match lower {
                Some(lower) => lower.midpoint(upper),
                None => upper.saturating_sub(1) / 2,
            };
            let place = self.next_visible(middle, upper, time);
            let found = self.entry(place).seek_time;
            if found >= time {
                upper = place;
            }
            if found <= time {
                lower = Some(place);
            }
        }
        Some(lower.unwrap_or(0))
    }

    /// Returns the next visible entry, unless the search would leave its range.
    fn next_visible(&self, place: usize, upper: usize, time: i64) -> usize {
        if self.entry(place).is_visible {
            return place;
        }
        let limit = upper.min(self.entries.len() - 1);
        let next = self.visible_entries.partition_point(|&visible| (visible as usize) < place);
        let next = self.visible_entries.get(next).map_or(limit, |&next| next as usize).min(limit);
        if next == upper && self.entry(next).seek_time >= time {
            return upper - 1;
        }
        next
    }
}
