//! The client against a scripted engine.

use std::time::Duration;

use crate::mock_engine::{MockEngine, Order, connect, hello, report, soon, text_request};
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutput, EngineCoreOutputs, EngineReady, FailureMessage, FinishReason,
    Logprobs, PrefillStats, SchedulerStats, UtilityOutput, Value, output,
};
use chiasm_engine::{
    ClientOptions, DeathCause, EngineClient, EngineEndpoints, EngineError, PendingEngine, SocketDir,
};
use chiasm_types::TokenId;

const ANY_PORT: &str = "tcp://127.0.0.1:0";

async fn pending(dir: &SocketDir) -> PendingEngine {
    crate::mock_engine::abort_on_client_panic();
    EngineClient::bind(EngineEndpoints::local(ANY_PORT, dir), ClientOptions::default())
        .await
        .unwrap()
}

async fn connected(dir: &SocketDir) -> (EngineClient, MockEngine) {
    connect(pending(dir).await, report(), Order::ReportFirst).await
}

fn dead(item: Option<Result<Box<EngineCoreOutput>, EngineError>>) -> DeathCause {
    match item {
        Some(Err(EngineError::Dead { cause } | EngineError::NotSent { cause })) => cause,
        other => panic!("not dead: {other:?}"),
    }
}

#[tokio::test]
async fn handshake_succeeds_in_either_order() {
    for order in [Order::ReportFirst, Order::ReadyFirst] {
        let dir = SocketDir::new().unwrap();
        let (client, _engine) = connect(pending(&dir).await, report(), order).await;
        assert_eq!(client.info(), &report());
        assert!(client.is_alive());
    }
}

#[tokio::test]
async fn silent_engine_is_probed_until_any_message() {
    let dir = SocketDir::new().unwrap();
    crate::mock_engine::abort_on_client_panic();
    let options =
        ClientOptions { probe_after: Some(Duration::from_millis(20)), ..ClientOptions::default() };
    let pending =
        EngineClient::bind(EngineEndpoints::local(ANY_PORT, &dir), options).await.unwrap();
    let (client, mut engine) = connect(pending, report(), Order::ReportFirst).await;
    let wait_for_silence = async |client: &EngineClient| {
        while client.silent_for() < Duration::from_millis(100) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    soon(wait_for_silence(&client)).await;
    let ClientMessage::Utility(call) = engine.receive().await else { panic!("not a probe") };
    assert_eq!((call.method.as_str(), call.call_id), ("is_scheduler_paused", 0));
    // The unanswered probe is not repeated: the next message is a request.
    let _stream = client.submit(text_request("a")).unwrap();
    engine.receive_add().await;
    engine.answer("a", 5, None).await;
    soon(async {
        while client.silent_for() > Duration::ZERO {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    soon(wait_for_silence(&client)).await;
    assert!(matches!(engine.receive().await, ClientMessage::Utility(_)));
}

#[tokio::test]
async fn unread_answer_is_aborted_without_delaying_others() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut unread = client.submit(text_request("unread")).unwrap();
    let mut read = client.submit(text_request("read")).unwrap();
    engine.receive_add().await;
    engine.receive_add().await;
    let output = |request_id: &str| EngineCoreOutput {
        request_id: request_id.into(),
        new_token_ids: vec![TokenId(5)],
        ..EngineCoreOutput::default()
    };
    // One message has the outputs of many steps: twenty times a thousand.
    for _ in 0..20 {
        let outputs = (0..1000).map(|_| output("unread")).chain([output("read")]).collect();
        engine.send(EngineCoreOutputs { outputs, ..EngineCoreOutputs::default() }).await;
        soon(read.next()).await.unwrap().unwrap();
    }
    assert!(matches!(engine.receive().await, ClientMessage::Abort(ids) if ids == ["unread"]));
    assert_eq!(client.open_requests(), 1);
    let mut outputs = 0;
    let end = loop {
        match soon(unread.next()).await {
            Some(Ok(_)) => outputs += 1,
            end => break end,
        }
    };
    assert!(matches!(end, Some(Err(EngineError::Unread))), "{end:?}");
    assert_eq!(outputs, 1 << 14);
    assert!(soon(unread.next()).await.is_none());
}

#[tokio::test]
async fn unread_bytes_are_limited() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut unread = client.submit(text_request("unread")).unwrap();
    engine.receive_add().await;
    // The output has twelve megabytes.
    let positions = 1 << 20;
    let prompt_logprobs = Some(Logprobs {
        width: 1,
        token_ids: vec![TokenId(5); positions],
        logprobs: vec![-1.0; positions],
        ranks: vec![1; positions],
    });
    let output = EngineCoreOutput {
        request_id: "unread".into(),
        prompt_logprobs,
        ..EngineCoreOutput::default()
    };
    for _ in 0..8 {
        let outputs = vec![output.clone()];
        engine.send(EngineCoreOutputs { outputs, ..EngineCoreOutputs::default() }).await;
    }
    assert!(matches!(engine.receive().await, ClientMessage::Abort(ids) if ids == ["unread"]));
    for _ in 0..6 {
        soon(unread.next()).await.unwrap().unwrap();
    }
    assert!(matches!(soon(unread.next()).await, Some(Err(EngineError::Unread))));
}

#[tokio::test]
async fn panic_in_receiving_task_ends_connection() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    client.follow_stats(|_| panic!("on purpose"));
    let mut stream = client.submit(text_request("a")).unwrap();
    engine.receive_add().await;
    let scheduler_stats = Some(SchedulerStats::default());
    engine.send(EngineCoreOutputs { scheduler_stats, ..EngineCoreOutputs::default() }).await;
    assert_eq!(dead(soon(stream.next()).await), DeathCause::TaskFailed);
    assert_eq!(soon(client.closed()).await, DeathCause::TaskFailed);
}

#[tokio::test]
async fn unsent_request_ends_with_not_sent() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut sent = client.submit(text_request("a")).unwrap();
    engine.receive_add().await;
    // No task of the client runs between these two calls.
    let mut unsent = client.submit(text_request("b")).unwrap();
    client.mark_dead(DeathCause::Reported);
    assert!(matches!(soon(sent.next()).await, Some(Err(EngineError::Dead { .. }))));
    assert!(matches!(soon(unsent.next()).await, Some(Err(EngineError::NotSent { .. }))));
}

