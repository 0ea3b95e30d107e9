//! The choice of workers that encode media items for those that compute prompts.

use chiasm_types::{MmHash, PlanClassId, Role};

use super::candidate::Candidate;
use super::{Assignment, Scratch, fits, is_busy};
use crate::config::{Policy, RouterConfig};
use crate::cost::{embedding_transfer, in_blocks};
use crate::error::RouteError;
use crate::explain::Decision;
use crate::request::{RouteItem, RouteRequest};
use crate::roster::Roster;
use crate::seat::Seat;
use crate::worker::{Admission, Pending};

/// A worker that could encode media items, for workers of its machine and class.
pub(super) struct Encoder {
    seat: Seat,
    machine: u64,
    class: PlanClassId,
    requests: usize,
    /// Work of the requests that wait there, in the unit of costs.
    waiting: f64,
}

/// Media items that a worker is to encode.
pub(crate) struct Encoding {
    pub(crate) assignment: Assignment,
    pub(crate) items: Vec<MmHash>,
}

impl Encoder {
    /// Whether workers of a class and machine find what this one encodes.
    fn works_for(&self, class: PlanClassId, machine: u64) -> bool {
        self.class == class && self.machine == machine
    }
}

/// The place of the encoder with the least to do, of those that work for a class and machine.
fn least_loaded(encoders: &[Encoder], class: PlanClassId, machine: u64) -> Option<usize> {
    let load = |at: usize| (encoders[at].waiting, encoders[at].requests);
    let less = |one: &usize, other: &usize| {
        let ((waiting, requests), (others_waiting, others_requests)) = (load(*one), load(*other));
        waiting.total_cmp(&others_waiting).then(requests.cmp(&others_requests))
    };
    (0..encoders.len()).filter(|at| encoders[*at].works_for(class, machine)).min_by(less)
}

impl Candidate {
    /// Has the worker's media items encoded elsewhere, if its other requests lose more by waiting
    /// for it than that costs. `encode` is the blocks that the embeddings of items fill which end
    /// after what it need not compute.
    pub(super) fn offer(&mut self, encoders: &[Encoder], encode: f64, config: &RouterConfig) {
        let Some(at) = least_loaded(encoders, self.class, self.machine) else { return };
        let blocks = self.terms(encode, 0.0).encode;
        if blocks == 0.0 {
            return;
        }
        let lost =
            config.stages.disturb * (self.requests + 1) as f64 * config.weights.encode * blocks;
        let price = config.stages.hop
            + embedding_transfer(config, blocks)
            + config.weights.queue * encoders[at].waiting;
        if price < lost {
            self.encodes_elsewhere = true;
            // What its other requests do not lose is no gain over workers that have fewer of them.
            self.cost += price;
        }
    }
}

