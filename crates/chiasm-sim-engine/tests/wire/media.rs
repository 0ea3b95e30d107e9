//! Requests with images: observed, cached and missing items.

use chiasm_engine::wire::{EngineCoreRequest, FinishReason, Value};
use chiasm_sim_engine::Exit;
use chiasm_types::TokenId;

use crate::frontend::{
    Frontend, feature, image, image_digest, image_request, text_request, tokens,
};

#[tokio::test]
async fn answer_describes_items_or_cached_tokens() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let observed = format!("1 image 280x224 (80 tokens, {})", image_digest(16, 20));
    let first = frontend.run(&image_request("1", "aa", Some(image(16, 20)))).await;
    assert_eq!(first.text(), format!("{observed}; 0 of 109 prompt tokens were cached"));
    let again = frontend.run(&image_request("2", "aa", None)).await;
    assert_eq!(again.text(), format!("{observed}; 96 of 109 prompt tokens were cached"));
    let other = frontend.run(&image_request("3", "bb", Some(image(16, 20)))).await;
    assert_eq!(other.text(), format!("{observed}; 0 of 109 prompt tokens were cached"));
}

#[tokio::test]
async fn other_salt_or_position_shares_no_blocks() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    frontend.run(&image_request("1", "aa", Some(image(16, 20)))).await;
    let salted =
        EngineCoreRequest { cache_salt: Some("salty".into()), ..image_request("2", "aa", None) };
    assert_eq!(frontend.run(&salted).await.cached(), 0);
    assert_eq!(
        frontend.run(&EngineCoreRequest { request_id: "3".into(), ..salted }).await.cached(),
        96
    );
    // The same tokens, but the placeholder starts one token later.
    let mut moved = image_request("4", "aa", None);
    moved.mm_features[0].position.offset += 1;
    assert_eq!(frontend.run(&moved).await.cached(), 0);
}

#[tokio::test]
async fn several_images_are_listed_in_order() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let prompt =
        [tokens(1, 10), vec![TokenId(999); 80], tokens(2, 3), vec![TokenId(999); 4], tokens(3, 2)]
            .concat();
    let mm_features =
        vec![feature("aa", Some(image(16, 20)), 10, 80), feature("bb", Some(image(4, 4)), 93, 4)];
    let answer =
        frontend.run(&EngineCoreRequest { mm_features, ..text_request("1", prompt) }).await;
    let [large, small] = [image_digest(16, 20), image_digest(4, 4)];
    let observed = format!("2 images 280x224 (80 tokens, {large}), 56x56 (4 tokens, {small})");
    assert_eq!(answer.text(), format!("{observed}; 0 of 99 prompt tokens were cached"));
}

#[tokio::test]
async fn uncached_items_are_requested_again() {
    let (mut frontend, _engine) = Frontend::engine(|_| {}).await;
    let miss = |id: &str| image_request(id, "aa", None);
    frontend.add(&miss("1")).await;
    let message = frontend.outputs().await;
    assert_eq!(message.finished_requests, ["1"]);
    assert_eq!(message.scheduler_stats, None);
    let [output] = &message.outputs[..] else { panic!("{message:?}") };
    assert_eq!((output.finish_reason, output.new_token_ids.len()), (Some(FinishReason::Error), 0));
    assert_eq!(output.mm_cache_miss_hashes, ["aa"]);

    frontend.run(&image_request("1", "aa", Some(image(16, 20)))).await;
    assert_eq!(frontend.run(&miss("2")).await.finish, Some(FinishReason::Stop));
    assert_eq!(frontend.call("reset_mm_cache", vec![]).await, Ok(Value::Nil));
    assert_eq!(frontend.run(&miss("3")).await.finish, Some(FinishReason::Error));
}

#[tokio::test]
async fn receiver_cache_holds_only_its_capacity() {
    let size = 320 * 1176 + 24;
    let (mut frontend, _engine) =
        Frontend::engine(|config| config.receiver_cache_bytes = Some(2 * size)).await;
    for hash in ["aa", "bb"] {
        frontend.run(&image_request(hash, hash, Some(image(16, 20)))).await;
    }
    assert_eq!(
        frontend.run(&image_request("1", "aa", None)).await.finish,
        Some(FinishReason::Stop)
    );
    frontend.run(&image_request("2", "cc", Some(image(16, 20)))).await;
    assert_eq!(
        frontend.run(&image_request("3", "aa", None)).await.finish,
        Some(FinishReason::Stop)
    );
    assert_eq!(
        frontend.run(&image_request("4", "bb", None)).await.finish,
        Some(FinishReason::Error)
    );
}

#[tokio::test]
async fn identifier_with_another_size_fails_one_request() {
    let (mut frontend, engine) = Frontend::engine(|_| {}).await;
    frontend.run(&image_request("1", "aa", Some(image(16, 20)))).await;
    let prompt = [tokens(7, 20), vec![TokenId(999); 4]].concat();
    let other = EngineCoreRequest {
        mm_features: vec![feature("aa", Some(image(4, 4)), 20, 4)],
        ..text_request("2", prompt)
    };
    let answer = frontend.run(&other).await;
    assert_eq!((answer.finish, answer.tokens.len()), (Some(FinishReason::Error), 0));
    assert!(matches!(engine.stop().await, Exit::Stopped));
}