#[tokio::test]
async fn handshake_succeeds_over_tcp_with_free_ports() {
    let endpoints = EngineEndpoints::tcp(ANY_PORT, "127.0.0.1");
    let pending = EngineClient::bind(endpoints, ClientOptions::default()).await.unwrap();
    assert!(!pending.endpoints().input.ends_with(":0"));
    let (client, mut engine) = connect(pending, report(), Order::ReadyFirst).await;
    let mut stream = client.submit(text_request("a")).unwrap();
    engine.receive_add().await;
    engine.answer("a", 5, Some(FinishReason::Stop)).await;
    assert_eq!(soon(stream.next()).await.unwrap().unwrap().new_token_ids, [TokenId(5)]);
}

#[tokio::test]
async fn engine_restarted_during_handshake_is_accepted() {
    let dir = SocketDir::new().unwrap();
    let pending = pending(&dir).await;
    let endpoints = pending.endpoints().clone();
    let starts = async {
        let (first, _) = hello(&endpoints, 0).await;
        drop(first);
        MockEngine::start(&endpoints, report(), Order::ReportFirst).await
    };
    let (client, _engine) = soon(async { tokio::join!(pending.ready(), starts) }).await;
    assert!(client.unwrap().is_alive());
}

#[tokio::test]
async fn engine_of_other_rank_is_ignored() {
    let dir = SocketDir::new().unwrap();
    let pending = pending(&dir).await;
    let endpoints = pending.endpoints().clone();
    let ready = tokio::spawn(pending.ready());
    let other = tokio::spawn({
        let endpoints = endpoints.clone();
        async move { hello(&endpoints, 7).await }
    });
    let _engine = soon(MockEngine::start(&endpoints, report(), Order::ReportFirst)).await;
    assert!(soon(ready).await.unwrap().is_ok());
    assert!(!other.is_finished(), "it gets no answer");
    other.abort();
}

