//! The discrete-event simulation of frontends, each with its router, and engines.

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
use crate::encoder::{EncodeJob, Encoder};
use crate::engine::{Engine, LiveRequest, Stage};
use crate::error::SimulateError;
use crate::frontends::{AnnouncingObserver, Frontends};
use crate::latency::Latency;
use crate::report::PolicyReport;
use crate::scenario::{Arrivals, Scenario};
use crate::sequence::{Image, Sequence, mix};
use crate::tally::Tally;
use crate::virtual_time::{Nanos, nanos, seconds};
use crate::workload::{Request, exponential};

/// The state of one run.
///
/// Simultaneous events are handled in this order: engine reports reach the routers, announcements
/// reach them, planned events of engines and tensors in the order of planning, a request arrives.
pub(crate) struct Fleet<'a> {
    scenario: &'a Scenario,
    policy: Policy,
    frontends: Frontends,
    clock: VirtualClock,
    /// One engine for each worker. Those of encoding workers never get a request.
    engines: Vec<Engine>,
    /// The encoding engines, by the index of the worker.
    encoders: BTreeMap<usize, Encoder>,
    /// The embeddings that the encoding engines have stored.
    store: EmbeddingStore,
    /// The requests that wait for their images to be encoded, by the number of the request.
    awaiting_images: HashMap<u64, encode::AwaitingImages>,
    /// The tensors that each engine has or is being sent, with their times of arrival.
    receiver_caches: Vec<WeightedLru<u64, Nanos>>,
    /// The time at which each engine's link for transfers of prompts is free.
    link_free_at: Vec<Nanos>,
    /// The times at which the frontends' threads are free. All frontends share them.
    threads: BinaryHeap<Reverse<Nanos>>,
    planned: BinaryHeap<PlannedEvent>,
    /// The number of events planned so far.
    planned_count: u64,
    /// Reports in flight from engines to the routers, in the order of their times.
    reports: VecDeque<EngineReport>,
    arrivals: ArrivalTimes,
    tally: Tally,
    /// The number of requests that arrived.
    arrived: u64,
    /// The state at the end of the warm-up.
    warm_up_end: Checkpoint,
    /// The state at the last arrival.
    last_arrival: Checkpoint,
    items: Vec<RouteItem>,
}

struct PlannedEvent {
    at: Nanos,
    /// The order of events with the same time.
    number: u64,
    worker: usize,
    event: Event,
}

enum Event {
    /// The engine is to be woken, unless its next wake-up has changed.
    Wake,
    /// The tensors of a job have all arrived at an encoding engine.
    StartEncode(EncodeJob),
    /// An encoding engine ends a step.
    EndEncodeStep,
    /// The tensors of a request have all arrived at the engine.
    Deliver(Box<LiveRequest>),
    /// The tensors of a request have all arrived at the engine that answers, which can receive the
    /// prompt now from the engine with index `from`.
    StartTransfer { from: usize, live: Box<LiveRequest> },
    /// The engine that answers has received the prompt.
    EndTransfer { from: usize, live: Box<LiveRequest> },
}

/// The KV events and statistics of an engine on the way to the routers.
struct EngineReport {
    at: Nanos,
    worker: usize,
    events: Vec<KvEvent>,
    stats: EngineStats,
}

/// The state at a moment.
#[derive(Clone, Default)]
struct Checkpoint {
    at: Nanos,
    completed: u64,
    /// The work of each engine up to then.
    work: Vec<f64>,
}

/// The generator of arrival times.
struct ArrivalTimes {
    mode: Arrivals,
    rng: SmallRng,
    last: Nanos,
}

impl ArrivalTimes {
    /// Returns the arrival time of the next request, `gap` after the last one where arrivals are
    /// random. `None` if it has to wait for the end of another request.
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

    /// Draws the time between two arrivals; 0 where arrivals are not random.
    fn gap(&mut self) -> Nanos {
        match self.mode {
            Arrivals::Poisson(per_second) => nanos(exponential(&mut self.rng) / per_second),
            Arrivals::Traced(_) | Arrivals::Closed(_) => 0,
        }
    }
}

impl<'a> Fleet<'a> {
    /// Creates an idle fleet.
    pub(crate) fn new(scenario: &'a Scenario, policy: Policy, arrivals: Arrivals) -> Self {
        let model = scenario.engine;
        let clock = VirtualClock::default();
        let threads = scenario.frontend.threads_per_worker * scenario.workers.len();
        let store = EmbeddingStore::new(&model);
        let engine = || Engine::new(model, scenario.has_encoders().then(|| store.clone()));
        let workers = scenario.workers.iter().enumerate();
        let encode_workers = workers.filter(|(_, role)| **role == Role::Encode);
        Self {
            scenario,
            policy,
            frontends: Frontends::new(scenario, policy, &clock),
            clock,
            engines: scenario.workers.iter().map(|_| engine()).collect(),
            encoders: encode_workers
                .map(|(worker, _)| (worker, Encoder::new(model, store.clone())))
                .collect(),
            awaiting_images: HashMap::new(),
            receiver_caches: scenario
                .workers
                .iter()
                .map(|_| WeightedLru::new(model.receiver_cache_bytes))
                .collect(),
            link_free_at: vec![0; scenario.workers.len()],
            threads: vec![Reverse(0); threads].into(),
            planned: BinaryHeap::new(),
            planned_count: 0,
            reports: VecDeque::new(),
            arrivals: ArrivalTimes {
                mode: arrivals,
                rng: SmallRng::seed_from_u64(mix(scenario.seed)),
                last: 0,
            },
            tally: Tally::new(),
            arrived: 0,
            warm_up_end: Checkpoint::default(),
            last_arrival: Checkpoint::default(),
            items: Vec::new(),
            store,
        }
    }

