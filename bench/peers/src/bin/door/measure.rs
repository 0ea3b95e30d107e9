//! Measures all sides: compares prompt lengths, fills caches, then sends load side by side, case by
//! case, round by round.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::RangeInclusive;
use std::time::Duration;

use peers::numbers::{median, quantile};
use peers::row::{Metric, Row, less, more, neutral};

use crate::client::Connection;
use crate::load::{self, Outcome};
use crate::ours::BASELINE;
use crate::side::Side;
use crate::workload::{Case, PROMPT_TOKENS, Workload};

/// The number of requests by which the length of text prompts is calibrated.
const CALIBRATION_REQUESTS: usize = 20;
/// The time of load before a side is measured.
const WARM_UP: Duration = Duration::from_secs(1);
const WARM_UP_CLIENTS: usize = 16;
/// The number of distinct images before a side is measured. They fill our shared memory twice, so
/// that used memory is measured: with three engines it holds 300 images. Slow sides, which have no
/// shared memory, get fewer images.
const WARM_UP_IMAGES: usize = 600;
const MAX_WARM_UPS: u32 = 15;
/// The metrics of bursts that have a limit.
const TTFT_MEAN: &str = "TTFT mean";
const BURST_DONE: &str = "burst done after";
/// The name of the limit of bursts: requests that are done one after the other, evenly spaced, in
/// the same total time.
const EVENLY_SPACED: &str = "evenly spaced";

/// The cases to measure, each with its numbers of concurrent clients.
pub(crate) type Cases<'a> = [(Case, &'a [usize])];
/// The expected prompt tokens by the numbers of side and case.
pub(crate) type Expected = BTreeMap<(usize, usize), RangeInclusive<u64>>;

/// The results of a case with a number of concurrent clients.
pub(crate) struct CaseResults {
    pub(crate) case: Case,
    pub(crate) clients: usize,
    rounds: usize,
    /// The outcomes of all rounds by side; none for a side that does not take part.
    pub(crate) outcomes: Vec<Vec<Outcome>>,
    /// For each side, `true` if its prompts have the same lengths as the first side's; `None` if
    /// they were not compared.
    equal: Vec<Option<bool>>,
}

impl CaseResults {
    /// Returns the name of the case with the number of clients.
    pub(crate) fn name(&self) -> String {
        self.name_with(self.case.name(), "client")
    }

    /// Returns a name of the case with the number of clients, which are called `noun`.
    pub(crate) fn name_with(&self, case: &str, noun: &str) -> String {
        let plural = if self.clients == 1 { "" } else { "s" };
        format!("{case}, {} {noun}{plural}", self.clients)
    }

    /// Returns our CPU time for the same work as a multiple of a peer's: the median over rounds.
    /// In each round both sides had the same number of measurements.
    pub(crate) fn cpu_share(&self, ours: usize, peer: usize) -> f64 {
        let cpu = |outcomes: &[Outcome]| {
            let cpu: f64 = outcomes.iter().map(|it| it.cpu.as_secs_f64()).sum();
            cpu / outcomes.iter().map(|it| work(self.case, it)).sum::<f64>()
        };
        let [ours, peer] = [ours, peer].map(|side| {
            let outcomes = &self.outcomes[side];
            outcomes.chunks((outcomes.len() / self.rounds).max(1))
        });
        median(ours.zip(peer).map(|(ours, peer)| cpu(ours) / cpu(peer)).collect())
    }

    /// Returns the rows of all metrics that our side has, in comparison with a peer.
    pub(crate) fn rows(&self, name: &str, [ours, peer]: [usize; 2], peer_name: &str) -> Vec<Row> {
        let equal = self.equal[peer].map(|equal| equal && self.equal[ours].unwrap_or(true));
        let [ours, peer] = [ours, peer].map(|side| metrics(self.case, &self.outcomes[side]));
        let rows = ours.into_iter().zip(peer).map(|((metric, ours), (_, peer))| Row {
            equal,
            ..metric.row(name, peer_name, ours, peer)
        });
        rows.filter(|row| !row.ours.is_nan()).collect()
    }

