//! A server before fake backends, for unit tests.

use std::sync::Arc;

use chiasm_api::openai::BodyLimits;
use chiasm_backend::fake::FakeBackend;
use chiasm_pipeline::PipelineLimits;
use chiasm_pipeline::test_support::TestPipeline;

use crate::page::{Page, PageOptions};
use crate::{Frontend, HttpLimits};

/// A server before fake backends.
pub(crate) struct TestServer {
    pub(crate) frontend: Arc<Frontend>,
    pub(crate) test: TestPipeline,
}

impl TestServer {
    /// Creates a server before as many workers.
    pub(crate) async fn new(workers: usize) -> Self {
        Self::before(TestPipeline::new(workers).await, HttpLimits::default())
    }

    /// Creates a server with these limits before one worker.
    pub(crate) async fn limited(http: HttpLimits, pipeline: PipelineLimits) -> Self {
        Self::before(TestPipeline::limited(pipeline, 1).await, http)
    }

    /// Creates a server before these backends.
    pub(crate) async fn with(backends: Vec<FakeBackend>) -> Self {
        Self::before(TestPipeline::with(backends).await, HttpLimits::default())
    }

    /// Creates a server with a live page before as many workers.
    pub(crate) async fn with_page(workers: usize) -> Self {
        let page = Arc::new(Page::new(PageOptions::default()));
        let test = TestPipeline::observed(workers, page.clone()).await;
        let frontend = Frontend::new(test.pipeline.clone(), HttpLimits::default(), BodyLimits::default());
        Self { frontend: Arc::new(frontend.with_page(Some(page))), test }
    }

    fn before(test: TestPipeline, http: HttpLimits) -> Self {
        let frontend = Frontend::new(test.pipeline.clone(), http, BodyLimits::default());
        Self { frontend: Arc::new(frontend), test }
    }
}
