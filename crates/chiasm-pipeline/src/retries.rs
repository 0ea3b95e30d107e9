//! Retry policy: how often a request may move to another worker, and which prompts may not be
//! retried.

use std::collections::VecDeque;
use std::hash::RandomState;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The maximum number of times that a request moves to another worker, for any reason. A prompt
/// that kills engines therefore kills at most three.
pub(crate) const MAX_MOVES: usize = 2;

/// The capacity of the quarantine: more prompts than can kill engines within its duration.
const MAX_QUARANTINED: usize = 1024;

/// The maximum duration of the quarantine.
const MAX_QUARANTINE: Duration = Duration::from_secs(24 * 3600);

/// The retry budget that each request earns, in thousandths of a move: a tenth of a move.
const EARNED_PER_REQUEST: u64 = 100;
/// The cost of a move, in thousandths of a move.
const COST_PER_MOVE: u64 = 1000;

/// The retry budget and the quarantine, which all requests share.
#[derive(Debug)]
pub struct Retries {
    debt: RetryDebt,
    quarantine: Quarantine,
}

impl Retries {
    /// Creates a policy that quarantines a prompt for `quarantine` after it was in three engines
    /// when they died.
    pub fn new(quarantine: Duration) -> Self {
        Self { debt: RetryDebt::default(), quarantine: Quarantine::new(quarantine) }
    }

    /// Credits the retry budget for an arriving request, which pays for a tenth of a move.
    pub fn on_request(&self) {
        self.debt.pay();
    }

    /// Takes one move from the budget. Returns `false` if `limit` moves are not paid for yet.
    pub(super) fn spend_move(&self, limit: usize) -> bool {
        self.debt.spend(limit)
    }

    /// Returns `true` if a prompt is quarantined.
    pub(super) fn is_quarantined(&self, fingerprint: impl FnOnce(&RandomState) -> u64) -> bool {
        self.quarantine.contains(fingerprint)
    }

    /// Quarantines a prompt.
    pub(super) fn quarantine(&self, fingerprint: impl FnOnce(&RandomState) -> u64) {
        self.quarantine.insert(fingerprint);
    }
}

/// The cost of moves that requests have not paid for yet.
///
/// It limits moves to a tenth of the requests, and to a fixed number in a burst.
#[derive(Debug, Default)]
struct RetryDebt(AtomicU64);

impl RetryDebt {
    fn pay(&self) {
        // All requests share the counter, so it is not written in the usual case of no debt.
        if self.0.load(Relaxed) > 0 {
            let _ = self.0.fetch_update(Relaxed, Relaxed, |debt| {
                Some(debt.saturating_sub(EARNED_PER_REQUEST))
            });
        }
    }

    fn spend(&self, limit: usize) -> bool {
        let max_debt = (limit as u64).saturating_mul(COST_PER_MOVE);
        let spend = |debt: u64| {
            let debt = debt + COST_PER_MOVE;
            (debt <= max_debt).then_some(debt)
        };
        self.0.fetch_update(Relaxed, Relaxed, spend).is_ok()
    }
}

/// The fingerprints of quarantined prompts.
#[derive(Debug)]
struct Quarantine {
    duration: Duration,
    /// Fingerprints and the ends of their quarantine, ordered by end.
    prompts: Mutex<VecDeque<(u64, Instant)>>,
    /// The number of prompts. It is usually 0, and nothing is hashed then.
    len: AtomicUsize,
    state: RandomState,
}

impl Quarantine {
    fn new(duration: Duration) -> Self {
        let duration = duration.min(MAX_QUARANTINE);
        Self {
            duration,
            prompts: Mutex::default(),
            len: AtomicUsize::new(0),
            state: RandomState::new(),
        }
    }

    fn contains(&self, fingerprint: impl FnOnce(&RandomState) -> u64) -> bool {
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
        prompts.iter().any(|(quarantined, _)| *quarantined == fingerprint)
    }

    fn insert(&self, fingerprint: impl FnOnce(&RandomState) -> u64) {
        let fingerprint = fingerprint(&self.state);
        let mut prompts = self.prompts();
        prompts.retain(|(quarantined, _)| *quarantined != fingerprint);
        if prompts.len() == MAX_QUARANTINED {
            prompts.pop_front();
        }
        prompts.push_back((fingerprint, Instant::now() + self.duration));
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
    fn tenth_of_requests_may_move_beyond_burst() {
        let budget = RetryDebt::default();
        (0..1000).for_each(|_| budget.pay());
        assert_eq!((0..10).filter(|_| budget.spend(3)).count(), 3);
        (0..9).for_each(|_| budget.pay());
        assert!(!budget.spend(3));
        budget.pay();
        assert!(budget.spend(3) && !budget.spend(3));
    }

    #[tokio::test(start_paused = true)]
    async fn quarantine_expires_within_its_capacity() {
        let quarantine = Quarantine::new(Duration::from_secs(60));
        quarantine.insert(|_| 7);
        assert!(quarantine.contains(|_| 7) && !quarantine.contains(|_| 8));
        tokio::time::advance(Duration::from_secs(59)).await;
        (100..100 + MAX_QUARANTINED as u64 - 1).for_each(|prompt| quarantine.insert(|_| prompt));
        assert!(quarantine.contains(|_| 7));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!quarantine.contains(|_| 7) && quarantine.contains(|_| 100));
        quarantine.insert(|_| 1);
        quarantine.insert(|_| 2);
        assert!(!quarantine.contains(|_| 100), "the oldest is evicted");
    }
}
