//! A number of clients that each ask again when they are answered, for a while.

use std::cell::RefCell;
use std::error::Error;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use rustix::time::{ClockId, clock_gettime};

use tokio::time::timeout;

use crate::client::{Answer, Connection};
use crate::side::Side;
use crate::workload::{Case, Workload};

/// How long a frontend gets, after its last answer, for what it does behind them.
const SETTLE: Duration = Duration::from_millis(50);

/// Tokens at both ends of a stream whose times are not looked at: while others begin and end.
const EDGE: usize = 8;

/// How long the last answers may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What one measurement of a side yields, counted on both sides of the frontend.
pub(crate) struct Outcome {
    pub(crate) answered: Answered,
    /// CPU time of the frontend and its agents until [`SETTLE`] after the last answer.
    pub(crate) cpu: Duration,
    /// The part of it that the frontend spent.
    pub(crate) of_frontend: Duration,
    /// CPU time of all engines behind the frontend, over the same span.
    pub(crate) engines: Duration,
    /// Requests that the origin got.
    pub(crate) origin: u64,
    /// Nanoseconds from what an engine had to say until it was here, for tokens of streams where
    /// the engine writes down when that was.
    pub(crate) delays: Vec<u64>,
}

/// What the clients measured, whatever answered them.
#[derive(Default)]
pub(crate) struct Answered {
    /// One entry per request: the time between sending it and the end of its answer.
    pub(crate) latencies: Vec<Duration>,
    /// Tokens of all answers together.
    pub(crate) tokens: u64,
    /// Events of all streams together.
    pub(crate) events: u64,
    /// Answers that say that another worker has computed their prompts.
    pub(crate) split: u64,
    /// When tokens of streams came, but the first and the last of each, which come with something
    /// else.
    pub(crate) arrivals: Vec<u64>,
    /// Time between the first request and the end of the last answer.
    pub(crate) wall: Duration,
    /// CPU time of the clients, all of which share one thread.
    pub(crate) cpu: Duration,
}

/// Asks with `clients` at once until `time` is over; what was asked by then is waited for.
///
/// # Errors
/// Any answer that is not a 200 with a number of prompt tokens in `expected` and as many of its own
/// as the case has, and any that was split where the side splits none, or was not where it splits
/// all.
pub(crate) async fn run(
    side: &mut Side,
    workload: &RefCell<Workload>,
    case: Case,
    clients: usize,
    time: Duration,
    expected: &RangeInclusive<u64>,
) -> Result<Outcome, Box<dyn Error>> {
    // What other cases have pushed out of caches comes back untold.
    let before = side.splits.counted().await?;
    let asks_first = case.has_image() || !case.is_streamed();
    if asks_first {
        let first = workload.borrow_mut().next(case, &side.url);
        Connection::open(side.address).await?.chat(first).await?;
    }
    let origin = workload.borrow().origin().requests();
    let (cpu, of_frontend, engines) = (side.cpu()?, side.frontend.cpu()?, side.engines_cpu()?);
    let answered = ask(side.address, workload, (case, &side.url), clients, time, expected).await;
    let answered =
        answered.map_err(|error| side.frontend.failed(&format!("was asked for '{}': {error}", case.name())))?;
    tokio::time::sleep(SETTLE).await;
    let (cpu, of_frontend) = (side.cpu()?.since(&cpu), side.frontend.cpu()?.since(&of_frontend));
    let engines = side.engines_cpu()?.since(&engines);
    side.splits
        .check(before, asks_first.into(), &answered)
        .await
        .map_err(|error| format!("{}, '{}': {error}", side.name, case.name()))?;
    let delays = delays(&side.steps()?, &answered.arrivals);
    let origin = workload.borrow().origin().requests() - origin;
    Ok(Outcome { answered, cpu, of_frontend, engines, origin, delays })
}

/// Does what [`run`] does, without counting what the frontend spends, so for any frontend at an
/// address that finds the picture at `url`.
pub(crate) async fn ask(
    address: SocketAddr,
    workload: &RefCell<Workload>,
    (case, url): (Case, &str),
    clients: usize,
    time: Duration,
    expected: &RangeInclusive<u64>,
) -> Result<Answered, Box<dyn Error>> {
    let mut connections = Vec::new();
    for _ in 0..clients {
        connections.push(Connection::open(address).await?);
    }
    let (cpu, start) = (thread_cpu(), Instant::now());
    let end = start + time;
    let clients = connections.into_iter().map(async |mut connection| {
        let (mut latencies, mut tokens, mut events, mut split, mut arrivals) = (Vec::new(), 0, 0, 0, Vec::new());
        while latencies.is_empty() || Instant::now() < end {
            let body = workload.borrow_mut().next(case, url);
            let start = Instant::now();
            let Answer { usage, events: of_answer, arrivals: pieces, is_split } = connection.chat(body).await?;
            latencies.push(start.elapsed());
            let answer = case.answer_tokens();
            if !expected.contains(&usage.prompt_tokens) || !answer.contains(&usage.completion_tokens) {
                return Err(format!("{usage:?}, expected {expected:?} prompt tokens and {answer:?} more").into());
            }
            tokens += usage.completion_tokens;
            events += of_answer;
            split += u64::from(is_split);
            arrivals.extend(pieces.get(EDGE..pieces.len().saturating_sub(EDGE)).unwrap_or_default());
        }
        Ok::<_, Box<dyn Error>>(Answered { latencies, tokens, events, split, arrivals, ..Answered::default() })
    });
    let answered =
        timeout(time + PATIENCE, try_join_all(clients)).await.map_err(|_| "some requests get no answer")??;
    let (wall, cpu) = (start.elapsed(), thread_cpu().saturating_sub(cpu));
    let mut all = Answered { wall, cpu, ..Answered::default() };
    for Answered { latencies, tokens, events, split, arrivals, .. } in answered {
        all.latencies.extend(latencies);
        all.tokens += tokens;
        all.events += events;
        all.split += split;
        all.arrivals.extend(arrivals);
    }
    Ok(all)
}

/// How long before each arrival the latest step was.
pub(crate) fn delays(steps: &[u64], arrivals: &[u64]) -> Vec<u64> {
    let before =
        |arrival: &u64| steps[..steps.partition_point(|step| step <= arrival)].last().map(|step| arrival - step);
    arrivals.iter().filter_map(before).collect()
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Neither is negative: it is time spent.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
