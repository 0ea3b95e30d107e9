//! The fetch policy: allowed schemes, ports, hosts and network addresses.
//!
//! Every URL, including that of a redirect, is checked before a request is sent. The addresses that
//! a name resolves to are checked when a connection is made: [`GuardedResolver`] returns only
//! allowed addresses, and the client connects to those.

mod address;
mod domain;
mod resolver;

use std::net::IpAddr;
use std::sync::Arc;

use url::{Host, Url};

use crate::{MediaConfig, MediaError};

use address::is_public;
pub use domain::DomainRule;
pub(crate) use resolver::{AddressRefused, AddressRule, GuardedResolver, Lookup, system_lookup};

/// The ports of the web, which are allowed by default.
const WEB_PORTS: [u16; 2] = [80, 443];

/// The maximum length of a fetched URL or redirect target in bytes; servers commonly accept this
/// much.
pub(crate) const MAX_URL_BYTES: usize = 8 << 10;

/// The rules for URLs that may be fetched.
pub(crate) struct UrlPolicy {
    /// The allowed ports; `None` allows all.
    ports: Option<Vec<u16>>,
    /// The allowed hosts; empty allows all.
    domains: Vec<DomainRule>,
    addresses: AddressRule,
}

impl UrlPolicy {
    /// Creates the policy of `config`, with `addresses` as the rule for literal addresses.
    pub(crate) fn new(config: &MediaConfig, addresses: AddressRule) -> Self {
        let default = || (!config.allow_private_addresses).then(|| WEB_PORTS.to_vec());
        let ports = config.allowed_ports.clone().or_else(default);
        Self { ports, domains: config.allowed_domains.clone(), addresses }
    }

    /// Returns the address rule of `config`: public addresses only, or all.
    pub(crate) fn address_rule(config: &MediaConfig) -> AddressRule {
        if config.allow_private_addresses { Arc::new(|_| true) } else { Arc::new(is_public) }
    }

