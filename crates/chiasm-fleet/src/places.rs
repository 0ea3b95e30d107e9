//! Numbers for workers' machines and networks, which the router compares.

use std::hash::{DefaultHasher, Hash, Hasher};

use chiasm_backend::{Capabilities, Locality};
use chiasm_types::WorkerId;

/// Returns a number that only workers on the same machine share.
pub(crate) fn machine(locality: &Locality, worker: WorkerId) -> u64 {
    match locality {
        Locality::Here => 0,
        Locality::Host(address) => hash(address) | 1,
        // The worker is presumed to be on a machine of its own.
        Locality::Unknown => (u64::from(worker.0) + 1) << 1,
    }
}

/// Returns the number of the domain in which a worker can hand computed prompts to others: that of
/// its private network, or else that of its machine.
pub(crate) fn handover_domain(capabilities: &Capabilities, worker: WorkerId) -> u64 {
    let is_local = match &capabilities.locality {
        Locality::Here => true,
        Locality::Host(address) => address.is_loopback(),
        Locality::Unknown => false,
    };
    // A loopback network is only meaningful on this machine.
    let private_network = capabilities.private_network;
    match private_network.filter(|network| is_local || !network.is_loopback()) {
        // Even and large: machines' numbers are odd or small.
        Some(network) => (hash(&network) | 1 << 63) & !1,
        None => machine(&capabilities.locality, worker),
    }
}

fn hash(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use chiasm_backend::fake::fake_capabilities;

    use super::*;

    fn domain(host: Option<[u8; 4]>, network: Option<&str>) -> u64 {
        let private_network = network.map(|network| network.parse().unwrap());
        let locality = host.map_or(Locality::Here, |host| Locality::Host(host.into()));
        let capabilities = Capabilities { locality, private_network, ..fake_capabilities() };
        handover_domain(&capabilities, WorkerId(7))
    }

    #[test]
    fn private_network_is_shared_handover_domain() {
        let first = Some([10, 0, 0, 7]);
        let second = Some([10, 0, 0, 8]);
        let rack = Some("10.0.0.0/24");
        assert_eq!(
            domain(first, None),
            machine(&Locality::Host([10, 0, 0, 7].into()), WorkerId(0))
        );
        assert_eq!(domain(None, None), 0);
        assert_ne!(domain(first, None), domain(second, None));
        assert_eq!(domain(first, rack), domain(second, rack));
        let message = "a frontend's own engines are in its rack";
        assert_eq!(domain(first, rack), domain(None, rack), "{message}");
        assert_ne!(domain(first, rack), domain(second, None));
        assert_ne!(domain(first, rack), domain(first, None));
        assert_ne!(domain(first, rack), domain(second, Some("10.0.0.0/16")));
    }

    #[test]
    fn loopback_network_is_local_to_this_machine() {
        let loopback = Some("127.0.0.0/24");
        assert_eq!(domain(Some([127, 0, 0, 2]), loopback), domain(Some([127, 0, 0, 3]), loopback));
        assert_ne!(domain(Some([10, 0, 0, 7]), loopback), domain(Some([10, 0, 0, 8]), loopback));
        assert_ne!(domain(Some([10, 0, 0, 7]), loopback), domain(None, loopback));
    }

    #[test]
    fn workers_of_unknown_locality_share_no_machine() {
        let unknown = |worker| machine(&Locality::Unknown, WorkerId(worker));
        assert!(unknown(0) != unknown(1) && unknown(0) != machine(&Locality::Here, WorkerId(0)));
    }
}
