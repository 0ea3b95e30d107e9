//! The discrete-event simulation: frontends, each with its router, and engines in virtual time.

mod encode;
mod handover;

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::time::Instant;

use chiasm_engine_model::WeightedLru;
use chiasm_kv::event::{KvEvent, KvEventBatch};
use chiasm_router::{EngineStats, Policy, Route, RouteItem, RouteRequest, VirtualClock};
use chiasm_types::{Role, WorkerId};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::embedding_store::EmbeddingStore;
use crate::encoder::{Encoder, Encoding};
use crate::engine::{Engine, Live, Stage};
use crate::error::SimulateError;
use crate::frontends::{Announced, Frontends};
use crate::latency::Latency;
use crate::report::PolicyReport;
use crate::scenario::{Arrivals, Scenario};
use crate::sequence::{Image, Sequence, mix};
use crate::tally::Tally;
use crate::virtual_time::{Nanos, nanos, seconds};
use crate::workload::{Request, exponential};

/// One run. What happens at the same time happens in this order: events reach the routers,
/// announcements do, engines and tensors move on in the order in which they were planned, a request
/// arrives.
pub(crate) struct Fleet<'a> {
    scenario: &'a Scenario,
    policy: Policy,
    frontends: Frontends,
    clock: VirtualClock,
    /// One for each worker. Of those that encode alone it never gets anything.
    engines: Vec<Engine>,
    /// Those that encode alone, by their numbers as workers.
    encoders: BTreeMap<usize, Encoder>,
    /// What these have left.
    store: EmbeddingStore,
    /// Requests that wait for their images to be encoded, by their numbers.
    awaiting: HashMap<u64, encode::Awaiting>,
    /// Per engine the tensors that it has or that are on their way, and when they are there.
    receivers: Vec<WeightedLru<u64, Nanos>>,
    /// Per engine when it is done with giving and getting prompts.
    links: Vec<Nanos>,
    /// The times at which the frontends' threads are free. All frontends share them.
    threads: BinaryHeap<Reverse<Nanos>>,
    planned: BinaryHeap<Planned>,
    plans: u64,
    /// Events and statistics on the way from engines to the routers, in the order of their times.
    published: VecDeque<Published>,
    arrivals: ArrivalTimes,
    tally: Tally,
    /// Requests that arrived.
    arrived: u64,
    /// The state at the end of the warm-up, and at the last arrival.
    marks: [Mark; 2],
    items: Vec<RouteItem>,
}

struct Planned {
    at: Nanos,
    /// Sets plans of the same time apart.
    number: u64,
    worker: usize,
    what: Plan,
}

enum Plan {
    /// The engine is to be woken, unless it has changed its mind.
    Wake,
    /// All tensors are there of what an engine that encodes alone is to encode.
    Encode(Encoding),
    /// It ends a step.
    Encoded,
    /// All tensors of the request are there.
    Deliver(Box<Live>),
    /// The same at the engine that answers, which can get the prompt now from the engine of this
    /// number.
    Get(usize, Box<Live>),
    /// It has got it.
    Got(usize, Box<Live>),
}

struct Published {
    at: Nanos,
    worker: usize,
    events: Vec<KvEvent>,
    stats: EngineStats,
}

/// The state at a moment.
#[derive(Clone, Default)]
struct Mark {
    at: Nanos,
    completed: u64,
    /// Per engine.
    work: Vec<f64>,
}

/// Says when the next request arrives.
struct ArrivalTimes {
    mode: Arrivals,
    rng: SmallRng,
    last: Nanos,
}

impl ArrivalTimes {
    /// `None`: not before another one ends.
    fn next(
        &self,
        request: &Request,
        gap: Nanos,
        in_flight: u64,
        workers: usize,
        now: Nanos,
    ) -> Option<Nanos> {
        match self.mode {
            Arrivals::Poisson(_) => Some(self.last + gap),
            Arrivals::Traced(speed) => Some((request.at as f64 / speed) as Nanos),
            Arrivals::Closed(per_worker) => {
                (in_flight < (per_worker * workers) as u64).then_some(now)
            }
        }
    }

