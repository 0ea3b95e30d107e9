//! Admission of requests: the request slot, the record and the caller of a request.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use chiasm_api::openai::RequestBody;
use chiasm_cpu::CpuBudget;
use chiasm_pipeline::RequestContext;
use tracing::Instrument;

use crate::arrival;
use crate::body::{self, JsonBody};
use crate::connection::Connection;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;
use crate::identity::Identity;
use crate::metrics::InFlight;
use crate::record::Record;
use crate::slots::{Slot, SlotError};

/// The request slot of a request, held until its answer has been read completely or dropped. Clones
/// share the slot.
#[derive(Clone)]
pub(crate) struct Admission {
    pub(crate) record: Record,
    connection: Arc<Connection>,
    _guards: Arc<(Slot, InFlight)>,
}

impl Admission {
    /// Cancels the request from now on if its client closes the connection or its sending side. The
    /// two can't be told apart without sending something.
    ///
    /// Call this after the request's fields have been checked: until then even a half-closed
    /// connection gets its error response.
    pub(crate) fn cancel_on_disconnect(&self) {
        self.connection.cancel_on_disconnect();
    }
}

/// A complete request with a request slot. A body that is still arriving holds no slot, as slow
/// clients would otherwise keep out all others.
pub(crate) struct Admitted<T> {
    pub(crate) caller: RequestContext,
    pub(crate) admission: Admission,
    pub(crate) body: JsonBody<T>,
}

impl<T: RequestBody> FromRequest<Arc<EndpointState>> for Admitted<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, state: &Arc<EndpointState>) -> Result<Self, HttpError> {
        let (mut head, body) = request.into_parts();
        let missing = || HttpError::internal("a request has no identity or record");
        let identity = head.extensions.remove::<Identity>().ok_or_else(missing)?;
        let connection = identity.connection.clone();
        let record = head.extensions.remove::<Record>().ok_or_else(missing)?;
        let owner = state.http_limits.trusted_proxies.owner(connection.peer(), &head.headers);
        let cpu = CpuBudget::new(owner, state.pipeline.limits.request_cost);
        let arriving = async {
            // A request that would get no slot is refused before its body takes memory.
            let refusal = state.slots.check(owner).err().map(slot_error);
            let body = arrival::receive(
                &head,
                body,
                refusal,
                &state.http_limits,
                state.pipeline.media.budget(),
                &connection,
            )
            .await?;
            connection.engage();
            let slot = state.slots.take(owner).map_err(slot_error)?;
            Ok::<_, HttpError>((slot, body::parse(state, &cpu, body).await?))
        };
        let (slot, body) = arriving.instrument(tracing::debug_span!("parse")).await?;
        let guards = Arc::new((slot, state.metrics.in_flight()));
        Ok(Self {
            caller: state.caller(identity, cpu, &head.headers, &record),
            admission: Admission { record, connection, _guards: guards },
            body,
        })
    }
}

fn slot_error(error: SlotError) -> HttpError {
    match error {
        SlotError::Full(limit) => HttpError::unavailable(
            "requests_full",
            format!(
                "{limit} requests are in flight, the maximum (--max-requests); \
                 try again later"
            ),
        ),
        SlotError::OverShare(held) => HttpError::over_share(format!(
            "{held} of your requests are in flight; the remaining slots are reserved for other \
             clients (--max-requests); try again later"
        )),
    }
}
