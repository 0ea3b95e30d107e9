//! HTTP: connections, TLS, keys, and the endpoints of OpenAI's and Anthropic's APIs.
//!
//! | module | is |
//! |---|---|
//! | `server`, `settings` | the server, assembled from its parts |
//! | `connections`, `connection`, `connection_metrics` | client connections, and the choice of connections to close when all slots are taken |
//! | `draining` | the flag of a server that is shutting down |
//! | `layers` | the layers around every answer: identity, keys, record, metrics |
//! | `routes`, `paths` | the routes, and the paths of the endpoints |
//! | `endpoints`, `endpoint_state` | the endpoints of all APIs, and their shared state |
//! | `forward` | requests that are forwarded unchanged to other servers |
//! | `status` | health, readiness, metrics, models and workers |
//! | `page` | the live page |
//! | `admission`, `arrival`, `body` | a request body, from its first byte to a parsed request with a slot |
//! | `slots` | request slots, and their fair shares among owners |
//! | `meter`, `sse` | streamed answers, and their token counts |
//! | `record`, `traces` | the log line and the trace of a finished request |
//! | `metrics`, `process_metrics`, `log_counts` | Prometheus metrics |
//! | `access`, `cors`, `root_path`, `tls`, `proxies`, `http_rules` | API keys, CORS, TLS, proxies and the rules of HTTP |
//! | `identity`, `routing_headers` | request identities, and the routing headers of answers |
//! | `poll_epoch` | epochs of a connection's task, one for each call of its `poll` |
//! | `error` | conversion of errors to HTTP responses |
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
pub use cors::{AllowList, Cors, CorsError};
pub use log_counts::LogCounts;
pub use page::{Page, PageOptions};
pub use paths::PAGE as PAGE_PATH;
pub use proxies::{Network, ParseNetworkError, TrustedProxies};
pub use root_path::{ParseRootPathError, RootPath};
pub use server::Server;
pub use settings::{HttpLimits, RoutingOptions, ServerSettings};
pub use tls::{Certificate, CertificateError};
pub use traces::Traces;