    fn gap(&mut self) -> Nanos {
        match self.mode {
            Arrivals::Poisson(per_second) => nanos(exponential(&mut self.rng) / per_second),
            Arrivals::Traced(_) | Arrivals::Closed(_) => 0,
        }
    }
}

impl<'a> Fleet<'a> {
    pub(crate) fn new(scenario: &'a Scenario, policy: Policy, arrivals: Arrivals) -> Self {
        let model = scenario.engine;
        let clock = VirtualClock::default();
        let threads = scenario.frontend.threads_per_worker * scenario.workers.len();
        let store = EmbeddingStore::new(&model);
        let engine = || Engine::new(model, scenario.has_encoders().then(|| store.clone()));
        let encoding =
            scenario.workers.iter().enumerate().filter(|(_, role)| **role == Role::Encode);
        Self {
            scenario,
            policy,
            frontends: Frontends::new(scenario, policy, &clock),
            clock,
            engines: scenario.workers.iter().map(|_| engine()).collect(),
            encoders: encoding
                .map(|(worker, _)| (worker, Encoder::new(model, store.clone())))
                .collect(),
            awaiting: HashMap::new(),
            receivers: scenario
                .workers
                .iter()
                .map(|_| WeightedLru::new(model.receiver_cache_bytes))
                .collect(),
            links: vec![0; scenario.workers.len()],
            threads: vec![Reverse(0); threads].into(),
            planned: BinaryHeap::new(),
            plans: 0,
            published: VecDeque::new(),
            arrivals: ArrivalTimes {
                mode: arrivals,
                rng: SmallRng::seed_from_u64(mix(scenario.seed)),
                last: 0,
            },
            tally: Tally::new(),
            arrived: 0,
            marks: Default::default(),
            items: Vec::new(),
            store,
        }
    }

    /// Plays all requests.
    pub(crate) fn run(
        mut self,
        requests: impl Iterator<Item = Result<Request, SimulateError>>,
    ) -> Result<PolicyReport, SimulateError> {
        let start = Instant::now();
        let end = self.play(requests)?;
        if self.tally.completed == 0 {
            return Err(SimulateError::NothingFits);
        }
        if self.arrived <= self.scenario.warm_up {
            return Err(SimulateError::Config("all requests came during the warm-up; shorten it"));
        }
        Ok(self.report(end, start.elapsed().as_secs_f64()))
    }

    /// Returns when the last token was given out.
    fn play(
        &mut self,
        mut requests: impl Iterator<Item = Result<Request, SimulateError>>,
    ) -> Result<Nanos, SimulateError> {
        let mut now = 0;
        let mut gap = self.arrivals.gap();
        let mut next = requests.next().transpose()?;
        loop {
            let workers = self.engines.len();
            let in_flight = self.arrived - self.tally.refused - self.tally.completed;
            let arrival = next
                .as_ref()
                .and_then(|next| self.arrivals.next(next, gap, in_flight, workers, now));
            let published = self.published.front().map(|published| published.at);
            let planned = self.planned.peek().map(|planned| planned.at);
            let announced = self.frontends.next_announcement();
            let Some(at) = [arrival, published, announced, planned].into_iter().flatten().min()
            else {
                return Ok(now);
            };
            now = at;
            self.clock.set(now);
            self.tally.timeline.pass(now, || work(&self.engines, &self.encoders));
            if published == Some(now) {
                self.receive();
            } else if announced == Some(now) {
                self.frontends.take_note()?;
            } else if planned == Some(now) {
                self.carry_out(now);
            } else if let Some(request) = next.take() {
                self.arrivals.last = now;
                gap = self.arrivals.gap();
                next = requests.next().transpose()?;
                self.arrive(request, now)?;
                if next.is_none() {
                    self.marks[1] = self.mark(now);
                }
            }
        }
    }

