//! The state that the endpoints share.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::HeaderMap;
use chiasm_api::openai::{BodyLimits, ReasoningFields};
use chiasm_pipeline::cpu::CpuBudget;
use chiasm_pipeline::{Attempts, Caller, Cause, Entries, Pipeline, RequestError};

use crate::access;
use crate::error::HttpError;
use crate::identity::Identity;
use crate::metrics::Metrics;
use crate::settings::{HttpLimits, RoutingOptions};
use crate::slots::Slots;

/// The state that the endpoints share.
pub(crate) struct EndpointState {
    /// The way of requests to engines.
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) http_limits: HttpLimits,
    pub(crate) body_limits: BodyLimits,
    pub(crate) routing: RoutingOptions,
    pub(crate) reasoning_fields: ReasoningFields,
    /// Every stream has its usage, in each chunk and at its end.
    pub(crate) usage_in_all_streams: bool,
    /// Makes numbers of session names that clients can't foresee.
    pub(crate) sessions: RandomState,
}

impl EndpointState {
    /// Returns the caller of a request.
    pub(crate) fn caller(
        &self,
        identity: Identity,
        cpu: CpuBudget,
        headers: &HeaderMap,
        entries: Entries,
    ) -> Caller {
        let Identity { id, trace, arrived, .. } = identity;
        let session = self.routing.session_header.as_ref().and_then(|name| headers.get(name));
        Caller {
            id,
            trace,
            arrived,
            cpu,
            session: session.map(|name| self.sessions.hash_one(name.as_bytes())),
            credentials: access::credentials(headers)
                .map(|key| Bytes::copy_from_slice(key.as_bytes())),
            tried: Attempts::default(),
            entries,
        }
    }

    /// Converts the error of a request. If all workers are busy, it is counted and has the status
    /// of `--busy-status`.
    pub(crate) fn http_error(&self, error: RequestError) -> HttpError {
        let is_busy = matches!(error.cause, Cause::Busy(_));
        let error = HttpError::from(error);
        if !is_busy {
            return error;
        }
        self.metrics.all_busy();
        error.with_status(self.routing.busy_status)
    }
}
