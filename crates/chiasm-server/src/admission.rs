//! What a request holds while it is answered, and who asks.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use tokio::sync::OwnedSemaphorePermit;

use crate::cpu::CpuBudget;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::layers::Identity;
use crate::metrics::InFlight;
use crate::pipeline::Caller;
use crate::record::Record;

/// A request's place among those in flight, until its answer has been read to the end or dropped.
pub(crate) struct Admission {
    pub(crate) record: Record,
    _place: OwnedSemaphorePermit,
    _in_flight: InFlight,
}

impl FromRequestParts<Arc<Frontend>> for Admission {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, frontend: &Arc<Frontend>) -> Result<Self, ApiError> {
        let place = frontend.slots.clone().try_acquire_owned().map_err(|_| {
            ApiError::unavailable(format!(
                "{} requests are in flight, as many as allowed (--max-requests); try again later",
                frontend.limits.requests
            ))
        })?;
        let record =
            parts.extensions.remove::<Record>().ok_or_else(|| ApiError::internal("a request has no record"))?;
        Ok(Self { record, _place: place, _in_flight: frontend.metrics.in_flight() })
    }
}

impl FromRequestParts<Arc<Frontend>> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, frontend: &Arc<Frontend>) -> Result<Self, ApiError> {
        let identity = parts.extensions.remove::<Identity>();
        let identity = identity.ok_or_else(|| ApiError::internal("a request has no identity"))?;
        let cpu = parts.extensions.get::<CpuBudget>().cloned();
        let cpu = cpu.ok_or_else(|| ApiError::internal("a request has no CPU budget"))?;
        Ok(frontend.caller(identity, cpu, &parts.headers))
    }
}
