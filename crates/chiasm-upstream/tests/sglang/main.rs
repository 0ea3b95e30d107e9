//! SGLang as a backend: the description of a server, its requests, and its answers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod requests;
mod stand_in;
#[path = "../support/mod.rs"]
mod support;

use chiasm_backend::{KeyScheme, KvSource, PlaceholderForm};
use serde_json::json;

use crate::stand_in::{Answer, Server, events, server_info, with};
use crate::support::SOON;

#[tokio::test]
async fn capabilities_come_from_the_server() {
    let server = Server::with(|| events(&[])).await;
    let backend = server.connect().await.unwrap();
    let capabilities = backend.capabilities();
    assert_eq!(
        (
            capabilities.max_model_len,
            capabilities.total_blocks,
            capabilities.class.block_size.get()
        ),
        (4096, 100, 16)
    );
    assert_eq!(capabilities.encoder_cache_tokens, 4096, "room for an item as long as the context");
    assert_eq!(
        (capabilities.class.placeholders, capabilities.class.keys),
        (PlaceholderForm::Marker, KeyScheme::Sglang)
    );
    assert_eq!(
        (capabilities.engine.as_str(), capabilities.max_running),
        ("SGLang 0.5.23, token mode", 64)
    );
    assert!(!format!("{backend:?}{capabilities:?}").contains("secret"));
    let KvSource::Events(stream) = &capabilities.kv else { panic!("{:?}", capabilities.kv) };
    assert_eq!((stream.endpoint.as_str(), stream.topic.as_str()), ("tcp://127.0.0.1:5557", "kv"));
    assert_eq!(stream.replay_endpoint.as_deref(), Some("tcp://127.0.0.1:5558"));
    let (sender, load) = std::sync::mpsc::channel();
    backend.follow_load(Box::new(move |load| {
        let _ = sender.send(load);
    }));
    let load = tokio::task::spawn_blocking(move || load.recv_timeout(SOON)).await.unwrap().unwrap();
    assert_eq!((load.running, load.waiting, load.kv_usage), (3, 1, 0.5));
}

#[tokio::test]
async fn previous_version_has_another_key_scheme() {
    let server = Server::with_info(with(server_info(), json!({"version": "0.5.22"}))).await;
    let capabilities = server.connect().await.unwrap().capabilities().clone();
    assert_eq!(capabilities.class.keys, KeyScheme::SglangNarrow);
    assert!(matches!(capabilities.kv, KvSource::Events(_)), "{:?}", capabilities.kv);
}

#[tokio::test]
async fn unusable_kv_events_are_ignored_with_a_reason() {
    let events_with =
        |changes| json!({"kv_events": with(server_info()["kv_events"].clone(), changes)});
    for (change, why) in [
        (json!({"version": "0.5.21"}), "0.5.21"),
        (json!({"version": "0.5.23.post1"}), "0.5.23.post1"),
        (json!({"kv_events": null}), "--kv-events-config"),
        (events_with(json!({"publisher": "null"})), "--kv-events-config"),
        (events_with(json!({"dp_size": 2})), "--dp-size"),
        (events_with(json!({"block_size": 64})), "block size"),
        (json!({"page_size": 1}), "--page-size"),
        (json!({"disable_radix_cache": true}), "--disable-radix-cache"),
        (json!({"speculative_algorithm": "EAGLE"}), "EAGLE"),
        (json!({"uses_mamba_radix_cache": true}), "states"),
        (json!({"kv_events_config": "{\"format\": \"dynamo\"}"}), "format"),
    ] {
        let server = Server::with_info(with(server_info(), change)).await;
        let backend = server.connect().await.unwrap();
        let capabilities = backend.capabilities();
        let KvSource::Unknown { why: reason } = &capabilities.kv else {
            panic!("{why}: {:?}", capabilities.kv)
        };
        assert!(reason.contains(why), "{reason}");
        assert_eq!(
            (capabilities.class.keys, capabilities.class.block_size.get()),
            (KeyScheme::Chiasm, 16),
            "{why}"
        );
    }
}

#[tokio::test]
async fn unusable_server_is_refused_with_a_reason() {
    for (change, why) in [
        (json!({"disaggregation_mode": "prefill"}), "--disaggregation-mode"),
        (json!({"page_size": 0, "version": "0"}), "0.5.23"),
        (json!({"version": null}), "server_info"),
    ] {
        let connected = Server::with_info(with(server_info(), change)).await.connect().await;
        match connected {
            Ok(backend) => assert!(format!("{:?}", backend.capabilities().kv).contains(why)),
            Err(error) => assert!(error.contains(why), "{error}"),
        }
    }
    let answer = || -> Answer { Box::new(|_| events(&[])) };
    let no_text = Server::start(server_info(), json!({"is_generation": false}), answer()).await;
    assert!(no_text.connect().await.unwrap_err().contains("does not generate"));
    let without_metrics = Server::start_with(server_info(), json!({}), answer(), false).await;
    assert!(without_metrics.connect().await.unwrap_err().contains("--enable-metrics"));
}

#[tokio::test]
async fn kind_of_sglang_is_detected() {
    let answer = || -> Answer { Box::new(|_| events(&[])) };
    let engine = async |server: Server| {
        server.connect_detected().await.map(|backend| backend.capabilities().engine.clone())
    };
    let server = Server::with_info(server_info()).await;
    assert_eq!(engine(server).await.as_deref(), Ok("SGLang 0.5.23, token mode"));
    // Both are used as plain OpenAI servers: the first reports no load, the second accepts images
    // only with text.
    let without_metrics = Server::start_with(server_info(), json!({}), answer(), false).await;
    let needs_text =
        Server::start(server_info(), json!({"model_type": "internvl"}), answer()).await;
    for server in [without_metrics, needs_text] {
        assert_eq!(engine(server).await.as_deref(), Ok("a server of OpenAI's API"));
    }
    let part = with(server_info(), json!({"disaggregation_mode": "prefill"}));
    let error = engine(Server::with_info(part).await).await.unwrap_err();
    assert!(error.contains("--disaggregation-mode"), "{error}");
}
