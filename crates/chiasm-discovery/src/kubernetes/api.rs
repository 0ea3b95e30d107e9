//! The API server's endpoints for EndpointSlices.

use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use reqwest::{Client, RequestBuilder};
use url::Url;

use super::Service;
use crate::ClusterAccess;
use crate::failure::Failure;
use crate::http::{self, LineStream};

/// A client of the API server for the slices of one service.
#[derive(Debug)]
pub(super) struct ApiServer<'a> {
    http: Client,
    cluster: &'a ClusterAccess,
    service: &'a Service,
    call_timeout: Duration,
}

impl<'a> ApiServer<'a> {
    pub(super) async fn new(
        cluster: &'a ClusterAccess,
        service: &'a Service,
        call_timeout: Duration,
    ) -> Result<Self, Failure> {
        let http = http::build_client(&cluster.tls()).await?;
        Ok(Self { http, cluster, service, call_timeout })
    }

    /// Returns the timeout of a call.
    pub(super) fn call_timeout(&self) -> Duration {
        self.call_timeout
    }

    /// Lists the service's slices.
    pub(super) async fn list(&self) -> Result<Bytes, Failure> {
        http::call(self.request(&[]).await?, self.call_timeout).await
    }

    /// Watches the changes after `version`. The server ends the watch after `duration`.
    pub(super) async fn watch(
        &self,
        version: &str,
        duration: Duration,
    ) -> Result<LineStream, Failure> {
        let seconds = duration.as_secs().max(1).to_string();
        let query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", &seconds),
        ];
        http::open_stream(self.request(&query).await?, self.call_timeout).await
    }

    async fn request(&self, query: &[(&str, &str)]) -> Result<RequestBuilder, Failure> {
        let request = self.http.get(self.url(query)).header(ACCEPT, "application/json");
        let Some(path) = &self.cluster.token else { return Ok(request) };
        // Read for each request, because Kubernetes replaces the token before it expires.
        let token = tokio::fs::read_to_string(path).await.map_err(Failure::Token)?;
        let header = HeaderValue::from_str(&format!("Bearer {}", token.trim()));
        let mut header = header.map_err(|error| Failure::Token(std::io::Error::other(error)))?;
        header.set_sensitive(true);
        Ok(request.header(AUTHORIZATION, header))
    }

    fn url(&self, query: &[(&str, &str)]) -> Url {
        let mut url = self.cluster.server.clone();
        let Service { namespace, name, .. } = self.service;
        // The path of the server's URL is kept, because a proxy may need it.
        if let Ok(mut path) = url.path_segments_mut() {
            path.pop_if_empty().extend([
                "apis",
                "discovery.k8s.io",
                "v1",
                "namespaces",
                namespace,
                "endpointslices",
            ]);
        }
        let selector = format!("kubernetes.io/service-name={name}");
        url.query_pairs_mut().append_pair("labelSelector", &selector).extend_pairs(query);
        url
    }
}
