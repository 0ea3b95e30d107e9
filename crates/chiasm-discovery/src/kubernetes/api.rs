//! The requests to the API server.

use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use reqwest::{Client, RequestBuilder};
use url::Url;

use super::Service;
use crate::ClusterAccess;
use crate::failure::Failure;
use crate::http::{self, LineStream};

/// Connections to the API server.
#[derive(Debug)]
pub(super) struct ApiServer<'a> {
    http: Client,
    cluster: &'a ClusterAccess,
    service: &'a Service,
    within: Duration,
}

impl<'a> ApiServer<'a> {
    /// Each call may take as long as `within`.
    pub(super) async fn new(
        cluster: &'a ClusterAccess,
        service: &'a Service,
        within: Duration,
    ) -> Result<Self, Failure> {
        Ok(Self { http: http::new_client(&cluster.tls()).await?, cluster, service, within })
    }

    /// How long a call may take.
    pub(super) fn within(&self) -> Duration {
        self.within
    }

    /// The slices that are there.
    pub(super) async fn list(&self) -> Result<Bytes, Failure> {
        http::answer(self.request(&[]).await?, self.within).await
    }

    /// What changes after `version`, for as long as `lasting`.
    pub(super) async fn watch(
        &self,
        version: &str,
        lasting: Duration,
    ) -> Result<LineStream, Failure> {
        let seconds = lasting.as_secs().max(1).to_string();
        let query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", version),
            ("timeoutSeconds", &seconds),
        ];
        http::stream(self.request(&query).await?, self.within).await
    }

    async fn request(&self, query: &[(&str, &str)]) -> Result<RequestBuilder, Failure> {
        let request = self.http.get(self.url(query)).header(ACCEPT, "application/json");
        let Some(path) = &self.cluster.token else { return Ok(request) };
        // Read each time: Kubernetes writes a new one before this one ends.
        let token = tokio::fs::read_to_string(path).await.map_err(Failure::Token)?;
        let header = HeaderValue::from_str(&format!("Bearer {}", token.trim()));
        let mut header = header.map_err(|error| Failure::Token(std::io::Error::other(error)))?;
        header.set_sensitive(true);
        Ok(request.header(AUTHORIZATION, header))
    }

    fn url(&self, query: &[(&str, &str)]) -> Url {
        let mut url = self.cluster.server.clone();
        let Service { namespace, name, .. } = self.service;
        // The server's own path stays before it: a proxy may have one.
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
