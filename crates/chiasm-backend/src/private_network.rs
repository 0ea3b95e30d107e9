//! Networks over which engines of several machines hand prompts to each other.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// Addresses that begin with the same bits: `10.0.0.0/24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network {
    first: IpAddr,
    bits: u8,
}

impl Network {
    /// The addresses that have this one's first bits: 1 to 32, and to 128 for IPv6. `None` for
    /// other numbers.
    pub fn around(address: IpAddr, bits: u8) -> Option<Self> {
        let first = match address {
            IpAddr::V4(address) if (1..=32).contains(&bits) => {
                IpAddr::V4(Ipv4Addr::from_bits(address.to_bits() & (u32::MAX << (32 - bits))))
            }
            IpAddr::V6(address) if (1..=128).contains(&bits) => {
                IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - bits))))
            }
            IpAddr::V4(_) | IpAddr::V6(_) => return None,
        };
        Some(Self { first, bits })
    }

    /// Whether an address is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        Self::around(address, self.bits) == Some(*self)
    }

    /// Whether its addresses are those of one machine.
    pub fn is_loopback(&self) -> bool {
        self.first.is_loopback()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

/// The fault of a text that names no network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// It is no [`Network`].
    #[error("expected an address and a number of bits, such as 10.0.0.0/24")]
    Network,
    /// It is no [`PrivateNetwork`].
    #[error(
        "expected this machine's address and how many of its bits are the network's, \
         such as 10.0.0.7/24"
    )]
    PrivateNetwork,
    /// The address of a [`PrivateNetwork`] is one of several machines, or of none.
    #[error("{0} is no address of one machine; {how}", how = NetworkError::PrivateNetwork)]
    NotOneMachine(IpAddr),
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let around = |(address, bits)| Self::around(address, bits);
        read(text).and_then(around).ok_or(NetworkError::Network)
    }
}

/// A network that an operator says is private, and where this machine is on it: `10.0.0.7/24`.
///
/// The number of bits is not guessed. What it allows is which addresses engines connect to and send
/// keys and values to, and neither an address's class nor a network card's mask tells whom the
/// operator trusts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrivateNetwork {
    /// This machine's address.
    pub address: IpAddr,
    /// The addresses of all machines.
    pub network: Network,
}

impl FromStr for PrivateNetwork {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (address, bits) = read(text).ok_or(NetworkError::PrivateNetwork)?;
        if address.is_unspecified() || address.is_multicast() {
            return Err(NetworkError::NotOneMachine(address));
        }
        let network = Network::around(address, bits).ok_or(NetworkError::PrivateNetwork)?;
        Ok(Self { address, network })
    }
}

fn read(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/')?;
    Some((address.parse().ok()?, bits.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        text.parse().unwrap()
    }

    #[test]
    fn a_network_has_the_addresses_with_its_bits() {
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
    fn machines_of_one_network_say_the_same() {
        assert_eq!(network("10.0.0.7/24"), network("10.0.0.8/24"));
        assert_ne!(network("10.0.0.7/24"), network("10.0.1.7/24"));
        assert_ne!(network("10.0.0.0/24"), network("10.0.0.0/16"));
        assert_eq!(network(&network("10.0.0.7/24").to_string()), network("10.0.0.8/24"));
        assert!(network("127.0.0.2/24").is_loopback() && !network("10.0.0.7/24").is_loopback());
    }

    #[test]
    fn whoever_gives_no_network_is_told_how() {
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
