//! Where workers are, as the numbers that the router compares.

use std::hash::{DefaultHasher, Hash, Hasher};

use chiasm_backend::{Capabilities, Locality};
use chiasm_types::WorkerId;

/// A number that workers of one machine share, and no others.
pub(crate) fn machine(locality: &Locality, worker: WorkerId) -> u64 {
    match locality {
        Locality::Here => 0,
        Locality::Host(address) => hashed(address) | 1,
        // On a machine of its own, as far as anybody knows.
        Locality::Unknown => (u64::from(worker.0) + 1) << 1,
    }
}

/// A number that workers share which hand prompts to each other, and no others: those of one
/// private network, else those of one machine.
pub(crate) fn hands_over_in(can: &Capabilities, worker: WorkerId) -> u64 {
    let is_here = match &can.locality {
        Locality::Here => true,
        Locality::Host(address) => address.is_loopback(),
        Locality::Unknown => false,
    };
    // The loopback addresses of another machine are not where they seem to be.
    match can.private_network.filter(|network| is_here || !network.is_loopback()) {
        // No machine's: those that are not odd are small.
        Some(network) => (hashed(&network) | 1 << 63) & !1,
        None => machine(&can.locality, worker),
    }
}

fn hashed(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use chiasm_backend::fake::fake_capabilities;

    use super::*;

    fn place(host: Option<[u8; 4]>, network: Option<&str>) -> u64 {
        let private_network = network.map(|network| network.parse().unwrap());
        let locality = host.map_or(Locality::Here, |host| Locality::Host(host.into()));
        hands_over_in(
            &Capabilities { locality, private_network, ..fake_capabilities() },
            WorkerId(7),
        )
    }

    #[test]
    fn prompts_stay_on_their_machine_unless_both_have_one_private_network() {
        let (one, other, rack) = (Some([10, 0, 0, 7]), Some([10, 0, 0, 8]), Some("10.0.0.0/24"));
        assert_eq!(place(one, None), machine(&Locality::Host([10, 0, 0, 7].into()), WorkerId(0)));
        assert_eq!((place(None, None), place(one, None) == place(other, None)), (0, false));
        assert_eq!(place(one, rack), place(other, rack));
        assert_eq!(place(one, rack), place(None, rack), "a frontend with engines of its own");
        assert_ne!(place(one, rack), place(other, None));
        assert_ne!(place(one, rack), place(one, None));
        assert_ne!(place(one, rack), place(other, Some("10.0.0.0/16")));
    }

    #[test]
    fn loopback_addresses_are_a_network_of_this_machine_alone() {
        let loopback = Some("127.0.0.0/24");
        assert_eq!(place(Some([127, 0, 0, 2]), loopback), place(Some([127, 0, 0, 3]), loopback));
        assert_ne!(place(Some([10, 0, 0, 7]), loopback), place(Some([10, 0, 0, 8]), loopback));
        assert_ne!(place(Some([10, 0, 0, 7]), loopback), place(None, loopback));
    }

    #[test]
    fn whoever_is_nobody_knows_where_is_alone() {
        let unknown = |worker| machine(&Locality::Unknown, WorkerId(worker));
        assert!(unknown(0) != unknown(1) && unknown(0) != machine(&Locality::Here, WorkerId(0)));
    }
}
