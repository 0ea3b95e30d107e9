//! The workers and what was given to them.

use std::time::Duration;

use chiasm_kv::BlockKey;
use chiasm_types::{MmHash, Role, WorkerId};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use crate::believed::Believed;
use crate::config::{Decoding, RouterConfig};
use crate::embeddings::Embeddings;
use crate::lately::Lately;
use crate::media_holders::{MediaHolders, Odometer, Odometers};
use crate::promises::{Promises, RequestNumber};
use crate::seat::Seat;
use crate::sessions::Sessions;
use crate::worker::{Admission, Pending, Worker, WorkerInfo};

/// The workers that can be picked and what was given to them; one lock of the router guards it.
pub(crate) struct Roster {
    /// The worker in each place. It keeps its place; places of removed workers are used again.
    places: Vec<Option<Worker>>,
    /// Ids and places of the workers, in the order of their ids.
    order: Vec<(WorkerId, u32)>,
    pub(crate) promises: Promises,
    pub(crate) media: MediaHolders,
    pub(crate) embeddings: Embeddings,
    pub(crate) sessions: Sessions,
    pub(crate) rng: SmallRng,
    /// The worker that got the last request, for round-robin.
    pub(crate) last: Option<WorkerId>,
    /// The same of those that compute prompts for others.
    pub(crate) last_prefill: Option<WorkerId>,
    pub(crate) typical: Typical,
    lately: Lately,
    requests: u64,
    lives: u32,
    /// Workers that compute some stages alone.
    specialists: usize,
    /// So many of these encode.
    encoders: usize,
}

/// What a request usually is, for those that engines have from others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Typical {
    pub(crate) work: f64,
}

/// What one request holds of a worker.
pub(crate) struct Hold {
    pub(crate) seat: Seat,
    pub(crate) request: RequestNumber,
    pub(crate) blocks: u64,
    /// What the request waits for; nothing once it has its first token.
    pub(crate) pending: Pending,
    pub(crate) promised: Vec<BlockKey>,
    /// Keys of the whole prompt, when the worker publishes no events; else empty.
    pub(crate) believed: Vec<BlockKey>,
    /// Media items that the worker encodes for others.
    encodes: Option<Encodes>,
}

struct Encodes {
    machine: u64,
    items: Vec<MmHash>,
}

impl Roster {
    pub(crate) fn new(config: &RouterConfig) -> Self {
        let rng = match config.seed {
            Some(seed) => SmallRng::seed_from_u64(seed),
            None => SmallRng::from_rng(&mut rand::rng()),
        };
        Self {
            places: Vec::new(),
            order: Vec::new(),
            promises: Promises::default(),
            media: MediaHolders::default(),
            embeddings: Embeddings::default(),
            sessions: Sessions::new(config.max_sessions),
            rng,
            last: None,
            last_prefill: None,
            typical: Typical::default(),
            lately: Lately::default(),
            requests: 0,
            lives: 0,
            specialists: 0,
            encoders: 0,
        }
    }

    /// Returns what a worker of the same id was believed to hold.
    pub(crate) fn add(&mut self, id: WorkerId, info: WorkerInfo) -> Option<Believed> {
        let replaced = self.remove(id);
        let place = self.places.iter().position(Option::is_none).unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        self.lives = self.lives.wrapping_add(1);
        // As much as the others: not one that is to catch up with them.
        let lately = self.mean_lately();
        self.lately.grow(lately);
        self.specialists += usize::from(info.role != Role::Aggregated);
        self.encoders += usize::from(info.role == Role::Encode);
        self.embeddings.joined(info.machine, info.embedding_store_bytes);
        let at = self.order.partition_point(|(other, _)| *other < id);
        self.order.insert(at, (id, place as u32));
        self.places[place] = Some(Worker {
            id,
            info,
            seat: Seat { place: place as u32, life: self.lives },
            requests: 0,
            blocks_in_use: 0,
            pending: Pending::default(),
            lately,
            odometers: Odometers {
                tensors: Odometer::new(info.receiver_cache_elements),
                embeddings: Odometer::new(info.encoder_cache_tokens),
            },
            engine: None,
            waiting_of_others: 0,
            suspect: false,
            admission: Admission::All,
            caught_up: false,
            believed: (!info.publishes_events).then(|| Believed::new(info.total_blocks)),
            events_at: 0,
        });
        replaced
    }

    /// Records that a worker was picked: one that may get a single request gets no more after it.
    pub(crate) fn use_admission(&mut self, seat: Seat) {
        let is_last = |worker: &&mut Worker| worker.admission == Admission::One;
        if let Some(worker) = self.at_mut(seat).filter(is_last) {
            worker.admission = Admission::None;
        }
    }

    /// Returns what the worker was believed to hold.
    pub(crate) fn remove(&mut self, id: WorkerId) -> Option<Believed> {
        let at = self.order.binary_search_by_key(&id, |(other, _)| *other).ok()?;
        let (_, place) = self.order.remove(at);
        let removed = self.places[place as usize].take()?;
        self.lately.grow(-removed.lately);
        self.specialists -= usize::from(removed.info.role != Role::Aggregated);
        self.encoders -= usize::from(removed.info.role == Role::Encode);
        self.embeddings.left(removed.info.machine, removed.info.embedding_store_bytes);
        removed.believed
    }

    /// Whether some workers encode media items for others.
    pub(crate) fn has_encoders(&self) -> bool {
        self.encoders > 0
    }

