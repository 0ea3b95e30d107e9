//! Parsing of `host:port`.

use std::net::Ipv6Addr;

use crate::DiscoveryError;

/// The maximum length of a name in DNS.
const MAX_HOST_BYTES: usize = 253;

/// Parses an address and returns its canonical form: lower-case, the port without leading zeros,
/// IPv6 in brackets.
pub(crate) fn parse(text: &str) -> Result<String, DiscoveryError> {
    canonical(text).ok_or_else(|| DiscoveryError::Address(text.chars().take(300).collect()))
}

fn canonical(text: &str) -> Option<String> {
    let (host, port) = text.rsplit_once(':')?;
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let port: u16 = port.parse().ok().filter(|&port| port > 0)?;
    if let Some(ip) = host.strip_prefix('[') {
        let ip: Ipv6Addr = ip.strip_suffix(']')?.parse().ok()?;
        return Some(format!("[{ip}]:{port}"));
    }
    let is_name_byte =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    let is_name =
        !host.is_empty() && host.len() <= MAX_HOST_BYTES && host.bytes().all(is_name_byte);
    is_name.then(|| format!("{}:{port}", host.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_returns_canonical_form() {
        for (text, expected) in [
            ("10.0.0.1:7000", Some("10.0.0.1:7000")),
            ("Agent-1.Example.com:07000", Some("agent-1.example.com:7000")),
            ("[2001:DB8:0::1]:7000", Some("[2001:db8::1]:7000")),
            ("a_b:1", Some("a_b:1")),
            ("host", None),
            ("host:", None),
            (":7000", None),
            ("host:0", None),
            ("host:65536", None),
            ("host:+80", None),
            ("2001:db8::1:7000", None),
            ("[::1:7000", None),
            ("[host]:7000", None),
            ("http://host:7000", None),
            ("user@host:7000", None),
            ("ho st:7000", None),
            ("host:7000/path", None),
            ("", None),
        ] {
            assert_eq!(parse(text).ok().as_deref(), expected, "{text}");
        }
        assert!(parse(&format!("{}:1", "a".repeat(254))).is_err());
    }

    proptest::proptest! {
        #[test]
        fn canonical_form_is_stable(text in "[\\[\\]a-zA-Z0-9:.]{0,30}") {
            if let Ok(address) = parse(&text) {
                proptest::prop_assert_eq!(parse(&address).unwrap(), address);
            }
        }
    }
}
