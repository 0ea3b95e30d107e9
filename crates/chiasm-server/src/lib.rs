//! HTTP: connections, TLS, keys, and the endpoints of OpenAI's and Anthropic's APIs.
//!
//! | module | is |
//! |---|---|
//! | `server`, `settings` | the server, put together of its parts |
//! | `connections`, `connection`, `connection_metrics` | connections of clients, and which of them make room for others |
//! | `draining` | the end of the server: its last requests |
//! | `layers` | everything that surrounds an answer: identity, keys, record, count |
//! | `routes`, `paths` | the routes, and the paths of the endpoints |
//! | `endpoints`, `endpoint_state` | the endpoints of all APIs, and the state that they share |
//! | `forward` | requests that are passed on as they came |
//! | `status` | health, readiness, metrics, models and workers |
//! | `page` | the live page |
//! | `admission`, `arrival`, `body` | a request body, from its first byte to a parsed request with a slot |
//! | `slots` | the shares that owners have of the requests in flight |
//! | `meter`, `sse` | streamed answers, and the count of their tokens |
//! | `record`, `traces` | the line in the log and the trace of a request that has ended |
//! | `metrics`, `process_metrics`, `log_counts` | Prometheus |
//! | `access`, `cors`, `root_path`, `tls`, `proxies`, `http_rules` | keys, web sites, proxies and the rules of HTTP |
//! | `identity`, `routing_headers` | the identity of a request, and the headers of its answer |
//! | `poll_epoch` | epochs of a connection's task, one for each call of its `poll` |
//! | `error` | errors become HTTP |
//! | `workers` | `GET /workers` |

#![forbid(unsafe_code)]

mod access;
mod admission;
mod arrival;
mod body;
mod connection;
mod connection_metrics;
mod connections;
mod cors;
mod draining;
mod endpoint_state;
mod endpoints;
mod error;
mod forward;
mod http_rules;
mod identity;
mod layers;
mod log_counts;
mod meter;
mod metrics;
mod page;
mod paths;
mod poll_epoch;
mod process_metrics;
mod proxies;
mod record;
mod root_path;
mod routes;
mod routing_headers;
mod server;
mod settings;
mod slots;
mod sse;
mod status;
#[cfg(test)]
mod test_server;
mod tls;
mod traces;
mod workers;

pub use access::{ApiKeys, CurrentKeys};
pub use cors::{Allowed, Cors, CorsError};
pub use log_counts::LogCounts;
pub use page::{Page, PageOptions};
pub use paths::PAGE as PAGE_PATH;
pub use proxies::{Network, NoNetwork, TrustedProxies};
pub use root_path::{NoRootPath, RootPath};
pub use server::Server;
pub use settings::{HttpLimits, RoutingOptions, ServerSettings};
pub use tls::{Certificate, CertificateError};
pub use traces::Traces;