    /// Returns the row of the mean time to first token in a burst, beside the limit: the mean if
    /// the requests were done one after the other within the same total time.
    pub(crate) fn burst_limit(&self, side: usize) -> Option<Row> {
        if !self.case.is_burst() {
            return None;
        }
        let metrics = metrics(self.case, &self.outcomes[side]);
        let number = |name| {
            let metric = metrics.iter().find(|(metric, _)| metric.name == name);
            metric.map_or(f64::NAN, |(_, number)| *number)
        };
        let clients = self.clients as f64;
        let limit = number(BURST_DONE) * (clients + 1.0) / (2.0 * clients);
        let row = less(TTFT_MEAN, "ms").row(&self.name(), EVENLY_SPACED, number(TTFT_MEAN), limit);
        Some(Row { ratio: row.ours / row.peer, ..row })
    }

    /// Returns the rows of cost and latency. Only the CPU time has a ratio, `cpu_ratio`, which was
    /// measured in pairs.
    pub(crate) fn cost_rows(
        &self,
        name: &str,
        sides: [usize; 2],
        peer_name: &str,
        cpu_ratio: f64,
    ) -> Vec<Row> {
        let mut rows = self.rows(name, sides, peer_name);
        rows.retain(|row| {
            let is_other = |part: &str| row.metric.contains(part);
            !["CPU second", "events per", "origin requests"].into_iter().any(is_other)
        });
        for row in &mut rows {
            let is_cpu = row.metric.starts_with("CPU per");
            row.ratio = if is_cpu { cpu_ratio } else { f64::NAN };
            row.equal = row.equal.filter(|_| is_cpu);
        }
        rows
    }
}

/// Converts CPU time per request from ms to µs.
pub(crate) fn in_microseconds(row: Row) -> Row {
    if row.unit != "ms" || !row.metric.starts_with("CPU per") {
        return row;
    }
    Row { unit: "µs", ours: 1e3 * row.ours, peer: 1e3 * row.peer, ..row }
}

/// Sets the length of text prompts, by the tokens that a side counts.
async fn calibrate(side: &Side, workload: &RefCell<Workload>) -> Result<(), Box<dyn Error>> {
    let mut connection = Connection::open(side.address).await?;
    let mut tokens = 0;
    for _ in 0..CALIBRATION_REQUESTS {
        let body = workload.borrow_mut().next(Case::Text, &side.url);
        tokens += connection.chat(body).await?.0.prompt_tokens;
    }
    let mut workload = workload.borrow_mut();
    let all_words = workload.prompt_words() as u64 * CALIBRATION_REQUESTS as u64;
    workload.set_prompt_words(usize::try_from(all_words * PROMPT_TOKENS / tokens.max(1))?);
    Ok(())
}

/// Sends the same requests to all sides that count alike. Returns for each side whether its counts
/// equal the first side's, and the rows of prompt lengths.
async fn compare_lengths(
    sides: &[Side],
    case: Case,
    workload: &RefCell<Workload>,
) -> Result<(Vec<Option<bool>>, Vec<Row>), Box<dyn Error>> {
    let compared = case.spec().compared;
    let mut different = vec![None; sides.len()];
    for _ in 0..compared {
        let text = workload.borrow_mut().next(case, "");
        let mut first = None;
        for (side, different) in sides.iter().zip(&mut different) {
            if !side.supports(case) || !side.counts_alike(case) {
                continue;
            }
            // All images have the same number of tokens; texts have not.
            let body = if case.has_image() {
                workload.borrow_mut().next(case, &side.url)
            } else {
                text.clone()
            };
            let answer = Connection::open(side.address).await?.chat(body).await;
            let (usage, _) =
                answer.map_err(|error| format!("{}, '{}': {error}", side.name, case.name()))?;
            let count = usage.prompt_tokens;
            *different.get_or_insert(0) += usize::from(*first.get_or_insert(count) != count);
        }
    }
    let lengths = neutral("prompts of another length", "prompts");
    let mut rows = Vec::new();
    for (side, different) in sides.iter().zip(&different).skip(1) {
        let Some(different) = *different else { continue };
        let row = lengths.row(case.name(), &side.name, compared as f64, different as f64);
        rows.push(Row { equal: Some(different == 0), ..row });
    }
    let equal = different.into_iter().map(|different| different.map(|count| count == 0));
    Ok((equal.collect(), rows))
}

