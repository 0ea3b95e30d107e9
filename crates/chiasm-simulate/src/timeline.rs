//! How a run went, interval by interval.

use serde::Serialize;

use crate::histogram::Histogram;
use crate::latency::Latency;
use crate::virtual_time::{Nanos, seconds};

/// Intervals that are kept at most. When there would be more, each two become one.
const MOST: usize = 96;
/// The length of the first intervals: about a millisecond.
const FIRST: Nanos = 1 << 20;

/// What came of the requests that arrived in one interval of a run, and what the engines did in it.
/// All intervals of a run are of the same length, and the last of them ends with or after the last
/// arrival.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Its end, in virtual seconds from the first arrival.
    pub end: f64,
    /// Requests that arrived.
    pub requests: u64,
    /// The time from their arrivals to their first tokens; `None` if none of them got one.
    pub ttft_ms: Option<Latency>,
    /// The part of their prompt tokens that the engines found in their KV caches; `None` if none of
    /// them ended.
    pub hit_rate: Option<f64>,
    /// Work of the worker with the most over the mean, as
    /// [`PolicyReport::balance`](crate::PolicyReport::balance); `None` where nothing worked, and
    /// for an interval that did not end before the run.
    pub balance: Option<f64>,
    /// The mean of that work, in seconds per second and worker.
    pub work: Option<f64>,
}

/// Counts by intervals, whose number is bounded and whose length therefore grows with the run.
pub(crate) struct Timeline {
    length: Nanos,
    arrived: Vec<Arrived>,
    /// At the end of each interval that has ended, the work that each engine had done so far.
    work: Vec<Vec<f64>>,
}

/// Requests that arrived in the same interval.
struct Arrived {
    requests: u64,
    ttft: Histogram,
    prompt_tokens: u64,
    cached_tokens: u64,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        Self { length: FIRST, arrived: Vec::new(), work: Vec::new() }
    }

    /// Time has come to this moment, until which each engine has done so much work.
    pub(crate) fn pass(&mut self, now: Nanos, work: impl Fn() -> Vec<f64>) {
        while now >= self.length * (self.work.len() as Nanos + 1) {
            if self.work.len() == MOST {
                self.merge();
            } else {
                self.work.push(work());
            }
        }
    }

    /// A request arrived.
    pub(crate) fn arrived(&mut self, arrival: Nanos) {
        self.of(arrival).requests += 1;
    }

    /// A request that arrived then got its first token after so long.
    pub(crate) fn first_token(&mut self, arrival: Nanos, after: Nanos) {
        self.of(arrival).ttft.add(after, 1);
    }

    /// A request that arrived then ended, with so many tokens of its prompt found.
    pub(crate) fn ended(&mut self, arrival: Nanos, prompt_tokens: u64, cached_tokens: u64) {
        let arrived = self.of(arrival);
        arrived.prompt_tokens += prompt_tokens;
        arrived.cached_tokens += cached_tokens;
    }

    fn of(&mut self, arrival: Nanos) -> &mut Arrived {
        while arrival / self.length >= MOST as Nanos {
            self.merge();
        }
        let at = (arrival / self.length) as usize;
        if self.arrived.len() <= at {
            self.arrived.resize_with(at + 1, Arrived::none);
        }
        &mut self.arrived[at]
    }

    /// Each two intervals become one.
    fn merge(&mut self) {
        self.length *= 2;
        let mut merged: Vec<Arrived> = Vec::with_capacity(MOST);
        for (at, arrived) in std::mem::take(&mut self.arrived).into_iter().enumerate() {
            match merged.last_mut().filter(|_| at % 2 == 1) {
                Some(before) => before.add(&arrived),
                None => merged.push(arrived),
            }
        }
        self.arrived = merged;
        // What was done by the end of the second is what was done by the end of both.
        let mut at = 0;
        self.work.retain(|_| {
            at += 1;
            at % 2 == 0
        });
    }

    /// The intervals in which requests arrived, and those between them.
    pub(crate) fn intervals(&self) -> Vec<Interval> {
        let length = seconds(self.length);
        let interval = |(at, arrived): (usize, &Arrived)| {
            let Arrived { requests, ttft, prompt_tokens, cached_tokens } = arrived;
            let work = self.work_in(at);
            let mean = work.as_ref().map(|work| work.iter().sum::<f64>() / work.len() as f64);
            let most = work.iter().flatten().copied().fold(0.0, f64::max);
            Interval {
                end: length * (at + 1) as f64,
                requests: *requests,
                ttft_ms: (ttft.count() > 0).then(|| Latency::of(ttft)),
                hit_rate: (*prompt_tokens > 0)
                    .then(|| *cached_tokens as f64 / *prompt_tokens as f64),
                balance: mean.filter(|mean| *mean > 0.0).map(|mean| most / mean),
                work: mean.map(|mean| mean / length),
            }
        };
        self.arrived.iter().enumerate().map(interval).collect()
    }

    /// What each engine did in an interval; `None` if it has not ended.
    fn work_in(&self, at: usize) -> Option<Vec<f64>> {
        let until = self.work.get(at)?;
        let before = at.checked_sub(1).and_then(|before| self.work.get(before));
        let since =
            |(engine, until): (usize, &f64)| until - before.map_or(0.0, |before| before[engine]);
        Some(until.iter().enumerate().map(since).collect())
    }
}

impl Arrived {
    fn none() -> Self {
        Self { requests: 0, ttft: Histogram::new(), prompt_tokens: 0, cached_tokens: 0 }
    }

    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.ttft.add_all(&other.ttft);
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request each millisecond for so many seconds, on two engines of which one works half of
    /// the time and the other never.
    fn played(length: u64) -> Timeline {
        let mut timeline = Timeline::new();
        for millisecond in 0..length * 1000 {
            let now = millisecond * 1_000_000;
            timeline.pass(now, || vec![seconds(now) / 2.0, 0.0]);
            timeline.arrived(now);
            timeline.first_token(now, 20_000_000);
            timeline.ended(now, 100, if millisecond < length * 500 { 0 } else { 50 });
        }
        timeline
    }

    #[test]
    fn intervals_are_few_and_lose_nothing_however_long_a_run_is() {
        for length in [1, 7, 60] {
            let intervals = played(length).intervals();
            assert!((MOST / 2 - 1..=MOST).contains(&intervals.len()), "{}", intervals.len());
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
    fn work_is_that_of_the_interval() {
        let intervals = played(7).intervals();
        for interval in &intervals[..intervals.len() - 1] {
            let (balance, work) = (interval.balance.unwrap(), interval.work.unwrap());
            assert!((balance - 2.0).abs() < 1e-9 && (work - 0.25).abs() < 0.02, "{interval:?}");
            assert!((interval.ttft_ms.unwrap().p90 - 20.0).abs() < 0.2);
        }
    }

    #[test]
    fn a_pause_is_an_interval_without_requests() {
        let mut timeline = Timeline::new();
        timeline.arrived(0);
        timeline.pass(10_000_000_000, || vec![1.0]);
        timeline.arrived(10_000_000_000);
        let intervals = timeline.intervals();
        assert_eq!(intervals.iter().filter(|interval| interval.requests == 1).count(), 2);
        let quiet = &intervals[intervals.len() / 2];
        assert_eq!(
            (quiet.requests, quiet.ttft_ms, quiet.hit_rate, quiet.balance),
            (0, None, None, None)
        );
    }
}
