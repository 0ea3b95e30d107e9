//! Agents that fetch images from their origin instead of receiving them from frontends.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::Path;
use axum::routing::get;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chiasm::scenarios::DAWN;
use serde_json::{Value, json};

use super::TIMEOUT;
use super::cluster::Cluster;
use crate::support::Server;

/// Returns a different file with the same pixels for each name, which is appended to the picture.
fn picture(name: &str) -> Vec<u8> {
    [DAWN.jpeg, name.as_bytes()].concat()
}

/// The requests that the origin has received.
#[derive(Clone, Default)]
struct OriginRequests {
    /// The number of requests per picture.
    counts: Arc<Mutex<HashMap<String, usize>>>,
    /// The number of requests that wait for a picture that never comes.
    hanging: Arc<AtomicUsize>,
    /// The maximum of `hanging` so far.
    max_hanging: Arc<AtomicUsize>,
}

impl OriginRequests {
    /// Waits until the client hangs up.
    async fn hang(&self) -> Vec<u8> {
        /// Counts down when the request is dropped.
        struct Hanging(Arc<AtomicUsize>);
        impl Drop for Hanging {
            fn drop(&mut self) {
                self.0.fetch_sub(1, SeqCst);
            }
        }
        let now = self.hanging.fetch_add(1, SeqCst) + 1;
        self.max_hanging.fetch_max(now, SeqCst);
        let _hanging = Hanging(self.hanging.clone());
        std::future::pending().await
    }

    /// Returns the number of requests since the last call, and resets it.
    fn take_count(&self) -> usize {
        self.counts.lock().expect("no panic").drain().map(|(_, count)| count).sum()
    }
}

/// Starts a web server with pictures.
///
/// The first request for a picture is the frontend's. Later requests for a picture named `other…`
/// get other bytes, those for a picture named `hangs…` never get an answer.
async fn origin(requests: OriginRequests) -> SocketAddr {
    let serve = move |Path(name): Path<String>| async move {
        let count = {
            let mut counts = requests.counts.lock().expect("no panic");
            let count = counts.entry(name.clone()).or_default();
            *count += 1;
            *count
        };
        match name.split('-').next() {
            Some("other") if count > 1 => picture("something else"),
            Some("hangs") if count > 1 => requests.hang().await,
            _ => picture(&name),
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tokio::spawn(
        async move { axum::serve(listener, Router::new().route("/{name}", get(serve))).await },
    );
    address
}

/// Sends a request with pictures. Returns its prompt tokens and how many of them were cached.
async fn chat(server: &Server, urls: &[&str]) -> (u64, u64) {
    let image = |url: &&str| json!({"type": "image_url", "image_url": {"url": url}});
    let text = json!({"type": "text", "text": "what is it?"});
    let parts: Vec<Value> = urls.iter().map(image).chain([text]).collect();
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 2});
    let usage = server.chat(&body).await.ok()["usage"].clone();
    let number = |value: &Value| value.as_u64().expect("a number");
    (number(&usage["prompt_tokens"]), number(&usage["prompt_tokens_details"]["cached_tokens"]))
}

/// Returns the bytes sent to agents, and the number of pictures that were sent because fetching
/// failed for `cause`.
async fn sent(server: &Server, cause: &str) -> (usize, usize) {
    let bytes = server.metric("chiasm_media_sent_bytes_total").await;
    let fallback = format!("chiasm_mm_transfer_fallback_total{{cause=\"{cause}\"}}");
    (bytes as usize, server.metric(&fallback).await as usize)
}

#[tokio::test]
async fn agent_is_sent_only_media_that_it_cannot_fetch() {
    let cluster = Cluster::new();
    let requests = OriginRequests::default();
    let origin = origin(requests.clone()).await;
    let url = |name: &str| format!("http://{origin}/{name}");
    let fetch_flags = ["--sim", "1", "--fetch-media", "--media-timeout", "0.5"];
    let agents = [cluster.agent(1, &[&fetch_flags[..], &["--allow-private-media"]].concat())];
    let server = cluster.serve(&agents, &["--allow-private-media"]);
    server.wait_ready(1, TIMEOUT).await;
    let (tokens, _) = chat(&server, &[&url("good")]).await;
    assert_eq!((sent(&server, "").await, requests.take_count()), ((0, 0), 2));
    // The engine has cached the picture.
    let (_, cached) = chat(&server, &[&url("good")]).await;
    assert!(cached > 0 && sent(&server, "").await == (0, 0), "{cached}");
    requests.take_count();

    let mut bytes = 0;
    for (name, cause) in [("other", "fetched_other"), ("hangs", "fetch_slow")] {
        assert_eq!(chat(&server, &[&url(name)]).await.0, tokens, "{name}");
        bytes += picture(name).len();
        assert_eq!(sent(&server, cause).await, (bytes, 1), "{name}");
        assert_eq!(requests.take_count(), 2, "{name}");
    }
    // The transfer is chosen per picture, and pictures don't wait for each other.
    let names =
        ["hangs-1", "good-1", "other-1", "hangs-2", "hangs-3", "hangs-4", "hangs-5", "hangs-6"];
    let urls = names.map(url);
    chat(&server, &urls.each_ref().map(String::as_str)).await;
    assert_eq!(requests.max_hanging.load(SeqCst), 6, "all six hang at once");
    bytes += names.map(|name| picture(name).len()).iter().sum::<usize>() - picture("good-1").len();
    assert_eq!(
        (sent(&server, "fetch_slow").await, sent(&server, "fetched_other").await),
        ((bytes, 7), (bytes, 2))
    );
    assert_eq!(requests.take_count(), 16);

    let data = format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(picture("data")));
    assert_eq!(chat(&server, &[&data]).await.0, tokens);
    bytes += picture("data").len();
    assert_eq!((sent(&server, "").await.0, requests.take_count()), (bytes, 0));

    // With tensors made by the frontend, agents don't fetch files.
    let tensor_flags = ["--allow-private-media", "--take-tensors"];
    let agents = [cluster.agent(3, &[&fetch_flags[..], &tensor_flags].concat())];
    let server = cluster.serve(&agents, &["--allow-private-media", "--agent-media", "tensors"]);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(chat(&server, &[&url("good-2")]).await, (tokens, 0));
    assert_eq!(requests.take_count(), 1);
    assert_eq!(server.metric("chiasm_media_sent_items_total{form=\"tensors\"}").await, 1.0);

    // The agent's policy decides which addresses it may fetch from.
    let agents = [cluster.agent(2, &fetch_flags)];
    let server = cluster.serve(&agents, &["--allow-private-media"]);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(chat(&server, &[&url("good")]).await, (tokens, 0));
    assert_eq!(
        (sent(&server, "fetch_refused").await, requests.take_count()),
        ((picture("good").len(), 1), 1)
    );
}
