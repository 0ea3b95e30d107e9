//! What one request may have done by the pool, and when its next piece of work is due.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chiasm_limit::Owner;

use super::error::CpuError;

/// How many times its price after it is asked for a piece of work is due. So a request waits in
/// proportion to what it asks for: work of 10 ms overtakes work of a second that was asked for up
/// to four seconds before, and nothing is overtaken for ever.
const STRETCH: u32 = 4;
/// How many times its price a piece of work may take before the rest is taken out of the budget,
/// too. Prices are within a factor of two on a usual core, but of files that are made for it.
const TOLERANCE: u32 = 3;

/// The work that one request has asked for so far. Clones are the same request's.
///
/// A piece of work is due four times its price after it is asked for, or after the request's piece
/// before it was due: a request that asks for much at once is served as if it had asked for one
/// thing after another.
#[derive(Clone, Debug)]
pub struct CpuBudget {
    request: Arc<Request>,
}

#[derive(Debug)]
struct Request {
    /// The one who asked; `None` where several may wait for the work.
    owner: Option<Owner>,
    limit: Duration,
    spent: Mutex<Spent>,
}

#[derive(Debug)]
struct Spent {
    cost: Duration,
    /// When the last piece is due; `None` before the first.
    due: Option<Instant>,
}

/// A piece of work that its request's budget has allowed.
#[derive(Clone, Debug)]
pub struct Ticket {
    price: Duration,
    request: Arc<Request>,
}

impl CpuBudget {
    /// A request of `owner` that may ask for work of `limit` in all: time of one core of a usual
    /// machine.
    pub fn new(owner: Owner, limit: Duration) -> Self {
        Self::made(Some(owner), limit)
    }

    /// Work that several requests may wait for, without a limit.
    pub fn shared() -> Self {
        Self::made(None, Duration::MAX)
    }

    fn made(owner: Option<Owner>, limit: Duration) -> Self {
        let spent = Mutex::new(Spent { cost: Duration::ZERO, due: None });
        Self { request: Arc::new(Request { owner, limit, spent }) }
    }

    /// What the request has asked for so far.
    pub fn spent(&self) -> Duration {
        self.request.spent().cost
    }

    /// Takes the price of a piece of work out of the budget, whether or not the work will be done
    /// in the end.
    ///
    /// # Errors
    /// [`CpuError::TooCostly`] if the request would have asked for more than it may. Then nothing
    /// is taken.
    pub fn ticket(&self, price: Duration) -> Result<Ticket, CpuError> {
        let mut spent = self.request.spent();
        let cost = spent.cost.saturating_add(price);
        self.request.check(cost)?;
        spent.cost = cost;
        Ok(Ticket { price, request: self.request.clone() })
    }
}

impl Ticket {
    /// The one who asked for the work; `None` if several may wait for it.
    pub(super) fn owner(&self) -> Option<Owner> {
        self.request.owner
    }

    /// Time of one core that the work takes, by estimate.
    pub(super) fn price(&self) -> Duration {
        self.price
    }

    /// Whether the work may be begun: what came before may have taken longer than its price.
    ///
    /// # Errors
    /// [`CpuError::TooCostly`] if all that the request may have done has been done.
    pub(super) fn check(&self) -> Result<(), CpuError> {
        self.request.check(self.request.spent().cost)
    }

    /// The work has taken so much time of one core. Takes what that was beyond the price out of the
    /// budget, if it was far beyond.
    pub(super) fn settle(&self, took: Duration) {
        if took > self.price.saturating_mul(TOLERANCE) {
            let mut spent = self.request.spent();
            spent.cost = spent.cost.saturating_add(took - self.price);
        }
    }

    /// When the work is due if it is asked for now.
    pub(super) fn due(&self, now: Instant) -> Instant {
        let mut spent = self.request.spent();
        let from = spent.due.map_or(now, |due| due.max(now));
        // A budget without a limit may lead beyond what an instant can hold: then the order of
        // asking decides.
        let due = from.checked_add(self.price.saturating_mul(STRETCH)).unwrap_or(from);
        spent.due = Some(due);
        due
    }
}

impl Request {
    fn check(&self, cost: Duration) -> Result<(), CpuError> {
        if cost > self.limit {
            Err(CpuError::TooCostly { cost, limit: self.limit })
        } else {
            Ok(())
        }
    }

    /// The state is never left half-changed.
    fn spent(&self) -> MutexGuard<'_, Spent> {
        self.spent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(limit: Duration) -> CpuBudget {
        CpuBudget::made(None, limit)
    }

    const SECOND: Duration = Duration::from_secs(1);

    fn due(budget: &CpuBudget, price: Duration, now: Instant) -> Instant {
        budget.ticket(price).unwrap().due(now)
    }

    #[test]
    fn a_request_may_ask_for_as_much_as_the_limit_and_no_more() {
        let budget = budget(3 * SECOND);
        budget.ticket(2 * SECOND).unwrap();
        let error = budget.ticket(2 * SECOND).unwrap_err();
        assert_eq!(error, CpuError::TooCostly { cost: 4 * SECOND, limit: 3 * SECOND });
        // What was refused has cost nothing.
        assert_eq!(budget.spent(), 2 * SECOND);
        budget.ticket(SECOND).unwrap();
        budget.ticket(Duration::from_nanos(1)).unwrap_err();
    }

    #[test]
    fn work_that_takes_far_longer_than_its_price_is_paid_for() {
        let budget = budget(8 * SECOND);
        let ticket = budget.ticket(SECOND).unwrap();
        // A slow machine is nobody's fault.
        ticket.settle(3 * SECOND);
        assert_eq!(budget.spent(), SECOND);
        ticket.settle(5 * SECOND);
        assert_eq!(budget.spent(), 5 * SECOND);
        let waiting = budget.ticket(SECOND).unwrap();
        waiting.check().unwrap();
        ticket.settle(5 * SECOND);
        // Also what was allowed before is not begun.
        assert!(matches!(waiting.check().unwrap_err(), CpuError::TooCostly { .. }));
        budget.ticket(Duration::ZERO).unwrap_err();
    }

    #[test]
    fn who_asks_for_much_is_served_after_who_asks_for_little() {
        let (now, greedy) = (Instant::now(), budget(100 * SECOND));
        let pieces: Vec<_> = (0..8).map(|_| due(&greedy, SECOND, now)).collect();
        assert!(pieces.is_sorted());
        let modest = due(&budget(SECOND), SECOND, now + SECOND);
        assert!(modest < pieces[1]);
        let light = due(&budget(SECOND), SECOND / 100, now + SECOND);
        assert!(light < pieces[0]);
    }

    #[test]
    fn nothing_is_overtaken_for_ever() {
        let now = Instant::now();
        let heavy = due(&budget(10 * SECOND), 10 * SECOND, now);
        let overtaken =
            |after: Duration| due(&budget(SECOND), Duration::from_millis(1), now + after) < heavy;
        assert!(overtaken(39 * SECOND));
        assert!(!overtaken(41 * SECOND));
    }

    #[test]
    fn a_request_that_has_waited_long_is_not_behind_for_what_it_had_before() {
        let (now, waited) = (Instant::now(), budget(10 * SECOND));
        due(&waited, SECOND, now);
        let later = now + 60 * SECOND;
        assert_eq!(due(&waited, SECOND, later), due(&budget(SECOND), SECOND, later));
    }
}
