//! The handshake, and a frontend that starts late, restarts or is missing.

use std::time::Duration;

use chiasm_sim_engine::{Exit, KvEvents, SimConfig, SimEngine, SimError};

use crate::frontend::{Frontend, soon, text_request, tokens};

#[tokio::test]
async fn handshake_is_that_of_a_headless_engine() {
    let mut frontend = Frontend::bind().await;
    let _engine = SimEngine::start(SimConfig { rank: 3, num_blocks: 100, ..frontend.config() });
    let ready = frontend.accept(3).await;
    assert_eq!((ready.block_size, ready.num_gpu_blocks, ready.max_model_len), (32, 100, 1024));
    assert_eq!(ready.kv_cache_size_tokens, Some(3200));
    assert_eq!(ready.effective_attention_block_size, Some(32));
    assert_eq!(ready.vllm_version, "0.32.0");
    let kv = ready.kv_events_config.unwrap();
    for endpoint in [&kv.endpoint, kv.replay_endpoint.as_ref().unwrap()] {
        let port = endpoint.strip_prefix("tcp://*:").expect("a wildcard host, as vLLM reports it");
        assert!(port.parse::<u16>().unwrap() > 0);
    }
}

#[tokio::test]
async fn each_start_has_its_own_instance_id() {
    let mut ids = Vec::new();
    for _ in 0..2 {
        let mut frontend = Frontend::bind().await;
        let _engine = SimEngine::start(SimConfig { kv_events: None, ..frontend.config() });
        let ready = frontend.accept(0).await;
        assert_eq!(ready.kv_events_config, None);
        ids.push(ready.instance_id);
    }
    assert_ne!(ids[0], ids[1]);
}

#[tokio::test]
async fn engine_may_start_before_its_frontend() {
    // A port that was free a moment ago.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = format!("tcp://127.0.0.1:{port}");
    let engine = SimEngine::start(SimConfig::new(&address));
    tokio::task::yield_now().await;
    let mut frontend =
        Frontend::bind_to([&address, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"]).await;
    frontend.accept(0).await;
    assert!(matches!(engine.stop().await, Exit::Stopped));
}

#[tokio::test]
async fn engine_without_a_frontend_can_be_stopped() {
    let engine = SimEngine::start(SimConfig::new("tcp://127.0.0.1:1"));
    assert!(matches!(soon("the end", engine.stop()).await, Exit::Stopped));
    assert!(matches!(engine.stop().await, Exit::Stopped), "a second stop has no effect");
}

#[tokio::test]
async fn restarted_frontend_continues_without_a_handshake() {
    let directory = std::env::temp_dir().join(format!("chiasm-sim-engine-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let at = |name: &str| format!("ipc://{}/{name}", directory.display());
    let handshake = at("handshake");
    let input = at("input");
    let output = at("output");
    let addresses = [&handshake[..], &input, &output];

    let mut frontend = Frontend::bind_to(addresses).await;
    let mut config = frontend.config();
    config.pace.speedup = 1.0;
    config.pace.decode_tokens_per_s = 100.0;
    let _engine = SimEngine::start(config);
    frontend.accept(0).await;
    let mut request = text_request("long", tokens(1, 40));
    request.sampling_params.max_tokens = 1000;
    request.sampling_params.eos_token_id = None;
    frontend.add(&request).await;
    assert_eq!(frontend.outputs().await.outputs[0].request_id, "long");

    frontend.close().await;
    let mut frontend = Frontend::bind_to(addresses).await;
    let streamed = loop {
        if let Some(output) = frontend.outputs().await.outputs.into_iter().next() {
            break output.request_id;
        }
    };
    assert_eq!(streamed, "long");
    // The input direction also recovers; its connection may open a little after the output's.
    soon("the input connection", async {
        while !frontend.try_abort("long").await {
            tokio::task::yield_now().await;
        }
    })
    .await;
    while frontend.outputs().await.outputs.iter().any(|output| output.request_id == "long") {}
    std::fs::remove_dir_all(&directory).unwrap();
}

#[tokio::test]
async fn unusable_configuration_ends_the_engine() {
    let frontend = Frontend::bind().await;
    let failure = |config: SimConfig| async {
        match soon("the end", SimEngine::start(config).done()).await {
            Exit::Failed(error) => error,
            other => panic!("{other:?}"),
        }
    };
    let config = SimConfig { num_blocks: 10, ..frontend.config() };
    assert!(matches!(&*failure(config).await, SimError::Config(_)));
    let config = SimConfig { handshake: "localhost".into(), ..frontend.config() };
    assert!(matches!(&*failure(config).await, SimError::Config(_)));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", taken.local_addr().unwrap());
    let config = SimConfig {
        kv_events: Some(KvEvents { endpoint, ..KvEvents::default() }),
        ..frontend.config()
    };
    assert!(matches!(&*failure(config).await, SimError::Bind { .. }));
    let config = SimConfig { init_timeout: Duration::from_millis(50), ..frontend.config() };
    assert!(matches!(&*failure(config).await, SimError::NoInit { .. }));
}
