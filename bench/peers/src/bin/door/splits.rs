//! Checks that one engine computed a request's prompt and another one answered, or that one engine
//! did both.

use std::error::Error;
use std::net::SocketAddr;

use crate::client::get;
use crate::load::Reply;

/// The header with which Chiasm names the worker that computed a prompt, if it is not the worker
/// that answers.
pub(crate) const PREFILL_WORKER: &str = "x-chiasm-prefill-worker";
/// The counter of requests of a worker of Dynamo, and the endpoint at which it computes.
const COUNTER: &str = "dynamo_component_requests_total{";
const ENDPOINT: &str = r#"dynamo_endpoint="generate""#;

/// The splits of a side's requests, and how they are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Splits {
    Never,
    /// All requests are split. Answers have the header [`PREFILL_WORKER`].
    ByHeader,
    /// All requests are split. Dynamo's worker for prompts counts its requests at this address.
    ByCounter(SocketAddr),
}

impl Splits {
    /// Returns the number of prompts that Dynamo's worker has counted so far; 0 without a counter.
    pub(crate) async fn count(self) -> Result<u64, Box<dyn Error>> {
        let Self::ByCounter(address) = self else { return Ok(0) };
        let metrics = get(address, "/metrics").await?.text;
        counter(&metrics).ok_or_else(|| "the worker does not count its requests".into())
    }

    /// Checks that all replies were split as expected. `before` is the count before the requests
    /// and before `other` further ones.
    pub(crate) async fn check(
        self,
        before: u64,
        other: u64,
        replies: &[Reply],
    ) -> Result<(), Box<dyn Error>> {
        let with_header = replies.iter().filter(|reply| reply.is_split).count() as u64;
        let replies = replies.len() as u64;
        let (split, expected) = match self {
            Self::Never => (with_header, 0),
            Self::ByHeader => (with_header, replies),
            Self::ByCounter(_) => (self.count().await? - before, replies + other),
        };
        if split != expected {
            return Err(format!("{split} requests were split, not {expected}").into());
        }
        Ok(())
    }
}

/// Returns the sum of the counters of a worker's own endpoint.
fn counter(metrics: &str) -> Option<u64> {
    let lines = metrics.lines().filter(|line| line.starts_with(COUNTER) && line.contains(ENDPOINT));
    let counts: Vec<u64> = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse().ok()).collect();
    (!counts.is_empty()).then(|| counts.iter().sum())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn only_own_endpoint_is_counted() {
        let line = |name: &str, endpoint: &str, value: u32| {
            let labels = format!(r#"dynamo_component="prefill",dynamo_endpoint="{endpoint}""#);
            format!("dynamo_component_{name}{{{labels},worker_id=\"2\"}} {value}\n")
        };
        let metrics = [
            "# TYPE dynamo_component_requests_total counter\n".to_owned(),
            line("requests_total", "generate", 37),
            line("requests_total", "worker_kv_query_1", 1),
            line("request_bytes_total", "generate", 3309),
        ];
        assert_eq!(counter(&metrics.concat()), Some(37));
        assert_eq!(counter("dynamo_engine_request 0"), None);
    }

    #[tokio::test]
    async fn reply_split_against_expectation_fails() {
        let replies = |split| -> Vec<Reply> {
            (0..3).map(|number| Reply { is_split: number < split, ..Reply::default() }).collect()
        };
        Splits::ByHeader.check(0, 1, &replies(3)).await.unwrap();
        Splits::ByHeader.check(0, 1, &replies(2)).await.unwrap_err();
        Splits::Never.check(0, 1, &replies(0)).await.unwrap();
        Splits::Never.check(0, 1, &replies(1)).await.unwrap_err();
    }
}
