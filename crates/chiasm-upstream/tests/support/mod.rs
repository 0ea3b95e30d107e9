//! Shared parts of the token servers' tests: jobs, pictures, and running a job.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its own part")]

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use chiasm_backend::{
    Backend, EncodedItem, Input, ItemField, Job, JobError, JobItem, MediaDelivery, MediaObserver,
    MediaSource, Output, RequestId, Sampling, SourceError, TensorRequest, TraceContext,
};
use chiasm_types::{MmHash, Modality, Placeholder, TokenId};
use futures_util::future::{BoxFuture, FutureExt};
use tokio::time::timeout;

pub const SOON: Duration = Duration::from_secs(20);

/// Runs a job and returns its outputs and its error.
pub async fn run(backend: &dyn Backend, job: Job) -> (Vec<Output>, Option<JobError>) {
    let mut running = match backend.start(Arc::new(job)).await {
        Ok(running) => running,
        Err(error) => return (Vec::new(), Some(error)),
    };
    let mut outputs = Vec::new();
    loop {
        match timeout(SOON, running.next()).await.unwrap() {
            Some(Ok(output)) => outputs.push(output),
            Some(Err(error)) => return (outputs, Some(error)),
            None => return (outputs, None),
        }
    }
}

/// Signals when it is dropped.
pub struct DropSignal(pub std::sync::mpsc::Sender<()>);

impl Drop for DropSignal {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

pub struct Unobserved;

impl MediaObserver for Unobserved {
    fn delivered(&self, _: MediaDelivery) {}
    fn missed(&self, _: usize) {}
    fn stepped_down(&self, _: &'static str, _: &dyn std::fmt::Display) {}
}

/// A picture from a client, with these processor settings.
pub struct Picture(pub &'static str);

impl MediaSource for Picture {
    fn tensors(
        &self,
        _: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        async { Ok(None) }.boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        let bytes = Bytes::from_static(b"\xff\xd8 picture");
        Some(EncodedItem {
            bytes,
            content: [0; 32],
            media_type: "image/jpeg",
            processor_kwargs: self.0.into(),
            url: None,
        })
    }
}

pub fn sampling() -> Sampling {
    Sampling {
        stop_token_ids: vec![TokenId(7)],
        eos_token: Some(TokenId(2)),
        logit_bias: vec![(TokenId(5), -1.5)],
        ..Sampling::greedy(4)
    }
}

pub fn job(sampling: Sampling) -> Job {
    Job {
        id: RequestId::new("r-1").unwrap(),
        input: Input::Tokens(Arc::new([1, 2, 3].map(TokenId).into())),
        media: Arc::new([]),
        sampling,
        adapter: None,
        cache_salt: Some("salt".to_owned()),
        priority: 0,
        trace: TraceContext::parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
        reasoning: Default::default(),
        stage: Default::default(),
        embedded: Vec::new(),
    }
}

/// Returns a job with a picture, whose marker 9 is expected to expand to three tokens.
pub fn with_picture(kwargs: &'static str, sampling: Sampling) -> Job {
    let item = JobItem {
        modality: Modality::Image,
        hash: MmHash::new([0xab; 32]),
        placeholder: Placeholder { offset: 1, length: 3, is_embed: None },
        elements: 1,
        source: Arc::new(Picture(kwargs)),
    };
    let tokens = [1, 9, 2].map(TokenId).into();
    let expanded = [1, 9, 9, 9, 2].map(TokenId).into();
    let input = Input::Marked { tokens: Arc::new(tokens), expanded: Arc::new(expanded) };
    Job { input, media: Arc::new([item]), ..job(sampling) }
}
