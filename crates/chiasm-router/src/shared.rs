//! What all clones of a router share: giving a request to workers under the lock of the roster, and
//! taking it back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_kv::{Chore, PrefixIndex};
use chiasm_types::{MmHash, WorkerId};

use crate::believed::Believed;
use crate::clock::Clock;
use crate::config::{Policy, RouterConfig};
use crate::error::RouteError;
use crate::request::{RouteRequest, Splitting};
use crate::roster::{Hold, Roster};
use crate::select::{self, Assignment, Encoding, Scratch, Stages};

/// Workers without events may be believed to hold a block for so much longer: looking at all of
/// them takes a while.
const BELIEFS_PAUSE: Duration = Duration::from_secs(1);
/// Blocks of a worker that are forgotten at once, in about a millisecond; the rest with the next
/// requests.
const MOST_FORGOTTEN: usize = 4096;

/// The index has locks of its own. They may be taken while the roster is locked, not the other way
/// round. No lock is held longer than a call.
pub(crate) struct Shared {
    pub(crate) config: RouterConfig,
    pub(crate) clock: Clock,
    pub(crate) index: PrefixIndex,
    roster: Mutex<Roster>,
    /// Batches of events whose blocks have been confirmed.
    pub(crate) batches: AtomicU64,
    /// When to look for beliefs to forget, in nanoseconds; `u64::MAX` for never.
    beliefs_expire_at: AtomicU64,
    /// Buffers of those who are not selecting now.
    scratch: Mutex<Vec<Scratch>>,
    background: Arc<dyn Fn(Chore) + Send + Sync>,
}

/// What a request holds of the workers of its stages, as [`Stages`] has them.
pub(crate) struct StageHolds {
    pub(crate) answers: Hold,
    pub(crate) prefills: Option<Hold>,
    pub(crate) encodes: Vec<Hold>,
}

impl Shared {
    /// Creates the state of a router without workers.
    pub(crate) fn new(
        config: RouterConfig,
        clock: Clock,
        background: Arc<dyn Fn(Chore) + Send + Sync>,
    ) -> Self {
        let roster = Mutex::new(Roster::new(&config));
        let index =
            config.index_max_bytes.map_or_else(PrefixIndex::new, PrefixIndex::with_max_bytes);
        let run = background.clone();
        let index = index.in_background(move |chore| run(chore));
        Self {
            config,
            clock,
            index,
            roster,
            batches: AtomicU64::new(0),
            beliefs_expire_at: AtomicU64::new(u64::MAX),
            scratch: Mutex::default(),
            background,
        }
    }

