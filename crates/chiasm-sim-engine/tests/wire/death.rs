//! The end of an engine, and the causes of its death.

use bytes::Bytes;
use chiasm_engine::wire::{EngineCoreRequest, EngineMessage, FinishReason, request};
use chiasm_sim_engine::{Death, Exit, SimConfig, SimEngine, SimError};
use chiasm_types::TokenId;

use crate::frontend::{Frontend, feature, image, image_request, soon, text_request, tokens};

fn endless(id: &str) -> EngineCoreRequest {
    let mut request = text_request(id, tokens(1, 40));
    request.sampling_params.max_tokens = 100_000;
    request.sampling_params.eos_token_id = None;
    request
}

fn slow(config: &mut SimConfig) {
    config.pace.speedup = 1.0;
    config.pace.decode_tokens_per_s = 200.0;
}

pub(crate) async fn failure(engine: &SimEngine) -> std::sync::Arc<SimError> {
    match soon("the end", engine.done()).await {
        Exit::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn requests_that_kill_vllm_kill_the_simulator() {
    let long = text_request("long", tokens(1, 1025));
    let mut wrong_rows = image_request("rows", "aa", Some(image(16, 20)));
    wrong_rows.mm_features[0].data.as_mut().unwrap().0[1] = image(16, 22).0.remove(1);
    let short = EngineCoreRequest {
        mm_features: vec![feature("aa", Some(image(16, 20)), 20, 79)],
        ..image_request("placeholder", "aa", None)
    };
    for (requests, reason) in [
        (vec![endless("twice"), endless("twice")], "duplicate request id twice"),
        (vec![long], "1025 prompt tokens"),
        (vec![wrong_rows], "320 rows"),
        (vec![short], "79 tokens for 80 embeddings"),
    ] {
        let (mut frontend, engine) = Frontend::engine(slow).await;
        for request in &requests {
            frontend.add(request).await;
        }
        frontend.death().await;
        let error = failure(&engine).await;
        assert!(error.to_string().contains(reason), "{error}");
        frontend.wait_for_disconnect().await;
    }
}

#[tokio::test]
async fn item_without_data_or_receiver_cache_is_fatal() {
    let (mut frontend, engine) =
        Frontend::engine(|config| config.receiver_cache_bytes = None).await;
    frontend.run(&image_request("1", "aa", Some(image(16, 20)))).await;
    frontend.add(&image_request("2", "aa", None)).await;
    frontend.death().await;
    assert!(failure(&engine).await.to_string().contains("aa has no data"));
}

#[tokio::test]
async fn undecodable_message_ends_receiving() {
    let mut bad = text_request("bad", tokens(1, 40));
    bad.sampling_params.max_tokens = 0;
    for frames in [
        request::encode(&bad),
        vec![Bytes::from_static(&[0]), Bytes::from_static(b"\x91\x01")],
        vec![Bytes::from_static(&[9])],
    ] {
        let (mut frontend, engine) = Frontend::engine(slow).await;
        let mut before = endless("before");
        before.sampling_params.max_tokens = 50;
        frontend.add(&before).await;
        frontend.send(frames).await;
        frontend.wait_for_disconnect().await;
        // The engine stays alive.
        assert_eq!(frontend.answers(1).await["before"].tokens.len(), 50);
        assert!(matches!(engine.stop().await, Exit::Stopped));
    }
}

#[tokio::test]
async fn prompt_of_full_length_spins_until_aborted() {
    let (mut frontend, _engine) =
        Frontend::engine(|config| config.max_num_batched_tokens = 256).await;
    frontend.add(&text_request("full", tokens(1, 1024))).await;
    for _ in 0..20 {
        let message = frontend.outputs().await;
        assert!(message.outputs.is_empty());
        assert_eq!(message.scheduler_stats.unwrap().num_running_reqs, 1);
    }
    frontend.abort(&["full"]).await;
    while frontend.outputs().await.scheduler_stats.unwrap().num_running_reqs > 0 {}
    assert_eq!(
        frontend.run(&text_request("next", tokens(2, 40))).await.finish,
        Some(FinishReason::Stop)
    );
}

#[tokio::test]
async fn kill_closes_the_connections_silently() {
    let (mut frontend, engine) = Frontend::engine(slow).await;
    frontend.add(&endless("a")).await;
    assert_eq!(frontend.outputs().await.outputs.len(), 1);
    engine.kill();
    frontend.wait_for_disconnect().await;
    assert!(matches!(soon("the end", engine.done()).await, Exit::Killed));
    // Messages in transit have only tokens: no end and no ENGINE_CORE_DEAD.
    while let Some(message) = frontend.remaining_message().await {
        let EngineMessage::Outputs(message) = message else { panic!("{message:?}") };
        assert!(message.outputs.iter().all(|output| output.finish_reason.is_none()));
    }
}

#[tokio::test]
async fn dropped_handle_kills_the_engine() {
    let (mut frontend, engine) = Frontend::engine(|_| {}).await;
    drop(engine);
    frontend.wait_for_disconnect().await;
}

#[tokio::test]
async fn stop_aborts_requests_before_disconnecting() {
    let (mut frontend, engine) = Frontend::engine(|config| {
        slow(config);
        config.max_num_seqs = 1;
    })
    .await;
    frontend.add(&endless("running")).await;
    frontend.add(&endless("waiting")).await;
    assert_eq!(frontend.outputs().await.outputs.len(), 1);
    assert!(matches!(engine.stop().await, Exit::Stopped));
    let answers = frontend.answers(2).await;
    assert_eq!(answers["running"].finish, Some(FinishReason::Abort));
    assert_eq!(
        (answers["waiting"].finish, answers["waiting"].tokens.len()),
        (Some(FinishReason::Abort), 0)
    );
    frontend.wait_for_disconnect().await;
}

#[tokio::test]
async fn configured_fault_ends_the_engine() {
    for (tokens, death) in [(0, Death::Announced), (3, Death::Announced), (3, Death::Silent)] {
        let (mut frontend, engine) = Frontend::engine(|config| {
            config.faults.die_after_tokens = Some(tokens);
            config.faults.death = death;
        })
        .await;
        frontend.add(&endless("a")).await;
        let mut received = Vec::<TokenId>::new();
        while (received.len() as u64) < tokens {
            received.extend(
                frontend.outputs().await.outputs.iter().flat_map(|output| &output.new_token_ids),
            );
        }
        assert!(matches!(&*failure(&engine).await, SimError::Fault));
        match death {
            Death::Announced => assert_eq!(frontend.message().await, EngineMessage::Dead),
            Death::Silent => {
                frontend.wait_for_disconnect().await;
                assert_eq!(frontend.remaining_message().await, None);
            }
        }
    }
}
