//! What a router costs before servers of models that somebody else runs, and how much of what it
//! sends there these find in their caches.
//!
//! | file | is |
//! |---|---|
//! | `server` | the upstream of all routers |
//! | `prompt`, `cache` | what a request holds, and what the upstream keeps of it |
//! | `kv_events` | how the upstream says what it keeps |
//! | `answer` | what it answers |
//! | `fleet` | upstreams, and the routers before them |
//! | `proxies` | how Envoy and nginx are configured |
//! | `conversations` | what shared pictures are asked about |

mod answer;
mod cache;
mod conversations;
mod fleet;
mod kv_events;
mod prompt;
mod proxies;
mod server;

use std::cell::RefCell;
use std::error::Error;

use crate::dynamo::{self, Discovery, Stage};
use crate::measure;
use crate::side::{Counts, Inputs, Side};
use crate::workload::{Case, Pace, Workload};
use crate::{Measurement, print};

pub(crate) use fleet::Programs;
pub(crate) use server::serve;

use conversations::{Conversations, TURNS};
use fleet::{Held, Router, SMG_DEFAULT, Upstreams, stats};
use server::Stats;

/// Upstreams before which routers are when their CPU time counts.
const BEFORE: usize = 2;
/// How many blocks such an upstream holds, as many as an engine with much memory: of a million
/// tokens.
const BLOCKS: usize = 1 << 16;
/// One client tells what a request costs that comes alone, many what a busy router spends.
const CASES: [(Case, &[usize]); 4] = [
    (Case::Text, &[1, 16, 64]),
    (Case::TextStreamed, &[16, 64]),
    (Case::RepeatedInline, &[1, 16]),
    (Case::Distinct, &[1, 16]),
];
/// Sides that are Chiasm: the first of all, in this order. What others spend is told in times of
/// what each of them does.
const OURS: [(Router, &str); 2] =
    [(Router::Passing, "CPU in times of chiasm, http's"), (Router::Tokens, "CPU in times of chiasm, vllm+http's")];

/// What is asked where upstreams' caches are looked at.
struct Shared {
    case: &'static str,
    upstreams: usize,
    /// Questions of a conversation. Where there is one, there are more conversations.
    turns: usize,
}

const SHARED: [Shared; 4] = [
    Shared { case: "shared images, conversations, 2 upstreams", upstreams: 2, turns: TURNS },
    Shared { case: "shared images, conversations, 4 upstreams", upstreams: 4, turns: TURNS },
    Shared { case: "shared images, single questions, 2 upstreams", upstreams: 2, turns: 1 },
    Shared { case: "shared images, single questions, 4 upstreams", upstreams: 4, turns: 1 },
];
/// Clients for each upstream there: as many as keep it busy, so that a router has a reason to leave
/// a cache alone.
const CLIENTS: usize = 32;
/// Tokens that an upstream computes per second there: a picture takes it 27 ms, so that upstreams
/// are what is waited for, and not this machine.
const RATE: f64 = 50_000.0;
/// Routers whose upstreams' caches are looked at: all but Envoy, which goes round as nginx does.
const LOOKED_AT: [Router; 5] =
    [Router::Passing, Router::Tokens, Router::Smg(SMG_DEFAULT), Router::Smg("round_robin"), Router::Nginx];
/// No router, but one upstream with the memory of all.
const ONE: &str = "one upstream with the memory of all";

/// Measures both and prints the results.
pub(crate) async fn run(
    inputs: &Inputs,
    programs: &Programs,
    rounds: usize,
    conversations: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    costs(inputs, programs, rounds, workload).await?;
    let conversations = (Conversations::new(workload), conversations);
    for shared in &SHARED {
        for router in LOOKED_AT {
            eprintln!("{}: {}", shared.case, router.name(programs));
            shared.measure(inputs, programs, router, &conversations, workload).await?;
        }
        shared.limit(inputs, &conversations).await?;
    }
    Ok(())
}

