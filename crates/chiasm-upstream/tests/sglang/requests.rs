//! The requests of a server, and jobs that are refused without a request.

use std::sync::Arc;

use chiasm_backend::{
    Constraint, Input, Job, JobError, JobItem, MediaForm, Repetition, Sampling, Structured,
};
use chiasm_types::{MmHash, Placeholder, TokenId};
use serde_json::{Value, json};

use crate::stand_in::{Server, event, events, length, picture_event, server_info, with};
use crate::support::{job, sampling, with_picture};

#[tokio::test]
async fn job_becomes_a_request() {
    let server = Server::with(|| events(&[picture_event(5, json!([1, 9, 9, 9, 2]))])).await;
    let constraint = Constraint::Regex("a+".into());
    let structured = Some(Structured { constraint, field: "response_format" });
    let seeded = Sampling { structured, seed: Some(3), logprobs: Some(0), ..sampling() };
    server.run(with_picture("{}", seeded)).await;
    let (headers, body) = server.state.requests.lock().unwrap().remove(0);
    assert_eq!(
        (headers["x-request-id"].to_str().unwrap(), headers["traceparent"].len()),
        ("r-1", 55)
    );
    assert!(
        body["rid"].as_str().unwrap().starts_with("r-1_"),
        "the logs of both sides have the same id: {body}"
    );
    assert_eq!(body["input_ids"], json!([1, 9, 2]), "one marker for the picture");
    assert_eq!(body["image_data"], json!(["data:image/jpeg;base64,/9ggcGljdHVyZQ=="]));
    assert_eq!(body["mm_hashes"], json!([MmHash::new([0xab; 32]).to_string()]));
    let fields = [
        &body["stream"],
        &body["cache_salt"],
        &body["return_logprob"],
        &body["return_prompt_token_ids"],
    ];
    assert_eq!(fields, [&json!(true), &json!("salt"), &json!(true), &json!(true)]);
    assert_eq!(body.get("priority"), None, "the server has no priorities");
    let params = &body["sampling_params"];
    assert_eq!(
        [&params["max_new_tokens"], &params["top_k"], &params["sampling_seed"]],
        [&json!(4), &json!(-1), &json!(3)]
    );
    let biased = [&params["stop_token_ids"], &params["logit_bias"]];
    assert_eq!(biased, [&json!([7]), &json!({"5": -1.5})]);
    assert_eq!([&params["regex"], &params["ignore_eos"]], [&json!("a+"), &json!(false)]);
    assert_eq!((params.get("n"), params.get("json_schema")), (None, None));
    for (constraint, field, value) in [
        (Constraint::JsonObject, "json_schema", r#"{"type": "object"}"#),
        (Constraint::JsonSchema("{}".into()), "json_schema", "{}"),
        (Constraint::Grammar("root ::= x".into()), "ebnf", "root ::= x"),
        (Constraint::StructuralTag("{}".into()), "structural_tag", "{}"),
    ] {
        let structured = Some(Structured { constraint, field: "response_format" });
        server.run(job(Sampling { structured, ..sampling() })).await;
        assert_eq!(server.requests()[0]["sampling_params"][field], value);
    }
}

#[tokio::test]
async fn priority_follows_the_servers_order() {
    for (lower_is_earlier, sent) in [(true, 7), (false, -7)] {
        let change = json!({
            "enable_priority_scheduling": true,
            "schedule_low_priority_values_first": lower_is_earlier,
        });
        let server = Server::with_info(with(server_info(), change)).await;
        server.run(Job { priority: 7, ..job(sampling()) }).await;
        assert_eq!(server.requests()[0]["priority"], sent);
    }
}

/// With more markers than images, the server would wait forever for images that do not exist.
#[tokio::test]
async fn prompt_without_one_marker_per_image_is_refused() {
    let server = Server::with(|| events(&[])).await;
    let picture = || with_picture("{}", sampling());
    let marked = |tokens: &[u32], expanded: &[u32]| {
        let [tokens, expanded] =
            [tokens, expanded].map(|ids| Arc::new(ids.iter().copied().map(TokenId).collect()));
        Job { input: Input::Marked { tokens, expanded }, ..picture() }
    };
    let as_tokens = Job { input: job(sampling()).input, ..picture() };
    for (job, field) in [
        (as_tokens, "input"),
        (marked(&[1, 9, 9, 9, 2], &[1, 9, 9, 9, 2]), "messages"),
        (marked(&[1, 9, 2, 9], &[1, 9, 9, 9, 2, 9]), "messages"),
        (marked(&[1, 9, 9, 9, 2, 3], &[1, 9, 9, 9, 2]), "messages"),
        (marked(&[], &[]), "messages"),
    ] {
        let (_, error) = server.run(job).await;
        assert!(
            matches!(&error, Some(JobError::Refused { field: refused, .. }) if refused == field),
            "{field}: {error:?}"
        );
    }
    assert!(server.requests().is_empty());
}

#[tokio::test]
async fn image_identities_are_sent_in_order() {
    let server = Server::with(|| events(&[picture_event(7, Value::Null)])).await;
    let mut job = with_picture("{}", sampling());
    let first = job.media[0].clone();
    let placeholder = Placeholder { offset: 4, length: 3, is_embed: None };
    let second = JobItem { hash: MmHash::new([0xcd; 32]), placeholder, ..first.clone() };
    job.media = Arc::new([first, second]);
    let [tokens, expanded] = [&[1, 9, 9, 2][..], &[1, 9, 9, 9, 9, 9, 9, 2]];
    let [tokens, expanded] =
        [tokens, expanded].map(|ids| Arc::new(ids.iter().copied().map(TokenId).collect()));
    job.input = Input::Marked { tokens, expanded };
    server.run(job).await;
    let body = server.requests().remove(0);
    let names = [[0xab; 32], [0xcd; 32]].map(|hash| MmHash::new(hash).to_string());
    assert_eq!(
        (&body["mm_hashes"], body["image_data"].as_array().unwrap().len()),
        (&json!(names), 2)
    );
}

#[tokio::test]
async fn image_for_server_without_images_is_refused() {
    for model in [
        json!({"has_image_understanding": false, "model_type": "gemma3"}),
        json!({"has_image_understanding": true, "model_type": "llava_next"}),
    ] {
        let server =
            Server::start(server_info(), model, Box::new(|_| events(&[event(&[5], 1, length())])))
                .await;
        assert_eq!(server.connect().await.unwrap().capabilities().media, MediaForm::None);
        let (_, error) = server.run(with_picture("{}", sampling())).await;
        assert!(
            matches!(&error, Some(JobError::Refused { field, .. }) if field == "messages"),
            "{error:?}"
        );
        assert!(server.run(job(sampling())).await.1.is_none());
        assert_eq!(server.requests().len(), 1);
    }
}

#[tokio::test]
async fn unsupported_parameter_is_refused_with_its_field() {
    let server = Server::with(|| events(&[])).await;
    let repetition = Repetition { max_pattern: 2, min_pattern: 1, count: 3 };
    for (job, field) in [
        (job(Sampling { bad_words: vec![vec![TokenId(1)]], ..sampling() }), "bad_words"),
        (job(Sampling { prompt_logprobs: Some(1), ..sampling() }), "prompt_logprobs"),
        (job(Sampling { allowed_token_ids: vec![TokenId(1)], ..sampling() }), "allowed_token_ids"),
        (job(Sampling { thinking_budget: Some(1), ..sampling() }), "thinking_token_budget"),
        (job(Sampling { repetition: Some(repetition), ..sampling() }), "repetition_detection"),
        (
            job(Sampling { skip_reading_prefix_cache: true, ..sampling() }),
            "skip_reading_prefix_cache",
        ),
        (with_picture(r#"{"max_pixels": 1}"#, sampling()), "mm_processor_kwargs"),
    ] {
        let (_, error) = server.run(job).await;
        assert!(
            matches!(&error, Some(JobError::Refused { field: refused, .. }) if refused == field),
            "{field}: {error:?}"
        );
    }
    assert!(server.requests().is_empty());
}