/// Measures all sides in turns, round by round, and calls `after_round` after each round. Returns
/// the results of all cases, and the rows of prompt lengths.
///
/// First calibrates the length of text prompts with the side `calibrating`, compares the sides'
/// counts of tokens, and fills caches.
pub(crate) async fn measure(
    sides: &mut [Side],
    calibrating: usize,
    cases: &Cases<'_>,
    rounds: usize,
    workload: &RefCell<Workload>,
    mut after_round: impl AsyncFnMut(&mut [Side], &Expected) -> Result<(), Box<dyn Error>>,
) -> Result<(Vec<CaseResults>, Vec<Row>), Box<dyn Error>> {
    calibrate(&sides[calibrating], workload).await?;
    let mut results = Vec::new();
    let mut length_rows = Vec::new();
    for (number, &(case, clients)) in cases.iter().enumerate() {
        let (equal, rows) = compare_lengths(sides, case, workload).await?;
        length_rows.extend(rows);
        results.extend(clients.iter().map(|&clients| {
            let outcomes = sides.iter().map(|_| Vec::new()).collect();
            (number, CaseResults { case, clients, rounds, outcomes, equal: equal.clone() })
        }));
    }
    let expected = warm_up(sides, cases, workload).await?;
    // Against a baseline small differences count. With the sides in order and then in reverse, a
    // steady change of the machine's speed affects all of them alike.
    let is_mirrored = sides.iter().any(|side| side.name == BASELINE);
    for round in 0..rounds {
        eprintln!("round {} of {rounds}", round + 1);
        for (number, results) in &mut results {
            let CaseResults { case, clients, outcomes, .. } = results;
            // Each round begins with another side.
            let mut turns: Vec<usize> =
                (0..sides.len()).map(|turn| (turn + round) % sides.len()).collect();
            if is_mirrored {
                turns.extend(turns.clone().iter().rev());
            }
            turns.retain(|&side| sides[side].supports(*case));
            for side in turns {
                let expected = &expected[&(side, *number)];
                let time = case.spec().time;
                let outcome =
                    load::run(&sides[side], workload, *case, *clients, time, expected).await?;
                outcomes[side].push(outcome);
            }
        }
        after_round(sides, &expected).await?;
    }
    Ok((results.into_iter().map(|(_, results)| results).collect(), length_rows))
}

/// Fills caches. Returns the expected prompt tokens of each side and case.
async fn warm_up(
    sides: &[Side],
    cases: &Cases<'_>,
    workload: &RefCell<Workload>,
) -> Result<Expected, Box<dyn Error>> {
    let mut expected = Expected::new();
    for (index, side) in sides.iter().enumerate() {
        for (number, &(case, _)) in cases.iter().enumerate() {
            if !side.supports(case) {
                continue;
            }
            eprintln!("warming up {}, {}", side.name, case.name());
            let mut counted = 0;
            // A long answer takes seconds, and its count would not be used.
            if !matches!(case, Case::Long(..)) {
                let body = workload.borrow_mut().next(case, &side.url);
                counted = Connection::open(side.address).await?.chat(body).await?.0.prompt_tokens;
            }
            let range = case.prompt_tokens(counted);
            let mut answered = 0;
            for _ in 0..MAX_WARM_UPS {
                let outcome =
                    load::run(side, workload, case, WARM_UP_CLIENTS, WARM_UP, &range).await?;
                answered += outcome.latencies.len();
                if case != Case::Distinct || answered >= WARM_UP_IMAGES {
                    break;
                }
            }
            expected.insert((index, number), range);
        }
    }
    Ok(expected)
}

/// Returns the number of requests, or of tokens of streams.
fn work(case: Case, outcome: &Outcome) -> f64 {
    if case.is_streamed() { outcome.tokens as f64 } else { outcome.latencies.len() as f64 }
}

