//! The results of a run by intervals.

use serde::Serialize;

use crate::histogram::Histogram;
use crate::latency::Latency;
use crate::virtual_time::{Nanos, seconds};

/// The maximum number of intervals. When it is exceeded, neighbouring intervals are merged in
/// pairs.
const MAX_INTERVALS: usize = 96;
/// The initial length of an interval: about a millisecond.
const INITIAL_LENGTH: Nanos = 1 << 20;

/// The results of the requests that arrived in one interval of a run, and the work of the engines
/// in it. All intervals of a run have the same length. The last one ends with or after the last
/// arrival.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// The end of the interval, in virtual seconds from the first arrival.
    pub end: f64,
    /// The number of requests that arrived.
    pub requests: u64,
    /// The time from the arrival of these requests to their first tokens; `None` if none has one.
    pub ttft_ms: Option<Latency>,
    /// The fraction of their prompt tokens that the engines found in their KV caches; `None` if
    /// none of the requests ended.
    pub hit_rate: Option<f64>,
    /// The work of the worker with the most, relative to the mean, as in
    /// [`PolicyReport::balance`](crate::PolicyReport::balance). `None` if no engine worked, and for
    /// an interval that did not end before the run.
    pub balance: Option<f64>,
    /// The mean work, in seconds per second and worker.
    pub work: Option<f64>,
}

/// Counts by intervals. The number of intervals is bounded, so their length grows with the run.
pub(crate) struct Timeline {
    length: Nanos,
    counts: Vec<IntervalCounts>,
    /// The total work of each engine up to the end of each interval that has ended.
    work: Vec<Vec<f64>>,
}

/// The counts of the requests that arrived in one interval.
struct IntervalCounts {
    requests: u64,
    ttft: Histogram,
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl Timeline {
    /// Creates an empty timeline.
    pub(crate) fn new() -> Self {
        Self { length: INITIAL_LENGTH, counts: Vec::new(), work: Vec::new() }
    }

    /// Advances the time to `now`. `work` returns the total work of each engine up to then.
    pub(crate) fn advance(&mut self, now: Nanos, work: impl Fn() -> Vec<f64>) {
        while now >= self.length * (self.work.len() as Nanos + 1) {
            if self.work.len() == MAX_INTERVALS {
                self.merge();
            } else {
                self.work.push(work());
            }
        }
    }

    /// Records the arrival of a request.
    pub(crate) fn record_arrival(&mut self, arrival: Nanos) {
        self.counts_at(arrival).requests += 1;
    }

    /// Records the first token of a request, `after` its arrival.
    pub(crate) fn record_first_token(&mut self, arrival: Nanos, after: Nanos) {
        self.counts_at(arrival).ttft.add(after, 1);
    }

    /// Records the end of a request, of whose prompt `cached_tokens` were found in a cache.
    pub(crate) fn record_end(&mut self, arrival: Nanos, prompt_tokens: u64, cached_tokens: u64) {
        let counts = self.counts_at(arrival);
        counts.prompt_tokens += prompt_tokens;
        counts.cached_tokens += cached_tokens;
    }

    /// Returns the counts of the interval of an arrival.
    fn counts_at(&mut self, arrival: Nanos) -> &mut IntervalCounts {
        while arrival / self.length >= MAX_INTERVALS as Nanos {
            self.merge();
        }
        let at = (arrival / self.length) as usize;
        if self.counts.len() <= at {
            self.counts.resize_with(at + 1, IntervalCounts::new);
        }
        &mut self.counts[at]
    }

    /// Merges neighbouring intervals in pairs.
    fn merge(&mut self) {
        self.length *= 2;
        let mut merged: Vec<IntervalCounts> = Vec::with_capacity(MAX_INTERVALS);
        for (at, counts) in std::mem::take(&mut self.counts).into_iter().enumerate() {
            match merged.last_mut().filter(|_| at % 2 == 1) {
                Some(previous) => previous.add(&counts),
                None => merged.push(counts),
            }
        }
        self.counts = merged;
        // The totals at the end of a merged interval are those at the end of its second half.
        let mut at = 0;
        self.work.retain(|_| {
            at += 1;
            at % 2 == 0
        });
    }

    /// Returns the intervals up to the last arrival.
    pub(crate) fn intervals(&self) -> Vec<Interval> {
        let length = seconds(self.length);
        let interval = |(at, counts): (usize, &IntervalCounts)| {
            let IntervalCounts { requests, ttft, prompt_tokens, cached_tokens } = counts;
            let work = self.work_in(at);
            let mean = work.as_ref().map(|work| work.iter().sum::<f64>() / work.len() as f64);
            let max = work.iter().flatten().copied().fold(0.0, f64::max);
            Interval {
                end: length * (at + 1) as f64,
                requests: *requests,
                ttft_ms: (ttft.count() > 0).then(|| Latency::from_histogram(ttft)),
                hit_rate: (*prompt_tokens > 0)
                    .then(|| *cached_tokens as f64 / *prompt_tokens as f64),
                balance: mean.filter(|mean| *mean > 0.0).map(|mean| max / mean),
                work: mean.map(|mean| mean / length),
            }
        };
        self.counts.iter().enumerate().map(interval).collect()
    }

    /// Returns the work of each engine in an interval; `None` if the interval has not ended.
    fn work_in(&self, at: usize) -> Option<Vec<f64>> {
        let end = self.work.get(at)?;
        let start = at.checked_sub(1).and_then(|previous| self.work.get(previous));
        let difference =
            |(engine, end): (usize, &f64)| end - start.map_or(0.0, |start| start[engine]);
        Some(end.iter().enumerate().map(difference).collect())
    }
}

impl IntervalCounts {
    fn new() -> Self {
        Self { requests: 0, ttft: Histogram::new(), prompt_tokens: 0, cached_tokens: 0 }
    }

    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.ttft.merge(&other.ttft);
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a timeline with a request each millisecond, on two engines of which one works half
    /// of the time and the other never.
    fn timeline_of(length_seconds: u64) -> Timeline {
        let mut timeline = Timeline::new();
        for millisecond in 0..length_seconds * 1000 {
            let now = millisecond * 1_000_000;
            timeline.advance(now, || vec![seconds(now) / 2.0, 0.0]);
            timeline.record_arrival(now);
            timeline.record_first_token(now, 20_000_000);
            let cached_tokens = if millisecond < length_seconds * 500 { 0 } else { 50 };
            timeline.record_end(now, 100, cached_tokens);
        }
        timeline
    }

