//! The configurations of proxies that know nothing of models: as little as keeps connections on both sides, and all else as it is
//! by default.

use std::net::SocketAddr;

use serde_json::{Value, json};

/// Connections to upstreams that nginx keeps: by default none.
const KEPT: usize = 128;
/// Requests after which it closes a connection: by default 1,000, which a client here has asked within a second.
const REQUESTS: u32 = 1_000_000_000;

/// Envoy's, as JSON.
pub(crate) fn envoy(address: SocketAddr, upstreams: &[SocketAddr]) -> String {
    let socket = |at: &SocketAddr| json!({"socket_address": {"address": at.ip().to_string(), "port_value": at.port()}});
    let kind = |name: &str| format!("type.googleapis.com/envoy.extensions.filters.{name}");
    let endpoints: Vec<Value> = upstreams.iter().map(|at| json!({"endpoint": {"address": socket(at)}})).collect();
    let cluster = json!({
        "name": "upstreams", "type": "STATIC", "lb_policy": "ROUND_ROBIN", "connect_timeout": "5s",
        "load_assignment": {"cluster_name": "upstreams", "endpoints": [{"lb_endpoints": endpoints}]},
    });
    let route = json!({"match": {"prefix": "/"}, "route": {"cluster": "upstreams", "timeout": "0s"}});
    let manager = json!({
        "@type": kind("network.http_connection_manager.v3.HttpConnectionManager"), "stat_prefix": "router",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": kind("http.router.v3.Router")}}],
    });
    let filters = json!([{"name": "http", "typed_config": manager}]);
    let listener = json!({"name": "http", "address": socket(&address), "filter_chains": [{"filters": filters}]});
    json!({"static_resources": {"listeners": [listener], "clusters": [cluster]}}).to_string()
}

/// nginx's. Bodies up to a megabyte stay in memory: by default it would write each image into a file.
pub(crate) fn nginx(address: SocketAddr, upstreams: &[SocketAddr]) -> String {
    let servers: String = upstreams.iter().map(|at| format!("        server {at};\n")).collect();
    let folders: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("    {name}_temp_path {name}_temp;\n"))
        .concat();
    format!(
        r#"daemon off;
pid nginx.pid;
worker_processes auto;
user root;
events {{}}
http {{
{folders}    access_log access.log;
    keepalive_requests {REQUESTS};
    upstream upstreams {{
{servers}        keepalive {KEPT};
        keepalive_requests {REQUESTS};
    }}
    server {{
        listen {address};
        client_max_body_size 64m;
        client_body_buffer_size 1m;
        location / {{
            proxy_pass http://upstreams;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
        }}
    }}
}}
"#
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn both_know_all_upstreams() {
        let addresses = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let nginx = nginx(addresses[0], &addresses[1..]);
        assert!(nginx.contains("listen 127.0.0.1:1;"), "{nginx}");
        assert!(
            nginx.contains("        server 127.0.0.1:2;\n        server 127.0.0.1:3;\n        keepalive"),
            "{nginx}"
        );
        let envoy: Value = serde_json::from_str(&envoy(addresses[0], &addresses[1..])).unwrap();
        let resources = &envoy["static_resources"];
        let endpoints = resources["clusters"][0]["load_assignment"]["endpoints"][0]["lb_endpoints"].as_array().unwrap();
        let ports = endpoints.iter().map(|it| it["endpoint"]["address"]["socket_address"]["port_value"].as_u64());
        assert_eq!(ports.collect::<Vec<_>>(), [Some(2), Some(3)]);
    }
}
