//! The state that the endpoints share.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

use axum::body::Bytes;
use axum::http::HeaderMap;
use chiasm_api::openai::{BodyLimits, ReasoningFields};
use chiasm_cpu::CpuBudget;
use chiasm_pipeline::{Attempts, Cause, Pipeline, RequestContext, RequestError};

use crate::access;
use crate::error::HttpError;
use crate::identity::Identity;
use crate::metrics::Metrics;
use crate::record::Record;
use crate::settings::{HttpLimits, RoutingOptions};
use crate::slots::Slots;

/// The state that the endpoints share.
pub(crate) struct EndpointState {
    /// The pipeline that answers requests.
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) http_limits: HttpLimits,
    pub(crate) body_limits: BodyLimits,
    pub(crate) routing: RoutingOptions,
    pub(crate) reasoning_fields: ReasoningFields,
    /// Adds usage to every stream, in each chunk and at the end.
    pub(crate) usage_in_all_streams: bool,
    /// The hasher of session names; its random keys make the hashes unpredictable for clients.
    pub(crate) sessions: RandomState,
}

impl EndpointState {
    /// Builds the caller of a request.
    pub(crate) fn caller(
        &self,
        identity: Identity,
        cpu: CpuBudget,
        headers: &HeaderMap,
        record: &Record,
    ) -> RequestContext {
        let Identity { id, trace, arrived, .. } = identity;
        let session = self.routing.session_header.as_ref().and_then(|name| headers.get(name));
        RequestContext {
            id,
            trace,
            arrived,
            cpu,
            session: session.map(|name| self.sessions.hash_one(name.as_bytes())),
            credentials: access::credentials(headers)
                .map(|key| Bytes::copy_from_slice(key.as_bytes())),
            attempts: Attempts::default(),
            entries: record.entries(),
            last_route: record.last_route(),
        }
    }

    /// Converts a request's error. If all workers are busy, counts that and uses the status of
    /// `--busy-status`.
    pub(crate) fn http_error(&self, error: RequestError) -> HttpError {
        let is_busy = matches!(error.cause, Cause::Busy(_));
        let error = HttpError::from(error);
        if !is_busy {
            return error;
        }
        self.metrics.count_busy();
        error.with_status(self.routing.busy_status)
    }
}