    /// Gives a request to the worker that `choose` says.
    pub(crate) fn assign(
        &self,
        plans: &[RouteRequest<'_>],
        scratch: &mut Scratch,
        choose: impl FnOnce(
            &RouterConfig,
            &mut Roster,
            &mut Scratch,
            &[RouteRequest<'_>],
        ) -> Result<Assignment, RouteError>,
    ) -> Result<(Hold, Assignment), RouteError> {
        let (mut roster, batches) = self.look_up(plans, scratch);
        let assignment = choose(&self.config, &mut roster, scratch, plans)?;
        let hold = self.hold(&mut roster, batches, plans, &assignment)?;
        if self.config.policy == Policy::KvMedia {
            scratch.note_media(&mut roster, &assignment);
        }
        Ok((hold, assignment))
    }

    /// Gives a request to the workers that are chosen for its stages: who they are, and what it
    /// holds of each.
    pub(crate) fn assign_stages(
        &self,
        plans: &[RouteRequest<'_>],
        splitting: Splitting,
        scratch: &mut Scratch,
    ) -> Result<(Stages, StageHolds), RouteError> {
        let (mut roster, batches) = self.look_up(plans, scratch);
        let stages = select::choose_stages(&self.config, &mut roster, scratch, plans, splitting)?;
        let prefills = stages.prefills.as_ref();
        let prefills = prefills
            .map(|assignment| self.hold(&mut roster, batches, plans, assignment))
            .transpose()?;
        let answers = self.hold(&mut roster, batches, plans, &stages.answers)?;
        let mut encodes = Vec::with_capacity(stages.encodes.len());
        for Encoding { assignment, items } in &stages.encodes {
            let hold = roster.hold(assignment.seat, 0, assignment.pending, &[], 0);
            let mut hold = hold.ok_or(RouteError::NoWorker)?;
            roster.encode(&mut hold, items);
            encodes.push(hold);
        }
        let given =
            stages.encodes.iter().map(|encoding| &encoding.assignment).chain(&stages.prefills);
        given.for_each(|assignment| roster.use_admission(assignment.seat));
        roster.use_admission(stages.answers.seat);
        if self.config.policy == Policy::KvMedia {
            // Whoever answers behind a prompt of others gets the tensors too, and encodes nothing.
            stages.prefills.iter().for_each(|prefills| scratch.note_media(&mut roster, prefills));
            scratch.note_media(&mut roster, &stages.answers);
        }
        Ok((stages, StageHolds { answers, prefills, encodes }))
    }

    /// Finds what workers hold of a request, before the roster is locked. The number is that of the
    /// batches which had been applied then.
    fn look_up(
        &self,
        plans: &[RouteRequest<'_>],
        scratch: &mut Scratch,
    ) -> (MutexGuard<'_, Roster>, u64) {
        let batches = self.batches.load(Ordering::Acquire);
        let now = self.clock.now();
        self.expire_beliefs(now);
        for (plan, of_plan) in plans.iter().zip(scratch.for_plans(plans.len())) {
            self.index.lookup(plan.keys, &mut of_plan.overlaps);
        }
        let mut roster = self.roster();
        roster.promises.expire(now);
        roster.fade(now, self.config.weights.prefill, self.config.decoding);
        (roster, batches)
    }

    /// Gives a request to a worker, with promises of what it will hold.
    fn hold(
        &self,
        roster: &mut Roster,
        batches: u64,
        plans: &[RouteRequest<'_>],
        assignment: &Assignment,
    ) -> Result<Hold, RouteError> {
        let keys = plans.get(assignment.plan).map_or(&[][..], |plan| plan.keys);
        let hold = roster.hold(
            assignment.seat,
            assignment.blocks,
            assignment.pending,
            keys,
            assignment.overlap,
        );
        let hold = hold.ok_or(RouteError::NoWorker)?;
        // Blocks that were confirmed between the lookup and the promise would stay promised, after
        // their eviction too.
        if roster.at(assignment.seat).is_some_and(|worker| worker.events_at > batches) {
            let held = self.index.overlap(assignment.id, keys);
            for key in keys.iter().take(held).skip(assignment.overlap) {
                roster.promises.confirm(assignment.seat, *key);
            }
        }
        Ok(hold)
    }

    pub(crate) fn computed(&self, id: WorkerId, hold: &mut Hold) {
        let mut roster = self.roster();
        roster.computed(hold);
        let keys = std::mem::take(&mut hold.believed);
        let Some(believed) = roster.at_mut(hold.seat).and_then(|worker| worker.believed.as_mut())
        else {
            return;
        };
        let now = self.clock.now();
        let mut forgotten = Vec::new();
        let kept = believed.computed(&keys, now, &mut forgotten);
        self.index.presume(id, kept);
        self.index.forget(id, &forgotten);
        keys.iter().for_each(|key| roster.promises.confirm(hold.seat, *key));
        let at = nanoseconds(now + self.config.believed_for);
        self.beliefs_expire_at.fetch_min(at, Ordering::AcqRel);
    }

    pub(crate) fn encoded(&self, hold: &Hold, item: MmHash, bytes: u64) {
        self.roster().encoded(hold, item, bytes);
    }

    /// What was believed for long enough is forgotten, up to [`BELIEFS_PAUSE`] later, and much of
    /// it bit by bit.
    fn expire_beliefs(&self, now: Duration) {
        if nanoseconds(now) < self.beliefs_expire_at.load(Ordering::Acquire) {
            return;
        }
        let mut roster = self.roster();
        let Some(since) = now.checked_sub(self.config.believed_for) else { return };
        let mut next = u64::MAX;
        let mut forgotten = Vec::new();
        for (id, believed) in roster.believed_mut() {
            believed.expire(since, MOST_FORGOTTEN, &mut forgotten);
            self.index.forget(id, &forgotten);
            let pause =
                if forgotten.len() < MOST_FORGOTTEN { BELIEFS_PAUSE } else { Duration::ZERO };
            forgotten.clear();
            if let Some(oldest) = believed.oldest() {
                next = next.min(nanoseconds((oldest + self.config.believed_for).max(now + pause)));
            }
        }
        self.beliefs_expire_at.store(next, Ordering::Release);
    }

    /// Has someone else drop what a worker is believed to hold: with a large cache it takes a
    /// while.
    pub(crate) fn drop_later(&self, believed: Option<Believed>) {
        if let Some(believed) = believed.filter(|believed| believed.oldest().is_some()) {
            (self.background)(Box::new(move || drop(believed)));
        }
    }

    pub(crate) fn release(&self, hold: Hold, computed: bool) {
        let until = computed.then(|| self.clock.now() + self.config.promise_grace);
        self.roster().release(hold, until);
    }

    // A thread that panicked in one of the methods above can at worst have left a number wrong: no
    // reason to fail all requests from then on.

    pub(crate) fn roster(&self) -> MutexGuard<'_, Roster> {
        self.roster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn scratch(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A time since the clock's start in nanoseconds: 584 years fit.
fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
