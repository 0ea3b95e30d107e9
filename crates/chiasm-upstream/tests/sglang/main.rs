//! SGLang as a backend: what is found of a server, what it is asked, and what becomes of its
//! answers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod answers;
mod asked;
mod stand_in;
#[path = "../support/mod.rs"]
mod support;

use chiasm_backend::{KeyScheme, KvSource, PlaceholderForm};
use serde_json::json;

use crate::stand_in::{Answer, Server, events, server_info, with};
use crate::support::SOON;

#[tokio::test]
async fn a_server_says_what_it_can_do() {
    let server = Server::with(|| events(&[])).await;
    let backend = server.connect().await.unwrap();
    let can = backend.capabilities();
    assert_eq!((can.max_model_len, can.total_blocks, can.class.block_size.get()), (4096, 100, 16));
    assert_eq!(can.encoder_cache_tokens, 4096, "room for an item as long as the context");
    assert_eq!(
        (can.class.placeholders, can.class.keys),
        (PlaceholderForm::Marker, KeyScheme::Sglang)
    );
    assert_eq!((can.engine.as_str(), can.max_running), ("SGLang 0.5.23, token mode", 64));
    assert!(!format!("{backend:?}{can:?}").contains("secret"));
    let KvSource::Events(stream) = &can.kv else { panic!("{:?}", can.kv) };
    assert_eq!((stream.endpoint.as_str(), stream.topic.as_str()), ("tcp://127.0.0.1:5557", "kv"));
    assert_eq!(stream.replay_endpoint.as_deref(), Some("tcp://127.0.0.1:5558"));
    let (told, load) = std::sync::mpsc::channel();
    backend.follow_load(Box::new(move |load| {
        let _ = told.send(load);
    }));
    let load = tokio::task::spawn_blocking(move || load.recv_timeout(SOON)).await.unwrap().unwrap();
    assert_eq!((load.running, load.waiting, load.kv_usage), (3, 1, 0.5));
}

#[tokio::test]
async fn the_version_before_has_other_names_for_images() {
    let server = Server::that_is(with(server_info(), json!({"version": "0.5.22"}))).await;
    let can = server.connect().await.unwrap().capabilities().clone();
    assert_eq!(can.class.keys, KeyScheme::SglangNarrow);
    assert!(matches!(can.kv, KvSource::Events(_)), "{:?}", can.kv);
}

#[tokio::test]
async fn knowledge_is_exact_of_servers_alone_whose_hashes_are_known() {
    let events_with =
        |changes| json!({"kv_events": with(server_info()["kv_events"].clone(), changes)});
    for (change, why) in [
        (json!({"version": "0.5.21"}), "0.5.21"),
        (json!({"version": "0.5.23.post1"}), "0.5.23.post1"),
        (json!({"kv_events": null}), "--kv-events-config"),
        (events_with(json!({"publisher": "null"})), "--kv-events-config"),
        (events_with(json!({"dp_size": 2})), "--dp-size"),
        (events_with(json!({"block_size": 64})), "other blocks"),
        (json!({"page_size": 1}), "--page-size"),
        (json!({"disable_radix_cache": true}), "--disable-radix-cache"),
        (json!({"speculative_algorithm": "EAGLE"}), "EAGLE"),
        (json!({"uses_mamba_radix_cache": true}), "states"),
        (json!({"kv_events_config": "{\"format\": \"dynamo\"}"}), "format"),
    ] {
        let backend = Server::that_is(with(server_info(), change)).await.connect().await.unwrap();
        let can = backend.capabilities();
        let KvSource::Unknown { why: told } = &can.kv else { panic!("{why}: {:?}", can.kv) };
        assert!(told.contains(why), "{told}");
        assert_eq!((can.class.keys, can.class.block_size.get()), (KeyScheme::Chiasm, 16), "{why}");
    }
}

#[tokio::test]
async fn what_can_not_be_used_is_said_when_it_is_found() {
    for (change, why) in [
        (json!({"disaggregation_mode": "prefill"}), "--disaggregation-mode"),
        (json!({"page_size": 0, "version": "0"}), "0.5.23"),
        (json!({"version": null}), "server_info"),
    ] {
        let connected = Server::that_is(with(server_info(), change)).await.connect().await;
        match connected {
            Ok(backend) => assert!(format!("{:?}", backend.capabilities().kv).contains(why)),
            Err(error) => assert!(error.contains(why), "{error}"),
        }
    }
    let answer = || -> Answer { Box::new(|_| events(&[])) };
    let no_text = Server::start(server_info(), json!({"is_generation": false}), answer()).await;
    assert!(no_text.connect().await.unwrap_err().contains("generates nothing"));
    let silent = Server::start_with(server_info(), json!({}), answer(), false).await;
    assert!(silent.connect().await.unwrap_err().contains("--enable-metrics"));
}