    /// Whether some workers compute some stages alone.
    pub(crate) fn has_roles(&self) -> bool {
        self.specialists > 0
    }

    /// One more than the highest place.
    pub(crate) fn places(&self) -> usize {
        self.places.len()
    }

    /// The workers in the order of their ids.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.order
            .iter()
            .filter_map(|(id, place)| Some((*id, self.places[*place as usize].as_ref()?)))
    }

    /// What the workers without events are believed to hold.
    pub(crate) fn believed_mut(&mut self) -> impl Iterator<Item = (WorkerId, &mut Believed)> {
        self.places
            .iter_mut()
            .flatten()
            .filter_map(|worker| Some((worker.id, worker.believed.as_mut()?)))
    }

    pub(crate) fn get(&self, id: WorkerId) -> Option<&Worker> {
        let at = self.order.binary_search_by_key(&id, |(other, _)| *other).ok()?;
        self.places[self.order[at].1 as usize].as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        let at = self.order.binary_search_by_key(&id, |(other, _)| *other).ok()?;
        self.places[self.order[at].1 as usize].as_mut()
    }

    /// `None` when its life is over.
    pub(crate) fn at(&self, seat: Seat) -> Option<&Worker> {
        self.places.get(seat.place as usize)?.as_ref().filter(|worker| worker.seat == seat)
    }

    /// `None` when its life is over.
    pub(crate) fn at_mut(&mut self, seat: Seat) -> Option<&mut Worker> {
        self.places.get_mut(seat.place as usize)?.as_mut().filter(|worker| worker.seat == seat)
    }

    /// Lets what workers did lately fade, now and then. `prefill` is what computing a block costs.
    pub(crate) fn fade(&mut self, now: Duration, prefill: f64, decoding: Decoding) {
        self.lately.fade(now, prefill, decoding, self.places.iter_mut().flatten());
    }

    /// What a worker did lately on average, in the unit of costs.
    pub(crate) fn mean_lately(&self) -> f64 {
        self.lately.mean(self.order.len())
    }

    /// Forgets media items that nobody has any more, now and then.
    pub(crate) fn sweep_media(&mut self) {
        let Self { media, places, .. } = self;
        media.sweep_if_due(|seat| {
            let worker =
                places.get(seat.place as usize)?.as_ref().filter(|worker| worker.seat == seat);
            worker.map(|worker| worker.odometers)
        });
    }

    /// Gives a request to a worker, with promises for the last of its `keys`. `None` when the
    /// worker is gone.
    pub(crate) fn hold(
        &mut self,
        seat: Seat,
        blocks: u64,
        pending: Pending,
        keys: &[BlockKey],
        overlap: usize,
    ) -> Option<Hold> {
        self.requests += 1;
        let request = RequestNumber(self.requests);
        let worker = self.at_mut(seat)?;
        worker.requests += 1;
        worker.blocks_in_use += blocks;
        worker.pending.tokens += pending.tokens;
        worker.pending.work += pending.work;
        let believed = if worker.believed.is_some() { keys.to_vec() } else { Vec::new() };
        let promised = keys[overlap..].to_vec();
        self.promises.make(seat, request, &promised);
        // Of the last hundred or so.
        self.typical.work += (pending.work - self.typical.work) / 100.0;
        Some(Hold { seat, request, blocks, pending, promised, believed, encodes: None })
    }

    /// Has a worker encode media items for others, beside what it holds for the request.
    pub(crate) fn encode(&mut self, hold: &mut Hold, items: &[MmHash]) {
        let Some(machine) = self.at(hold.seat).map(|worker| worker.info.machine) else { return };
        items.iter().for_each(|item| self.embeddings.begin(machine, *item, hold.seat));
        hold.encodes = Some(Encodes { machine, items: items.to_vec() });
    }

    /// A worker has left the embeddings of an item, which take so many bytes.
    pub(crate) fn encoded(&mut self, hold: &Hold, item: MmHash, bytes: u64) {
        let Some(Encodes { machine, .. }) = hold.encodes else { return };
        self.embeddings.kept(machine, item, bytes);
    }

    /// The worker has computed the prompt of a request.
    pub(crate) fn computed(&mut self, hold: &mut Hold) {
        let work = self.settle(hold);
        if let Some(worker) = self.at_mut(hold.seat) {
            worker.lately += work;
            self.lately.grow(work);
        }
    }

    /// A request waits no longer; returns the work that waited with it.
    fn settle(&mut self, hold: &mut Hold) -> f64 {
        let pending = std::mem::take(&mut hold.pending);
        if let Some(worker) = self.at_mut(hold.seat) {
            worker.pending.tokens -= pending.tokens;
            worker.pending.work -= pending.work;
            if worker.pending.tokens == 0 {
                // What rounding left.
                worker.pending.work = 0.0;
            }
        }
        pending.work
    }

    /// Takes a request back. Its promises last `until` then if there is a time.
    pub(crate) fn release(&mut self, mut hold: Hold, until: Option<Duration>) {
        // Of one without a token nobody knows what was done of its work.
        self.settle(&mut hold);
        let until = until.filter(|_| self.at(hold.seat).is_some());
        if let Some(worker) = self.at_mut(hold.seat) {
            worker.requests -= 1;
            worker.blocks_in_use -= hold.blocks;
        }
        if let Some(Encodes { machine, items }) = hold.encodes {
            items.iter().for_each(|item| self.embeddings.end(machine, *item, hold.seat));
        }
        self.promises.end(hold.seat, hold.request, hold.promised, until);
    }
}
