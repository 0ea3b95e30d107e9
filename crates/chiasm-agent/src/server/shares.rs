//! Fair shares of an agent's resources, by frontend address.

use std::collections::HashMap;
use std::mem;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use chiasm_media::{ByteBudget, Charge};

use crate::peer::Peer;

/// A budget shared by all addresses.
///
/// An address may hold at most `weight` times the free budget. With a weight of 1, one address
/// alone gets half of the budget and two get a third each. With 7 one gets seven eighths and two
/// get seven fifteenths each. So there is always room for newcomers.
#[derive(Clone)]
pub(crate) struct Shares {
    budget: ByteBudget,
    weight: u64,
    /// The amount held by each address that holds any, or is about to.
    held: Arc<Mutex<HashMap<Peer, Weak<AtomicU64>>>>,
}

/// The error for an exhausted budget or share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShareExhausted;

impl Shares {
    /// Creates shares of a budget, whose unit may be another than bytes. Others may charge the
    /// budget as well.
    pub(crate) fn new(budget: ByteBudget, weight: u64) -> Self {
        Self { budget, weight, held: Arc::default() }
    }

    /// Returns the share of the frontends at an address.
    pub(crate) fn for_peer(&self, peer: Peer) -> Share {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let own = held.get(&peer).and_then(Weak::upgrade).unwrap_or_else(|| {
            held.retain(|_, own| own.strong_count() > 0);
            let own = Arc::default();
            held.insert(peer, Arc::downgrade(&own));
            own
        });
        Share { budget: self.budget.clone(), weight: self.weight, own }
    }
}

/// The share of the frontends at one address. Clones are the same share.
#[derive(Clone)]
pub(crate) struct Share {
    budget: ByteBudget,
    weight: u64,
    /// The amount held by the address.
    own: Arc<AtomicU64>,
}

impl Share {
    /// Holds `count` until the guard is dropped.
    pub(crate) fn acquire(&self, count: u64) -> Result<ShareGuard, ShareExhausted> {
        let mut guard = self.empty();
        guard.grow(count).map(|()| guard)
    }

    /// Returns a guard that holds nothing yet.
    pub(crate) fn empty(&self) -> ShareGuard {
        ShareGuard { share: self.clone(), count: 0, charge: Some(self.budget.empty_charge()) }
    }

    /// Returns a guard that holds nothing yet and does not charge the budget: its user does.
    pub(crate) fn empty_uncharged(&self) -> ShareGuard {
        ShareGuard { share: self.clone(), count: 0, charge: None }
    }
}

/// A part of a share that is held until this is dropped.
pub(crate) struct ShareGuard {
    share: Share,
    count: u64,
    /// The same amount in the budget; `None` if the user charges the budget.
    charge: Option<Charge>,
}

impl ShareGuard {
    /// Returns the amount held.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Holds `more` in addition. Changes nothing if there is no room.
    pub(crate) fn grow(&mut self, more: u64) -> Result<(), ShareExhausted> {
        let Share { budget, weight, own } = &self.share;
        let free = budget.limit().saturating_sub(budget.held().saturating_add(more));
        // Two guards that grow at once may both pass this check. So a share may be exceeded by some
        // messages, but the budget is strict.
        if own.load(Relaxed).saturating_add(more) > weight.saturating_mul(free) {
            return Err(ShareExhausted);
        }
        if let Some(charge) = &mut self.charge {
            charge.grow(more).map_err(|_| ShareExhausted)?;
        }
        own.fetch_add(more, Relaxed);
        self.count += more;
        Ok(())
    }

    /// Releases everything.
    pub(crate) fn clear(&mut self) {
        if self.count > 0 {
            self.share.own.fetch_sub(mem::take(&mut self.count), Relaxed);
            self.charge.iter_mut().for_each(|charge| charge.shrink_to(0));
        }
    }
}

impl Drop for ShareGuard {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn peer(number: u8) -> Peer {
        Peer::from_address(IpAddr::V4(Ipv4Addr::new(10, 0, 0, number)))
    }

    /// Lets addresses take as much as they can, one after the other. Returns what each gets.
    fn taken(weight: u64, addresses: u8) -> Vec<u64> {
        let shares = Shares::new(ByteBudget::new(1024), weight);
        let mut held = Vec::new();
        for number in 0..addresses {
            let mut all = shares.for_peer(peer(number)).empty();
            while all.grow(1).is_ok() {}
            held.push(all);
        }
        held.iter().map(ShareGuard::count).collect()
    }

    #[test]
    fn greedy_address_leaves_room_to_later_ones() {
        assert_eq!(taken(1, 4), [512, 256, 128, 64]);
        assert_eq!(taken(7, 3), [896, 112, 14]);
    }

    #[test]
    fn largest_holder_grows_only_once_shares_are_equal() {
        let shares = Shares::new(ByteBudget::new(1500), 7);
        let [mut first, mut second] = [1, 2].map(|number| shares.for_peer(peer(number)).empty());
        let mut pieces: Vec<_> =
            (0..1312).map(|_| shares.for_peer(peer(1)).acquire(1).unwrap()).collect();
        assert_eq!((first.grow(1), second.grow(100)), (Err(ShareExhausted), Ok(())));
        while pieces.pop().is_some() {
            while second.grow(1).is_ok() {}
            if first.grow(1).is_ok() {
                break;
            }
        }
        // Each address has seven fifteenths of the budget.
        assert_eq!((pieces.len() as u64 + first.count(), second.count()), (700, 700));
    }

    #[test]
    fn other_charges_reduce_shares() {
        let budget = ByteBudget::new(1000);
        let shares = Shares::new(budget.clone(), 7);
        let others = budget.charge(920).unwrap();
        assert!(shares.for_peer(peer(1)).acquire(71).is_err());
        let held = shares.for_peer(peer(1)).acquire(70).unwrap();
        assert!(shares.for_peer(peer(1)).empty_uncharged().grow(2).is_err());
        drop(others);
        assert!(shares.for_peer(peer(2)).empty_uncharged().grow(813).is_ok());
        assert_eq!((budget.held(), shares.held.lock().unwrap().len()), (70, 2));
        drop(held);
        drop(shares.for_peer(peer(3)));
        assert_eq!((budget.held(), shares.held.lock().unwrap().len()), (0, 1));
    }
}
