//! Agents that fetch images from where frontends have got them.

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

use super::SOON;
use super::cluster::Cluster;
use crate::support::Server;

/// A picture of its own for each name: what follows its end makes another file of it.
fn picture(name: &str) -> Vec<u8> {
    [DAWN.jpeg, name.as_bytes()].concat()
}

/// The requests that the origin has received.
#[derive(Clone, Default)]
struct Asked {
    /// The number of requests for each picture.
    times: Arc<Mutex<HashMap<String, usize>>>,
    /// The number of requests that wait for a picture that never comes.
    hanging: Arc<AtomicUsize>,
    /// The maximum of `hanging` so far.
    most_hanging: Arc<AtomicUsize>,
}

impl Asked {
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
        self.most_hanging.fetch_max(now, SeqCst);
        let _hanging = Hanging(self.hanging.clone());
        std::future::pending().await
    }
}

/// How often pictures were asked for since this was asked last.
fn taken(asked: &Asked) -> usize {
    asked.times.lock().expect("no panic").drain().map(|(_, times)| times).sum()
}

/// A web server whose pictures may be others, or never come, when they are asked for again: the
/// first who asks is the frontend.
async fn origin(asked: Asked) -> SocketAddr {
    let serve = move |Path(name): Path<String>| async move {
        let times = {
            let mut counts = asked.times.lock().expect("no panic");
            let times = counts.entry(name.clone()).or_default();
            *times += 1;
            *times
        };
        match name.split('-').next() {
            Some("other") if times > 1 => picture("something else"),
            Some("hangs") if times > 1 => asked.hang().await,
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

/// Asks about pictures. Tokens of the prompt, and those that the engine held.
async fn ask(server: &Server, urls: &[&str]) -> (u64, u64) {
    let image = |url: &&str| json!({"type": "image_url", "image_url": {"url": url}});
    let text = json!({"type": "text", "text": "what is it?"});
    let parts: Vec<Value> = urls.iter().map(image).chain([text]).collect();
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 2});
    let usage = server.chat(&body).await.ok()["usage"].clone();
    let number = |value: &Value| value.as_u64().expect("a number");
    (number(&usage["prompt_tokens"]), number(&usage["prompt_tokens_details"]["cached_tokens"]))
}

/// Bytes that agents were sent, and pictures that were sent though an agent was to fetch them, for
/// this reason.
async fn sent(server: &Server, cause: &str) -> (usize, usize) {
    let bytes = server.metric("chiasm_media_sent_bytes_total").await;
    let fallback = format!("chiasm_mm_transfer_fallback_total{{cause=\"{cause}\"}}");
    (bytes as usize, server.metric(&fallback).await as usize)
}

#[tokio::test]
async fn what_an_agent_fetches_is_not_sent_and_what_it_can_not_fetch_is() {
    let (cluster, asked) = (Cluster::new(), Asked::default());
    let origin = origin(asked.clone()).await;
    let url = |name: &str| format!("http://{origin}/{name}");
    let fetches = ["--sim", "1", "--fetch-media", "--media-timeout", "0.5"];
    let agents = [cluster.agent(1, &[&fetches[..], &["--allow-private-media"]].concat())];
    let server = cluster.serve(&agents, &["--allow-private-media"]);
    server.wait_ready(1, SOON).await;
    let (tokens, _) = ask(&server, &[&url("good")]).await;
    assert_eq!((sent(&server, "").await, taken(&asked)), ((0, 0), 2));
    // The engine holds it.
    let (_, cached) = ask(&server, &[&url("good")]).await;
    assert!(cached > 0 && sent(&server, "").await == (0, 0), "{cached}");
    taken(&asked);

    let mut bytes = 0;
    for (name, cause) in [("other", "fetched_other"), ("hangs", "fetch_slow")] {
        assert_eq!(ask(&server, &[&url(name)]).await.0, tokens, "{name}");
        bytes += picture(name).len();
        assert_eq!(sent(&server, cause).await, (bytes, 1), "{name}");
        assert_eq!(taken(&asked), 2, "{name}");
    }
    // Each goes its own way, and none waits for another.
    let names =
        ["hangs-1", "good-1", "other-1", "hangs-2", "hangs-3", "hangs-4", "hangs-5", "hangs-6"];
    let urls = names.map(url);
    ask(&server, &urls.each_ref().map(String::as_str)).await;
    assert_eq!(asked.most_hanging.load(SeqCst), 6, "all six are waited for at once");
    bytes += names.map(|name| picture(name).len()).iter().sum::<usize>() - picture("good-1").len();
    assert_eq!(
        (sent(&server, "fetch_slow").await, sent(&server, "fetched_other").await),
        ((bytes, 7), (bytes, 2))
    );
    assert_eq!(taken(&asked), 16);

    let data = format!("data:image/jpeg;base64,{}", BASE64_STANDARD.encode(picture("data")));
    assert_eq!(ask(&server, &[&data]).await.0, tokens);
    bytes += picture("data").len();
    assert_eq!((sent(&server, "").await.0, taken(&asked)), (bytes, 0));

    // Who wants tensors made by frontends does not want files fetched by agents.
    let takes = ["--allow-private-media", "--take-tensors"];
    let makes = [cluster.agent(3, &[&fetches[..], &takes].concat())];
    let server = cluster.serve(&makes, &["--allow-private-media", "--agent-media", "tensors"]);
    server.wait_ready(1, SOON).await;
    assert_eq!(ask(&server, &[&url("good-2")]).await, (tokens, 0));
    assert_eq!(taken(&asked), 1);
    assert_eq!(server.metric("chiasm_media_sent_items_total{form=\"tensors\"}").await, 1.0);

    // The policy that counts is the agent's.
    let careful = [cluster.agent(2, &fetches)];
    let server = cluster.serve(&careful, &["--allow-private-media"]);
    server.wait_ready(1, SOON).await;
    assert_eq!(ask(&server, &[&url("good")]).await, (tokens, 0));
    assert_eq!(
        (sent(&server, "fetch_refused").await, taken(&asked)),
        ((picture("good").len(), 1), 1)
    );
}
