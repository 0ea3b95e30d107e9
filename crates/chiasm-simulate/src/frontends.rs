//! The frontends: a router each, and the announcements of requests to each other.

use std::collections::{HashMap, VecDeque};

use chiasm_kv::BlockKey;
use chiasm_kv::event::KvEventBatch;
use chiasm_router::{
    Clock, EngineStats, Policy, Reservation, Route, RouteItem, RouteRequest, Router, RouterConfig,
    Splitting, VirtualClock, WorkerInfo,
};
use chiasm_types::{PlanClassId, Role, WorkerId};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::engine::{LiveRequest, Observer};
use crate::error::SimulateError;
use crate::scenario::Scenario;
use crate::sequence::mix;
use crate::tally::Tally;
use crate::virtual_time::{Nanos, nanos};

/// Equal routers in front of the same engines.
///
/// The routers receive the engines' events and statistics at the same time. A request that one of
/// them gave to an engine is announced to the others after a delay, if at all, as are its first
/// token and its end.
pub(crate) struct Frontends {
    routers: Vec<Router>,
    /// Draws the frontend of a request, and nothing else, so that the requests and their times are
    /// the same for any number of frontends.
    rng: SmallRng,
    /// The delay of announcements; `None` if there are none.
    announce_delay: Option<Nanos>,
    /// The announcements in flight, in the order of their times.
    announcements: VecDeque<Announcement>,
    /// The reservations of the other routers for announced requests, by the number of the request.
    peer_reservations: HashMap<u64, Vec<Reservation>>,
}

struct Announcement {
    at: Nanos,
    request: u64,
    change: Change,
}

/// An announced change of a request.
enum Change {
    Begun(Placement),
    FirstToken,
    Ended,
}

/// A request that a frontend has given to a worker.
struct Placement {
    frontend: usize,
    worker: WorkerId,
    keys: Vec<BlockKey>,
    prompt_tokens: usize,
    media: Vec<RouteItem>,
}

impl Frontends {
    /// Creates the frontends of a scenario.
    pub(crate) fn new(scenario: &Scenario, policy: Policy, clock: &VirtualClock) -> Self {
        let model = scenario.frontend;
        let router = |number: u64| {
            // The first router has the seed of the scenario.
            let seed = if number == 0 { scenario.seed } else { mix(scenario.seed ^ mix(number)) };
            let config = RouterConfig { policy, seed: Some(seed), ..scenario.router.clone() };
            let router = Router::with_clock(config, Clock::Virtual(clock.clone()));
            let workers = scenario.workers.iter().enumerate();
            workers.for_each(|(worker, role)| {
                router.add_worker(WorkerId(worker as u32), worker_info(scenario, *role))
            });
            router
        };
        Self {
            routers: (0..model.frontends as u64).map(router).collect(),
            rng: SmallRng::seed_from_u64(mix(mix(scenario.seed))),
            announce_delay: model.announce_delay.filter(|_| model.frontends > 1).map(nanos),
            announcements: VecDeque::new(),
            peer_reservations: HashMap::new(),
        }
    }

    /// Returns the routers, one for each frontend.
    pub(crate) fn routers(&self) -> &[Router] {
        &self.routers
    }

    /// Routes the request with this number by a random frontend, like a load balancer without
    /// state.
    ///
    /// The worker that answers is announced to the other frontends. With roles there are no
    /// announcements.
    pub(crate) fn select(
        &mut self,
        number: u64,
        request: &RouteRequest<'_>,
        now: Nanos,
    ) -> Result<Route, SimulateError> {
        let frontend = self.rng.random_range(0..self.routers.len());
        let route = self.routers[frontend]
            .select_stages(std::slice::from_ref(request), Splitting::Allowed)?;
        if self.announce_delay.is_some() {
            let placement = Placement {
                frontend,
                worker: route.answer.worker,
                keys: request.keys.to_vec(),
                prompt_tokens: request.prompt_tokens,
                media: request.media.to_vec(),
            };
            self.announce(number, Change::Begun(placement), now);
        }
        Ok(route)
    }

