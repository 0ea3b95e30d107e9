//! Tests of URLs here; tests with a scripted server and with a real etcd in the submodules.

mod certificates;
mod real;
mod scripted;
mod server;

use super::Etcd;
use crate::DiscoveryError;

#[test]
fn url_has_servers_with_optional_prefix() {
    for (url, shown, is_tls, servers) in [
        ("etcd://a:1", "etcd://a:1/chiasm/agents/", false, 1),
        ("etcd://a:1/", "etcd://a:1/chiasm/agents/", false, 1),
        ("etcds://A:1,[::1]:2,10.0.0.1:3/x", "etcds://a:1,[::1]:2,10.0.0.1:3/x/", true, 3),
        ("etcd://a:1/x/y/", "etcd://a:1/x/y/", false, 1),
        ("etcd://a:1//x", "etcd://a:1//x/", false, 1),
    ] {
        let etcd: Etcd = url.parse().unwrap();
        assert_eq!(
            (etcd.to_string(), etcd.is_tls, etcd.endpoints.len()),
            (shown.to_owned(), is_tls, servers),
            "{url}"
        );
        assert_eq!(shown.parse::<Etcd>().unwrap(), etcd);
    }
}

#[test]
fn invalid_url_is_refused_with_reason() {
    for (url, reason) in [
        ("etcd://", "server is missing"),
        ("etcd:///x", "server is missing"),
        ("etcd://a", "host:port"),
        ("etcd://a:1,", "host:port"),
        ("etcd://a:0/x", "host:port"),
        ("etcd://a:1/x y", "spaces"),
        ("etcd://a:1/x?y=z", "query"),
        ("http://a:1/x", "scheme"),
    ] {
        let error = url.parse::<Etcd>().unwrap_err();
        assert!(
            matches!(&error, DiscoveryError::EtcdUrl { problem, .. } if problem.contains(reason)),
            "{url}: {error}"
        );
    }
    assert!(format!("etcd://{}", vec!["a:1"; 33].join(",")).parse::<Etcd>().is_err());
    assert!(format!("etcd://a:1/{}", "x".repeat(513)).parse::<Etcd>().is_err());
    let error = "etcd://root:secret@a:1/x".parse::<Etcd>().unwrap_err().to_string();
    assert!(error.contains("not supported") && !error.contains("secret"), "{error}");
}
