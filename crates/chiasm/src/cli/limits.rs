//! Flags of the limits on requests and connections.

use std::num::NonZeroUsize;
use std::thread::available_parallelism;
use std::time::Duration;

use chiasm_api::openai::BodyLimits;
use chiasm_backend::unread::DEFAULT_MAX_BYTES;
use chiasm_server::Network;
use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::seconds;

#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Most bytes of a request body
    #[arg(long, env = "CHIASM_MAX_BODY_BYTES", default_value_t = 64 << 20)]
    pub(crate) max_body_bytes: usize,
    /// Most JSON values in a request beside messages and prompts: in template settings, tool calls
    /// and the like
    #[arg(long, env = "CHIASM_MAX_JSON_VALUES", default_value_t = BodyLimits::default().json_values)]
    pub(crate) max_json_values: usize,
    /// Most messages in a request
    #[arg(long, env = "CHIASM_MAX_MESSAGES", default_value_t = BodyLimits::default().messages)]
    pub(crate) max_messages: usize,
    /// Most content parts in all messages of a request
    #[arg(long, env = "CHIASM_MAX_CONTENT_PARTS", default_value_t = BodyLimits::default().content_parts)]
    pub(crate) max_content_parts: usize,
    /// Seconds that a request body may take to arrive
    #[arg(long, env = "CHIASM_BODY_TIMEOUT", value_parser = seconds, default_value = "60")]
    pub(crate) body_timeout: Duration,
    /// Bytes per second of a request body that have to arrive, over any ten seconds; 0 for any
    #[arg(long, env = "CHIASM_MIN_BODY_RATE", default_value_t = 1024)]
    pub(crate) min_body_rate: u64,
    /// Most open connections of clients; for more, others that wait for their clients are closed
    #[arg(long, env = "CHIASM_MAX_CONNECTIONS", default_value_t = 8192, value_parser = at_least_one())]
    pub(crate) max_connections: usize,
    /// Seconds after which a connection is closed that has not sent the head of its next request
    #[arg(long, env = "CHIASM_HEAD_TIMEOUT", value_parser = seconds, default_value = "60")]
    pub(crate) head_timeout: Duration,
    /// Seconds after which a connection is closed whose client reads nothing of its answer
    #[arg(long, env = "CHIASM_WRITE_TIMEOUT", value_parser = seconds, default_value = "60")]
    pub(crate) write_timeout: Duration,
    /// Most bytes of all answers together that wait to be read; beyond that the answer that is
    /// furthest behind is cut
    #[arg(long, env = "CHIASM_MAX_UNREAD_BYTES", default_value_t = DEFAULT_MAX_BYTES, value_parser = at_least_one())]
    pub(crate) max_unread_bytes: usize,
    /// Most requests in flight; more get 503 [default: twice what the engines run at once, but at
    /// least 1024]
    #[arg(long, env = "CHIASM_MAX_REQUESTS", value_parser = at_least_one())]
    pub(crate) max_requests: Option<usize>,
    /// Proxies that are believed about whom a request is from, in X-Forwarded-For or Forwarded:
    /// addresses or networks
    #[arg(long, env = "CHIASM_TRUSTED_PROXIES", value_name = "CIDR", num_args = 1.., value_delimiter = ',')]
    pub(crate) trusted_proxies: Vec<Network>,
    /// Most seconds of this server's CPU time that one request may ask for, by estimate before the
    /// work is done; more gets 413
    #[arg(long, env = "CHIASM_MAX_REQUEST_COST", value_parser = seconds, default_value = "10")]
    pub(crate) max_request_cost: Duration,
    /// Threads for connections and engines' outputs; more share the load of more tokens per second,
    /// at a higher cost for each [default: half of the cores]
    #[arg(long, env = "CHIASM_ASYNC_THREADS")]
    pub(crate) async_threads: Option<NonZeroUsize>,
    /// Threads for decoding, tokenizing and parsing; cheap and very dear work have more of their
    /// own [default: one less than cores]
    #[arg(long, env = "CHIASM_CPU_THREADS")]
    pub(crate) cpu_threads: Option<usize>,
    /// Seconds within which first tokens should come: what does and what does not is counted, for
    /// those who add engines by it
    #[arg(long, env = "CHIASM_SLO_TTFT", value_name = "SECONDS", value_parser = seconds)]
    pub(crate) slo_ttft: Option<Duration>,
    /// Seconds within which each token after the first should come
    #[arg(long, env = "CHIASM_SLO_ITL", value_name = "SECONDS", value_parser = seconds)]
    pub(crate) slo_itl: Option<Duration>,
    /// Seconds that a request may wait for its first token, 0 for any number
    #[arg(long, env = "CHIASM_FIRST_TOKEN_TIMEOUT", value_parser = seconds, default_value = "600")]
    pub(crate) first_token_timeout: Duration,
    /// Seconds that a request may take in all, 0 for any number
    #[arg(long, env = "CHIASM_REQUEST_TIMEOUT", value_parser = seconds, default_value = "3600")]
    pub(crate) request_timeout: Duration,
    /// Seconds for which a prompt is refused that was in three engines when they died
    #[arg(long, env = "CHIASM_QUARANTINE", value_parser = seconds, default_value = "60")]
    pub(crate) quarantine: Duration,
    /// Seconds after SIGTERM for which requests are still taken, while /ready says that none should
    /// be sent
    #[arg(long, env = "CHIASM_DRAIN_DELAY", value_parser = seconds, default_value = "0")]
    pub(crate) drain_delay: Duration,
    /// Seconds that requests in flight get to finish after that
    #[arg(long, env = "CHIASM_DRAIN_TIMEOUT", value_parser = seconds, default_value = "30")]
    pub(crate) drain_timeout: Duration,
}

impl LimitArgs {
    /// Returns the number of threads for async tasks, by default half of the cores.
    ///
    /// The work per token is cheaper than handing it to another thread, so fewer threads than cores
    /// are faster. Long work has threads of its own.
    pub(crate) fn async_threads(&self) -> usize {
        let half = || available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
        self.async_threads.map_or_else(half, NonZeroUsize::get)
    }
}

/// Returns a parser that refuses 0.
fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}
