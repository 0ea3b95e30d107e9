//! Engines that survive their frontend: the client against a scripted engine of an earlier
//! frontend.

use crate::mock_engine::{MockEngine, Order, connect, report, soon, text_request};
use bytes::Bytes;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutputs, EngineReady, FailureMessage, FinishReason, Utility,
    UtilityOutput, Value,
};
use chiasm_engine::{ClientOptions, EngineClient, EngineEndpoints, PendingEngine};
use chiasm_types::TokenId;

/// Binds over TCP. If one process binds a Unix socket's path twice, closing the first socket can
/// remove the path.
async fn bind() -> PendingEngine {
    crate::mock_engine::abort_on_client_panic();
    let endpoints = EngineEndpoints::tcp("tcp://127.0.0.1:0", "127.0.0.1");
    EngineClient::bind(endpoints, ClientOptions::default()).await.unwrap()
}

/// Runs a frontend until its engine is ready. Returns its addresses and the engine's report.
async fn former_frontend() -> (EngineEndpoints, Bytes) {
    let (client, _engine) = connect(bind().await, report(), Order::ReportFirst).await;
    (client.endpoints().clone(), client.report().clone())
}

async fn rebind() -> PendingEngine {
    rebind_with(async {}).await
}

async fn rebind_with(forget: impl Future<Output = ()> + Send + 'static) -> PendingEngine {
    let (endpoints, report) = former_frontend().await;
    let rebound = EngineClient::bind(endpoints, ClientOptions::default()).await.unwrap();
    rebound.or_adopt(report, forget).unwrap()
}

async fn receive_probe(engine: &mut MockEngine) -> Utility {
    match engine.receive().await {
        ClientMessage::Utility(call) => call,
        other => panic!("not a probe: {other:?}"),
    }
}

async fn answer(engine: &mut MockEngine, call_id: u64, result: Result<Value, FailureMessage>) {
    let utility_output = Some(UtilityOutput { call_id, result });
    engine.send(EngineCoreOutputs { utility_output, ..EngineCoreOutputs::default() }).await;
}

#[tokio::test]
async fn reconnected_engine_is_adopted_after_cache_reset() {
    let pending = rebind().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut engine = soon(MockEngine::reconnect(&endpoints)).await;
    let call = receive_probe(&mut engine).await;
    assert_eq!(call.method, "reset_mm_cache");
    // Results and outputs for the former frontend arrive here.
    answer(&mut engine, 1, Ok(Value::from("to another call"))).await;
    engine.answer("former", 5, None).await;
    engine.answer("former", 6, None).await;
    engine.answer("ended", 7, Some(FinishReason::Stop)).await;
    assert_eq!(
        engine.receive().await,
        ClientMessage::Abort(vec!["former".into()]),
        "each request once, and none that has ended"
    );
    assert!(!ready.is_finished(), "it has not answered yet");
    answer(&mut engine, call.call_id, Ok(Value::Nil)).await;

    let client = soon(ready).await.unwrap().unwrap();
    assert!(client.is_adopted());
    assert_eq!(client.info(), &report());
    let mut stream = client.submit(text_request("new")).unwrap();
    assert_eq!(engine.receive_add().await.request_id, "new");
    // This request of the former frontend was queued until now.
    engine.answer("queued", 5, None).await;
    assert_eq!(engine.receive().await, ClientMessage::Abort(vec!["queued".into()]));
    engine.answer("new", 8, Some(FinishReason::Stop)).await;
    assert_eq!(soon(stream.next()).await.unwrap().unwrap().new_token_ids, [TokenId(8)]);
}

#[tokio::test]
async fn absent_engine_does_not_delay_a_new_one() {
    let pending = rebind().await;
    let (client, mut engine) = connect(pending, report(), Order::ReadyFirst).await;
    assert!(!client.is_adopted());
    let _stream = client.submit(text_request("a")).unwrap();
    assert_eq!(engine.receive_add().await.request_id, "a", "no probe");
}

#[tokio::test]
async fn report_is_deleted_before_another_engine_gets_init() {
    let (allow, allowed) = tokio::sync::oneshot::channel::<()>();
    let (start, started) = tokio::sync::oneshot::channel::<()>();
    let pending = rebind_with(async {
        start.send(()).unwrap();
        allowed.await.unwrap();
    })
    .await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let engine =
        tokio::spawn(
            async move { MockEngine::start(&endpoints, report(), Order::ReportFirst).await },
        );
    soon(started).await.unwrap();
    assert!(!engine.is_finished());
    allow.send(()).unwrap();
    let _engine = soon(engine).await.unwrap();
    let client = soon(ready).await.unwrap().unwrap();
    assert!(!client.is_adopted());
}

#[tokio::test]
async fn hello_replaces_silent_reconnected_engine() {
    let pending = rebind().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut silent = soon(MockEngine::reconnect(&endpoints)).await;
    receive_probe(&mut silent).await;
    let other = EngineReady { max_model_len: 256, ..report() };
    let mut engine = soon(MockEngine::start(&endpoints, other.clone(), Order::ReportFirst)).await;
    let client = soon(ready).await.unwrap().unwrap();
    assert!(!client.is_adopted());
    assert_eq!(client.info(), &other);
    // The end of the silent engine does not end the client of the other.
    drop(silent);
    let mut stream = client.submit(text_request("a")).unwrap();
    engine.receive_add().await;
    engine.answer("a", 5, Some(FinishReason::Stop)).await;
    assert!(soon(stream.next()).await.unwrap().is_ok());
    assert!(client.is_alive());
}

#[tokio::test]
async fn engine_is_probed_at_each_reconnect() {
    let pending = rebind().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut engine = soon(MockEngine::reconnect(&endpoints)).await;
    let first = receive_probe(&mut engine).await;
    drop(engine);
    let mut engine = soon(MockEngine::reconnect(&endpoints)).await;
    let second = receive_probe(&mut engine).await;
    assert_eq!(first.call_id, second.call_id);
    answer(&mut engine, second.call_id, Ok(Value::Nil)).await;
    assert!(soon(ready).await.unwrap().unwrap().is_alive());
}

#[tokio::test]
async fn engine_that_fails_the_probe_is_not_adopted() {
    let pending = rebind().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut ending = soon(MockEngine::reconnect(&endpoints)).await;
    let call = receive_probe(&mut ending).await;
    let failure = FailureMessage("Server shutting down".to_owned());
    answer(&mut ending, call.call_id, Err(failure)).await;
    let _engine = soon(MockEngine::start(&endpoints, report(), Order::ReportFirst)).await;
    assert!(!soon(ready).await.unwrap().unwrap().is_adopted());
}

#[tokio::test]
async fn loading_engine_becomes_ready_for_next_frontend() {
    let pending = bind().await;
    let endpoints = pending.endpoints().clone();
    let waiting = tokio::spawn(pending.ready());
    let (mut handshake, _init) = soon(crate::mock_engine::hello(&endpoints, 0)).await;
    waiting.abort();
    assert!(waiting.await.is_err());
    drop(handshake);
    let pending = EngineClient::bind(endpoints.clone(), ClientOptions::default()).await.unwrap();
    let ready = tokio::spawn(pending.ready());
    handshake = soon(crate::mock_engine::ready_without_hello(&endpoints)).await;
    let client = soon(ready).await.unwrap().unwrap();
    assert!(!client.is_adopted());
    drop(handshake);
}
