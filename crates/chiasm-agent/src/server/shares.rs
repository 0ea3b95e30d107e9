//! Shares of what an agent has for all frontends, by where these are.

use std::collections::HashMap;
use std::mem;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use chiasm_media::{ByteBudget, Charge};

use crate::peer::Peer;

/// What there is for all, and who holds how much of it. Each address may hold so many `times` as
/// much as it leaves to all others: with 1 one alone half of what there is and two a third each,
/// with 7 seven eighths and seven fifteenths. Whoever comes later finds room.
#[derive(Clone)]
pub(crate) struct Shares {
    of_all: ByteBudget,
    times: u64,
    /// What each address holds that holds any, or is about to.
    held: Arc<Mutex<HashMap<Peer, Weak<AtomicU64>>>>,
}

/// There is no room, or what there is left is for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoRoom;

impl Shares {
    /// Shares of what a budget has, whose unit may be another than bytes. Others may count in it as
    /// well.
    pub(crate) fn new(of_all: ByteBudget, times: u64) -> Self {
        Self { of_all, times, held: Arc::default() }
    }

    /// The share of the frontends at an address.
    pub(crate) fn of(&self, peer: Peer) -> Share {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let own = held.get(&peer).and_then(Weak::upgrade).unwrap_or_else(|| {
            held.retain(|_, own| own.strong_count() > 0);
            let own = Arc::default();
            held.insert(peer, Arc::downgrade(&own));
            own
        });
        Share { of_all: self.of_all.clone(), times: self.times, own }
    }
}

/// The share of the frontends at one address. Clones are the same.
#[derive(Clone)]
pub(crate) struct Share {
    of_all: ByteBudget,
    times: u64,
    /// What is held of it.
    own: Arc<AtomicU64>,
}

impl Share {
    /// Holds so much until what is returned is dropped.
    pub(crate) fn take(&self, count: u64) -> Result<Held, NoRoom> {
        let mut held = self.nothing();
        held.grow(count).map(|()| held)
    }

    /// Holds nothing yet.
    pub(crate) fn nothing(&self) -> Held {
        Held { share: self.clone(), count: 0, charge: Some(self.of_all.empty_charge()) }
    }

    /// Holds nothing yet of what its user counts in the budget as well.
    pub(crate) fn nothing_beside(&self) -> Held {
        Held { share: self.clone(), count: 0, charge: None }
    }
}

/// A part of a share that is held until this is dropped.
pub(crate) struct Held {
    share: Share,
    count: u64,
    /// The same in the budget, unless it is counted there elsewhere.
    charge: Option<Charge>,
}

impl Held {
    /// How much it is.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Holds `more` as well. If there is no room nothing has changed.
    pub(crate) fn grow(&mut self, more: u64) -> Result<(), NoRoom> {
        let Share { of_all, times, own } = &self.share;
        let left = of_all.limit().saturating_sub(of_all.held().saturating_add(more));
        // Two that grow at once may both be let in: what there is for all is bounded strictly, a
        // share by some messages more.
        if own.load(Relaxed).saturating_add(more) > times.saturating_mul(left) {
            return Err(NoRoom);
        }
        if let Some(charge) = &mut self.charge {
            charge.grow(more).map_err(|_| NoRoom)?;
        }
        own.fetch_add(more, Relaxed);
        self.count += more;
        Ok(())
    }

    /// Holds nothing any more.
    pub(crate) fn clear(&mut self) {
        if self.count > 0 {
            self.share.own.fetch_sub(mem::take(&mut self.count), Relaxed);
            self.charge.iter_mut().for_each(|charge| charge.shrink_to(0));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn peer(number: u8) -> Peer {
        Peer::at(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
    }

    /// What one of these addresses gets, one after the other, if it takes what it can.
    fn taken(times: u64, addresses: u8) -> Vec<u64> {
        let shares = Shares::new(ByteBudget::new(1024), times);
        let mut held = Vec::new();
        for number in 0..addresses {
            let mut all = shares.of(peer(number)).nothing();
            while all.grow(1).is_ok() {}
            held.push(all);
        }
        held.iter().map(Held::count).collect()
    }

    #[test]
    fn one_address_leaves_room_to_those_that_come_later() {
        assert_eq!(taken(1, 4), [512, 256, 128, 64]);
        assert_eq!(taken(7, 3), [896, 112, 14]);
    }

    #[test]
    fn who_holds_most_gets_no_more_until_all_have_the_same() {
        let shares = Shares::new(ByteBudget::new(1500), 7);
        let [mut one, mut two] = [1, 2].map(|number| shares.of(peer(number)).nothing());
        let mut pieces: Vec<_> = (0..1312).map(|_| shares.of(peer(1)).take(1).unwrap()).collect();
        assert_eq!((one.grow(1), two.grow(100)), (Err(NoRoom), Ok(())));
        while pieces.pop().is_some() {
            while two.grow(1).is_ok() {}
            if one.grow(1).is_ok() {
                break;
            }
        }
        // Seven fifteenths.
        assert_eq!((pieces.len() as u64 + one.count(), two.count()), (700, 700));
    }

    #[test]
    fn what_others_count_in_the_budget_is_not_there_and_nobody_is_remembered_who_holds_nothing() {
        let budget = ByteBudget::new(1000);
        let shares = Shares::new(budget.clone(), 7);
        let others = budget.charge(920).unwrap();
        assert!(shares.of(peer(1)).take(71).is_err());
        let held = shares.of(peer(1)).take(70).unwrap();
        assert!(shares.of(peer(1)).nothing_beside().grow(2).is_err());
        drop(others);
        assert!(shares.of(peer(2)).nothing_beside().grow(813).is_ok());
        assert_eq!((budget.held(), shares.held.lock().unwrap().len()), (70, 2));
        drop(held);
        drop(shares.of(peer(3)));
        assert_eq!((budget.held(), shares.held.lock().unwrap().len()), (0, 1));
    }
}