#[tokio::test]
async fn older_version_is_refused() {
    let dir = SocketDir::new().unwrap();
    let pending = pending(&dir).await;
    let endpoints = pending.endpoints().clone();
    let old = EngineReady { vllm_version: "0.30.0".into(), ..report() };
    let start = MockEngine::start(&endpoints, old, Order::ReportFirst);
    let (client, _engine) = soon(async { tokio::join!(pending.ready(), start) }).await;
    assert!(matches!(client, Err(EngineError::Version { found, .. }) if found == "0.30.0"));
}

#[tokio::test]
async fn absent_engine_times_out() {
    let dir = SocketDir::new().unwrap();
    let options = ClientOptions {
        ready_timeout: Some(Duration::from_millis(50)),
        ..ClientOptions::default()
    };
    let pending =
        EngineClient::bind(EngineEndpoints::local(ANY_PORT, &dir), options).await.unwrap();
    assert!(matches!(soon(pending.ready()).await, Err(EngineError::ReadyTimeout { .. })));
}

#[tokio::test]
async fn streams_get_their_outputs_in_order() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut a = client.submit(text_request("a")).unwrap();
    let mut b = client.submit(text_request("b")).unwrap();
    assert_eq!(engine.receive_add().await, text_request("a"));
    assert_eq!(engine.receive_add().await, text_request("b"));
    assert_eq!(client.open_requests(), 2);

    let output = |id: &str, token, finish_reason| EngineCoreOutput {
        request_id: id.into(),
        new_token_ids: vec![TokenId(token)],
        prefill_stats: Some(PrefillStats { num_cached_tokens: 7, ..PrefillStats::default() }),
        finish_reason,
        ..EngineCoreOutput::default()
    };
    let outputs = vec![
        output("a", 1, None),
        output("b", 2, Some(FinishReason::Length)),
        output("unknown", 9, None),
    ];
    engine.send(EngineCoreOutputs { outputs, ..EngineCoreOutputs::default() }).await;
    engine.answer("a", 3, Some(FinishReason::Stop)).await;

    let first = soon(a.next()).await.unwrap().unwrap();
    assert_eq!(first.new_token_ids, [TokenId(1)]);
    assert_eq!(first.prefill_stats.unwrap().num_cached_tokens, 7);
    assert_eq!(soon(a.next()).await.unwrap().unwrap().finish_reason, Some(FinishReason::Stop));
    assert!(soon(a.next()).await.is_none());
    assert_eq!(soon(b.next()).await.unwrap().unwrap().finish_reason, Some(FinishReason::Length));
    assert!(soon(b.next()).await.is_none());
    assert_eq!(client.open_requests(), 0);
}

#[tokio::test]
async fn unread_stream_does_not_delay_another() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut idle = client.submit(text_request("idle")).unwrap();
    let mut busy = client.submit(text_request("busy")).unwrap();
    for token in 0..5_000 {
        engine.answer("idle", token, None).await;
    }
    engine.answer("busy", 1, Some(FinishReason::Stop)).await;
    assert!(soon(busy.next()).await.unwrap().is_ok());
    for token in 0..5_000 {
        assert_eq!(soon(idle.next()).await.unwrap().unwrap().new_token_ids, [TokenId(token)]);
    }
}

#[tokio::test]
async fn dropped_stream_aborts_its_request_once() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    drop(client.submit(text_request("a")).unwrap());
    let mut finished = client.submit(text_request("b")).unwrap();
    engine.receive_add().await;
    assert_eq!(engine.receive().await, ClientMessage::Abort(vec!["a".into()]));
    engine.receive_add().await;
    // A late output of the aborted request is dropped.
    engine.answer("a", 1, None).await;
    engine.answer("b", 2, Some(FinishReason::Stop)).await;
    assert!(soon(finished.next()).await.unwrap().is_ok());
    drop(finished);
    // Neither a finished stream nor an aborted id is aborted: the next message is the next request.
    let _last = client.submit(text_request("c")).unwrap();
    assert_eq!(engine.receive_add().await.request_id, "c");
}