    fn mark(&self, now: Nanos) -> Mark {
        Mark { at: now, completed: self.tally.completed, work: work(&self.engines, &self.encoders) }
    }

    fn arrive(&mut self, request: Request, now: Nanos) -> Result<(), SimulateError> {
        if self.arrived == self.scenario.warm_up {
            self.tally.count_from = now;
            self.marks[0] = self.mark(now);
        }
        let counted = self.arrived >= self.scenario.warm_up;
        self.tally.timeline.arrived(now);
        self.arrived += 1;
        let sequence = request.sequence;
        let model = &self.scenario.engine;
        if !Engine::fits(model, &sequence) {
            self.tally.refused += 1;
            return Ok(());
        }
        let keys = sequence.keys(model.block_size);
        self.items.clear();
        self.items.extend(sequence.items().iter().map(|item| RouteItem {
            hash: item.image.hash(),
            end: item.end(),
            embeds: item.image.embeds as usize,
            elements: item.image.tensor_bytes(),
        }));
        let routed = RouteRequest {
            keys: &keys[..sequence.prompt() / model.block_size.get()],
            prompt_tokens: sequence.prompt(),
            media: &self.items,
            ..RouteRequest::default()
        };
        let number = self.arrived;
        let Route { answers, prefills, encodes, .. } =
            self.frontends.select(number, &routed, now)?;
        let mut live = Live::new(number, sequence, keys, now, counted);
        live.stage = if prefills.is_some() { Stage::Prefill } else { Stage::Whole };
        (live.reservation, live.prefills) = (Some(answers), prefills);
        if encodes.is_empty() {
            self.give(live, now);
        } else {
            self.encode(encodes, live, now);
        }
        Ok(())
    }

    /// Gives a request to the engine that computes its prompt, with the tensors that it lacks.
    fn give(&mut self, live: Live, now: Nanos) {
        let Some(computes) = live.prefills.as_ref().or(live.reservation.as_ref()) else { return };
        let worker = computes.worker.0 as usize;
        let ready = self.make_tensors(worker, &live.sequence, now, live.counted);
        if ready > now {
            self.plan(ready, worker, Plan::Deliver(Box::new(live)));
        } else {
            self.deliver(worker, live, now);
        }
    }

    /// Makes the tensors that an engine lacks; returns when all are there.
    fn make_tensors(
        &mut self,
        worker: usize,
        sequence: &Sequence,
        now: Nanos,
        counted: bool,
    ) -> Nanos {
        let items = sequence.items().iter();
        items.map(|item| self.make_tensor(worker, item.image, now, counted)).fold(now, Nanos::max)
    }

    /// Makes the tensor of an image if an engine lacks it; returns when it is there.
    fn make_tensor(&mut self, worker: usize, image: Image, now: Nanos, counted: bool) -> Nanos {
        let there = self.receivers[worker].get(&image.id).copied();
        self.tally.items += u64::from(counted);
        self.tally.reused_items += u64::from(counted && there.is_some());
        there.unwrap_or_else(|| {
            let free = self.threads.pop().map_or(now, |Reverse(free)| free);
            let done = now.max(free) + nanos(image.pixels() as f64 * self.scenario.frontend.pixel);
            self.threads.push(Reverse(done));
            self.receivers[worker].insert(image.id, image.tensor_bytes(), done);
            done
        })
    }

    fn plan(&mut self, at: Nanos, worker: usize, what: Plan) {
        self.plans += 1;
        self.planned.push(Planned { at, number: self.plans, worker, what });
    }

    fn plan_wake(&mut self, worker: usize, before: Option<Nanos>) {
        let wake = self.engines[worker].next_wake();
        if let Some(at) = wake.filter(|_| wake != before) {
            self.plan(at, worker, Plan::Wake);
        }
    }

    fn deliver(&mut self, worker: usize, live: Live, now: Nanos) {
        let before = self.engines[worker].next_wake();
        self.engines[worker].deliver(live, now);
        self.plan_wake(worker, before);
    }

