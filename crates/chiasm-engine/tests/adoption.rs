//! Engines that survive their frontend: the client against a scripted engine that was ready for
//! another one.

use crate::mock_engine::{MockEngine, Order, connect, report, soon, text_request};
use bytes::Bytes;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutputs, EngineReady, FailureMessage, FinishReason, Utility,
    UtilityOutput, Value,
};
use chiasm_engine::{ClientOptions, EngineClient, EngineEndpoints, PendingEngine};
use chiasm_types::TokenId;

/// Over TCP: a path that is bound a second time in one process can be removed by the end of the
/// first socket there.
async fn bind() -> PendingEngine {
    crate::mock_engine::abort_on_panics_of_the_client();
    let endpoints = EngineEndpoints::tcp("tcp://127.0.0.1:0", "127.0.0.1");
    EngineClient::bind(endpoints, ClientOptions::default()).await.unwrap()
}

/// A frontend that ended after its engine had become ready: where it listened, and what it was
/// told.
async fn former_frontend() -> (EngineEndpoints, Bytes) {
    let (client, _engine) = connect(bind().await, report(), Order::ReportFirst).await;
    (client.endpoints().clone(), client.report().clone())
}

async fn bind_again() -> PendingEngine {
    bind_again_and(async {}).await
}

async fn bind_again_and(forget: impl Future<Output = ()> + Send + 'static) -> PendingEngine {
    let (endpoints, report) = former_frontend().await;
    let again = EngineClient::bind(endpoints, ClientOptions::default()).await.unwrap();
    again.or_return_of(report, forget).unwrap()
}

async fn question(engine: &mut MockEngine) -> Utility {
    match engine.receive().await {
        ClientMessage::Utility(call) => call,
        other => panic!("no question: {other:?}"),
    }
}

async fn answer(engine: &mut MockEngine, call_id: i64, result: Result<Value, FailureMessage>) {
    let utility_output = Some(UtilityOutput { call_id, result });
    engine.send(EngineCoreOutputs { utility_output, ..EngineCoreOutputs::default() }).await;
}

#[tokio::test]
async fn an_engine_that_comes_back_is_used_once_its_receiver_cache_is_empty() {
    let pending = bind_again().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut engine = soon(MockEngine::come_back(&endpoints)).await;
    let call = question(&mut engine).await;
    assert_eq!(call.method, "reset_mm_cache");
    // What the former frontend had asked is answered to this one.
    answer(&mut engine, 1, Ok(Value::from("to another call"))).await;
    engine.answer("former", 5, None).await;
    engine.answer("former", 6, None).await;
    engine.answer("ended", 7, Some(FinishReason::Stop)).await;
    assert_eq!(
        engine.receive().await,
        ClientMessage::Abort(vec!["former".into()]),
        "once, and none that has ended"
    );
    assert!(!ready.is_finished(), "it has not answered yet");
    answer(&mut engine, call.call_id, Ok(Value::Nil)).await;

    let client = soon(ready).await.unwrap().unwrap();
    assert!(client.is_adopted());
    assert_eq!(client.info(), &report());
    let mut stream = client.submit(text_request("new")).unwrap();
    assert_eq!(engine.receive_add().await.request_id, "new");
    // This one had not begun before.
    engine.answer("had-waited", 5, None).await;
    assert_eq!(engine.receive().await, ClientMessage::Abort(vec!["had-waited".into()]));
    engine.answer("new", 8, Some(FinishReason::Stop)).await;
    assert_eq!(soon(stream.next()).await.unwrap().unwrap().new_token_ids, [TokenId(8)]);
}

#[tokio::test]
async fn an_engine_that_never_comes_back_holds_up_nobody() {
    let pending = bind_again().await;
    let (client, mut engine) = connect(pending, report(), Order::ReadyFirst).await;
    assert!(!client.is_adopted());
    let _stream = client.submit(text_request("a")).unwrap();
    assert_eq!(engine.receive_add().await.request_id, "a", "it is asked nothing");
}

#[tokio::test]
async fn the_report_is_forgotten_before_another_engine_is_told_the_addresses() {
    let (may_forget, wait) = tokio::sync::oneshot::channel::<()>();
    let (forgets, forgotten) = tokio::sync::oneshot::channel::<()>();
    let pending = bind_again_and(async {
        forgets.send(()).unwrap();
        wait.await.unwrap();
    })
    .await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let engine =
        tokio::spawn(
            async move { MockEngine::start(&endpoints, report(), Order::ReportFirst).await },
        );
    soon(forgotten).await.unwrap();
    assert!(!engine.is_finished());
    may_forget.send(()).unwrap();
    let (_engine, client) = (soon(engine).await.unwrap(), soon(ready).await.unwrap().unwrap());
    assert!(!client.is_adopted());
}

#[tokio::test]
async fn a_hello_counts_while_the_engine_that_came_back_is_silent() {
    let pending = bind_again().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut silent = soon(MockEngine::come_back(&endpoints)).await;
    question(&mut silent).await;
    let other = EngineReady { max_model_len: 256, ..report() };
    let mut engine = soon(MockEngine::start(&endpoints, other.clone(), Order::ReportFirst)).await;
    let client = soon(ready).await.unwrap().unwrap();
    assert!(!client.is_adopted());
    assert_eq!(client.info(), &other);
    // The end of the silent one is not this one's.
    drop(silent);
    let mut stream = client.submit(text_request("a")).unwrap();
    engine.receive_add().await;
    engine.answer("a", 5, Some(FinishReason::Stop)).await;
    assert!(soon(stream.next()).await.unwrap().is_ok());
    assert!(client.is_alive());
}

#[tokio::test]
async fn an_engine_that_comes_back_twice_is_asked_twice() {
    let pending = bind_again().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut engine = soon(MockEngine::come_back(&endpoints)).await;
    let first = question(&mut engine).await;
    drop(engine);
    let mut engine = soon(MockEngine::come_back(&endpoints)).await;
    let second = question(&mut engine).await;
    assert_eq!(first.call_id, second.call_id);
    answer(&mut engine, second.call_id, Ok(Value::Nil)).await;
    assert!(soon(ready).await.unwrap().unwrap().is_alive());
}

#[tokio::test]
async fn an_engine_that_is_going_down_is_not_used() {
    let pending = bind_again().await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let mut leaving = soon(MockEngine::come_back(&endpoints)).await;
    let call = question(&mut leaving).await;
    answer(&mut leaving, call.call_id, Err(FailureMessage("Server shutting down".to_owned())))
        .await;
    let _engine = soon(MockEngine::start(&endpoints, report(), Order::ReportFirst)).await;
    assert!(!soon(ready).await.unwrap().unwrap().is_adopted());
}

#[tokio::test]
async fn an_engine_that_was_loading_its_model_is_ready_for_the_next_frontend() {
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
