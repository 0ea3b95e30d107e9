//! The frontends before the engines: a router each, and what they are told of each other's choices.

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

use crate::engine::{Live, Observer};
use crate::error::SimulateError;
use crate::scenario::Scenario;
use crate::sequence::mix;
use crate::tally::Tally;
use crate::virtual_time::{Nanos, nanos};

/// Routers of the same kind before the same engines. All of them hear of the engines' events and
/// statistics at the same time; of a request that one of them gave to an engine the others are told
/// a while later, if at all, as of its first token and its end.
pub(crate) struct Frontends {
    routers: Vec<Router>,
    /// Draws the frontend that a request comes to. Nothing else is drawn from it, so that the
    /// requests and their times are the same for any number of frontends.
    rng: SmallRng,
    /// Time from a choice until the others know of it; `None` when they never do, or there are
    /// none.
    announce_delay: Option<Nanos>,
    /// News on the way, in the order of their times.
    announcements: VecDeque<Announcement>,
    /// What the others hold for a request of which they were told, by its number.
    told: HashMap<u64, Vec<Reservation>>,
}

struct Announcement {
    at: Nanos,
    request: u64,
    news: News,
}

enum News {
    Begun(Choice),
    FirstToken,
    Ended,
}

/// A request that a frontend has given to a worker, as the others are told of it.
struct Choice {
    frontend: usize,
    worker: WorkerId,
    keys: Vec<BlockKey>,
    prompt_tokens: usize,
    media: Vec<RouteItem>,
}

impl Frontends {
    pub(crate) fn new(scenario: &Scenario, policy: Policy, clock: &VirtualClock) -> Self {
        let model = scenario.frontend;
        let router = |number: u64| {
            // The first one's is the scenario's own.
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
            told: HashMap::new(),
        }
    }

    pub(crate) fn routers(&self) -> &[Router] {
        &self.routers
    }

    /// One of the frontends, drawn as by a load balancer that knows nothing, gives the request with
    /// this number to a worker, or to two where workers have roles. The others are told of the one
    /// that answers; where there are roles there is nothing to tell.
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
            let choice = Choice {
                frontend,
                worker: route.answers.worker,
                keys: request.keys.to_vec(),
                prompt_tokens: request.prompt_tokens,
                media: request.media.to_vec(),
            };
            self.announce(number, News::Begun(choice), now);
        }
        Ok(route)
    }

    /// All frontends take in what an engine published.
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

    /// When the next announcement arrives.
    pub(crate) fn next_announcement(&self) -> Option<Nanos> {
        self.announcements.front().map(|announcement| announcement.at)
    }

    /// The others take note of the next announcement.
    pub(crate) fn take_note(&mut self) -> Result<(), SimulateError> {
        let Some(Announcement { request, news, .. }) = self.announcements.pop_front() else {
            return Ok(());
        };
        match news {
            News::Begun(choice) => {
                let told = self.tell(&choice)?;
                self.told.insert(request, told);
            }
            News::FirstToken => {
                self.told.get_mut(&request).into_iter().flatten().for_each(Reservation::first_token)
            }
            News::Ended => drop(self.told.remove(&request)),
        }
        Ok(())
    }

    fn tell(&self, choice: &Choice) -> Result<Vec<Reservation>, SimulateError> {
        let plan = RouteRequest {
            keys: &choice.keys,
            prompt_tokens: choice.prompt_tokens,
            media: &choice.media,
            ..RouteRequest::default()
        };
        let others =
            self.routers.iter().enumerate().filter(|(frontend, _)| *frontend != choice.frontend);
        others.map(|(_, router)| Ok(router.chosen_elsewhere(choice.worker, &plan)?)).collect()
    }

    fn announce(&mut self, request: u64, news: News, now: Nanos) {
        if let Some(delay) = self.announce_delay {
            self.announcements.push_back(Announcement { at: now + delay, request, news });
        }
    }
}

/// What every router knows of every engine of a role, as they are all alike.
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
        hands_over_in: 0,
        embedding_store_bytes: if scenario.has_encoders() {
            model.embedding_store_bytes
        } else {
            0
        },
        max_prompt_tokens: usize::MAX,
        max_encoder_tokens: usize::MAX,
    }
}

/// Counts what an engine gives out, and has the frontends tell each other of it.
pub(crate) struct Announced<'a> {
    pub(crate) tally: &'a mut Tally,
    pub(crate) frontends: &'a mut Frontends,
    /// Requests whose prompts are computed, for other engines.
    pub(crate) prefilled: Vec<Live>,
}

impl Observer for Announced<'_> {
    fn first_token(&mut self, live: &mut Live, now: Nanos) {
        self.frontends.announce(live.number, News::FirstToken, now);
        self.tally.first_token(live, now);
    }

    fn prefilled(&mut self, live: Live, _: Nanos) {
        self.prefilled.push(live);
    }

    fn finished(&mut self, live: Live, now: Nanos) {
        self.frontends.announce(live.number, News::Ended, now);
        self.tally.finished(live, now);
    }

    fn gaps(&mut self, gap: Nanos, tokens: u64, now: Nanos) {
        self.tally.gaps(gap, tokens, now);
    }
}

#[cfg(test)]
mod tests;
