//! A web server with the demo's pictures that counts the requests for them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::routing::get;
use chiasm::scenarios::PICTURES;

use super::stand_ins;

pub struct Origin {
    address: SocketAddr,
    pub hits: Arc<AtomicUsize>,
}

impl Origin {
    pub async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let hits = Arc::new(AtomicUsize::new(0));
        let mut routes = Router::new();
        for picture in PICTURES {
            let hits = hits.clone();
            let serve = move || async move {
                hits.fetch_add(1, Ordering::SeqCst);
                ([("content-type", "image/jpeg")], picture.jpeg)
            };
            routes = routes.route(&format!("/{}", picture.name), get(serve));
        }
        for modality in ["video", "audio"] {
            for number in 0..PICTURES.len() {
                let serve = move || async move { stand_ins::file(modality, number) };
                routes = routes.route(&format!("/{modality}/{number}"), get(serve));
            }
        }
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Self { address, hits }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}
