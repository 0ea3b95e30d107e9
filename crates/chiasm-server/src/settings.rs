//! The settings of a server.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderName, StatusCode};
use chiasm_api::openai::{BodyLimits, ReasoningFields};

use crate::access::ApiKeys;
use crate::cors::Cors;
use crate::log_counts::LogCounts;
use crate::page::Page;
use crate::proxies::TrustedProxies;
use crate::root_path::RootPath;
use crate::traces::Traces;

/// The settings of a server. The defaults are those of a server without keys and without a live
/// page.
#[derive(Default)]
pub struct ServerSettings {
    /// The bounds on connections and requests.
    pub http_limits: HttpLimits,
    /// The bounds on the content of a request body.
    pub body_limits: BodyLimits,
    /// The parts of routing that clients see.
    pub routing: RoutingOptions,
    /// The keys of clients.
    pub keys: ApiKeys,
    /// The fields in which clients find reasoning.
    pub reasoning_fields: ReasoningFields,
    /// Every chunk of every stream of chats and completions has its usage so far, and each stream
    /// ends with that of all of it.
    pub usage_in_all_streams: bool,
    /// The web sites whose pages may send requests; `None` for none.
    pub cors: Option<Cors>,
    /// The prefix that paths may have; `None` for none.
    pub root_path: Option<RootPath>,
    /// Clients may load and unload LoRA adapters.
    pub adapters_may_change: bool,
    /// Requests are passed on as they come: all workers take them so.
    pub forwards: bool,
    /// The live page at `/ui/`, which has to be the observer of the pipeline, too.
    pub page: Option<Arc<Page>>,
    /// Records traces, if any are.
    pub traces: Option<Traces>,
    /// Returns the counts of the process's log; `None` if nothing counts.
    pub log_counts: Option<Box<dyn Fn() -> LogCounts + Send + Sync>>,
}

/// The bounds on connections and requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Bytes of a request body.
    pub body_bytes: usize,
    /// The time that a request body may take to arrive.
    pub body_timeout: Duration,
    /// The least bytes per second of a request body, over any ten seconds; 0 for any rate.
    pub min_body_rate: u64,
    /// Open connections of clients. A connection beyond them takes the place of one whose client is
    /// waited for; if there is none, it waits, with at most 1024 others.
    pub connections: usize,
    /// The time that the head of a connection's next request may take to arrive, counted from when
    /// it could.
    pub head_timeout: Duration,
    /// The time after which a connection is closed whose client reads nothing of what waits for it.
    pub write_timeout: Duration,
    /// The proxies that are believed about the address that a request is from, for shares of
    /// connections and requests.
    pub trusted_proxies: TrustedProxies,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            body_timeout: Duration::from_secs(60),
            min_body_rate: 1024,
            connections: 8192,
            head_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            trusted_proxies: TrustedProxies::default(),
        }
    }
}

/// The options for the parts of routing that clients see.
#[derive(Clone, Debug)]
pub struct RoutingOptions {
    /// Requests that bear the same value in this header go to the same worker.
    pub session_header: Option<HeaderName>,
    /// The status when all workers are busy.
    pub busy_status: StatusCode,
}

impl Default for RoutingOptions {
    fn default() -> Self {
        Self {
            session_header: Some(HeaderName::from_static("x-session-id")),
            busy_status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}
