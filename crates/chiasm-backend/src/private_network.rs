//! Private networks over which engines on several machines hand prompts to each other.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A network: the addresses that share a prefix, such as `10.0.0.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    first: IpAddr,
    prefix_bits: u8,
}

impl Network {
    /// Returns the network that contains `address`. The prefix has 1 to 32 bits for IPv4 and 1 to
    /// 128 bits for IPv6; `None` for other lengths.
    pub fn containing(address: IpAddr, prefix_bits: u8) -> Option<Self> {
        let first = match address {
            IpAddr::V4(address) if (1..=32).contains(&prefix_bits) => {
                let mask = u32::MAX << (32 - prefix_bits);
                IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & mask))
            }
            IpAddr::V6(address) if (1..=128).contains(&prefix_bits) => {
                let mask = u128::MAX << (128 - prefix_bits);
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & mask))
            }
            IpAddr::V4(_) | IpAddr::V6(_) => return None,
        };
        Some(Self { first, prefix_bits })
    }

    /// Returns `true` if `address` belongs to this network.
    pub fn contains(&self, address: IpAddr) -> bool {
        Self::containing(address, self.prefix_bits) == Some(*self)
    }

    /// Returns `true` if this is a loopback network, which does not leave the machine.
    pub fn is_loopback(&self) -> bool {
        self.first.is_loopback()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix_bits)
    }
}

/// The error for a text that is not a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The text is not a [`Network`].
    #[error("expected an address and a prefix length, such as 10.0.0.0/24")]
    Network,
    /// The text is not a [`PrivateNetwork`].
    #[error("expected this machine's address and a prefix length, such as 10.0.0.7/24")]
    PrivateNetwork,
    /// The address of a [`PrivateNetwork`] does not name exactly one machine.
    #[error(
        "{0} is not the address of a single machine; {how}",
        how = NetworkError::PrivateNetwork
    )]
    NotOneMachine(IpAddr),
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (address, prefix_bits) = split(text).ok_or(NetworkError::Network)?;
        Self::containing(address, prefix_bits).ok_or(NetworkError::Network)
    }
}

/// A network that the operator declares private, with this machine's address on it: `10.0.0.7/24`.
///
/// The prefix length is never guessed. It determines to which addresses engines connect and send
/// keys and values. Neither an address's class nor a network card's mask shows which machines the
/// operator trusts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateNetwork {
    /// This machine's address.
    pub address: IpAddr,
    /// The network that all machines are on.
    pub network: Network,
}

impl FromStr for PrivateNetwork {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (address, prefix_bits) = split(text).ok_or(NetworkError::PrivateNetwork)?;
        if address.is_unspecified() || address.is_multicast() {
            return Err(NetworkError::NotOneMachine(address));
        }
        let network =
            Network::containing(address, prefix_bits).ok_or(NetworkError::PrivateNetwork)?;
        Ok(Self { address, network })
    }
}

/// Splits a text into an address and the number of its prefix bits.
fn split(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix_bits) = text.split_once('/')?;
    Some((address.parse().ok()?, prefix_bits.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        text.parse().unwrap()
    }

    #[test]
    fn network_contains_addresses_with_its_prefix() {
        let office = network("10.1.2.7/22");
        assert_eq!(office.to_string(), "10.1.0.0/22");
        let has = |address: &str| office.contains(address.parse().unwrap());
        assert!(has("10.1.0.0") && has("10.1.3.255"));
        for other in ["10.1.4.0", "10.0.255.255", "127.0.0.1", "::1", "::ffff:10.1.2.7"] {
            assert!(!has(other), "{other}");
        }
        assert!(network("10.1.2.7/32").contains([10, 1, 2, 7].into()));
        let six = network("fd00:1::7/64");
        assert!(
            six.contains("fd00:1::8".parse().unwrap())
                && !six.contains("fd00:2::8".parse().unwrap())
        );
        assert_eq!(six.to_string(), "fd00:1::/64");
    }

    #[test]
    fn machines_of_one_network_parse_to_equal_networks() {
        assert_eq!(network("10.0.0.7/24"), network("10.0.0.8/24"));
        assert_ne!(network("10.0.0.7/24"), network("10.0.1.7/24"));
        assert_ne!(network("10.0.0.0/24"), network("10.0.0.0/16"));
        assert_eq!(network(&network("10.0.0.7/24").to_string()), network("10.0.0.8/24"));
        assert!(network("127.0.0.2/24").is_loopback() && !network("10.0.0.7/24").is_loopback());
    }

    #[test]
    fn text_that_is_not_a_network_gets_an_example() {
        for wrong in [
            "10.0.0.7",
            "",
            "/24",
            "10.0.0.7/0",
            "10.0.0.7/33",
            "10.0.0.7/x",
            "gpu1/24",
            "0.0.0.0/8",
            "224.0.0.1/24",
        ] {
            let error = wrong.parse::<PrivateNetwork>().unwrap_err().to_string();
            assert!(error.contains("10.0.0.7/24"), "{wrong}: {error}");
        }
        let here: PrivateNetwork = "10.0.0.7/24".parse().unwrap();
        assert_eq!(
            (here.address, here.network.to_string()),
            ([10, 0, 0, 7].into(), "10.0.0.0/24".to_owned())
        );
    }
}
