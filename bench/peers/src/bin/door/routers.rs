//! The cost of a router in front of servers that are already running, and the part of its prompts
//! that the servers find in their caches.
//!
//! | file | contents |
//! |---|---|
//! | `server` | the upstream of all routers |
//! | `prompt`, `cache` | the tokens of a request, and the upstream's prefix cache |
//! | `kv_events` | the upstream's KV events |
//! | `answer` | the upstream's answers |
//! | `fleet` | upstreams, and the routers in front of them |
//! | `conversations` | conversations about shared pictures |

mod answer;
mod cache;
mod conversations;
mod fleet;
mod kv_events;
mod prompt;
mod server;

use std::cell::RefCell;
use std::error::Error;

use peers::flags::Flags;
use peers::numbers::quantile;
use peers::row::{Row, neutral};

use crate::dynamo::{self, Stage};
use crate::measure::{self, in_microseconds};
use crate::side::{Counts, Inputs, Side, Versioned};
use crate::workload::{Case, Pace, Workload};

pub(crate) use server::serve;

use conversations::{Conversations, TURNS};
use fleet::{Capacity, Programs, Router, SMG_DEFAULT, Upstreams, stats};
use server::Stats;

/// The number of upstreams of each router when its CPU time is measured.
const UPSTREAMS: usize = 2;
/// The number of blocks of such an upstream, a million tokens, as of an engine with much memory.
const BLOCKS: usize = 1 << 16;
/// One client shows the cost of a single request, many clients that of a busy router.
const CASES: [(Case, &[usize]); 4] = [
    (Case::Text, &[1, 16, 64]),
    (Case::TextStreamed, &[16, 64]),
    (Case::RepeatedInline, &[1, 16]),
    (Case::Distinct, &[1, 16]),
];
/// The kinds of upstream of our two sides, which are the first sides. Names of cases end with them.
const WAYS: [&str; 2] = ["http", "vllm+http"];

/// A case in which the caches of upstreams are measured.
struct Shared {
    case: &'static str,
    upstreams: usize,
    /// The number of questions of a conversation.
    turns: usize,
}

const SHARED: [Shared; 4] = [
    Shared { case: "shared images, conversations, 2 upstreams", upstreams: 2, turns: TURNS },
    Shared { case: "shared images, conversations, 4 upstreams", upstreams: 4, turns: TURNS },
    Shared { case: "shared images, single questions, 2 upstreams", upstreams: 2, turns: 1 },
    Shared { case: "shared images, single questions, 4 upstreams", upstreams: 4, turns: 1 },
];
/// The number of clients for each upstream in these cases. They keep it busy, so a router has a
/// reason to use an upstream with a colder cache.
const CLIENTS: usize = 32;
/// The prompt tokens per second of an upstream in these cases. A picture takes 27 ms, so upstreams
/// are the bottleneck and not this machine.
const PREFILL_RATE: f64 = 50_000.0;
/// The routers in these cases, ours first: all but Envoy, which uses round robin as nginx does.
const SHARED_ROUTERS: [Router; 5] = [
    Router::Passing,
    Router::Tokens,
    Router::Smg(SMG_DEFAULT),
    Router::Smg("round_robin"),
    Router::Nginx,
];

/// Measures everything and prints the rows.
pub(crate) async fn run(
    inputs: &Inputs,
    dynamo: &Versioned,
    flags: &Flags,
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    let programs = Programs::from_flags(flags)?;
    let conversations = flags.parse("--conversations")?;
    Row::for_run("rounds", rounds, "all").print()?;
    Row::for_run("conversations", conversations, "all").print()?;
    measure_costs(inputs, &programs, dynamo, rounds, workload).await?;
    let all = Conversations::new(workload);
    for shared in &SHARED {
        let mut results = Vec::new();
        for router in SHARED_ROUTERS {
            let name = router.name(&programs);
            eprintln!("{}: {name}", shared.case);
            let metrics =
                shared.measure(inputs, &programs, router, &all, conversations, workload).await?;
            results.push((name, metrics));
        }
        let limit = shared.measure_limit(inputs, &all, conversations).await?;
        results.push(("one upstream with the memory of all".to_owned(), limit));
        shared.print(&results)?;
    }
    Ok(())
}

/// The metrics of a router in a case with shared pictures.
struct RouterMetrics {
    /// The part of all prompt tokens that upstreams had in their caches, in percent.
    cached: f64,
    /// The part of all requests at the busiest upstream, in percent.
    busiest: f64,
    /// The times of answers in ms, sorted.
    times: Vec<f64>,
}

impl Shared {
    async fn measure(
        &self,
        inputs: &Inputs,
        programs: &Programs,
        router: Router,
        all: &Conversations<'_>,
        conversations: usize,
        workload: &RefCell<Workload>,
    ) -> Result<RouterMetrics, Box<dyn Error>> {
        let name = format!("{}, {}", router.name(programs), self.case);
        let blocks = conversations::blocks() / self.upstreams;
        let capacity = Capacity { blocks, prefill_rate: Some(PREFILL_RATE) };
        let upstreams = Upstreams::start(inputs, &name, self.upstreams, capacity)?;
        let addresses = upstreams.addresses.clone();
        let mut side = router.start(inputs, programs, upstreams)?;
        router.wait(&mut side, workload).await?;
        let before = stats(&addresses).await?;
        let times = all.hold(side.address, self.counts(conversations), self.clients()).await;
        let mut times =
            times.map_err(|error| side.frontend.failed(&format!("failed in {name}: {error}")))?;
        times.sort_by(f64::total_cmp);
        let after = stats(&addresses).await?;
        // Checks that the router still trusts the caches that upstreams report.
        router.wait(&mut side, workload).await?;
        RouterMetrics::new(&name, &before, &after, times)
    }

