//! The place that a request holds while it is answered, and its caller.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use chiasm_api::openai::RequestBody;
use chiasm_pipeline::Caller;
use chiasm_pipeline::cpu::CpuBudget;
use tracing::Instrument;

use crate::arrival;
use crate::body::{self, JsonBody};
use crate::connection::Connection;
use crate::endpoint_state::EndpointState;
use crate::error::HttpError;
use crate::identity::Identity;
use crate::metrics::InFlight;
use crate::record::Record;
use crate::slots::{NoSlot, Slot};

/// A request's place among those in flight, until its answer has been read to the end or dropped.
/// Clones are the same place.
#[derive(Clone)]
pub(crate) struct Admission {
    pub(crate) record: Record,
    connection: Arc<Connection>,
    _held: Arc<(Slot, InFlight)>,
}

impl Admission {
    /// Lets the request end, from now on, when its client closes the connection or only its own
    /// side of it: the two can't be told apart without sending something. What is wrong with a
    /// request's fields is told before this.
    pub(crate) fn ends_with_client(&self) {
        self.connection.ends_with_client();
    }
}

/// A request that has arrived whole, and has a place among those in flight. While it comes it holds
/// none: slow clients would keep out all others.
pub(crate) struct Admitted<T> {
    pub(crate) caller: Caller,
    pub(crate) admission: Admission,
    pub(crate) body: JsonBody<T>,
}

impl<T: RequestBody> FromRequest<Arc<EndpointState>> for Admitted<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, state: &Arc<EndpointState>) -> Result<Self, HttpError> {
        let (mut head, body) = request.into_parts();
        let lost = || HttpError::internal("a request has no identity or record");
        let identity = head.extensions.remove::<Identity>().ok_or_else(lost)?;
        let connection = identity.connection.clone();
        let record = head.extensions.remove::<Record>().ok_or_else(lost)?;
        let owner = state.http_limits.trusted_proxies.owner(connection.peer(), &head.headers);
        let cpu = CpuBudget::new(owner, state.pipeline.limits.request_cost);
        let arriving = async {
            // A body that will find no slot needs no memory either.
            let refused = state.slots.check(owner).err().map(no_slot);
            let body = arrival::arrive(
                &head,
                body,
                refused,
                &state.http_limits,
                state.pipeline.media.budget(),
                &connection,
            )
            .await?;
            connection.engage();
            let slot = state.slots.take(owner).map_err(no_slot)?;
            Ok::<_, HttpError>((slot, body::parse(state, &cpu, body).await?))
        };
        let (slot, body) = arriving.instrument(tracing::debug_span!("parse")).await?;
        let held = Arc::new((slot, state.metrics.in_flight()));
        Ok(Self {
            caller: state.caller(identity, cpu, &head.headers, record.entries()),
            admission: Admission { record, connection, _held: held },
            body,
        })
    }
}

fn no_slot(why: NoSlot) -> HttpError {
    match why {
        NoSlot::AllTaken(limit) => HttpError::unavailable(
            "requests_full",
            format!(
                "{limit} requests are in flight, as many as allowed (--max-requests); try again later"
            ),
        ),
        NoSlot::ForOthers(held) => HttpError::over_share(format!(
            "{held} of your requests are in flight; what is left is for others who ask too (--max-requests); try again later"
        )),
    }
}
