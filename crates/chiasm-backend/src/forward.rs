use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_types::{MmHash, Placeholder, TokenId};
use futures_util::stream::BoxStream;

use crate::{JobError, RequestId, TraceContext};

/// A client's request that is passed on to a worker unchanged.
///
/// Only workers that take messages get such requests
/// ([`InputForm::Messages`](crate::InputForm::Messages)).
#[derive(Clone, Debug)]
pub struct ForwardRequest {
    /// The request's identity.
    pub id: RequestId,
    /// The path of the endpoint, such as `v1/chat/completions`, relative to the worker's address.
    pub path: &'static str,
    /// The body, a JSON object.
    pub body: Bytes,
    /// The byte range of the value of `model` in the body, if the body has that field: workers may
    /// know the model by another name.
    pub model: Option<Range<usize>>,
    /// The trace that the worker's own spans belong to.
    pub trace: Option<TraceContext>,
    /// The prompt that the worker is expected to make of the request. Set if the request has media
    /// items and the worker's names of them are learned
    /// ([`PlaceholderForm::Learned`](crate::PlaceholderForm::Learned)).
    pub prompt: Option<PredictedPrompt>,
}

/// The prompt that a worker is expected to make of a request.
#[derive(Clone, Debug)]
pub struct PredictedPrompt {
    /// The tokens, with a placeholder for each media item.
    pub tokens: Arc<Vec<TokenId>>,
    /// The identities and placeholders of the media items, in the order of the prompt.
    pub items: Vec<(MmHash, Placeholder)>,
}

/// A worker's response to a [`ForwardRequest`].
pub struct ForwardResponse {
    /// The HTTP status: a success, or an error that is the client's fault.
    pub status: u16,
    /// The `Content-Type` header.
    pub content_type: Option<String>,
    /// The body as it arrives. Dropping it aborts the request.
    pub body: BoxStream<'static, Result<Bytes, JobError>>,
}
