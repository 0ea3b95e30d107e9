//! The addresses that proxies add to a request: `X-Forwarded-For`, and `Forwarded` as in RFC 7239.

use std::net::{IpAddr, SocketAddr};

use axum::http::HeaderMap;

/// Returns the addresses of `X-Forwarded-For`, nearest first; `None` if the header is missing. An
/// item is `None` if its entry is not an address.
pub(super) fn x_forwarded_for(headers: &HeaderMap) -> Option<impl Iterator<Item = Option<IpAddr>>> {
    Some(entries(headers, "x-forwarded-for")?.map(address))
}

/// Returns the `for` addresses of `Forwarded`, nearest first; `None` if the header is missing. An
/// item is `None` if its entry has no address or hides it.
pub(super) fn forwarded(headers: &HeaderMap) -> Option<impl Iterator<Item = Option<IpAddr>>> {
    let address_in = |entry: &str| {
        let mut pairs = entry.split(';').filter_map(|pair| pair.split_once('='));
        let (_, node) = pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case("for"))?;
        address(node.trim().trim_matches('"'))
    };
    Some(entries(headers, "forwarded")?.map(address_in))
}

/// Returns the entries of all lines of a header, last first; `None` if the header is missing.
fn entries<'a>(
    headers: &'a HeaderMap,
    name: &'static str,
) -> Option<impl Iterator<Item = &'a str>> {
    let lines = headers.get_all(name);
    lines.iter().next()?;
    // A line that is not text becomes one unreadable entry.
    Some(lines.iter().rev().flat_map(|line| line.to_str().unwrap_or_default().rsplit(',')))
}

/// Parses an address with or without a port.
fn address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    let in_brackets = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    text.parse().ok().or_else(with_port).or_else(in_brackets)
}
