//! A web server with the demo's pictures, for the scenarios with URLs.

use std::net::{Ipv4Addr, SocketAddr};

use axum::Router;
use axum::routing::get;
use tokio::task::JoinHandle;

use crate::error::CliError;
use crate::scenarios::PICTURES;
use crate::serve::listen;

pub(super) struct Origin {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl Origin {
    pub(super) async fn start() -> Result<Self, CliError> {
        let listener = listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).await?;
        let address = listener.local_addr().map_err(CliError::Server)?;
        let routes = PICTURES.iter().fold(Router::new(), |routes, picture| {
            let jpeg = picture.jpeg;
            routes.route(
                &format!("/{}", picture.name),
                get(async move || ([("content-type", "image/jpeg")], jpeg)),
            )
        });
        let server = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, routes).await {
                tracing::error!(%error, "the demo's web server failed");
            }
        });
        Ok(Self { address, server })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.server.abort();
    }
}
