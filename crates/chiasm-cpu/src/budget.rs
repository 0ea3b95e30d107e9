//! The CPU budget of a request, and the due times of its work.
//!
//! Of several requests that wait for the CPU, the one with the least remaining work is served
//! first. This minimizes the mean time until requests are done: if every request got an equal share
//! instead, all would be done late. Waiting raises a request's rank, so none starves.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chiasm_limit::Owner;

use crate::error::CpuError;

/// The time until a request's remaining work is due, as a multiple of its price.
///
/// A request therefore waits in proportion to its work: work of 10 ms overtakes work of a second
/// that was requested up to four seconds earlier. No work is overtaken forever.
const DUE_FACTOR: u32 = 4;
/// The multiple of its price that a piece of work may take before the excess is charged. Prices are
/// within a factor of two on a usual core, except for files that are crafted to exceed them.
const TOLERANCE_FACTOR: u32 = 3;

/// The CPU budget of one request. Clones share it.
///
/// The request's remaining work is all work that was announced and is not done. It is due four
/// times its price after the first announcement. Pieces announced before any is queued, such as
/// the images of a request, share one due time, before that of later requests of the same size.
#[derive(Clone, Debug)]
pub struct CpuBudget {
    state: Arc<BudgetState>,
}

#[derive(Debug)]
struct BudgetState {
    /// The request's owner; `None` if several requests may wait for the work.
    owner: Option<Owner>,
    limit: Duration,
    spent: Mutex<Spent>,
}

#[derive(Debug)]
struct Spent {
    cost: Duration,
    /// The price of the announced work that is not done.
    remaining: Duration,
    /// The time of the first announcement since nothing remained.
    since: Option<Instant>,
}

/// The permission for a piece of work, which its request's budget has paid for.
#[derive(Clone, Debug)]
pub struct Ticket {
    price: Duration,
    state: Arc<BudgetState>,
}

/// Announced work. Dropping this marks it as done or cancelled.
#[derive(Debug)]
pub struct AnnouncedWork {
    price: Duration,
    state: Arc<BudgetState>,
}

impl CpuBudget {
    /// Creates the budget of a request: `limit` is its total time of one core of a usual machine.
    pub fn new(owner: Owner, limit: Duration) -> Self {
        Self::build(Some(owner), limit)
    }

    /// Creates an unlimited budget for work that several requests may wait for.
    pub fn shared() -> Self {
        Self::build(None, Duration::MAX)
    }

    fn build(owner: Option<Owner>, limit: Duration) -> Self {
        let spent =
            Mutex::new(Spent { cost: Duration::ZERO, remaining: Duration::ZERO, since: None });
        Self { state: Arc::new(BudgetState { owner, limit, spent }) }
    }

    /// Returns the cost of the work so far.
    pub fn spent(&self) -> Duration {
        self.state.spent().cost
    }

    /// Announces work at this price. The work may turn out to be unnecessary.
    pub fn announce(&self, price: Duration) -> AnnouncedWork {
        AnnouncedWork::new(&self.state, price, Instant::now())
    }

    /// Charges the price of a piece of work, even if the work is never done.
    ///
    /// # Errors
    /// Returns [`CpuError::TooCostly`], and charges nothing, if the price exceeds the rest of the
    /// budget.
    pub fn ticket(&self, price: Duration) -> Result<Ticket, CpuError> {
        let mut spent = self.state.spent();
        let cost = spent.cost.saturating_add(price);
        self.state.check(cost)?;
        spent.cost = cost;
        Ok(Ticket { price, state: self.state.clone() })
    }
}

impl Ticket {
    /// Returns the owner of the work; `None` if several requests may wait for it.
    pub(crate) fn owner(&self) -> Option<Owner> {
        self.state.owner
    }

    /// Returns the estimated time of one core for the work.
    pub(crate) fn price(&self) -> Duration {
        self.price
    }

    /// Checks that the work may begin: earlier work may have taken longer than its price.
    ///
    /// # Errors
    /// Returns [`CpuError::TooCostly`] if the budget has been exceeded since.
    pub(crate) fn check(&self) -> Result<(), CpuError> {
        self.state.check(self.state.spent().cost)
    }

    /// Charges the excess over the price if the work took `took`, far longer than its price.
    pub(crate) fn settle(&self, took: Duration) {
        if took > self.price.saturating_mul(TOLERANCE_FACTOR) {
            let mut spent = self.state.spent();
            spent.cost = spent.cost.saturating_add(took - self.price);
        }
    }

    /// Announces the work.
    pub(crate) fn announce(&self) -> AnnouncedWork {
        AnnouncedWork::new(&self.state, self.price, Instant::now())
    }
}

impl AnnouncedWork {
    fn new(state: &Arc<BudgetState>, price: Duration, now: Instant) -> Self {
        let mut spent = state.spent();
        spent.remaining = spent.remaining.saturating_add(price);
        spent.since.get_or_insert(now);
        drop(spent);
        Self { price, state: state.clone() }
    }

