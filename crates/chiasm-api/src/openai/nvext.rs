//! `nvext.extra_fields`: additional facts about an answer, requested and reported as in Dynamo's
//! API.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use chiasm_request::RouteOutcome;
use serde::Serialize;
use serde_json::Value;

use super::fields::Fields;
use crate::error::ApiError;

/// The extra fields that a request selects.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraFields {
    timing: bool,
    worker_id: bool,
}

/// The `nvext` object of an answer, or of the last chunk of each of its choices.
#[derive(Debug, Serialize)]
pub struct Nvext {
    #[serde(skip_serializing_if = "Option::is_none")]
    timing: Option<Timing>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_id: Option<WorkerIds>,
}

/// Times in milliseconds, and the part of the prompt that was cached.
#[derive(Debug, Serialize)]
struct Timing {
    /// The request's arrival, in milliseconds since the Unix epoch.
    request_received_ms: u64,
    /// The time from the request's arrival to the start of its prefill.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_wait_time_ms: Option<f64>,
    /// The time from the start of the prefill to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_time_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<f64>,
    total_time_ms: f64,
    /// The fraction of the prompt's tokens that the engine had cached, from 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_hit_rate: Option<f64>,
}

/// The worker of each phase. Both phases may have the same worker.
#[derive(Debug, Serialize)]
struct WorkerIds {
    prefill_worker_id: u32,
    decode_worker_id: u32,
}

impl ExtraFields {
    pub(super) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let Some(nvext) = fields.take::<Value>("nvext")? else { return Ok(Self::default()) };
        let mut nvext = Fields::new(nvext, "nvext")?;
        let names: Vec<String> = nvext.take("extra_fields")?.unwrap_or_default();
        nvext.finish()?;
        let mut selected = Self::default();
        for (index, name) in names.iter().enumerate() {
            match name.as_str() {
                "timing" => selected.timing = true,
                "worker_id" => selected.worker_id = true,
                _ => return Err(ApiError::unsupported(format!("nvext.extra_fields[{index}]"))),
            }
        }
        Ok(selected)
    }

    /// Returns the selected fields for a request that has taken `total` so far; `None` if no field
    /// is selected.
    pub fn for_request(self, outcome: &RouteOutcome, total: Duration) -> Option<Nvext> {
        let Self { timing, worker_id } = self;
        let worker = outcome.worker.0;
        let prefilled = outcome.prefilled.map_or(worker, |by| by.worker.0);
        (timing || worker_id).then(|| Nvext {
            timing: timing.then(|| Timing::new(outcome, total)),
            worker_id: worker_id
                .then_some(WorkerIds { prefill_worker_id: prefilled, decode_worker_id: worker }),
        })
    }
}

impl Timing {
    fn new(outcome: &RouteOutcome, total: Duration) -> Self {
        let RouteOutcome { prompt_tokens, prefill, prefill_wait, first_token, .. } = *outcome;
        let received =
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(total);
        let prefilling = first_token
            .zip(prefill_wait)
            .map(|(first_token, wait)| first_token.saturating_sub(wait));
        let hit_rate = first_token.map(|_| {
            (1e4 * prefill.cached_tokens as f64 / prompt_tokens.max(1) as f64).round() / 1e4
        });
        Self {
            request_received_ms: received.as_millis() as u64,
            prefill_wait_time_ms: prefill_wait.map(milliseconds),
            prefill_time_ms: prefilling.map(milliseconds),
            ttft_ms: first_token.map(milliseconds),
            total_time_ms: milliseconds(total),
            kv_hit_rate: hit_rate,
        }
    }
}

/// Converts a time to milliseconds, rounded to whole microseconds.
fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(nvext: Value) -> Option<String> {
        let mut fields = Fields::new(json!({"nvext": nvext}), "").unwrap();
        ExtraFields::take(&mut fields).err().and_then(|error| error.param)
    }

    #[test]
    fn unknown_extra_field_is_refused_by_name() {
        assert_eq!(
            refused(json!({"extra_fields": ["timing", "engine_data"]})).as_deref(),
            Some("nvext.extra_fields[1]")
        );
        assert_eq!(
            refused(json!({"extra_fields": "timing"})).as_deref(),
            Some("nvext.extra_fields")
        );
        assert_eq!(
            refused(json!({"greed_sampling": true})).as_deref(),
            Some("nvext.greed_sampling")
        );
        assert_eq!(refused(json!("timing")).as_deref(), Some("nvext"));
        assert_eq!(refused(json!({"extra_fields": ["worker_id", "timing"]})), None);
        assert_eq!(refused(json!({"extra_fields": null})), None);
    }
}