#[tokio::test]
async fn id_in_use_is_refused_until_its_stream_ends() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut stream = client.submit(text_request("a")).unwrap();
    let refused = client.submit(text_request("a"));
    assert!(
        matches!(refused, Err(EngineError::InvalidRequest { field, .. }) if field == "request_id")
    );
    engine.answer("a", 1, Some(FinishReason::Stop)).await;
    assert!(soon(stream.next()).await.unwrap().is_ok());
    assert!(client.submit(text_request("a")).is_ok());
}

#[tokio::test]
async fn invalid_request_is_not_sent() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut request = text_request("a");
    request.prompt_token_ids = vec![TokenId(1); report().max_model_len].into();
    let refused = client.submit(request);
    let Err(EngineError::InvalidRequest { field, .. }) = refused else { panic!("not refused") };
    assert_eq!(field, "prompt_token_ids");
    assert_eq!(client.open_requests(), 0);
    let _stream = client.submit(text_request("b")).unwrap();
    assert_eq!(engine.receive_add().await.request_id, "b");
}

#[tokio::test]
async fn finished_request_without_output_ends_stream() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut stream = client.submit(text_request("a")).unwrap();
    engine
        .send(EngineCoreOutputs {
            finished_requests: vec!["a".into()],
            ..EngineCoreOutputs::default()
        })
        .await;
    assert!(matches!(soon(stream.next()).await, Some(Err(EngineError::Ended))));
    assert!(soon(stream.next()).await.is_none());
}

#[tokio::test]
async fn concurrent_calls_get_their_results() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let calls = {
        let client = client.clone();
        tokio::spawn(async move {
            let timeout = crate::mock_engine::STEP_TIMEOUT;
            tokio::join!(
                client.utility("reset_prefix_cache", vec![false.into()], timeout),
                client.utility("nope", vec![], timeout)
            )
        })
    };
    let mut answers = Vec::new();
    for _ in 0..2 {
        let ClientMessage::Utility(call) = engine.receive().await else { panic!("not a call") };
        let result = match call.method.as_str() {
            "reset_prefix_cache" => Ok(Value::from(call.args == [Value::from(false)])),
            _ => Err(FailureMessage("no such method".to_owned())),
        };
        answers.push(UtilityOutput { call_id: call.call_id, result });
    }
    for answer in answers.into_iter().rev() {
        engine
            .send(EngineCoreOutputs {
                utility_output: Some(answer),
                ..EngineCoreOutputs::default()
            })
            .await;
    }
    let (reset, nope) = soon(calls).await.unwrap();
    assert_eq!(reset.unwrap(), Value::from(true));
    assert!(
        matches!(nope, Err(EngineError::Utility { message, .. }) if message == "no such method")
    );
}

#[tokio::test]
async fn unanswered_call_times_out() {
    let dir = SocketDir::new().unwrap();
    let (client, _engine) = connected(&dir).await;
    let error = soon(client.utility("reset_mm_cache", vec![], Duration::from_millis(30))).await;
    assert!(matches!(error, Err(EngineError::UtilityTimeout { .. })));
}

#[tokio::test]
async fn stats_are_of_the_last_step() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut stats = client.stats();
    assert_eq!(*stats.borrow(), SchedulerStats::default());
    let sent = SchedulerStats {
        num_running_reqs: 3,
        num_waiting_reqs: 4,
        kv_cache_usage: 0.5,
        ..Default::default()
    };
    engine
        .send(EngineCoreOutputs {
            scheduler_stats: Some(sent.clone()),
            ..EngineCoreOutputs::default()
        })
        .await;
    soon(stats.changed()).await.unwrap();
    assert_eq!(*stats.borrow(), sent);
}