impl Scratch {
    /// The workers that could encode a request's media items.
    pub(super) fn gather_encoders(
        &mut self,
        config: &RouterConfig,
        roster: &Roster,
        plans: &[RouteRequest<'_>],
    ) {
        self.encoders.clear();
        if !roster.has_encoders() {
            return;
        }
        for plan in plans.iter().filter(|plan| !plan.media.is_empty()) {
            let can = roster.workers().filter(|(id, worker)| {
                worker.info.role == Role::Encode
                    && worker.info.class == plan.class
                    && !worker.suspect
                    && worker.admission != Admission::None
                    && !plan.exclude.contains(id)
                    && fits(worker, plan)
                    && !is_busy(&config.busy, worker)
            });
            self.encoders.extend(can.map(|(_, worker)| Encoder {
                seat: worker.seat,
                machine: worker.info.machine,
                class: worker.info.class,
                requests: worker.requests,
                waiting: worker.pending.work,
            }));
        }
    }

    /// Media work that workers are spared because others of their machine have encoded an item.
    pub(super) fn find_embeddings(&mut self, config: &RouterConfig, roster: &Roster, plan: u32) {
        if roster.embeddings.is_empty() {
            return;
        }
        let mut spared = std::mem::take(&mut self.spared);
        for at in 0..self.plans[plan as usize].items.sorted.len() {
            let item = self.plans[plan as usize].items.sorted[at];
            let blocks = in_blocks(item.embeds as f64);
            // What a worker has itself it is spared already.
            spared.clear();
            spared.resize(self.candidates.len(), false);
            for seat in holders(config, roster, &item) {
                if let Some(at) = self.candidate_of(seat) {
                    spared[at] = true;
                }
            }
            for (candidate, _) in
                self.candidates.iter_mut().zip(&spared).filter(|(_, spared)| !**spared)
            {
                if candidate.plan == plan
                    && item.end > candidate.covered_tokens()
                    && roster.embeddings.has(candidate.machine, item.hash)
                {
                    candidate.encode_spared += blocks;
                    candidate.embedded += blocks;
                }
            }
        }
        self.spared = spared;
    }

    /// Has all that would encode something have it done elsewhere, where there is somebody for it:
    /// what policies do that know no costs.
    pub(super) fn encode_elsewhere(&mut self) {
        let Self { candidates, encoders, .. } = self;
        for candidate in candidates {
            candidate.encodes_elsewhere =
                least_loaded(encoders, candidate.class, candidate.machine).is_some();
        }
    }

    /// Of the media items that the worker needs the embeddings of which computes the prompt: those
    /// that it finds, and who encodes others for it, each item one worker, so that several are
    /// encoded at the same time.
    pub(super) fn embeddings_for(
        &mut self,
        config: &RouterConfig,
        roster: &mut Roster,
        computes: &Assignment,
    ) -> Result<(Vec<MmHash>, Vec<Encoding>), RouteError> {
        let (mut embedded, mut encodings) = (Vec::new(), Vec::new());
        let Some(info) = roster.at(computes.seat).map(|worker| worker.info) else {
            return Ok((embedded, encodings));
        };
        if roster.embeddings.is_empty() {
            return Ok((embedded, encodings));
        }
        let Self { plans, encoders, .. } = self;
        for item in plans[computes.plan].items.sorted.iter().skip(computes.encodes_from) {
            if roster.embeddings.used(info.machine, item.hash) {
                embedded.push(item.hash);
                continue;
            }
            if !computes.encodes_elsewhere
                || holders(config, roster, item).any(|holder| holder == computes.seat)
            {
                continue;
            }
            // One that encodes it for another request already does so once.
            let by = roster.embeddings.encoded_by(info.machine, item.hash);
            let at_it = encoders.iter().position(|encoder| {
                Some(encoder.seat) == by && encoder.works_for(info.class, info.machine)
            });
            let work = match at_it {
                Some(_) => 0.0,
                None => config.weights.encode * in_blocks(item.embeds as f64),
            };
            let Some(at) = at_it.or_else(|| least_loaded(encoders, info.class, info.machine))
            else {
                continue;
            };
            encoders[at].waiting += work;
            add(config, roster, &mut encodings, encoders[at].seat, item, work)?;
        }
        Ok((embedded, encodings))
    }
}

/// The workers that are taken to have an item's embeddings in their own caches.
fn holders<'a>(
    config: &RouterConfig,
    roster: &'a Roster,
    item: &RouteItem,
) -> impl Iterator<Item = Seat> + use<'a> {
    let odometers = |seat| roster.at(seat).map(|worker| worker.odometers);
    let held = roster.media.of(item.hash, item.elements, item.embeds, odometers);
    let looks = config.policy == Policy::KvMedia;
    held.filter(move |(_, held)| looks && held.embeddings).map(|(seat, _)| seat)
}

/// Adds an item to what a worker encodes.
fn add(
    config: &RouterConfig,
    roster: &Roster,
    encodings: &mut Vec<Encoding>,
    seat: Seat,
    item: &RouteItem,
    work: f64,
) -> Result<(), RouteError> {
    let at = encodings.iter().position(|encoding| encoding.assignment.seat == seat);
    let at = match at {
        Some(at) => at,
        None => {
            let worker = roster.at(seat).ok_or(RouteError::NoWorker)?;
            let assignment = Assignment {
                id: worker.id,
                seat,
                plan: 0,
                decision: Decision::Policy(config.policy),
                block_size: worker.info.block_size,
                knowledge: worker.knowledge(),
                blocks: 0,
                overlap: 0,
                pending: Pending::default(),
                encodes_from: usize::MAX,
                encodes_elsewhere: false,
            };
            encodings.push(Encoding { assignment, items: Vec::new() });
            encodings.len() - 1
        }
    };
    let Encoding { assignment: Assignment { pending, .. }, items } = &mut encodings[at];
    pending.tokens += item.embeds as u64;
    pending.work += work;
    items.push(item.hash);
    Ok(())
}
