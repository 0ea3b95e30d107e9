//! When a request that lost its worker is given to another one, and what may no longer be.

use std::collections::VecDeque;
use std::hash::RandomState;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The most times that a request moves to another worker, whatever the reason. A prompt that kills
/// engines has killed three by then.
pub(crate) const MAX_MOVES: usize = 2;

/// Prompts that are remembered to have killed engines: more than can do so while they are
/// remembered.
const MAX_QUARANTINED: usize = 1024;

/// The longest time that they may be remembered for.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// What a request earns for all, and what a move costs, in thousandths of a move: one in ten.
const EARNED: u64 = 100;
const MOVE: u64 = 1000;

/// What requests that lose their workers share.
#[derive(Debug)]
pub struct Retries {
    debt: RetryDebt,
    quarantine: Quarantine,
}

impl Retries {
    /// Creates the state of a frontend in which nothing has failed. A prompt that was in three
    /// engines when they died is quarantined for `quarantine`.
    pub fn new(quarantine: Duration) -> Self {
        Self { debt: RetryDebt::default(), quarantine: Quarantine::new(quarantine) }
    }

    /// Notes that a request has come, which pays for a tenth of a move.
    pub fn earn(&self) {
        self.debt.pay();
    }

    /// Spends one move. Returns `false` if as many as `limit` moves are not paid for yet.
    pub(super) fn spend_move(&self, limit: usize) -> bool {
        self.debt.spend(limit)
    }

    /// Whether too many engines died with this prompt lately.
    pub(super) fn is_quarantined(&self, fingerprint: impl FnOnce(&RandomState) -> u64) -> bool {
        self.quarantine.holds(fingerprint)
    }

    /// A prompt was in too many engines when they died.
    pub(super) fn quarantine(&self, fingerprint: impl FnOnce(&RandomState) -> u64) {
        self.quarantine.put(fingerprint);
    }
}

/// The cost of moves that requests have not paid for yet. It bounds moves to a tenth of the
/// requests, and a number at once.
#[derive(Debug, Default)]
struct RetryDebt(AtomicU64);

impl RetryDebt {
    fn pay(&self) {
        // Nearly always nothing, and then not written to: all requests share it.
        if self.0.load(Relaxed) > 0 {
            let _ = self.0.fetch_update(Relaxed, Relaxed, |owed| Some(owed.saturating_sub(EARNED)));
        }
    }

    fn spend(&self, limit: usize) -> bool {
        let most = (limit as u64).saturating_mul(MOVE);
        self.0
            .fetch_update(Relaxed, Relaxed, |owed| (owed + MOVE <= most).then_some(owed + MOVE))
            .is_ok()
    }
}

/// Fingerprints of prompts, each for a while.
#[derive(Debug)]
struct Quarantine {
    lasts: Duration,
    /// In the order in which they came, and so of their ends.
    prompts: Mutex<VecDeque<(u64, Instant)>>,
    /// Number of prompts: mostly 0, and then nothing is hashed.
    len: AtomicUsize,
    state: RandomState,
}

impl Quarantine {
    fn new(lasts: Duration) -> Self {
        let lasts = lasts.min(LONGEST);
        Self {
            lasts,
            prompts: Mutex::default(),
            len: AtomicUsize::new(0),
            state: RandomState::new(),
        }
    }

    fn holds(&self, fingerprint: impl FnOnce(&RandomState) -> u64) -> bool {
        if self.len.load(Relaxed) == 0 {
            return false;
        }
        let fingerprint = fingerprint(&self.state);
        let mut prompts = self.prompts();
        let now = Instant::now();
        while prompts.front().is_some_and(|(_, end)| *end <= now) {
            prompts.pop_front();
        }
        self.len.store(prompts.len(), Relaxed);
        prompts.iter().any(|(held, _)| *held == fingerprint)
    }

    fn put(&self, fingerprint: impl FnOnce(&RandomState) -> u64) {
        let fingerprint = fingerprint(&self.state);
        let mut prompts = self.prompts();
        prompts.retain(|(held, _)| *held != fingerprint);
        if prompts.len() == MAX_QUARANTINED {
            prompts.pop_front();
        }
        prompts.push_back((fingerprint, Instant::now() + self.lasts));
        self.len.store(prompts.len(), Relaxed);
    }

    fn prompts(&self) -> MutexGuard<'_, VecDeque<(u64, Instant)>> {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_the_requests_may_move_and_a_number_at_once() {
        let budget = RetryDebt::default();
        (0..1000).for_each(|_| budget.pay());
        assert_eq!((0..10).filter(|_| budget.spend(3)).count(), 3);
        (0..9).for_each(|_| budget.pay());
        assert!(!budget.spend(3));
        budget.pay();
        assert!(budget.spend(3) && !budget.spend(3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_quarantine_ends_and_holds_a_bounded_number() {
        let quarantine = Quarantine::new(Duration::from_secs(60));
        quarantine.put(|_| 7);
        assert!(quarantine.holds(|_| 7) && !quarantine.holds(|_| 8));
        tokio::time::advance(Duration::from_secs(59)).await;
        (100..100 + MAX_QUARANTINED as u64 - 1).for_each(|prompt| quarantine.put(|_| prompt));
        assert!(quarantine.holds(|_| 7));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!quarantine.holds(|_| 7) && quarantine.holds(|_| 100));
        quarantine.put(|_| 1);
        quarantine.put(|_| 2);
        assert!(!quarantine.holds(|_| 100), "the oldest makes room");
    }
}
