//! Whether a prompt was computed by another worker than the one that answers: a measurement of a
//! side that splits requests says nothing if it did not split all of them.

use std::error::Error;
use std::net::SocketAddr;

use crate::client::Connection;
use crate::load::Answered;

/// The counter of a worker of Dynamo, of requests to the endpoint at which it computes.
const COUNTER: &str = "dynamo_component_requests_total{";
const ENDPOINT: &str = r#"dynamo_endpoint="generate""#;

/// How it is known of a side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Splits {
    /// None of its prompts is.
    Never,
    /// Each answer has a header that names the worker: ours.
    Told,
    /// The worker that computes prompts says at this address how many it was asked for: Dynamo's.
    Counted(SocketAddr),
}

impl Splits {
    /// Prompts that were computed so far, where they are counted; 0 elsewhere.
    pub(crate) async fn counted(self) -> Result<u64, Box<dyn Error>> {
        let Self::Counted(address) = self else { return Ok(0) };
        let (_, metrics) = Connection::open(address).await?.get("/metrics").await?;
        counter(&metrics).ok_or_else(|| "the worker does not count its requests".into())
    }

    /// Checks all of these answers; `before` is what was counted before them, and before `unlooked`
    /// requests that are not among them.
    ///
    /// # Errors
    /// One was not split although it had to be, or was although it had not.
    pub(crate) async fn check(self, before: u64, unlooked: u64, answered: &Answered) -> Result<(), Box<dyn Error>> {
        let answers = answered.latencies.len() as u64;
        let (split, expected) = match self {
            Self::Never => (answered.split, 0),
            Self::Told => (answered.split, answers),
            Self::Counted(_) => (self.counted().await? - before, answers + unlooked),
        };
        match split == expected {
            true => Ok(()),
            false => Err(format!("{split} prompts were computed by another worker, not {expected}").into()),
        }
    }
}

/// The sum over all that a worker counts by.
fn counter(metrics: &str) -> Option<u64> {
    let lines = metrics.lines().filter(|line| line.starts_with(COUNTER) && line.contains(ENDPOINT));
    let counts: Vec<u64> = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse().ok()).collect();
    (!counts.is_empty()).then(|| counts.iter().sum())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_workers_own_endpoint_is_counted_and_no_other() {
        let metrics = r#"# TYPE dynamo_component_requests_total counter
dynamo_component_requests_total{dynamo_component="prefill",dynamo_endpoint="generate",worker_id="2"} 37
dynamo_component_requests_total{dynamo_component="prefill",dynamo_endpoint="worker_kv_query_1",worker_id="2"} 1
dynamo_component_request_bytes_total{dynamo_component="prefill",dynamo_endpoint="generate"} 3309"#;
        assert_eq!(counter(metrics), Some(37));
        assert_eq!(counter("dynamo_engine_request 0"), None);
    }

    #[tokio::test]
    async fn one_answer_that_was_not_split_is_an_error() {
        let answered = |split| Answered { latencies: vec![Duration::ZERO; 3], split, ..Answered::default() };
        Splits::Told.check(0, 1, &answered(3)).await.unwrap();
        Splits::Told.check(0, 1, &answered(2)).await.unwrap_err();
        Splits::Never.check(0, 1, &answered(0)).await.unwrap();
        Splits::Never.check(0, 1, &answered(1)).await.unwrap_err();
    }
}
