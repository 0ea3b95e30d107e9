//! A server in front of fake backends, for unit tests.

use std::sync::Arc;

use chiasm_backend::fake::FakeBackend;
use chiasm_pipeline::PipelineLimits;
use chiasm_pipeline::test_support::TestPipeline;

use crate::endpoint_state::EndpointState;
use crate::page::{Page, PageOptions};
use crate::record::Recorder;
use crate::{HttpLimits, Server, ServerSettings};

/// A server in front of fake backends.
pub(crate) struct TestServer {
    pub(crate) server: Arc<Server>,
    pub(crate) test: TestPipeline,
}

impl TestServer {
    /// Creates a server in front of `workers` workers.
    pub(crate) async fn new(workers: usize) -> Self {
        Self::with_pipeline(TestPipeline::new(workers).await, ServerSettings::default())
    }

    /// Creates a server with these limits in front of one worker.
    pub(crate) async fn with_limits(http_limits: HttpLimits, pipeline: PipelineLimits) -> Self {
        let settings = ServerSettings { http_limits, ..ServerSettings::default() };
        Self::with_pipeline(TestPipeline::limited(pipeline, 1).await, settings)
    }

    /// Creates a server in front of these backends.
    pub(crate) async fn with_backends(backends: Vec<FakeBackend>) -> Self {
        Self::with_pipeline(TestPipeline::with(backends).await, ServerSettings::default())
    }

    /// Creates a server in front of these backends that may also forward requests.
    pub(crate) async fn forwarding(backends: Vec<FakeBackend>) -> Self {
        let settings = ServerSettings { forwards: true, ..ServerSettings::default() };
        Self::with_pipeline(TestPipeline::with(backends).await, settings)
    }

    /// Creates a server with these settings in front of one worker.
    pub(crate) async fn with_settings(settings: ServerSettings) -> Self {
        Self::with_pipeline(TestPipeline::new(1).await, settings)
    }

    /// Creates a server with a live page in front of `workers` workers.
    pub(crate) async fn with_page(workers: usize) -> Self {
        let page = Arc::new(Page::new(PageOptions::default()));
        let test = TestPipeline::observed(workers, page.clone()).await;
        Self::with_pipeline(test, ServerSettings { page: Some(page), ..ServerSettings::default() })
    }

    fn with_pipeline(test: TestPipeline, settings: ServerSettings) -> Self {
        Self { server: Arc::new(Server::new(test.pipeline.clone(), settings)), test }
    }

    /// Returns the number of requests that may be in flight.
    pub(crate) fn slots(&self) -> usize {
        self.endpoints().slots.limit()
    }

    pub(crate) fn endpoints(&self) -> &EndpointState {
        self.server.parts().0
    }

    /// Returns the text of all metrics.
    pub(crate) fn metrics(&self) -> String {
        self.server.parts().1.render().unwrap()
    }

    /// Returns the live page.
    pub(crate) fn page(&self) -> &Page {
        &self.server.parts().2.unwrap().page
    }

    pub(crate) fn recorder(&self) -> Arc<Recorder> {
        self.server.parts().3.recorder.clone()
    }
}
