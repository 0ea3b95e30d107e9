//! The configurations of proxies that know nothing of models: as little as keeps connections on
//! both sides, and all else as it is by default.

use std::net::SocketAddr;

/// Returns Envoy's, as JSON.
pub(crate) fn envoy(address: SocketAddr, upstreams: &[SocketAddr]) -> String {
    let endpoints = upstreams.iter().map(|at| {
        let [host, port] = [at.ip().to_string(), at.port().to_string()];
        let socket = format!(r#"{{"address":"{host}","port_value":{port}}}"#);
        format!(r#"{{"endpoint":{{"address":{{"socket_address":{socket}}}}}}}"#)
    });
    include_str!("../../../../routers/envoy.json")
        .replace("{{host}}", &address.ip().to_string())
        .replace("{{port}}", &address.port().to_string())
        .replace("{{endpoints}}", &endpoints.collect::<Vec<_>>().join(","))
}

/// Returns nginx's.
pub(crate) fn nginx(address: SocketAddr, upstreams: &[SocketAddr]) -> String {
    let servers: String = upstreams.iter().map(|at| format!("        server {at};\n")).collect();
    let config = include_str!("../../../../routers/nginx.conf");
    config.replace("{{servers}}", &servers).replace("{{address}}", &address.to_string())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn both_know_all_upstreams() {
        let addresses = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let nginx = nginx(addresses[0], &addresses[1..]);
        assert!(nginx.contains("listen 127.0.0.1:1;"), "{nginx}");
        let servers = "        server 127.0.0.1:2;\n        server 127.0.0.1:3;\n        # By default none.";
        assert!(nginx.contains(servers), "{nginx}");
        let envoy: Value = serde_json::from_str(&envoy(addresses[0], &addresses[1..])).unwrap();
        let resources = &envoy["static_resources"];
        let endpoints = resources["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"].as_array().unwrap();
        let ports = endpoints.iter().map(|it| it["endpoint"]["address"]["socket_address"]["port_value"].as_u64());
        assert_eq!(ports.collect::<Vec<_>>(), [Some(2), Some(3)]);
    }
}
