//! The client that a connection or a request is accounted to.

use std::net::{IpAddr, Ipv4Addr};

/// The client that a connection or a request is accounted to.
///
/// Each owner has a share of connections, request slots and CPU time, so that no owner can starve
/// the others. Owners are addresses; an API key would be another variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The clients at an IPv4 address.
    Address(Ipv4Addr),
    /// The clients of an IPv6 network, by its first 64 bits: a host can choose among all addresses
    /// with the same prefix.
    Network(u64),
}

impl Owner {
    /// Returns the owner of an address. An IPv4-mapped IPv6 address counts as the IPv4 address.
    pub fn from_address(address: IpAddr) -> Self {
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
        Owner::from_address(address.parse().unwrap())
    }

    #[test]
    fn ipv6_addresses_with_one_prefix_share_an_owner() {
        assert_eq!(owner("2001:db8:1:2::1"), owner("2001:db8:1:2:ffff:ffff:ffff:ffff"));
        assert_ne!(owner("2001:db8:1:2::1"), owner("2001:db8:1:3::1"));
        assert_eq!(owner("::ffff:192.0.2.1"), owner("192.0.2.1"));
        assert_ne!(owner("192.0.2.2"), owner("192.0.2.1"));
    }
}