#[tokio::test]
async fn reported_death_ends_all_streams_with_calls() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut streams: Vec<_> =
        (0..3).map(|i| client.submit(text_request(&i.to_string())).unwrap()).collect();
    let call = {
        let client = client.clone();
        tokio::spawn(async move {
            client.utility("reset_mm_cache", vec![], crate::mock_engine::STEP_TIMEOUT).await
        })
    };
    // All four messages have been sent.
    for _ in 0..4 {
        engine.receive().await;
    }
    engine.answer("0", 1, None).await;
    engine.send_frames(output::encode_dead()).await;
    assert!(soon(streams[0].next()).await.unwrap().is_ok(), "earlier outputs are not lost");
    for stream in &mut streams {
        assert_eq!(dead(soon(stream.next()).await), DeathCause::Reported);
        assert!(soon(stream.next()).await.is_none());
    }
    assert!(matches!(
        soon(call).await.unwrap(),
        Err(EngineError::Dead { cause: DeathCause::Reported })
    ));
    assert_eq!(soon(client.closed()).await, DeathCause::Reported);
    assert!(!client.is_alive());
    assert!(matches!(client.submit(text_request("late")), Err(EngineError::NotSent { .. })));
    let late = client.utility("reset_mm_cache", vec![], crate::mock_engine::STEP_TIMEOUT).await;
    assert!(late.is_err_and(|error| error.is_dead()));
}

#[tokio::test]
async fn disconnect_ends_stream_after_last_outputs() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut stream = client.submit(text_request("a")).unwrap();
    engine.receive_add().await;
    engine.answer("a", 1, None).await;
    assert!(soon(stream.next()).await.unwrap().is_ok());
    engine.answer("a", 2, None).await;
    let MockEngine { input, output } = engine;
    drop(input);
    assert!(soon(stream.next()).await.unwrap().is_ok(), "earlier outputs are not lost");
    assert_eq!(dead(soon(stream.next()).await), DeathCause::Disconnected);
    drop(output);
}

#[tokio::test]
async fn output_disconnect_alone_closes_sockets() {
    let dir = SocketDir::new().unwrap();
    let (client, engine) = connected(&dir).await;
    let MockEngine { input, output } = engine;
    drop(output);
    assert_eq!(soon(client.closed()).await, DeathCause::Disconnected);
    soon(async {
        while ["in", "out"].iter().any(|socket| dir.path().join(socket).exists()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    drop(input);
}

#[tokio::test]
async fn first_cause_of_death_wins() {
    let dir = SocketDir::new().unwrap();
    let (client, _engine) = connected(&dir).await;
    let mut stream = client.submit(text_request("a")).unwrap();
    client.mark_dead(DeathCause::Exited("signal: 9".into()));
    client.mark_dead(DeathCause::Closed);
    assert_eq!(dead(soon(stream.next()).await), DeathCause::Exited("signal: 9".into()));
}

#[tokio::test]
async fn undecodable_message_ends_connection() {
    let dir = SocketDir::new().unwrap();
    let (client, mut engine) = connected(&dir).await;
    let mut stream = client.submit(text_request("a")).unwrap();
    engine.send_frames(vec![bytes::Bytes::from_static(b"\x92\x00\xc1")]).await;
    assert!(matches!(dead(soon(stream.next()).await), DeathCause::Protocol(_)));
}

#[tokio::test]
async fn last_client_closes_connection() {
    let dir = SocketDir::new().unwrap();
    let (client, _engine) = connected(&dir).await;
    let mut stream = client.submit(text_request("a")).unwrap();
    let other = client.clone();
    drop(client);
    assert!(other.is_alive());
    drop(other);
    assert_eq!(dead(soon(stream.next()).await), DeathCause::Closed);
}

#[tokio::test]
async fn next_start_uses_same_addresses() {
    let endpoints = EngineEndpoints::tcp(ANY_PORT, "127.0.0.1");
    let pending = EngineClient::bind(endpoints, ClientOptions::default()).await.unwrap();
    let mut endpoints = pending.endpoints().clone();
    let (mut client, mut engine) = connect(pending, report(), Order::ReportFirst).await;
    for start in 0..3 {
        let mut stream = client.submit(text_request("a")).unwrap();
        engine.receive_add().await;
        engine.answer("a", start, Some(FinishReason::Stop)).await;
        assert_eq!(soon(stream.next()).await.unwrap().unwrap().new_token_ids, [TokenId(start)]);
        drop(engine);
        assert_eq!(soon(client.closed()).await, DeathCause::Disconnected);

        let pending =
            EngineClient::bind(endpoints.clone(), ClientOptions::default()).await.unwrap();
        assert_eq!(pending.endpoints().input, endpoints.input);
        endpoints = pending.endpoints().clone();
        (client, engine) = connect(pending, report(), Order::ReportFirst).await;
    }
}
