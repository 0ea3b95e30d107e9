//! Load: concurrent clients, each of which sends its next request when the last one is answered.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use peers::clock::thread_cpu;

use crate::client::{Connection, Response, Usage};
use crate::pieces::Pieces;
use crate::side::Side;
use crate::splits::PREFILL_WORKER;
use crate::workload::{Case, Workload};

/// The pause after the last answer, in which a frontend finishes its work on the requests.
pub(crate) const SETTLE: Duration = Duration::from_millis(50);
/// The number of tokens at both ends of a stream whose times are ignored, because other streams
/// begin and end at that time.
const EDGE_TOKENS: usize = 8;
/// The timeout of the last answers.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The measurements of all clients.
pub(crate) struct Answered<T> {
    /// The results of all requests.
    pub(crate) results: Vec<T>,
    /// The time between the first request and the end of the last answer.
    pub(crate) wall: Duration,
    /// The CPU time of the clients, all of which share one thread.
    pub(crate) cpu: Duration,
}

/// Sends the requests of each client over a connection, one after the other. Clients connect to the
/// addresses in turn. `keep` turns the key,
/// the latency and the answer of a request into a result.
pub(crate) async fn send<K, T, R: Iterator<Item = (K, Pieces)>>(
    addresses: &[SocketAddr],
    clients: impl Iterator<Item = R>,
    timeout: Duration,
    keep: impl Fn(K, Duration, Usage, Response) -> Result<T, Box<dyn Error>>,
) -> Result<Answered<T>, Box<dyn Error>> {
    let mut connections = Vec::new();
    for (requests, address) in clients.zip(addresses.iter().cycle()) {
        connections.push((Connection::open(*address).await?, requests));
    }
    let cpu = thread_cpu();
    let start = Instant::now();
    let clients = connections.into_iter().map(async |(mut connection, requests)| {
        let mut results = Vec::new();
        for (key, body) in requests {
            let start = Instant::now();
            let (usage, response) = connection.chat(body).await?;
            results.push(keep(key, start.elapsed(), usage, response)?);
        }
        Ok::<_, Box<dyn Error>>(results)
    });
    let results = tokio::time::timeout(timeout, try_join_all(clients)).await;
    let results = results.map_err(|_| "some requests were not answered in time")??;
    let wall = start.elapsed();
    let cpu = thread_cpu().saturating_sub(cpu);
    Ok(Answered { results: results.into_iter().flatten().collect(), wall, cpu })
}

/// An answered request.
#[derive(Default)]
pub(crate) struct Reply {
    pub(crate) latency: Duration,
    /// The milliseconds to the first text of a stream.
    pub(crate) ttft_ms: Option<f64>,
    pub(crate) tokens: u64,
    /// The number of events of a stream.
    pub(crate) events: u64,
    /// `true` if the answer says that another worker computed the prompt.
    pub(crate) is_split: bool,
    /// The arrivals of the tokens of a stream, without those at its ends.
    pub(crate) arrivals: Vec<u64>,
}

/// A measurement of a side.
pub(crate) struct Outcome {
    pub(crate) latencies: Vec<Duration>,
    /// The milliseconds to the first text of each stream.
    pub(crate) ttfts_ms: Vec<f64>,
    /// The number of tokens of all answers.
    pub(crate) tokens: u64,
    /// The number of events of all streams.
    pub(crate) events: u64,
    pub(crate) wall: Duration,
    /// The CPU time of the clients.
    pub(crate) clients_cpu: Duration,
    /// The CPU time of the frontend and its agents until [`SETTLE`] after the last answer.
    pub(crate) cpu: Duration,
    /// The part of `cpu` that the frontend took.
    pub(crate) frontend_cpu: Duration,
    /// The CPU time of all engines of the frontend.
    pub(crate) engines_cpu: Duration,
    /// The number of requests to the origin.
    pub(crate) origin_requests: u64,
    /// Nanoseconds from an engine's output to its arrival here, for tokens of streams whose engine
    /// writes a step log.
    pub(crate) delays: Vec<u64>,
}

