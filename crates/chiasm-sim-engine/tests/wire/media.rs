//! Requests with images: what is seen, what is cached, what is missing.

use chiasm_engine::wire::{EngineCoreRequest, FinishReason, Value};
use chiasm_sim_engine::Exit;
use chiasm_types::TokenId;

use crate::frontend::{
    Frontend, digest_of_image, feature, image, image_request, text_request, tokens,
};

#[tokio::test]
async fn the_answer_says_what_was_seen_and_what_was_cached() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let saw = format!("1 image 280x224 (80 tokens, {})", digest_of_image(16, 20));
    let first = frontend.ask(&image_request("1", "aa", Some(image(16, 20)))).await;
    assert_eq!(first.text(), format!("{saw}; 0 of 109 prompt tokens were cached"));
    let again = frontend.ask(&image_request("2", "aa", None)).await;
    assert_eq!(again.text(), format!("{saw}; 96 of 109 prompt tokens were cached"));
    let other = frontend.ask(&image_request("3", "bb", Some(image(16, 20)))).await;
    assert_eq!(other.text(), format!("{saw}; 0 of 109 prompt tokens were cached"));
}

#[tokio::test]
async fn another_salt_and_another_place_share_nothing() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    frontend.ask(&image_request("1", "aa", Some(image(16, 20)))).await;
    let salted =
        EngineCoreRequest { cache_salt: Some("salty".into()), ..image_request("2", "aa", None) };
    assert_eq!(frontend.ask(&salted).await.cached(), 0);
    assert_eq!(
        frontend.ask(&EngineCoreRequest { request_id: "3".into(), ..salted }).await.cached(),
        96
    );
    // The same tokens, but the placeholder starts one later.
    let mut moved = image_request("4", "aa", None);
    moved.mm_features[0].position.offset += 1;
    assert_eq!(frontend.ask(&moved).await.cached(), 0);
}

#[tokio::test]
async fn several_images_are_named_in_order() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let prompt =
        [tokens(1, 10), vec![TokenId(999); 80], tokens(2, 3), vec![TokenId(999); 4], tokens(3, 2)]
            .concat();
    let mm_features =
        vec![feature("aa", Some(image(16, 20)), 10, 80), feature("bb", Some(image(4, 4)), 93, 4)];
    let answer =
        frontend.ask(&EngineCoreRequest { mm_features, ..text_request("1", prompt) }).await;
    let [large, small] = [digest_of_image(16, 20), digest_of_image(4, 4)];
    let saw = format!("2 images 280x224 (80 tokens, {large}), 56x56 (4 tokens, {small})");
    assert_eq!(answer.text(), format!("{saw}; 0 of 99 prompt tokens were cached"));
}

#[tokio::test]
async fn items_that_are_not_cached_are_asked_for_again() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let miss = |id: &str| image_request(id, "aa", None);
    frontend.add(&miss("1")).await;
    let message = frontend.outputs().await;
    assert_eq!(message.finished_requests, ["1"]);
    assert_eq!(message.scheduler_stats, None);
    let [output] = &message.outputs[..] else { panic!("{message:?}") };
    assert_eq!((output.finish_reason, output.new_token_ids.len()), (Some(FinishReason::Error), 0));
    assert_eq!(output.mm_cache_miss_hashes, ["aa"]);

    frontend.ask(&image_request("1", "aa", Some(image(16, 20)))).await;
    assert_eq!(frontend.ask(&miss("2")).await.finish, Some(FinishReason::Stop));
    assert_eq!(frontend.call("reset_mm_cache", vec![]).await, Ok(Value::Nil));
    assert_eq!(frontend.ask(&miss("3")).await.finish, Some(FinishReason::Error));
}

#[tokio::test]
async fn the_receiver_cache_holds_what_fits() {
    let size = 320 * 1176 + 24;
    let (mut frontend, _engine) =
        Frontend::engine(|config| config.receiver_cache_bytes = Some(2 * size)).await;
    for hash in ["aa", "bb"] {
        frontend.ask(&image_request(hash, hash, Some(image(16, 20)))).await;
    }
    assert_eq!(
        frontend.ask(&image_request("1", "aa", None)).await.finish,
        Some(FinishReason::Stop)
    );
    frontend.ask(&image_request("2", "cc", Some(image(16, 20)))).await;
    assert_eq!(
        frontend.ask(&image_request("3", "aa", None)).await.finish,
        Some(FinishReason::Stop)
    );
    assert_eq!(
        frontend.ask(&image_request("4", "bb", None)).await.finish,
        Some(FinishReason::Error)
    );
}

#[tokio::test]
async fn an_identifier_that_changes_its_size_fails_only_its_request() {
    let (mut frontend, engine) = Frontend::engine(|_| {}).await;
    frontend.ask(&image_request("1", "aa", Some(image(16, 20)))).await;
    let prompt = [tokens(7, 20), vec![TokenId(999); 4]].concat();
    let other = EngineCoreRequest {
        mm_features: vec![feature("aa", Some(image(4, 4)), 20, 4)],
        ..text_request("2", prompt)
    };
    let answer = frontend.ask(&other).await;
    assert_eq!((answer.finish, answer.tokens.len()), (Some(FinishReason::Error), 0));
    assert!(matches!(engine.stop().await, Exit::Stopped));
}
