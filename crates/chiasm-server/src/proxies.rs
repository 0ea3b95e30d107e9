//! Trusted proxies, whose headers say which address a request is from.

mod forwarded;

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::HeaderMap;
use chiasm_limit::Owner;

/// A network such as `10.0.0.0/8` or `fd00::/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// The first address as IPv6; IPv4 addresses are mapped to IPv6.
    first: u128,
    mask: u128,
}

/// The error for a text that is neither an address nor a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an address or a network, such as 10.0.0.0/8")]
pub struct ParseNetworkError;

impl Network {
    fn contains(&self, address: IpAddr) -> bool {
        as_ipv6(address) & self.mask == self.first
    }
}

impl FromStr for Network {
    type Err = ParseNetworkError;

    fn from_str(text: &str) -> Result<Self, ParseNetworkError> {
        let (address, prefix) =
            text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| ParseNetworkError)?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(bits), str::parse::<u32>).map_err(|_| ParseNetworkError)?;
        let host_bits = bits.checked_sub(prefix).ok_or(ParseNetworkError)?;
        let mask = u128::MAX.checked_shl(host_bits).unwrap_or(0);
        Ok(Self { first: as_ipv6(address) & mask, mask })
    }
}

fn as_ipv6(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The proxies that are trusted to name a request's origin in `X-Forwarded-For` or `Forwarded`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<Network>);

impl TrustedProxies {
    /// Trusts the proxies in these networks.
    pub fn new(networks: Vec<Network>) -> Self {
        Self(networks)
    }

    /// Returns the owner of a request received from `peer`.
    ///
    /// The owner is the last address in the proxies' header that is not a trusted proxy: a client
    /// may have invented the addresses before it. If both headers are present and disagree, neither
    /// is trusted, because a proxy passes on a header that it does not know.
    pub(crate) fn owner(&self, peer: IpAddr, headers: &HeaderMap) -> Owner {
        if !self.trusts(peer) {
            return Owner::from_address(peer);
        }
        let first_untrusted =
            |hops: &mut dyn Iterator<Item = Option<IpAddr>>| self.first_untrusted(peer, hops);
        let named = [
            forwarded::x_forwarded_for(headers).map(|mut hops| first_untrusted(&mut hops)),
            forwarded::forwarded(headers).map(|mut hops| first_untrusted(&mut hops)),
        ];
        Owner::from_address(match named {
            [Some(one), Some(other)] if one != other => peer,
            [Some(client), _] | [None, Some(client)] => client,
            [None, None] => peer,
        })
    }

    /// Follows the hops away from `peer` while they are trusted. An unreadable hop ends the walk at
    /// the hop before it.
    fn first_untrusted(
        &self,
        peer: IpAddr,
        hops: &mut dyn Iterator<Item = Option<IpAddr>>,
    ) -> IpAddr {
        let mut current = peer;
        for hop in hops.take(MAX_HOPS) {
            let Some(hop) = hop else { break };
            current = hop;
            if !self.trusts(hop) {
                break;
            }
        }
        current
    }

    fn trusts(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(address))
    }
}

