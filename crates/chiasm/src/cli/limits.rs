//! Flags of the limits on requests and connections.

use std::thread::available_parallelism;
use std::time::Duration;

use chiasm_api::openai::BodyLimits;
use chiasm_backend::unread::DEFAULT_MAX_BYTES;
use chiasm_server::Network;
use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::{positive_seconds, seconds};

/// The maximum number of threads of one kind. Each one has a stack and a queue.
const MAX_THREADS: u64 = 1024;

#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Maximum bytes of a request body; larger ones get 413
    #[arg(long, env = "CHIASM_MAX_BODY_BYTES", default_value_t = 64 << 20)]
    pub(crate) max_body_bytes: usize,
    /// Maximum number of JSON values in a request besides messages and prompts, as in template
    /// settings and tool calls; more get 413
    #[arg(
        long,
        env = "CHIASM_MAX_JSON_VALUES",
        default_value_t = BodyLimits::default().json_values
    )]
    pub(crate) max_json_values: usize,
    /// Maximum number of messages in a request; more get 413
    #[arg(long, env = "CHIASM_MAX_MESSAGES", default_value_t = BodyLimits::default().messages)]
    pub(crate) max_messages: usize,
    /// Maximum number of content parts in all messages of a request; more get 413
    #[arg(
        long,
        env = "CHIASM_MAX_CONTENT_PARTS",
        default_value_t = BodyLimits::default().content_parts
    )]
    pub(crate) max_content_parts: usize,
    /// Seconds within which a request body must arrive; slower ones get 408
    #[arg(long, env = "CHIASM_BODY_TIMEOUT", value_parser = positive_seconds, default_value = "60")]
    pub(crate) body_timeout: Duration,
    /// Minimum bytes per second of a request body, over any ten seconds; 0 for no minimum
    #[arg(long, env = "CHIASM_MIN_BODY_RATE", default_value_t = 1024)]
    pub(crate) min_body_rate: u64,
    /// Maximum number of open client connections; beyond it a new connection closes one that waits
    /// for its client
    #[arg(
        long,
        env = "CHIASM_MAX_CONNECTIONS",
        default_value_t = 8192,
        value_parser = at_least_one()
    )]
    pub(crate) max_connections: usize,
    /// Seconds within which a client must send the head of its next request, or its connection is
    /// closed
    #[arg(long, env = "CHIASM_HEAD_TIMEOUT", value_parser = positive_seconds, default_value = "60")]
    pub(crate) head_timeout: Duration,
    /// Seconds after which a connection is closed if its client reads nothing of its response
    #[arg(
        long,
        env = "CHIASM_WRITE_TIMEOUT",
        value_parser = positive_seconds,
        default_value = "60"
    )]
    pub(crate) write_timeout: Duration,
    /// Maximum bytes of all responses together that clients have not read yet; beyond it the
    /// response with the most unread bytes is cut
    #[arg(
        long,
        env = "CHIASM_MAX_UNREAD_BYTES",
        default_value_t = DEFAULT_MAX_BYTES,
        value_parser = at_least_one()
    )]
    pub(crate) max_unread_bytes: usize,
    /// Maximum number of requests in flight; more get 503 [default: twice what the engines run at
    /// once, but at least 1024]
    #[arg(long, env = "CHIASM_MAX_REQUESTS", value_parser = at_least_one())]
    pub(crate) max_requests: Option<usize>,
    /// Proxies, as addresses or networks, that are trusted to name the client in X-Forwarded-For or
    /// Forwarded
    #[arg(
        long,
        env = "CHIASM_TRUSTED_PROXIES",
        value_name = "CIDR",
        num_args = 1..,
        value_delimiter = ','
    )]
    pub(crate) trusted_proxies: Vec<Network>,
    /// Maximum estimated CPU time of this server for one request, in seconds; a request above it
    /// gets 413 before the work begins
    #[arg(long, env = "CHIASM_MAX_REQUEST_COST", value_parser = seconds, default_value = "10")]
    pub(crate) max_request_cost: Duration,
    /// Threads for connections and engines' outputs; more of them serve more tokens per second, at
    /// a higher cost per token [default: half of the cores]
    #[arg(long, env = "CHIASM_ASYNC_THREADS", value_parser = threads())]
    pub(crate) async_threads: Option<usize>,
    /// Threads for decoding, tokenizing and parsing; short work and heavy work have further threads
    /// [default: one less than cores]
    #[arg(long, env = "CHIASM_CPU_THREADS", value_parser = threads())]
    pub(crate) cpu_threads: Option<usize>,
    /// Target for the time to first token, in seconds; first tokens within and beyond it are
    /// counted, for autoscalers. Nothing else depends on it
    #[arg(long, env = "CHIASM_SLO_TTFT", value_name = "SECONDS", value_parser = seconds)]
    pub(crate) slo_ttft: Option<Duration>,
    /// Target for the time between two tokens, in seconds; counted like --slo-ttft
    #[arg(long, env = "CHIASM_SLO_ITL", value_name = "SECONDS", value_parser = seconds)]
    pub(crate) slo_itl: Option<Duration>,
    /// Maximum seconds from a request's arrival to its first token; 0 for no limit
    #[arg(long, env = "CHIASM_FIRST_TOKEN_TIMEOUT", value_parser = seconds, default_value = "600")]
    pub(crate) first_token_timeout: Duration,
    /// Maximum seconds from a request's arrival to its end; 0 for no limit
    #[arg(long, env = "CHIASM_REQUEST_TIMEOUT", value_parser = seconds, default_value = "3600")]
    pub(crate) request_timeout: Duration,
    /// Seconds for which a prompt is refused after three engines died with it
    #[arg(long, env = "CHIASM_QUARANTINE", value_parser = seconds, default_value = "60")]
    pub(crate) quarantine: Duration,
    /// Seconds after SIGTERM for which requests are still accepted, while /ready answers 503
    #[arg(long, env = "CHIASM_DRAIN_DELAY", value_parser = seconds, default_value = "0")]
    pub(crate) drain_delay: Duration,
    /// Seconds for requests in flight to finish after SIGTERM and --drain-delay; the rest are
    /// aborted
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
        self.async_threads.unwrap_or_else(half)
    }
}

/// Returns a parser that refuses 0.
fn at_least_one() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..)
}

/// Returns the parser of a number of threads.
fn threads() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=MAX_THREADS)
}

#[cfg(test)]
mod tests {
    use crate::cli::Cli;

    fn error(flag: &str, value: &str) -> String {
        Cli::parse_args(["chiasm", "serve", "m", flag, value]).unwrap_err().to_string()
    }

    #[test]
    fn thread_counts_are_bounded() {
        for flag in ["--async-threads", "--cpu-threads"] {
            for value in ["0", "1025", "100000"] {
                let error = error(flag, value);
                assert!(error.contains("expected a whole number from 1 to 1024"), "{error}");
            }
            assert!(Cli::parse_args(["chiasm", "serve", "m", flag, "1024"]).is_ok());
        }
    }

    #[test]
    fn timeout_that_no_client_can_meet_is_refused() {
        for flag in ["--head-timeout", "--body-timeout", "--write-timeout"] {
            for value in ["0", "-1"] {
                let error = error(flag, value);
                assert!(error.contains("expected more than 0 seconds"), "{error}");
            }
        }
    }
}
