use std::ops::Range;

use bytes::Bytes;
use futures_util::stream::BoxStream;

use crate::{JobError, RequestId, TraceContext};

/// A request that a worker is given as its client sent it, for workers that take messages
/// ([`InputForm::Messages`](crate::InputForm::Messages)).
#[derive(Clone, Debug)]
pub struct Forward {
    /// The request's identity.
    pub id: RequestId,
    /// Where it was sent: `v1/chat/completions`, below whatever the worker's own address is.
    pub path: &'static str,
    /// The body, a JSON object.
    pub body: Bytes,
    /// Where in the body the value of its field `model` is, if it has one: workers may know the model by another name.
    pub model: Option<Range<usize>>,
    /// The trace that the worker's own spans belong to.
    pub trace: Option<TraceContext>,
}

/// What a worker answers to a request that it was given as it came.
pub struct Forwarded {
    /// The status, a success or what is the client's own fault.
    pub status: u16,
    /// The header of that name.
    pub content_type: Option<String>,
    /// The body as it comes. Dropping it ends the request.
    pub body: BoxStream<'static, Result<Bytes, JobError>>,
}