/// The maximum number of hops followed: more proxies in a row than anybody has.
const MAX_HOPS: usize = 32;

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    fn owner(address: &str) -> Owner {
        Owner::from_address(address.parse().unwrap())
    }

    fn networks(networks: &[&str]) -> TrustedProxies {
        TrustedProxies::new(networks.iter().map(|network| network.parse().unwrap()).collect())
    }

    /// Returns the owner of a request with these headers from 10.0.0.1, with trusted proxies in
    /// 10.0.0.0/8.
    fn behind_proxies(headers: &[(&'static str, &str)]) -> Owner {
        let headers: HeaderMap = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        networks(&["10.0.0.0/8"]).owner("10.0.0.1".parse().unwrap(), &headers)
    }

    #[test]
    fn network_contains_only_its_addresses() {
        let trusted = networks(&["10.0.0.0/8", "192.0.2.7", "fd00::/8", "172.16.3.9/12"]);
        for inside in ["10.255.0.1", "192.0.2.7", "fdff::1", "::ffff:10.0.0.1", "172.31.0.1"] {
            assert!(trusted.trusts(inside.parse().unwrap()), "{inside}");
        }
        for outside in ["11.0.0.1", "192.0.2.8", "fe00::1", "::10.0.0.1", "172.32.0.1"] {
            assert!(!trusted.trusts(outside.parse().unwrap()), "{outside}");
        }
        assert!(networks(&["0.0.0.0/0"]).trusts("8.8.8.8".parse().unwrap()));
        assert!(networks(&["::/0"]).trusts("8.8.8.8".parse().unwrap()));
        for wrong in
            ["", "10.0.0.0/33", "fd00::/129", "10.0.0.0/", "10/8", "example.com", "10.0.0.0/-1"]
        {
            assert_eq!(wrong.parse::<Network>(), Err(ParseNetworkError), "{wrong}");
        }
    }

    #[test]
    fn untrusted_peer_is_the_owner() {
        let headers = HeaderMap::from_iter([(
            HeaderName::from_static("x-forwarded-for"),
            "1.2.3.4".parse().unwrap(),
        )]);
        let peer = "192.0.2.1".parse().unwrap();
        assert_eq!(networks(&["10.0.0.0/8"]).owner(peer, &headers), Owner::from_address(peer));
        assert_eq!(TrustedProxies::default().owner(peer, &headers), Owner::from_address(peer));
    }

    #[test]
    fn last_untrusted_address_is_the_owner() {
        let named = |value| behind_proxies(&[("x-forwarded-for", value)]);
        assert_eq!(named("192.0.2.1"), owner("192.0.2.1"));
        assert_eq!(
            named("1.1.1.1, 192.0.2.1, 10.0.0.2"),
            owner("192.0.2.1"),
            "a client may have invented the addresses before it"
        );
        assert_eq!(named("10.0.0.3, 10.0.0.2"), owner("10.0.0.3"), "a client among the proxies");
        assert_eq!(
            named("192.0.2.1, unknown"),
            owner("10.0.0.1"),
            "the entry of the nearest proxy is unreadable"
        );
        assert_eq!(named("192.0.2.1:4711"), owner("192.0.2.1"));
        assert_eq!(named("[2001:db8::1]:4711, 10.0.0.2"), owner("2001:db8::1"));
        assert_eq!(behind_proxies(&[]), owner("10.0.0.1"));
        let lines = [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "192.0.2.1")];
        assert_eq!(behind_proxies(&lines), owner("192.0.2.1"), "the last line is the nearest");
    }

    #[test]
    fn forwarded_header_is_read() {
        let named = |value| behind_proxies(&[("forwarded", value)]);
        assert_eq!(named("for=192.0.2.1;proto=https"), owner("192.0.2.1"));
        assert_eq!(
            named("for=1.1.1.1, By=10.0.0.9; For=\"[2001:db8::1]:4711\""),
            owner("2001:db8::1")
        );
        assert_eq!(named("for=192.0.2.1, for=_hidden"), owner("10.0.0.1"));
        assert_eq!(named("proto=https"), owner("10.0.0.1"));
    }

    #[test]
    fn disagreeing_headers_are_ignored() {
        let both = |one, other| behind_proxies(&[("x-forwarded-for", one), ("forwarded", other)]);
        assert_eq!(both("192.0.2.1", "for=192.0.2.1"), owner("192.0.2.1"));
        assert_eq!(both("192.0.2.1", "for=1.1.1.1"), owner("10.0.0.1"));
        assert_eq!(both("1.1.1.1", "for=192.0.2.1"), owner("10.0.0.1"));
    }

    #[test]
    fn hops_are_bounded() {
        let hops = vec!["10.0.0.9"; 10_000].join(",");
        assert_eq!(
            behind_proxies(&[("x-forwarded-for", &format!("192.0.2.1,{hops}"))]),
            owner("10.0.0.9")
        );
    }
}