    /// Checks all rules that need no network access. Names are checked by the resolver, once their
    /// addresses are known.
    pub(crate) fn check(&self, url: &Url) -> Result<(), MediaError> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(MediaError::UnsupportedScheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(MediaError::CredentialsInUrl);
        }
        if url.as_str().len() > MAX_URL_BYTES {
            return Err(MediaError::InvalidUrl { reason: "it is too long" });
        }
        let (Some(host), Some(port)) = (url.host(), url.port_or_known_default()) else {
            return Err(MediaError::InvalidUrl { reason: "it has no host" });
        };
        if !self.domains.is_empty() && !self.domains.iter().any(|rule| rule.allows(&host)) {
            return Err(MediaError::HostForbidden);
        }
        let literal: Option<IpAddr> = match host {
            Host::Domain(_) => None,
            Host::Ipv4(address) => Some(address.into()),
            Host::Ipv6(address) => Some(address.into()),
        };
        if literal.is_some_and(|address| !(self.addresses)(address)) {
            return Err(MediaError::AddressForbidden);
        }
        if self.ports.as_ref().is_some_and(|ports| !ports.contains(&port)) {
            return Err(MediaError::PortForbidden);
        }
        Ok(())
    }

    /// Checks the target of a redirect. In addition to [`check`](Self::check) it refuses a redirect
    /// from `https:` to `http:`, whose answer anyone on the path could replace.
    pub(crate) fn check_redirect(&self, from: &Url, to: &Url) -> Result<(), MediaError> {
        if from.scheme() == "https" && to.scheme() == "http" {
            return Err(MediaError::InvalidRedirect);
        }
        self.check(to).map_err(|error| match error {
            MediaError::AddressForbidden
            | MediaError::PortForbidden
            | MediaError::HostForbidden => error,
            _ => MediaError::InvalidRedirect,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;

    use super::*;

    fn policy(config: &MediaConfig) -> UrlPolicy {
        UrlPolicy::new(config, UrlPolicy::address_rule(config))
    }

    fn check(url: &str) -> Result<(), MediaError> {
        policy(&MediaConfig::default()).check(&Url::parse(url).unwrap())
    }

    #[test]
    fn public_web_urls_are_allowed() {
        for url in [
            "http://example.com/a.png",
            "HTTPS://EXAMPLE.com./a?b#c",
            "http://example.com:80/",
            "http://example.com:443/",
            "https://8.8.8.8/",
            "https://[2606:4700::1111]/",
            "http://localhost.example.com/",
            "http://xn--bcher-kva.example/",
        ] {
            assert_eq!(check(url), Ok(()), "{url}");
        }
    }

    #[test]
    fn private_address_is_refused_in_every_spelling() {
        for host in [
            "127.0.0.1",
            "127.0.0.1.",
            "127.1",
            "0x7f.1",
            "0x7f000001",
            "2130706433",
            "017700000001",
            "0177.0.0.1",
            "0x7F.0.0x0.01",
            "127.0.0.1%2e",
            "%31%32%37.0.0.1",
            "\u{ff11}27.0.0.1",
            "127\u{3002}0\u{ff0e}0\u{ff61}1",
            "\u{2460}27.0.0.1",
            "0",
            "0.0.0.0",
            "10.1",
            "192.168.257",
            "172.31.255.255",
            "2852039166",
            "169.254.169.254",
            "0xa9fea9fe",
            "100.100.100.200",
            "168.63.129.16",
            "[::1]",
            "[0:0:0:0:0:0:0:1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::ffff:7f00:1]",
            "[::FFFF:A9FE:A9FE]",
            "[::127.0.0.1]",
            "[64:ff9b::a9fe:a9fe]",
            "[64:ff9b:1::1]",
            "[2002:7f00:1::]",
            "[2001:0:7f00:1::]",
            "[fd00:ec2::254]",
            "[fe80::1]",
            "[fec0::1]",
            "[ff02::1]",
        ] {
            for scheme in ["http", "https"] {
                assert_eq!(
                    check(&format!("{scheme}://{host}/")),
                    Err(MediaError::AddressForbidden),
                    "{host}"
                );
            }
        }
    }

    #[test]
    fn url_with_invalid_host_does_not_parse() {
        for url in [
            "http://",
            "http://:80/",
            "http://[fe80::1%25eth0]/",
            "http://[fe80::1%eth0]/",
            "http://1.2.3.4.5/",
            "http://256.1.1.1/",
            "http://4294967296/",
            "http://0x7f.1.1.1.1/",
            "http://a b/",
            "http://a<b/",
            "http://example.com:65536/",
            "http://example.com:-1/",
            "http://[::1/",
            "http://xn--/",
        ] {
            assert!(Url::parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn misleading_url_is_refused() {
        for (url, expected) in [
            ("http://8.8.8.8@127.0.0.1/", MediaError::CredentialsInUrl),
            ("http://8.8.8.8:80@127.0.0.1/", MediaError::CredentialsInUrl),
            ("http:127.0.0.1", MediaError::AddressForbidden),
            ("http:\\\\127.0.0.1\\x", MediaError::AddressForbidden),
            ("http:/\t/127.0.0.1/", MediaError::AddressForbidden),
            ("\n ht\ntp://127.0.0.1/", MediaError::AddressForbidden),
            ("http:///127.0.0.1/", MediaError::AddressForbidden),
            ("http://example.com:22/", MediaError::PortForbidden),
            ("http://example.com:8080/", MediaError::PortForbidden),
            ("http://example.com:0/", MediaError::PortForbidden),
            ("ws://example.com/", MediaError::UnsupportedScheme),
            ("gopher://example.com/", MediaError::UnsupportedScheme),
            ("javascript:alert(1)", MediaError::UnsupportedScheme),
            ("blob:https://example.com/x", MediaError::UnsupportedScheme),
            ("view-source:http://example.com/", MediaError::UnsupportedScheme),
        ] {
            assert_eq!(check(url), Err(expected), "{url}");
        }
        let long = format!("http://example.com/{}", "x".repeat(MAX_URL_BYTES));
        assert_eq!(check(&long), Err(MediaError::InvalidUrl { reason: "it is too long" }));
    }

    /// A backslash counts as a slash: the host is 8.8.8.8, and the path is `/@127.0.0.1/`.
    #[test]
    fn backslash_ends_the_host() {
        assert_eq!(check("http://8.8.8.8\\@127.0.0.1/"), Ok(()));
    }

    #[test]
    fn private_addresses_imply_all_ports_by_default() {
        let open = MediaConfig { allow_private_addresses: true, ..MediaConfig::default() };
        let url = Url::parse("http://10.0.0.7:9000/").unwrap();
        assert_eq!(policy(&open).check(&url), Ok(()));
        let restricted = MediaConfig { allowed_ports: Some(vec![80]), ..open };
        assert_eq!(policy(&restricted).check(&url), Err(MediaError::PortForbidden));
    }

    #[test]
    fn allowed_domains_do_not_open_private_addresses() {
        let rules = ["127.0.0.1", "*.example.com"].map(|rule| rule.parse().unwrap());
        let listed =
            policy(&MediaConfig { allowed_domains: rules.into(), ..MediaConfig::default() });
        let check = |url| listed.check(&Url::parse(url).unwrap());
        assert_eq!(check("http://a.example.com/"), Ok(()));
        assert_eq!(check("http://127.0.0.1/"), Err(MediaError::AddressForbidden));
        assert_eq!(check("http://example.com/"), Err(MediaError::HostForbidden));
        assert_eq!(check("http://8.8.8.8/"), Err(MediaError::HostForbidden));
    }

    #[test]
    fn refused_redirect_names_the_violated_rule() {
        let open = policy(&MediaConfig::default());
        let [plain, encrypted] =
            ["http://example.com/", "https://example.com/"].map(|url| Url::parse(url).unwrap());
        assert_eq!(open.check_redirect(&plain, &encrypted), Ok(()));
        assert_eq!(open.check_redirect(&plain, &plain), Ok(()));
        assert_eq!(open.check_redirect(&encrypted, &encrypted), Ok(()));
        assert_eq!(open.check_redirect(&encrypted, &plain), Err(MediaError::InvalidRedirect));
        for (target, expected) in [
            ("http://10.0.0.1/", MediaError::AddressForbidden),
            ("http://example.com:25/", MediaError::PortForbidden),
            ("http://me@example.com/", MediaError::InvalidRedirect),
            ("file:///etc/passwd", MediaError::InvalidRedirect),
        ] {
            let target = Url::parse(target).unwrap();
            assert_eq!(open.check_redirect(&plain, &target), Err(expected), "{target}");
        }
    }

    proptest! {
        /// An IPv6 form of an IPv4 address is exactly as public as the address.
        #[test]
        fn embedded_ipv4_is_as_public_as_the_address(bits: u32, prefix in 0x2003u16..0x3fff) {
            let v4 = Ipv4Addr::from(bits);
            let public = is_public(v4.into());
            prop_assert_eq!(is_public(v4.to_ipv6_mapped().into()), public);
            let [a, b] = [(bits >> 16) as u16, bits as u16];
            let nat64 = Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, a, b);
            prop_assert_eq!(is_public(nat64.into()), public);
            let sixto4 = Ipv6Addr::new(0x2002, a, b, 0, 0, 0, 0, 1);
            prop_assert_eq!(is_public(sixto4.into()), public);
            let isatap = Ipv6Addr::new(prefix, 1, 2, 3, 0, 0x5efe, a, b);
            prop_assert_eq!(is_public(isatap.into()), public);
            for special in [
                Ipv6Addr::new(0, 0, 0, 0, 0, 0, a, b),
                Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, a, b),
                Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, a, b),
                Ipv6Addr::new(0x2001, 0, a, b, 0, 0, a, b),
                Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0x5efe, a, b),
            ] {
                prop_assert!(!is_public(special.into()), "{}", special);
            }
            // The part of the same registries that the standard library covers.
            let special = v4.is_loopback()
                || v4.is_private()
                || v4.is_link_local()
                || v4.is_multicast()
                || v4.is_unspecified()
                || v4.is_broadcast()
                || v4.is_documentation();
            prop_assert!(!(special && public), "{}", v4);
        }

        #[test]
        fn only_global_unicast_is_public(bits: u128) {
            let v6 = Ipv6Addr::from(bits);
            let special = v6.is_loopback()
                || v6.is_unspecified()
                || v6.is_multicast()
                || v6.is_unique_local()
                || v6.is_unicast_link_local()
                || bits >> 125 != 1;
            let embeds_ipv4 = v6.to_ipv4_mapped().is_some() || bits >> 32 == 0x64_ff9b << 64;
            prop_assert!(embeds_ipv4 || !(special && is_public(v6.into())), "{}", v6);
        }

        /// Every accepted URL has a web port and, if its host is an address, a public one.
        #[test]
        fn accepted_urls_satisfy_every_rule(
            text in "(https?|ftp|file|http):/{0,3}[0-9a-fx.:@\\[\\]%/ -]{0,24}",
        ) {
            if let Ok(url) = Url::parse(&text)
                && policy(&MediaConfig::default()).check(&url).is_ok()
            {
                prop_assert!(["http", "https"].contains(&url.scheme()));
                prop_assert!(url.username().is_empty() && url.password().is_none());
                prop_assert!(WEB_PORTS.contains(&url.port_or_known_default().unwrap()));
                match url.host().unwrap() {
                    Host::Domain(name) => prop_assert!(name.parse::<IpAddr>().is_err()),
                    Host::Ipv4(address) => prop_assert!(is_public(address.into())),
                    Host::Ipv6(address) => prop_assert!(is_public(address.into())),
                }
            }
        }
    }
}
