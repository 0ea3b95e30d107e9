//! The party that a connection or a request belongs to.

use std::net::{IpAddr, Ipv4Addr};

/// The party that has a share of connections, of request slots and of CPU time, so that none can
/// hold what others need. It is an address; an API key would be another variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The clients at an IPv4 address.
    Address(Ipv4Addr),
    /// The clients of an IPv6 network, by its first 64 bits: a host has all addresses below them to
    /// choose from.
    Network(u64),
}

impl Owner {
    /// Returns the owner at an address. An IPv4 address that is wrapped into IPv6 is the IPv4
    /// address.
    pub fn at(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::Address(address),
            IpAddr::V6(address) => Self::Network((address.to_bits() >> 64) as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(address: &str) -> Owner {
        Owner::at(address.parse().unwrap())
    }

    #[test]
    fn ipv6_host_is_one_owner_at_all_its_addresses() {
        assert_eq!(owner("2001:db8:1:2::1"), owner("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(owner("2001:db8:1:2::1"), owner("2001:db8:1:3::1"));
        assert_eq!(owner("::ffff:192.0.2.1"), owner("192.0.2.1"));
        assert_ne!(owner("192.0.2.2"), owner("192.0.2.1"));
    }
}
