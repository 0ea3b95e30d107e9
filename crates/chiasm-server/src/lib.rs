//! The OpenAI HTTP frontend.
//!
//! | module | is |
//! |---|---|
//! | `routes` | paths, headers that tell where a request went |
//! | `layers` | the identity of every request; its record and count |
//! | [`connections`] | connections of clients, and who makes room for whom |
//! | `http_rules` | what HTTP asks of every request |
//! | `access` | who may ask |
//! | `cors` | pages of which web sites may ask |
//! | `root_path` | the prefix of all paths behind a proxy |
//! | `tls` | the server's certificate |
//! | `proxies` | the proxies that are believed about the address that a request is from |
//! | `slots` | the shares that owners have of the requests in flight |
//! | `arrival` | reading request bodies within limits of size and time |
//! | `admission` | what a request holds while it is answered, and who asks |
//! | `body` | understanding request bodies |
//! | `endpoints` | the endpoints of all APIs |
//! | `forward` | requests that are passed on as they came |
//! | [`page`] | the live page |
//! | `poll_epoch` | epochs of a connection's task, one for each call of its `poll` |
//! | `traces` | which requests OpenTelemetry is told of, and what |
//! | `record` | the line in the log when a request has finished |
//! | `error` | errors to HTTP |
//! | `metrics` | Prometheus |
//! | `workers` | what is known of each worker, as JSON |
//!
//! [`connections::serve`] answers for a [`Frontend`]; the binary decides where it listens.
#![forbid(unsafe_code)]

mod access;
mod admission;
mod arrival;
mod body;
pub mod connections;
mod cors;
mod endpoints;
mod error;
mod forward;
mod frontend;
mod http_rules;
mod layers;
mod meter;
mod metrics;
pub mod page;
mod paths;
mod poll_epoch;
mod process_metrics;
mod proxies;
mod record;
mod root_path;
mod routes;
mod routing_headers;
mod slots;
mod sse;
#[cfg(test)]
mod test_server;
mod tls;
mod traces;
mod workers;

pub use access::{ApiKeys, CurrentKeys};
pub use cors::{Allowed, Cors, CorsError};
pub use frontend::{Frontend, HttpLimits, LogCounts, RoutingOptions};
pub use proxies::{Network, NoNetwork, TrustedProxies};
pub use root_path::{NoRootPath, RootPath};
pub use tls::{Certificate, CertificateError};
pub use traces::Traces;
