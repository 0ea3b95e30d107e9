//! The identity of a frontend at an agent: its address.

use std::net::{IpAddr, Ipv6Addr};

/// A frontend's address: an IPv4 address, or an IPv6 network of 64 bits, as a host has all
/// addresses of its network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Peer(Option<IpAddr>);

impl Peer {
    /// Returns the peer at an address. An IPv4 address that is mapped to IPv6 counts as the IPv4
    /// address.
    pub(crate) fn from_address(address: IpAddr) -> Self {
        Self(Some(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            address => address,
        }))
    }
}