    fn carry_out(&mut self, now: Nanos) {
        let Some(Planned { worker, what, .. }) = self.planned.pop() else { return };
        match what {
            Plan::Encode(encoding) => self.begin_encoding(worker, encoding, now),
            Plan::Encoded => self.encoded(worker, now),
            Plan::Deliver(live) => self.deliver(worker, *live, now),
            Plan::Get(from, live) => self.get(from, worker, live, now),
            Plan::Got(from, live) => self.got(from, worker, *live, now),
            Plan::Wake if self.engines[worker].next_wake() == Some(now) => {
                let (tally, frontends) = (&mut self.tally, &mut self.frontends);
                let mut observer = Announced { tally, frontends, prefilled: Vec::new() };
                let events = self.engines[worker].wake(now, &mut observer);
                let prefilled = observer.prefilled;
                let at = now + nanos(self.scenario.engine.event_delay);
                let stats = self.engines[worker].stats();
                self.published.push_back(Published { at, worker, events, stats });
                self.plan_wake(worker, None);
                prefilled.into_iter().for_each(|live| self.hand_over(worker, live, now));
            }
            Plan::Wake => {}
        }
    }

    /// The routers take in what an engine published.
    fn receive(&mut self) {
        let Some(Published { at, worker, events, stats }) = self.published.pop_front() else {
            return;
        };
        let batch = KvEventBatch { timestamp: seconds(at), events, data_parallel_rank: None };
        let batch = Some(&batch).filter(|batch| !batch.events.is_empty());
        self.frontends.receive(WorkerId(worker as u32), batch, stats);
    }

    fn report(&self, end: Nanos, wall_seconds: f64) -> PolicyReport {
        let Tally { prompt_tokens, cached_tokens, embeds, encoded, items, reused_items, .. } =
            self.tally;
        let part = |of: u64, all: u64| of as f64 / all.max(1) as f64;
        let [from, to] = &self.marks;
        let work: Vec<f64> = from.work.iter().zip(&to.work).map(|(from, to)| to - from).collect();
        let mean = work.iter().sum::<f64>() / work.len().max(1) as f64;
        let passed = seconds(to.at.saturating_sub(from.at));
        let ratio = |number: f64, by: f64| if by > 0.0 { number / by } else { 0.0 };
        PolicyReport {
            policy: self.policy.name(),
            frontends: self.frontends.routers().len(),
            ttft_ms: Latency::of(&self.tally.ttft),
            itl_ms: Latency::of(&self.tally.gaps),
            hit_rate: part(cached_tokens, prompt_tokens),
            encoder_saved: (embeds > 0).then(|| 1.0 - part(encoded, embeds)),
            tensors_reused: (items > 0).then(|| part(reused_items, items)),
            balance: ratio(work.into_iter().fold(0.0, f64::max), mean),
            work: ratio(mean, passed),
            requests_per_second: ratio((to.completed - from.completed) as f64, passed),
            split: self.scenario.has_roles().then(|| part(self.tally.split, self.tally.ended)),
            encoded_elsewhere: self
                .scenario
                .has_encoders()
                .then(|| part(self.tally.encoded_elsewhere, self.tally.images)),
            completed: self.tally.completed,
            refused: self.tally.refused,
            virtual_seconds: seconds(end),
            warm_up_seconds: seconds(from.at),
            timeline: self.tally.timeline.intervals(),
            wall_seconds,
        }
    }
}

/// What each worker has done so far.
fn work(engines: &[Engine], encoders: &BTreeMap<usize, Encoder>) -> Vec<f64> {
    let encoder = |worker| encoders.get(&worker).map_or(0.0, Encoder::work);
    engines.iter().enumerate().map(|(worker, engine)| engine.work() + encoder(worker)).collect()
}

// The earliest plan is the greatest.

impl Ord for Planned {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Planned {}

#[cfg(test)]
mod tests;
