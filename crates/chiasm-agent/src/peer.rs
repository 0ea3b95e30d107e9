//! The identity by which an agent tells frontends apart: their address.

use std::net::{IpAddr, Ipv6Addr};

/// Who connects to an agent: whoever is at an IPv4 address, or in an IPv6 network of 64 bits, as a
/// host has all addresses of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Peer(Option<IpAddr>);

impl Peer {
    /// The one at an address; an IPv4 address that is wrapped into IPv6 is the IPv4 address.
    pub(crate) fn at(address: IpAddr) -> Self {
        Self(Some(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
            address => address,
        }))
    }
}
