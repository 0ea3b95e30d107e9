//! Rules for hosts that media may be fetched from.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

use url::Host;

use crate::MediaError;

/// A rule for allowed hosts. `example.com` matches that host alone, `*.example.com` every host
/// below it. An address is a host too.
///
/// Names are compared in their ASCII form (IDNA). Case and a trailing dot are ignored.
///
/// ```
/// use chiasm_media::DomainRule;
///
/// assert_eq!("*.Bücher.example".parse::<DomainRule>()?.to_string(), "*.xn--bcher-kva.example");
/// assert!("https://example.com".parse::<DomainRule>().is_err());
/// # Ok::<(), chiasm_media::MediaError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DomainRule {
    host: Host<String>,
    /// Matches the hosts below `host`, and not `host` itself.
    is_wildcard: bool,
}

impl DomainRule {
    /// Returns `true` if this rule allows the host of a URL.
    pub(crate) fn allows(&self, host: &Host<&str>) -> bool {
        match (&self.host, host) {
            (Host::Domain(rule), Host::Domain(name)) => {
                let name = strip_trailing_dot(name);
                if !self.is_wildcard {
                    return name.eq_ignore_ascii_case(rule);
                }
                // The name must be the rule's domain after a dot, with at least one byte before the
                // dot.
                let Some(dot) =
                    name.len().checked_sub(rule.len() + 1).filter(|&position| position > 0)
                else {
                    return false;
                };
                let name = name.as_bytes();
                name[dot] == b'.' && name[dot + 1..].eq_ignore_ascii_case(rule.as_bytes())
            }
            (Host::Ipv4(rule), Host::Ipv4(address)) => rule == address,
            (Host::Ipv6(rule), Host::Ipv6(address)) => rule == address,
            _ => false,
        }
    }
}

impl FromStr for DomainRule {
    type Err = MediaError;

    fn from_str(rule: &str) -> Result<Self, MediaError> {
        let (is_wildcard, host) =
            rule.strip_prefix("*.").map_or((false, rule), |domain| (true, domain));
        let host = match Host::parse(host).map_err(|_| MediaError::InvalidDomainRule)? {
            Host::Domain(name) => {
                let name = strip_trailing_dot(&name);
                if name.is_empty() || name.contains('*') || name.split('.').any(str::is_empty) {
                    return Err(MediaError::InvalidDomainRule);
                }
                Host::Domain(name.to_ascii_lowercase())
            }
            _ if is_wildcard => return Err(MediaError::InvalidDomainRule),
            address => address,
        };
        Ok(Self { host, is_wildcard })
    }
}

impl Display for DomainRule {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", if self.is_wildcard { "*." } else { "" }, self.host)
    }
}

/// Removes the trailing dot of an absolute name.
fn strip_trailing_dot(name: &str) -> &str {
    name.strip_suffix('.').unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use url::Url;

    use super::*;

    fn allows(rule: &str, url: &str) -> bool {
        rule.parse::<DomainRule>().unwrap().allows(&Url::parse(url).unwrap().host().unwrap())
    }

    #[test]
    fn host_rule_matches_every_spelling() {
        for url in [
            "http://images.example.com/",
            "https://IMAGES.Example.COM:8443/",
            "http://images.example.com./",
            "http://images%2Eexample.com/",
            "http://images\u{3002}example.com/",
            "http://images.exam\u{ff50}le.com/",
        ] {
            for rule in ["images.example.com", "Images.EXAMPLE.com."] {
                assert!(allows(rule, url), "{rule} {url}");
            }
        }
    }

    #[test]
    fn host_rule_matches_no_other_host() {
        for url in [
            "http://example.com/",
            "http://a.images.example.com/",
            "http://images.example.com.evil.test/",
            "http://evil.test/images.example.com",
            "http://evilimages.example.com/",
            "http://images-example.com/",
            "http://127.0.0.1/",
        ] {
            assert!(!allows("images.example.com", url), "{url}");
        }
    }

    #[test]
    fn wildcard_rule_matches_only_subdomains() {
        for url in ["http://a.example.com/", "http://a.b.example.com/", "http://A.EXAMPLE.COM./"] {
            assert!(allows("*.example.com", url), "{url}");
        }
        for url in [
            "http://example.com/",
            "http://aexample.com/",
            "http://.example.com/",
            "http://example.com.evil.test/",
            "http://a.example.com.evil.test/",
            "http://a.example.org/",
        ] {
            assert!(!allows("*.example.com", url), "{url}");
        }
    }

    #[test]
    fn address_rule_matches_the_same_address() {
        assert!(allows("10.0.0.7", "http://10.7/"));
        assert!(!allows("10.0.0.7", "http://10.0.0.8/"));
        assert!(!allows("10.0.0.7", "http://[::ffff:10.0.0.7]/"));
        assert!(allows("[fd00::1]", "http://[FD00:0::1]:8080/"));
    }

    #[test]
    fn invalid_rule_is_refused() {
        for rule in [
            "",
            ".",
            "*",
            "*.",
            "**.example.com",
            "*.*.example.com",
            "a.*.example.com",
            "*.10.0.0.7",
            "*.[::1]",
            "a..b",
            "https://example.com",
            "example.com:80",
            "example.com/",
            "user@example.com",
            "exa mple.com",
            "1.2.3.4.5",
        ] {
            assert_eq!(rule.parse::<DomainRule>(), Err(MediaError::InvalidDomainRule), "{rule:?}");
        }
    }

    #[test]
    fn rule_displays_as_parsed() {
        for rule in
            ["example.com", "*.example.com", "10.0.0.7", "[fd00::1]", "xn--bcher-kva.example"]
        {
            assert_eq!(rule.parse::<DomainRule>().unwrap().to_string(), rule);
        }
    }
}