    /// Returns the time at which the request's remaining work is due.
    pub(crate) fn due(&self) -> Instant {
        let spent = self.state.spent();
        let since = spent.since.unwrap_or_else(Instant::now);
        // An unlimited budget may exceed the range of `Instant`. The order of requests decides
        // then.
        since.checked_add(spent.remaining.saturating_mul(DUE_FACTOR)).unwrap_or(since)
    }
}

impl Drop for AnnouncedWork {
    fn drop(&mut self) {
        let mut spent = self.state.spent();
        spent.remaining = spent.remaining.saturating_sub(self.price);
        if spent.remaining.is_zero() {
            spent.since = None;
        }
    }
}

impl BudgetState {
    fn check(&self, cost: Duration) -> Result<(), CpuError> {
        if cost > self.limit {
            Err(CpuError::TooCostly { cost, limit: self.limit })
        } else {
            Ok(())
        }
    }

    /// Locks the state, ignoring poison: it is never left half changed.
    fn spent(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(limit: Duration) -> CpuBudget {
        CpuBudget::build(None, limit)
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn announce(budget: &CpuBudget, price: Duration, now: Instant) -> AnnouncedWork {
        AnnouncedWork::new(&budget.state, price, now)
    }

    #[test]
    fn budget_allows_work_up_to_its_limit() {
        let budget = budget(3 * SECOND);
        budget.ticket(2 * SECOND).unwrap();
        let error = budget.ticket(2 * SECOND).unwrap_err();
        assert_eq!(error, CpuError::TooCostly { cost: 4 * SECOND, limit: 3 * SECOND });
        // The refused piece was not charged.
        assert_eq!(budget.spent(), 2 * SECOND);
        budget.ticket(SECOND).unwrap();
        budget.ticket(Duration::from_nanos(1)).unwrap_err();
    }

    #[test]
    fn work_far_over_its_price_is_charged() {
        let budget = budget(8 * SECOND);
        let ticket = budget.ticket(SECOND).unwrap();
        // A slow machine is tolerated.
        ticket.settle(3 * SECOND);
        assert_eq!(budget.spent(), SECOND);
        ticket.settle(5 * SECOND);
        assert_eq!(budget.spent(), 5 * SECOND);
        let waiting = budget.ticket(SECOND).unwrap();
        waiting.check().unwrap();
        ticket.settle(5 * SECOND);
        // Work that was paid for before does not begin either.
        assert!(matches!(waiting.check().unwrap_err(), CpuError::TooCostly { .. }));
        budget.ticket(Duration::ZERO).unwrap_err();
    }

    #[test]
    fn light_request_is_due_before_heavy_one() {
        let now = Instant::now();
        let greedy = budget(100 * SECOND);
        let pieces: Vec<_> = (0..8).map(|_| announce(&greedy, SECOND, now)).collect();
        let modest = budget(SECOND);
        let light = announce(&modest, SECOND, now + SECOND);
        assert!(light.due() < pieces[0].due());
    }

    #[test]
    fn request_with_less_remaining_work_is_due_first() {
        let now = Instant::now();
        let first = budget(100 * SECOND);
        let second = budget(100 * SECOND);
        let mut of_first: Vec<_> = (0..5).map(|_| announce(&first, SECOND, now)).collect();
        let of_second: Vec<_> =
            (0..5).map(|_| announce(&second, SECOND, now + SECOND / 1000)).collect();
        // A request's pieces share a due time; requests keep their order.
        assert_eq!(of_first[0].due(), of_first[4].due());
        assert!(of_first[4].due() < of_second[0].due());
        // A shorter request overtakes, but not a request that is nearly done.
        let third = budget(SECOND);
        let of_third = announce(&third, 2 * SECOND, now + SECOND);
        assert!(of_third.due() < of_first[0].due());
        of_first.truncate(1);
        assert!(of_first[0].due() < of_third.due());
    }

    #[test]
    fn heavy_work_is_overtaken_for_limited_time() {
        let now = Instant::now();
        let heavy = budget(10 * SECOND);
        let heavy = announce(&heavy, 10 * SECOND, now);
        let overtaken = |after: Duration| {
            announce(&budget(SECOND), Duration::from_millis(1), now + after).due() < heavy.due()
        };
        assert!(overtaken(39 * SECOND));
        assert!(!overtaken(41 * SECOND));
    }

    #[test]
    fn past_work_does_not_delay_later_work() {
        let now = Instant::now();
        let waited = budget(10 * SECOND);
        drop(announce(&waited, SECOND, now));
        let later = now + 60 * SECOND;
        let new = budget(SECOND);
        assert_eq!(announce(&waited, SECOND, later).due(), announce(&new, SECOND, later).due());
    }
}
