//! The server, assembled from its parts.

use std::collections::hash_map::RandomState;
use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use chiasm_pipeline::Pipeline;
use tokio::net::TcpListener;

use crate::access::CurrentKeys;
use crate::connections::{self, BulkThreads, ConnectionSettings};
use crate::draining::Draining;
use crate::endpoint_state::EndpointState;
use crate::layers::RequestLayers;
use crate::metrics::Metrics;
use crate::page::{self, PageState};
use crate::record::Recorder;
use crate::routes::{self, EndpointOptions};
use crate::settings::{HttpLimits, ServerSettings};
use crate::slots::Slots;
use crate::status::{self, StatusState};
use crate::tls::Certificate;
use crate::traces::Traces;

/// An HTTP server in front of a pipeline. Each part of the server holds only what it uses.
pub struct Server {
    pipeline: Arc<Pipeline>,
    http_limits: HttpLimits,
    keys: Arc<CurrentKeys>,
    draining: Draining,
    traces: Option<Arc<Traces>>,
    metrics: Arc<Metrics>,
    bulk: Arc<BulkThreads>,
    endpoints: Arc<EndpointState>,
    status: Arc<StatusState>,
    /// `None` without a live page.
    page: Option<Arc<PageState>>,
    layers: Arc<RequestLayers>,
    endpoint_options: EndpointOptions,
}

impl Server {
    /// Creates a server in front of a pipeline.
    pub fn new(pipeline: Arc<Pipeline>, settings: ServerSettings) -> Self {
        let ServerSettings {
            http_limits,
            body_limits,
            routing,
            keys,
            reasoning_fields,
            usage_in_all_streams,
            cors,
            root_path,
            adapters_may_change,
            forwards,
            page,
            traces,
            log_counts,
        } = settings;
        let metrics = Arc::new(Metrics::new(&pipeline));
        let keys = Arc::new(CurrentKeys::new(keys));
        let traces = traces.map(Arc::new);
        let draining = Draining::default();
        let slots = Slots::new({
            let pipeline = pipeline.clone();
            move || pipeline.in_flight_limit()
        });
        let recorder = Recorder {
            metrics: metrics.clone(),
            page: page.clone(),
            traces: traces.clone(),
            model: pipeline.model.clone(),
        };
        Self {
            endpoints: Arc::new(EndpointState {
                pipeline: pipeline.clone(),
                metrics: metrics.clone(),
                slots: slots.clone(),
                http_limits: http_limits.clone(),
                body_limits,
                routing,
                reasoning_fields,
                usage_in_all_streams,
                sessions: RandomState::new(),
            }),
            status: Arc::new(StatusState {
                pipeline: pipeline.clone(),
                metrics: metrics.clone(),
                slots: slots.clone(),
                traces: traces.clone(),
                draining: draining.clone(),
                log_counts,
            }),
            page: page.map(|page| {
                Arc::new(PageState {
                    page,
                    keys: keys.clone(),
                    pipeline: pipeline.clone(),
                    metrics: metrics.clone(),
                    slots,
                    draining: draining.clone(),
                })
            }),
            layers: Arc::new(RequestLayers {
                cors,
                keys: keys.clone(),
                root_path,
                adapters_may_change,
                recorder: Arc::new(recorder),
            }),
            bulk: Arc::new(BulkThreads::new(pipeline.limits.cpu_threads.div_ceil(2))),
            endpoint_options: EndpointOptions { adapters_may_change, forwards },
            pipeline,
            http_limits,
            keys,
            draining,
            traces,
            metrics,
        }
    }

    /// Returns the server's pipeline.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        &self.pipeline
    }

    /// Returns the API keys of clients, which may be replaced while requests are in flight.
    pub fn keys(&self) -> &CurrentKeys {
        &self.keys
    }

    /// Returns `true` if there is a live page.
    pub fn has_page(&self) -> bool {
        self.page.is_some()
    }

    /// Makes `/ready` fail from now on, so that requests are sent elsewhere.
    pub fn begin_draining(&self) {
        self.draining.begin();
    }

    /// Sends the queued traces, for at most `timeout`.
    pub async fn finish_traces(&self, timeout: Duration) {
        if let Some(traces) = &self.traces {
            traces.finish(timeout).await;
        }
    }

    /// Keeps the live page up to date. Does nothing without one.
    pub async fn keep_page(&self) -> Infallible {
        match &self.page {
            Some(page) => page::update(page.clone()).await,
            None => std::future::pending().await,
        }
    }

    /// Serves until `stop`, then lets requests in flight finish.
    ///
    /// With a certificate all connections use TLS. A connection is closed if its client does not
    /// complete the handshake within 10 s, or within [`HttpLimits::head_timeout`] if that is
    /// shorter.
    ///
    /// A connection beyond [`HttpLimits::connections`] replaces one that waits for its client, or
    /// waits until it can. A connection is closed if the head of its next request does not arrive
    /// within [`HttpLimits::head_timeout`], or if its client reads nothing of an answer for
    /// [`HttpLimits::write_timeout`].
    pub async fn serve(
        &self,
        listener: TcpListener,
        certificate: Option<Arc<Certificate>>,
        stop: impl Future<Output = ()>,
    ) {
        let settings = ConnectionSettings {
            limits: self.http_limits.clone(),
            metrics: self.metrics.connections.clone(),
            cpu: self.pipeline.cpu.clone(),
            bulk: self.bulk.clone(),
            app: self.app(),
            layers: self.layers.clone(),
        };
        connections::serve(listener, certificate, settings, stop).await;
    }

    /// Returns the routes.
    pub(crate) fn app(&self) -> Router {
        let page = self.page.iter().map(|page| page::router(page.clone()));
        let others = page.chain([status::router(self.status.clone())]).collect();
        routes::router(self.endpoints.clone(), self.endpoint_options, others)
    }

    /// Returns the parts that unit tests inspect.
    #[cfg(test)]
    pub(crate) fn parts(
        &self,
    ) -> (&EndpointState, &StatusState, Option<&PageState>, &Arc<RequestLayers>) {
        (&self.endpoints, &self.status, self.page.as_deref(), &self.layers)
    }
}
