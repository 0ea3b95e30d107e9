use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_types::{MmHash, Placeholder, TokenId};
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
    /// Where in the body the value of its field `model` is, if it has one: workers may know the
    /// model by another name.
    pub model: Option<Range<usize>>,
    /// The trace that the worker's own spans belong to.
    pub trace: Option<TraceContext>,
    /// What the worker is expected to make of it, if it has media items and the worker's names of
    /// these are learned ([`PlaceholderForm::Learned`](crate::PlaceholderForm::Learned)).
    pub prompt: Option<ForeseenPrompt>,
}

/// A prompt as a worker is expected to write it.
#[derive(Clone, Debug)]
pub struct ForeseenPrompt {
    /// Its tokens: each media item stands as its placeholder.
    pub tokens: Arc<Vec<TokenId>>,
    /// The identities of its media items and where these stand, in the order of the prompt.
    pub items: Vec<(MmHash, Placeholder)>,
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