    /// Applies the events and statistics of an engine to all routers.
    pub(crate) fn receive(
        &self,
        worker: WorkerId,
        batch: Option<&KvEventBatch>,
        stats: EngineStats,
    ) {
        for router in &self.routers {
            batch.into_iter().for_each(|batch| router.apply(worker, batch));
            router.set_stats(worker, stats);
        }
    }

    /// Returns the time of the next announcement.
    pub(crate) fn next_announcement(&self) -> Option<Nanos> {
        self.announcements.front().map(|announcement| announcement.at)
    }

    /// Applies the next announcement to the routers that it is for.
    pub(crate) fn apply_announcement(&mut self) -> Result<(), SimulateError> {
        let Some(Announcement { request, change, .. }) = self.announcements.pop_front() else {
            return Ok(());
        };
        match change {
            Change::Begun(placement) => {
                let reservations = self.reserve_on_peers(&placement)?;
                self.peer_reservations.insert(request, reservations);
            }
            Change::FirstToken => {
                let reservations = self.peer_reservations.get_mut(&request);
                reservations.into_iter().flatten().for_each(Reservation::first_token);
            }
            Change::Ended => drop(self.peer_reservations.remove(&request)),
        }
        Ok(())
    }

    /// Reserves the worker of a request on the routers of all other frontends.
    fn reserve_on_peers(&self, placement: &Placement) -> Result<Vec<Reservation>, SimulateError> {
        let plan = RouteRequest {
            keys: &placement.keys,
            prompt_tokens: placement.prompt_tokens,
            media: &placement.media,
            ..RouteRequest::default()
        };
        let routers = self.routers.iter().enumerate();
        let peers = routers.filter(|(frontend, _)| *frontend != placement.frontend);
        peers.map(|(_, router)| Ok(router.reserve_on(placement.worker, &plan)?)).collect()
    }

    fn announce(&mut self, request: u64, change: Change, now: Nanos) {
        if let Some(delay) = self.announce_delay {
            self.announcements.push_back(Announcement { at: now + delay, request, change });
        }
    }
}

/// Returns the properties of an engine with this role; engines of one role are all alike.
fn worker_info(scenario: &Scenario, role: Role) -> WorkerInfo {
    let model = scenario.engine;
    WorkerInfo {
        total_blocks: u64::from(model.num_blocks),
        block_size: model.block_size,
        publishes_events: true,
        encoder_cache_tokens: scenario
            .frontend
            .believed_encoder_cache_tokens
            .unwrap_or(model.encoder_cache_tokens),
        // Raw values, a byte each.
        receiver_cache_elements: model.receiver_cache_bytes,
        class: PlanClassId(0),
        role,
        machine: 0,
        handover_domain: 0,
        embedding_store_bytes: if scenario.has_encoders() {
            model.embedding_store_bytes
        } else {
            0
        },
        max_prompt_tokens: usize::MAX,
        max_encoder_tokens: usize::MAX,
    }
}

/// An observer that counts the tokens of an engine and announces them to the other frontends.
pub(crate) struct AnnouncingObserver<'a> {
    pub(crate) tally: &'a mut Tally,
    pub(crate) frontends: &'a mut Frontends,
    /// Requests whose prompts were computed for other engines.
    pub(crate) prefilled: Vec<LiveRequest>,
}

impl Observer for AnnouncingObserver<'_> {
    fn on_first_token(&mut self, live: &mut LiveRequest, now: Nanos) {
        self.frontends.announce(live.number, Change::FirstToken, now);
        self.tally.on_first_token(live, now);
    }

    fn on_prefilled(&mut self, live: LiveRequest, _: Nanos) {
        self.prefilled.push(live);
    }

    fn on_finished(&mut self, live: LiveRequest, now: Nanos) {
        self.frontends.announce(live.number, Change::Ended, now);
        self.tally.on_finished(live, now);
    }

    fn on_gaps(&mut self, gap: Nanos, tokens: u64, now: Nanos) {
        self.tally.on_gaps(gap, tokens, now);
    }
}

#[cfg(test)]
mod tests;
