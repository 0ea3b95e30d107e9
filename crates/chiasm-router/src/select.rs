//! The choice of a worker.

use std::time::Instant;

use chiasm_kv::PrefixIndex;
use chiasm_types::WorkerId;
use rand::Rng;
use rand::rngs::SmallRng;

use crate::config::{Policy, RouterConfig};
use crate::fleet::{Fleet, Worker};
use crate::router::RouteRequest;

/// A worker and how many of the request's leading blocks it holds, as its events confirm.
pub(crate) struct Choice {
    pub(crate) worker: WorkerId,
    pub(crate) overlap: usize,
}

/// Blocks that a prompt takes on a worker, the last one possibly part full.
pub(crate) fn prompt_blocks(request: &RouteRequest<'_>, worker: &Worker) -> u64 {
    request.prompt_tokens.div_ceil(worker.info.block_size.get()) as u64
}

/// Picks a worker; `None` when there is none. Takes time proportional to the workers, for the kv policy times what they will hold beyond their overlap.
pub(crate) fn choose(
    config: &RouterConfig,
    fleet: &mut Fleet,
    index: &PrefixIndex,
    request: &RouteRequest<'_>,
) -> Option<Choice> {
    let Fleet { workers, rng, last, .. } = fleet;
    let overlaps = index.overlaps(request.keys);
    let overlap_of =
        |id: WorkerId| overlaps.binary_search_by_key(&id, |(id, _)| *id).map_or(0, |found| overlaps[found].1);
    let candidates = workers.iter_mut().filter(|(id, _)| !request.exclude.contains(id));
    let worker = match config.policy {
        Policy::Kv => {
            let now = Instant::now();
            lowest(
                rng,
                candidates.map(|(id, worker)| {
                    worker.promises.expire(now);
                    (*id, cost(config, index, request, *id, worker, overlap_of(*id)))
                }),
            )
        }
        Policy::LeastLoaded => lowest(rng, candidates.map(|(id, worker)| (*id, worker.blocks_in_use as f64))),
        Policy::Random => lowest(rng, candidates.map(|(id, _)| (*id, 0.0))),
        Policy::RoundRobin => {
            let ids: Vec<WorkerId> = candidates.map(|(id, _)| *id).collect();
            let next = ids.iter().find(|id| last.is_none_or(|last| **id > last)).or(ids.first()).copied();
            *last = next.or(*last);
            next
        }
    }?;
    Some(Choice { worker, overlap: overlap_of(worker) })
}

/// See [`Policy::Kv`]. Here, promised blocks overlap as held ones do.
fn cost(
    config: &RouterConfig,
    index: &PrefixIndex,
    request: &RouteRequest<'_>,
    id: WorkerId,
    worker: &Worker,
    confirmed: usize,
) -> f64 {
    let will_hold = |key| worker.promises.contains(key) || index.holds(id, key);
    let more = request.keys[confirmed..].iter().take_while(|key| will_hold(**key)).count();
    let missing = prompt_blocks(request, worker).saturating_sub((confirmed + more) as u64);
    missing as f64 * config.prefill_weight + worker.blocks_in_use as f64 * config.load_weight
}

/// The one with the lowest cost, each of several with equal chance.
fn lowest(rng: &mut SmallRng, costs: impl Iterator<Item = (WorkerId, f64)>) -> Option<WorkerId> {
    let mut best: Option<(WorkerId, f64)> = None;
    let mut ties = 0;
    for (id, cost) in costs {
        match best {
            Some((_, lowest)) if cost > lowest => continue,
            Some((_, lowest)) if cost == lowest => ties += 1,
            _ => ties = 1,
        }
        // The n-th of n equals takes over with chance 1/n: each is left with 1/n in the end.
        if ties == 1 || rng.random_range(0..ties) == 0 {
            best = Some((id, cost));
        }
    }
    best.map(|(id, _)| id)
}
