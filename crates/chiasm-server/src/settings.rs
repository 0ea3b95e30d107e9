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

/// The settings of a server. By default it has neither API keys nor a live page.
#[derive(Default)]
pub struct ServerSettings {
    /// The bounds on connections and requests.
    pub http_limits: HttpLimits,
    /// The bounds on the content of a request body.
    pub body_limits: BodyLimits,
    /// The parts of routing that clients see.
    pub routing: RoutingOptions,
    /// The API keys of clients.
    pub keys: ApiKeys,
    /// The response fields that hold reasoning.
    pub reasoning_fields: ReasoningFields,
    /// Adds usage to every stream of chats and completions: the usage so far in each chunk, and
    /// that of the whole answer at the end.
    pub usage_in_all_streams: bool,
    /// The CORS policy: web sites whose pages may send requests; `None` for none.
    pub cors: Option<Cors>,
    /// The prefix that paths may have; `None` for none.
    pub root_path: Option<RootPath>,
    /// Lets clients load and unload LoRA adapters.
    pub adapters_may_change: bool,
    /// Forwards requests unchanged. `true` if all workers are servers that take whole requests.
    pub forwards: bool,
    /// The live page at `/ui/`; `None` for none. It must also be the pipeline's observer.
    pub page: Option<Arc<Page>>,
    /// The recorder of traces; `None` to record none.
    pub traces: Option<Traces>,
    /// A function that returns the counts of the process's log; `None` if the log is not counted.
    pub log_counts: Option<Box<dyn Fn() -> LogCounts + Send + Sync>>,
}

/// The bounds on connections and requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// The maximum size of a request body, in bytes.
    pub body_bytes: usize,
    /// The timeout for receiving a request body.
    pub body_timeout: Duration,
    /// The minimum rate of a request body in bytes per second, over any ten seconds; 0 for any
    /// rate.
    pub min_body_rate: u64,
    /// The maximum number of open client connections. A further connection replaces one that waits
    /// for its client. If there is none, up to 1024 further connections wait for a slot.
    pub connections: usize,
    /// The timeout for the head of a connection's next request, counted from when it could have
    /// been sent.
    pub head_timeout: Duration,
    /// The time after which a connection is closed if its client reads nothing of what is to be
    /// sent.
    pub write_timeout: Duration,
    /// The proxies whose headers about client addresses are trusted, for shares of connections and
    /// requests.
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
    /// The session header: requests with the same value in it go to the same worker.
    pub session_header: Option<HeaderName>,
    /// The HTTP status of a response when all workers are busy.
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