impl Shared {
    async fn measure(
        &self,
        inputs: &Inputs,
        programs: &Programs,
        router: Router,
        (all, count): &(Conversations<'_>, usize),
        workload: &RefCell<Workload>,
    ) -> Result<(), Box<dyn Error>> {
        let (name, case) = (router.name(programs), self.case);
        let held = Held { blocks: conversations::blocks() / self.upstreams, rate: Some(RATE) };
        let upstreams = Upstreams::start(inputs, &format!("{name}, {case}"), self.upstreams, held)?;
        let addresses = upstreams.addresses.clone();
        let mut side = router.start(inputs, programs, upstreams)?;
        router.wait(&mut side, workload).await?;
        let before = stats(&addresses).await?;
        let times = all.all(side.address, self.asked(*count), self.clients()).await;
        let mut times = times.map_err(|error| side.frontend.failed(&format!("was asked for '{case}': {error}")))?;
        times.sort();
        let found = Found::since(&before, &stats(&addresses).await?);
        if found.requests != times.len() as u64 {
            return Err(format!("{name} has sent {} requests on, and was sent {}", found.requests, times.len()).into());
        }
        // It still believes what they say of their caches.
        router.wait(&mut side, workload).await?;
        self.print(&name, "cached prompt tokens", found.cached)?;
        self.print(&name, "requests at the busiest upstream", found.busiest)?;
        for (metric, part) in [("time to answer p50", 0.5), ("time to answer p90", 0.9)] {
            let time = times.get((times.len() as f64 * part) as usize).copied().unwrap_or_default();
            self.print(&name, metric, time.as_secs_f64() * 1e3)?;
        }
        Ok(())
    }

    /// What all of it comes to where no upstream keeps what another has too.
    async fn limit(&self, inputs: &Inputs, (all, count): &(Conversations<'_>, usize)) -> Result<(), Box<dyn Error>> {
        let whole = Held { blocks: conversations::blocks(), rate: None };
        let upstream = Upstreams::start(inputs, &format!("{ONE}, {}", self.case), 1, whole)?;
        all.all(upstream.addresses[0], self.asked(*count), self.clients()).await?;
        let found = Found::since(&[Stats::default()], &stats(&upstream.addresses).await?);
        self.print(ONE, "cached prompt tokens", found.cached)
    }

    /// Conversations and their questions: as many questions whatever a conversation has.
    fn asked(&self, conversations: usize) -> (usize, usize) {
        (conversations * TURNS / self.turns, self.turns)
    }

    fn clients(&self) -> usize {
        self.upstreams * CLIENTS
    }

    fn print(&self, side: &str, metric: &'static str, value: f64) -> Result<(), Box<dyn Error>> {
        Measurement { case: self.case, clients: Some(self.clients()), side, metric, value }.print()
    }
}

/// What upstreams have found in their caches.
struct Found {
    requests: u64,
    /// Part of all prompt tokens, in percent.
    cached: f64,
    /// Part of the requests that the one had which had most, in percent.
    busiest: f64,
}

impl Found {
    fn since(before: &[Stats], after: &[Stats]) -> Self {
        let each = |number: fn(&Stats) -> u64| {
            let pairs = before.iter().zip(after);
            pairs.map(|(before, after)| number(after) - number(before)).collect::<Vec<u64>>()
        };
        let requests = each(|it| it.requests);
        let [all, prompt, cached] = [&requests, &each(|it| it.prompt_tokens), &each(|it| it.cached_tokens)]
            .map(|counts| counts.iter().sum::<u64>());
        let busiest = requests.iter().max().copied().unwrap_or_default();
        let percent = |part: u64, whole: u64| 100.0 * part as f64 / whole as f64;
        Self { requests: all, cached: percent(cached, prompt), busiest: percent(busiest, all) }
    }
}

/// Asks all routers in turns and prints what each spends.
async fn costs(
    inputs: &Inputs,
    programs: &Programs,
    rounds: usize,
    workload: &RefCell<Workload>,
) -> Result<(), Box<dyn Error>> {
    let held = Held { blocks: BLOCKS, rate: None };
    let mut sides = Vec::new();
    for router in Router::ALL {
        let upstreams = Upstreams::start(inputs, &router.name(programs), BEFORE, held)?;
        sides.push(router.start(inputs, programs, upstreams)?);
    }
    let dynamo = {
        let workload = workload.borrow();
        dynamo::start(inputs, &programs.dynamo, Pace::Unbounded, workload.origin(), Discovery::Files, &[Stage::All])?
    };
    // Neither does it count images, nor is what it counts what an upstream here does.
    sides.push(Side { counts: Counts::Nothing, ..dynamo });
    for (number, side) in sides.iter_mut().enumerate() {
        eprintln!("waiting for {}", side.name);
        match Router::ALL.get(number) {
            Some(router) => router.wait(side, workload).await?,
            None => side.wait(workload).await?,
        }
    }
    // Only the one that makes tokens counts those of the model.
    let outcomes = measure::measure(&mut sides, 1, &CASES, rounds, workload, async |_, _| Ok(())).await?;
    for (&(number, clients, index), of_side) in &outcomes {
        let case = CASES[number].0;
        let side = &sides[index].name;
        for (ours, (_, metric)) in OURS.iter().enumerate() {
            if index >= OURS.len() {
                let share = measure::share(case, of_side, &outcomes[&(number, clients, ours)], rounds);
                print(case, Some(clients), side, metric, share)?;
            }
        }
    }
    Ok(())
}