    #[test]
    fn long_run_has_few_intervals_without_losses() {
        for length in [1, 7, 60] {
            let intervals = timeline_of(length).intervals();
            assert!(
                (MAX_INTERVALS / 2 - 1..=MAX_INTERVALS).contains(&intervals.len()),
                "{}",
                intervals.len()
            );
            assert_eq!(
                intervals.iter().map(|interval| interval.requests).sum::<u64>(),
                length * 1000
            );
            let last = &intervals[intervals.len() - 1];
            assert!(last.end >= length as f64 && last.end < length as f64 * 1.1, "{last:?}");
            let hits: Vec<f64> =
                intervals.iter().filter_map(|interval| interval.hit_rate).collect();
            assert_eq!((hits[0], hits[hits.len() - 1]), (0.0, 0.5));
        }
    }

    #[test]
    fn work_is_counted_by_interval() {
        let intervals = timeline_of(7).intervals();
        for interval in &intervals[..intervals.len() - 1] {
            assert!((interval.balance.unwrap() - 2.0).abs() < 1e-9, "{interval:?}");
            assert!((interval.work.unwrap() - 0.25).abs() < 0.02, "{interval:?}");
            assert!((interval.ttft_ms.unwrap().p90 - 20.0).abs() < 0.2);
        }
    }

    #[test]
    fn pause_is_an_interval_without_requests() {
        let mut timeline = Timeline::new();
        timeline.record_arrival(0);
        timeline.advance(10_000_000_000, || vec![1.0]);
        timeline.record_arrival(10_000_000_000);
        let intervals = timeline.intervals();
        assert_eq!(intervals.iter().filter(|interval| interval.requests == 1).count(), 2);
        let quiet = &intervals[intervals.len() / 2];
        assert_eq!(
            (quiet.requests, quiet.ttft_ms, quiet.hit_rate, quiet.balance),
            (0, None, None, None)
        );
    }
}