    /// Measures one upstream with the memory of all and without a router: the limit, because no
    /// block is held twice.
    async fn measure_limit(
        &self,
        inputs: &Inputs,
        all: &Conversations<'_>,
        conversations: usize,
    ) -> Result<RouterMetrics, Box<dyn Error>> {
        let name = format!("one upstream, {}", self.case);
        let capacity = Capacity { blocks: conversations::blocks(), prefill_rate: None };
        let upstream = Upstreams::start(inputs, &name, 1, capacity)?;
        let counts = self.counts(conversations);
        let times = all.hold(upstream.addresses[0], counts, self.clients()).await?;
        let after = stats(&upstream.addresses).await?;
        let metrics = RouterMetrics::new(&name, &[Stats::default()], &after, times)?;
        // Only the cache is comparable.
        Ok(RouterMetrics { busiest: f64::NAN, times: Vec::new(), ..metrics })
    }

    /// Returns the number of conversations and of questions in each. The total number of questions
    /// is the same in all cases.
    fn counts(&self, conversations: usize) -> (usize, usize) {
        (conversations * TURNS / self.turns, self.turns)
    }

    fn clients(&self) -> usize {
        self.upstreams * CLIENTS
    }

    /// Prints the rows of our sides in comparison with each other side.
    fn print(&self, results: &[(String, RouterMetrics)]) -> Result<(), Box<dyn Error>> {
        let (ours, peers) = results.split_at(WAYS.len());
        for (way, (_, ours)) in WAYS.into_iter().zip(ours) {
            for (peer_name, peer) in peers {
                let case = format!("{}, {way}", self.case);
                let rows = [
                    (neutral("cached prompt tokens", "%"), [ours, peer].map(|it| it.cached)),
                    (
                        neutral("requests at the busiest upstream", "%"),
                        [ours, peer].map(|it| it.busiest),
                    ),
                    (
                        neutral("time to answer p50", "ms"),
                        [ours, peer].map(|it| quantile(&it.times, 0.5)),
                    ),
                    (
                        neutral("time to answer p90", "ms"),
                        [ours, peer].map(|it| quantile(&it.times, 0.9)),
                    ),
                ];
                for (metric, [ours, peer]) in rows {
                    if !peer.is_nan() {
                        metric.row(&case, peer_name, ours, peer).print()?;
                    }
                }
            }
        }
        Ok(())
    }
}

impl RouterMetrics {
    /// Computes the metrics from the counts of upstreams.
    fn new(
        name: &str,
        before: &[Stats],
        after: &[Stats],
        times: Vec<f64>,
    ) -> Result<Self, Box<dyn Error>> {
        let counts = |count: fn(&Stats) -> u64| {
            let pairs = before.iter().zip(after);
            pairs.map(|(before, after)| count(after) - count(before)).collect::<Vec<u64>>()
        };
        let sum = |count| counts(count).iter().sum::<u64>() as f64;
        let requests = sum(|it| it.requests);
        if requests != times.len() as f64 {
            return Err(format!("{name}: {requests} requests arrived of {}", times.len()).into());
        }
        let busiest = counts(|it| it.requests).into_iter().max().unwrap_or_default();
        Ok(Self {
            cached: 100.0 * sum(|it| it.cached_tokens) / sum(|it| it.prompt_tokens),
            busiest: 100.0 * busiest as f64 / requests,
            times,
        })
    }
}

/// Measures the CPU time of all routers in turns and prints the rows.
async fn measure_costs(
    inputs: &Inputs,
    programs: &Programs,
    dynamo: &Versioned,
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    let capacity = Capacity { blocks: BLOCKS, prefill_rate: None };
    let mut sides = Vec::new();
    for router in Router::ALL {
        let upstreams = Upstreams::start(inputs, &router.name(programs), UPSTREAMS, capacity)?;
        sides.push(router.start(inputs, programs, upstreams)?);
    }
    let dynamo = {
        let workload = workload.borrow();
        dynamo::start(inputs, dynamo, Pace::Unbounded, workload.origin(), None, &[Stage::All])?
    };
    // Dynamo counts no images, and its tokens are the model's and not an upstream's.
    sides.push(Side { counts: Counts::Nothing, ..dynamo });
    for (number, side) in sides.iter_mut().enumerate() {
        match Router::ALL.get(number) {
            Some(router) => router.wait(side, workload).await?,
            None => side.wait(workload).await?,
        }
    }
    // Calibrates with side 1: only a side that tokenizes counts the model's tokens.
    let results = measure::measure(&mut sides, 1, &CASES, rounds, workload, async |_, _| Ok(()));
    let (results, lengths) = results.await?;
    for results in &results {
        for (ours, way) in WAYS.into_iter().enumerate() {
            let name = format!("{}, {way}", results.name());
            for (peer, side) in sides.iter().enumerate().skip(WAYS.len()) {
                let multiple = results.cpu_share(peer, ours);
                let is_floor = side.name.starts_with("Envoy") || side.name.starts_with("nginx");
                let ratio = if is_floor { multiple.recip() } else { multiple };
                for row in results.cost_rows(&name, [ours, peer], &side.name, ratio) {
                    in_microseconds(row).print()?;
                }
            }
        }
    }
    lengths.iter().try_for_each(Row::print)
}