/// Returns the CPU seconds of a frontend per request, or per token of a stream.
pub(crate) fn cpu(case: Case, outcome: &Outcome) -> f64 {
    outcome.cpu.as_secs_f64() / work(case, outcome)
}

/// Returns the metrics of a side: medians of all outcomes, and quantiles of all times together.
fn metrics(case: Case, outcomes: &[Outcome]) -> Vec<(Metric, f64)> {
    let median_of =
        |number: &dyn Fn(&Outcome) -> f64| median(outcomes.iter().map(number).collect());
    let sorted = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times
    };
    let latencies = outcomes.iter().flat_map(|it| &it.latencies);
    let latencies = sorted(latencies.map(|time| time.as_secs_f64() * 1e3).collect());
    let delays = outcomes.iter().flat_map(|it| &it.delays);
    let delays = sorted(delays.map(|&time| time as f64 / 1e3).collect());
    if case.is_burst() {
        return burst_metrics(outcomes, &latencies);
    }
    let per_cpu = median_of(&|it| work(case, it) / it.cpu.as_secs_f64());
    let cpu = median_of(&|it| cpu(case, it));
    let rate = median_of(&|it| work(case, it) / it.wall.as_secs_f64());
    let mut metrics = if case.is_streamed() {
        vec![
            (more("output tokens per CPU second", "tokens/s"), per_cpu),
            (less("CPU per output token", "µs"), cpu * 1e6),
            (neutral("output tokens per second", "tokens/s"), rate),
            (
                neutral("events per output token", "events"),
                median_of(&|it| it.events as f64 / work(case, it)),
            ),
        ]
    } else {
        vec![
            (more("requests per CPU second", "requests/s"), per_cpu),
            (less("CPU per request", "ms"), cpu * 1e3),
            (more("requests per second", "requests/s"), rate),
        ]
    };
    metrics.extend([
        (less("engine to client p50", "µs"), quantile(&delays, 0.5)),
        (less("engine to client p99", "µs"), quantile(&delays, 0.99)),
        (less("latency p50", "ms"), quantile(&latencies, 0.5)),
        (less("latency p99", "ms"), quantile(&latencies, 0.99)),
        (
            neutral("origin requests per request", "requests"),
            median_of(&|it| it.origin_requests as f64 / it.latencies.len() as f64),
        ),
        // Shows the bottleneck: on a saturated machine it is the busier of frontend and engines.
        (neutral("engines", "cores"), median_of(&|it| it.engines_cpu.div_duration_f64(it.wall))),
        // The load generator has one thread.
        (
            neutral("load generator", "cores"),
            median_of(&|it| it.clients_cpu.div_duration_f64(it.wall)),
        ),
    ]);
    metrics
}

/// Returns the metrics of bursts. `latencies` are those of all requests in milliseconds.
fn burst_metrics(outcomes: &[Outcome], latencies: &[f64]) -> Vec<(Metric, f64)> {
    let mean = |times: &[f64]| times.iter().sum::<f64>() / times.len() as f64;
    let median_of =
        |number: &dyn Fn(&Outcome) -> f64| median(outcomes.iter().map(number).collect());
    let mut ttfts: Vec<f64> = outcomes.iter().flat_map(|it| &it.ttfts_ms).copied().collect();
    ttfts.sort_by(f64::total_cmp);
    let last = latencies.last().copied().unwrap_or(f64::NAN);
    vec![
        (less(TTFT_MEAN, "ms"), median_of(&|it| mean(&it.ttfts_ms))),
        (less("TTFT p50", "ms"), quantile(&ttfts, 0.5)),
        (less("TTFT p90", "ms"), quantile(&ttfts, 0.9)),
        (less(BURST_DONE, "ms"), median_of(&|it| it.wall.as_secs_f64() * 1e3)),
        (less("slowest answer", "ms"), last),
        (less("CPU per request", "ms"), median_of(&|it| cpu_of_requests(it) * 1e3)),
    ]
}

/// Returns the CPU seconds of a frontend per request.
fn cpu_of_requests(outcome: &Outcome) -> f64 {
    outcome.cpu.as_secs_f64() / outcome.latencies.len() as f64
}