    /// Simulates all requests and returns the report.
    pub(crate) fn run(
        mut self,
        requests: impl Iterator<Item = Result<Request, SimulateError>>,
    ) -> Result<PolicyReport, SimulateError> {
        let start = Instant::now();
        let end = self.simulate(requests)?;
        if self.tally.completed == 0 {
            return Err(SimulateError::NothingFits);
        }
        if self.arrived <= self.scenario.warm_up {
            return Err(SimulateError::Config(
                "all requests came during the warm-up: give a smaller --warm-up, or more --requests",
            ));
        }
        Ok(self.report(end, start.elapsed().as_secs_f64()))
    }

    /// Simulates all requests and returns the time of the last event.
    fn simulate(
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
            let reported = self.reports.front().map(|report| report.at);
            let planned = self.planned.peek().map(|planned| planned.at);
            let announced = self.frontends.next_announcement();
            let Some(at) = [arrival, reported, announced, planned].into_iter().flatten().min()
            else {
                return Ok(now);
            };
            now = at;
            self.clock.set(now);
            self.tally.timeline.advance(now, || work(&self.engines, &self.encoders));
            if reported == Some(now) {
                self.apply_report();
            } else if announced == Some(now) {
                self.frontends.apply_announcement()?;
            } else if planned == Some(now) {
                self.handle_planned(now);
            } else if let Some(request) = next.take() {
                self.arrivals.last = now;
                gap = self.arrivals.gap();
                next = requests.next().transpose()?;
                self.arrive(request, now)?;
                if next.is_none() {
                    self.last_arrival = self.checkpoint(now);
                }
            }
        }
    }

    fn checkpoint(&self, now: Nanos) -> Checkpoint {
        let work = work(&self.engines, &self.encoders);
        Checkpoint { at: now, completed: self.tally.completed, work }
    }

    /// Routes a request that arrives now.
    fn arrive(&mut self, request: Request, now: Nanos) -> Result<(), SimulateError> {
        if self.arrived == self.scenario.warm_up {
            self.tally.count_from = now;
            self.warm_up_end = self.checkpoint(now);
        }
        let counted = self.arrived >= self.scenario.warm_up;
        self.tally.timeline.record_arrival(now);
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
        let Route { answer, prefill, encode_stages, .. } =
            self.frontends.select(number, &routed, now)?;
        let mut live = LiveRequest::new(number, sequence, keys, now, counted);
        live.stage = if prefill.is_some() { Stage::Prefill } else { Stage::Whole };
        live.reservation = Some(answer);
        live.prefill = prefill;
        if encode_stages.is_empty() {
            self.send_prompt(live, now);
        } else {
            self.send_images(encode_stages, live, now);
        }
        Ok(())
    }

    /// Sends a request to the engine that computes its prompt, with the tensors that the engine
    /// lacks.
    fn send_prompt(&mut self, live: LiveRequest, now: Nanos) {
        let reservation = live.prefill.as_ref().or(live.reservation.as_ref());
        let Some(reservation) = reservation else { return };
        let worker = reservation.worker.0 as usize;
        let ready = self.make_tensors(worker, &live.sequence, now, live.counted);
        if ready > now {
            self.plan(ready, worker, Event::Deliver(Box::new(live)));
        } else {
            self.deliver(worker, live, now);
        }
    }

    /// Makes the tensors that an engine lacks. Returns the time at which all have arrived.
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

    /// Makes the tensor of an image if an engine lacks it. Returns the time of its arrival.
    fn make_tensor(&mut self, worker: usize, image: Image, now: Nanos, counted: bool) -> Nanos {
        let cached = self.receiver_caches[worker].get(&image.id).copied();
        self.tally.items += u64::from(counted);
        self.tally.reused_items += u64::from(counted && cached.is_some());
        cached.unwrap_or_else(|| {
            let free = self.threads.pop().map_or(now, |Reverse(free)| free);
            let done = now.max(free) + nanos(image.pixels() as f64 * self.scenario.frontend.pixel);
            self.threads.push(Reverse(done));
            self.receiver_caches[worker].insert(image.id, image.tensor_bytes(), done);
            done
        })
    }

    /// Plans an event.
    fn plan(&mut self, at: Nanos, worker: usize, event: Event) {
        self.planned_count += 1;
        self.planned.push(PlannedEvent { at, number: self.planned_count, worker, event });
    }

    /// Plans the next wake-up of an engine if it is not `before`, which was planned already.
    fn plan_wake(&mut self, worker: usize, before: Option<Nanos>) {
        let wake = self.engines[worker].next_wake();
        if let Some(at) = wake.filter(|_| wake != before) {
            self.plan(at, worker, Event::Wake);
        }
    }

    fn deliver(&mut self, worker: usize, live: LiveRequest, now: Nanos) {
        let before = self.engines[worker].next_wake();
        self.engines[worker].deliver(live, now);
        self.plan_wake(worker, before);
    }

    /// Handles the next planned event.
    fn handle_planned(&mut self, now: Nanos) {
        let Some(PlannedEvent { worker, event, .. }) = self.planned.pop() else { return };
        match event {
            Event::StartEncode(job) => self.start_encode(worker, job, now),
            Event::EndEncodeStep => self.end_encode_step(worker, now),
            Event::Deliver(live) => self.deliver(worker, *live, now),
            Event::StartTransfer { from, live } => self.start_transfer(from, worker, live, now),
            Event::EndTransfer { from, live } => self.end_transfer(from, worker, *live, now),
            Event::Wake if self.engines[worker].next_wake() == Some(now) => {
                let mut observer = AnnouncingObserver {
                    tally: &mut self.tally,
                    frontends: &mut self.frontends,
                    prefilled: Vec::new(),
                };
                let events = self.engines[worker].wake(now, &mut observer);
                let prefilled = observer.prefilled;
                let at = now + nanos(self.scenario.engine.event_delay);
                let stats = self.engines[worker].stats();
                self.reports.push_back(EngineReport { at, worker, events, stats });
                self.plan_wake(worker, None);
                prefilled.into_iter().for_each(|live| self.hand_over(worker, live, now));
            }
            Event::Wake => {}
        }
    }

    /// Applies the next engine report to the routers.
    fn apply_report(&mut self) {
        let Some(EngineReport { at, worker, events, stats }) = self.reports.pop_front() else {
            return;
        };
        let batch = KvEventBatch { timestamp: seconds(at), events, data_parallel_rank: None };
        let batch = Some(&batch).filter(|batch| !batch.events.is_empty());
        self.frontends.receive(WorkerId(worker as u32), batch, stats);
    }

    fn report(&self, end: Nanos, wall_seconds: f64) -> PolicyReport {
        let Tally { prompt_tokens, cached_tokens, embeds, encoded, items, reused_items, .. } =
            self.tally;
        let fraction = |part: u64, total: u64| part as f64 / total.max(1) as f64;
        let Self { warm_up_end: start, last_arrival, .. } = self;
        let work = start.work.iter().zip(&last_arrival.work);
        let work: Vec<f64> = work.map(|(before, after)| after - before).collect();
        let mean = work.iter().sum::<f64>() / work.len().max(1) as f64;
        let elapsed = seconds(last_arrival.at.saturating_sub(start.at));
        let ratio = |number: f64, by: f64| if by > 0.0 { number / by } else { 0.0 };
        PolicyReport {
            policy: self.policy.name(),
            frontends: self.frontends.routers().len(),
            ttft_ms: Latency::from_histogram(&self.tally.ttft),
            itl_ms: Latency::from_histogram(&self.tally.gaps),
            hit_rate: fraction(cached_tokens, prompt_tokens),
            encoder_saved: (embeds > 0).then(|| 1.0 - fraction(encoded, embeds)),
            tensors_reused: (items > 0).then(|| fraction(reused_items, items)),
            balance: ratio(work.into_iter().fold(0.0, f64::max), mean),
            work: ratio(mean, elapsed),
            requests_per_second: ratio((last_arrival.completed - start.completed) as f64, elapsed),
            split: self.scenario.has_roles().then(|| fraction(self.tally.split, self.tally.ended)),
            encoded_elsewhere: self
                .scenario
                .has_encoders()
                .then(|| fraction(self.tally.encoded_elsewhere, self.tally.images)),
            completed: self.tally.completed,
            refused: self.tally.refused,
            virtual_seconds: seconds(end),
            warm_up_seconds: seconds(start.at),
            timeline: self.tally.timeline.intervals(),
            wall_seconds,
        }
    }
}

/// Returns the work of each worker so far.
fn work(engines: &[Engine], encoders: &BTreeMap<usize, Encoder>) -> Vec<f64> {
    let encoder = |worker| encoders.get(&worker).map_or(0.0, Encoder::work);
    engines.iter().enumerate().map(|(worker, engine)| engine.work() + encoder(worker)).collect()
}

// The earliest event is the greatest.

impl Ord for PlannedEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

impl PartialOrd for PlannedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for PlannedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for PlannedEvent {}

#[cfg(test)]
mod tests;