/// Sends requests with `clients` at once until `time` has passed, and waits for the last answers.
///
/// # Errors
/// An answer is not a 200, its prompt tokens are not in `expected`, its own tokens do not fit the
/// case, or it was split between engines although the side does not split requests, or the reverse.
pub(crate) async fn run(
    side: &Side,
    workload: &RefCell<Workload>,
    case: Case,
    clients: usize,
    time: Duration,
    expected: &RangeInclusive<u64>,
) -> Result<Outcome, Box<dyn Error>> {
    let split_before = side.splits.count().await?;
    // Other cases may have evicted the repeated image.
    let has_first = !case.is_burst() && (case.has_image() || !case.is_streamed());
    if has_first {
        let first = workload.borrow_mut().next(case, &side.url);
        Connection::open(side.address).await?.chat(first).await?;
    }
    let origin_before = workload.borrow().origin().requests();
    let cpu_before = side.cpu()?;
    let frontend_before = side.frontend.cpu()?;
    let engines_before = side.engines_cpu()?;
    // The end is set by the first request, after all connections are open.
    let end = &Cell::new(None::<Instant>);
    let requests = (0..clients).map(|_| {
        let mut is_first = true;
        std::iter::from_fn(move || {
            let now = Instant::now();
            let deadline = end.get().unwrap_or(now + time);
            end.set(Some(deadline));
            let is_next = std::mem::take(&mut is_first) || now < deadline;
            is_next.then(|| ((), workload.borrow_mut().next(case, &side.url)))
        })
    });
    let answer_tokens = case.spec().answer_tokens;
    let keep = |(), latency, usage: Usage, response: Response| {
        let Usage { prompt_tokens, completion_tokens: tokens, .. } = usage;
        if !expected.contains(&prompt_tokens) || !answer_tokens.contains(&tokens) {
            let expected =
                format!("expected {expected:?} prompt tokens, {answer_tokens:?} answer tokens");
            return Err(format!("{usage:?}, {expected}").into());
        }
        let arrivals: Vec<u64> = response.arrivals().collect();
        let inner = EDGE_TOKENS..arrivals.len().saturating_sub(EDGE_TOKENS);
        Ok::<_, Box<dyn Error>>(Reply {
            latency,
            ttft_ms: response.ttft_ms(),
            tokens,
            events: response.events(),
            is_split: response.headers.contains_key(PREFILL_WORKER),
            arrivals: arrivals.get(inner).unwrap_or_default().to_vec(),
        })
    };
    let answered = send(&[side.address], requests, time + TIMEOUT, keep).await;
    let answered = answered.map_err(|error| {
        side.frontend.failed(&format!("failed in the case '{}': {error}", case.name()))
    })?;
    tokio::time::sleep(SETTLE).await;
    let cpu = side.cpu()?.since(&cpu_before);
    let frontend_cpu = side.frontend.cpu()?.since(&frontend_before);
    let engines_cpu = side.engines_cpu()?.since(&engines_before);
    let Answered { results: replies, wall, cpu: clients_cpu } = answered;
    let checked = side.splits.check(split_before, has_first.into(), &replies).await;
    checked.map_err(|error| format!("{}, '{}': {error}", side.name, case.name()))?;
    let arrivals: Vec<u64> = replies.iter().flat_map(|reply| &reply.arrivals).copied().collect();
    Ok(Outcome {
        latencies: replies.iter().map(|reply| reply.latency).collect(),
        ttfts_ms: replies.iter().filter_map(|reply| reply.ttft_ms).collect(),
        tokens: replies.iter().map(|reply| reply.tokens).sum(),
        events: replies.iter().map(|reply| reply.events).sum(),
        wall,
        clients_cpu,
        cpu,
        frontend_cpu,
        engines_cpu,
        origin_requests: workload.borrow().origin().requests() - origin_before,
        delays: delays(&side.steps()?, &arrivals),
    })
}

/// Returns the time from the latest step to each arrival.
pub(crate) fn delays(steps: &[u64], arrivals: &[u64]) -> Vec<u64> {
    let delay = |arrival: &u64| {
        let before = steps[..steps.partition_point(|step| step <= arrival)].last()?;
        Some(arrival - before)
    };
    arrivals.iter().filter_map(delay).collect()
}
