//! The proxies that are believed about the address that a request is from.

mod forwarded;

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::HeaderMap;
use chiasm_limit::Owner;

/// A network such as `10.0.0.0/8` or `fd00::/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Its first address as IPv6; IPv4 is wrapped into it.
    first: u128,
    mask: u128,
}

/// A text that names no network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected an address or a network, such as 10.0.0.0/8")]
pub struct NoNetwork;

impl Network {
    fn contains(&self, address: IpAddr) -> bool {
        as_ipv6(address) & self.mask == self.first
    }
}

impl FromStr for Network {
    type Err = NoNetwork;

    fn from_str(text: &str) -> Result<Self, NoNetwork> {
        let (address, prefix) =
            text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| NoNetwork)?;
        let bits = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(bits), str::parse::<u32>).map_err(|_| NoNetwork)?;
        let free = bits.checked_sub(prefix).ok_or(NoNetwork)?;
        let mask = u128::MAX.checked_shl(free).unwrap_or(0);
        Ok(Self { first: as_ipv6(address) & mask, mask })
    }
}

fn as_ipv6(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// The proxies that are believed when they say whom a request is from, in `X-Forwarded-For` or
/// `Forwarded`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<Network>);

impl TrustedProxies {
    /// The proxies in these networks.
    pub fn new(networks: Vec<Network>) -> Self {
        Self(networks)
    }

    /// The owner of a request that came from `peer`. Of the addresses that proxies have added, the
    /// last one that is no trusted proxy counts: what stands before it may be the client's own
    /// invention. If both headers are there and disagree, neither is believed, as a proxy passes on
    /// the one that it does not know.
    pub(crate) fn owner(&self, peer: IpAddr, headers: &HeaderMap) -> Owner {
        if !self.trust(peer) {
            return Owner::at(peer);
        }
        let first_untrusted =
            |hops: &mut dyn Iterator<Item = Option<IpAddr>>| self.first_untrusted(peer, hops);
        let named = [
            forwarded::x_forwarded_for(headers).map(|mut hops| first_untrusted(&mut hops)),
            forwarded::forwarded(headers).map(|mut hops| first_untrusted(&mut hops)),
        ];
        Owner::at(match named {
            [Some(one), Some(other)] if one != other => peer,
            [Some(client), _] | [None, Some(client)] => client,
            [None, None] => peer,
        })
    }

    /// Follows the hops away from `peer` for as long as they are trusted; one that can't be read
    /// ends the way at the one before.
    fn first_untrusted(
        &self,
        peer: IpAddr,
        hops: &mut dyn Iterator<Item = Option<IpAddr>>,
    ) -> IpAddr {
        let mut at = peer;
        for hop in hops.take(MAX_HOPS) {
            let Some(hop) = hop else { break };
            at = hop;
            if !self.trust(hop) {
                break;
            }
        }
        at
    }

    fn trust(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(address))
    }
}

/// More proxies in a row than anybody has.
const MAX_HOPS: usize = 32;

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    fn owner(address: &str) -> Owner {
        Owner::at(address.parse().unwrap())
    }

    fn networks(networks: &[&str]) -> TrustedProxies {
        TrustedProxies::new(networks.iter().map(|network| network.parse().unwrap()).collect())
    }

    /// The owner of a request that came from 10.0.0.1 with these headers, behind proxies in
    /// 10.0.0.0/8.
    fn behind_proxies(headers: &[(&'static str, &str)]) -> Owner {
        let headers: HeaderMap = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        networks(&["10.0.0.0/8"]).owner("10.0.0.1".parse().unwrap(), &headers)
    }

    #[test]
    fn networks_hold_their_addresses_and_no_others() {
        let trusted = networks(&["10.0.0.0/8", "192.0.2.7", "fd00::/8", "172.16.3.9/12"]);
        for inside in ["10.255.0.1", "192.0.2.7", "fdff::1", "::ffff:10.0.0.1", "172.31.0.1"] {
            assert!(trusted.trust(inside.parse().unwrap()), "{inside}");
        }
        for outside in ["11.0.0.1", "192.0.2.8", "fe00::1", "::10.0.0.1", "172.32.0.1"] {
            assert!(!trusted.trust(outside.parse().unwrap()), "{outside}");
        }
        assert!(networks(&["0.0.0.0/0"]).trust("8.8.8.8".parse().unwrap()));
        assert!(networks(&["::/0"]).trust("8.8.8.8".parse().unwrap()));
        for wrong in
            ["", "10.0.0.0/33", "fd00::/129", "10.0.0.0/", "10/8", "example.com", "10.0.0.0/-1"]
        {
            assert_eq!(wrong.parse::<Network>(), Err(NoNetwork), "{wrong}");
        }
    }

    #[test]
    fn strangers_are_not_believed() {
        let headers = HeaderMap::from_iter([(
            HeaderName::from_static("x-forwarded-for"),
            "1.2.3.4".parse().unwrap(),
        )]);
        let peer = "192.0.2.1".parse().unwrap();
        assert_eq!(networks(&["10.0.0.0/8"]).owner(peer, &headers), Owner::at(peer));
        assert_eq!(TrustedProxies::default().owner(peer, &headers), Owner::at(peer));
    }

    #[test]
    fn the_last_address_that_is_no_proxy_counts() {
        let named = |value| behind_proxies(&[("x-forwarded-for", value)]);
        assert_eq!(named("192.0.2.1"), owner("192.0.2.1"));
        assert_eq!(
            named("1.1.1.1, 192.0.2.1, 10.0.0.2"),
            owner("192.0.2.1"),
            "what stands before it may be invented"
        );
        assert_eq!(named("10.0.0.3, 10.0.0.2"), owner("10.0.0.3"), "a client among the proxies");
        assert_eq!(
            named("192.0.2.1, unknown"),
            owner("10.0.0.1"),
            "the proxy's own word is missing"
        );
        assert_eq!(named("192.0.2.1:4711"), owner("192.0.2.1"));
        assert_eq!(named("[2001:db8::1]:4711, 10.0.0.2"), owner("2001:db8::1"));
        assert_eq!(behind_proxies(&[]), owner("10.0.0.1"));
        let lines = [("x-forwarded-for", "1.1.1.1"), ("x-forwarded-for", "192.0.2.1")];
        assert_eq!(behind_proxies(&lines), owner("192.0.2.1"), "the last line is the nearest");
    }

    #[test]
    fn forwarded_is_read_as_well() {
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
    fn headers_that_disagree_are_not_believed() {
        let both = |one, other| behind_proxies(&[("x-forwarded-for", one), ("forwarded", other)]);
        assert_eq!(both("192.0.2.1", "for=192.0.2.1"), owner("192.0.2.1"));
        assert_eq!(both("192.0.2.1", "for=1.1.1.1"), owner("10.0.0.1"));
        assert_eq!(both("1.1.1.1", "for=192.0.2.1"), owner("10.0.0.1"));
    }

    #[test]
    fn a_way_without_end_is_not_followed() {
        let hops = vec!["10.0.0.9"; 10_000].join(",");
        assert_eq!(
            behind_proxies(&[("x-forwarded-for", &format!("192.0.2.1,{hops}"))]),
            owner("10.0.0.9")
        );
    }
}
