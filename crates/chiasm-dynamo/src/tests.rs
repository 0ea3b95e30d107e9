//! Jobs at a worker whose behaviour each test chooses.

mod knowledge;
mod tensors;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_backend::{
    Content, Finish, Input, Job, JobError, KvSource, Output, RequestId, Sampling, Structured,
};
use chiasm_backend::{EncodedItem, ItemField, JobItem, MediaSource, SourceError, TensorRequest};
use chiasm_types::{MmHash, Modality, Placeholder, TokenId};
use futures_util::future::{BoxFuture, FutureExt};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::frame::TwoPart;
use crate::response_listener::KILL;
use worker::{AnswerConnection, FakeWorker};

const SOON: Duration = Duration::from_secs(20);

fn sampling() -> Sampling {
    Sampling {
        min_tokens: 1,
        temperature: 0.5,
        top_p: 0.9,
        min_p: 0.1,
        seed: Some(7),
        presence_penalty: 0.2,
        frequency_penalty: 0.3,
        repetition_penalty: 1.1,
        stop_token_ids: vec![TokenId(7)],
        eos_token: Some(TokenId(2)),
        thinking_budget: Some(3),
        ..Sampling::greedy(4)
    }
}

fn job(sampling: Sampling) -> Job {
    Job {
        id: RequestId::new("r-1").unwrap(),
        input: Input::Tokens(Arc::new([1, 2, 3].map(TokenId).into())),
        media: Arc::new([]),
        sampling,
        adapter: None,
        cache_salt: None,
        priority: 3,
        trace: None,
        reasoning: Default::default(),
        stage: Default::default(),
        embedded: Vec::new(),
    }
}

/// Runs a job with the worker's answer `answer`, and returns its outputs and its error.
async fn run(
    sampling: Sampling,
    answer: impl AsyncFnOnce(&mut AnswerConnection),
) -> (Vec<Output>, Option<JobError>) {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let mut running = backend.start(Arc::new(job(sampling))).await.unwrap();
    let mut connection = worker.next_request().await.open_answer().await;
    answer(&mut connection).await;
    let mut outputs = Vec::new();
    loop {
        match timeout(SOON, running.next()).await.unwrap() {
            Some(Ok(output)) => outputs.push(output),
            Some(Err(error)) => return (outputs, Some(error)),
            None => return (outputs, None),
        }
    }
}

fn tokens(output: &Output) -> Vec<u32> {
    let Content::Tokens { tokens, .. } = &output.content else { panic!("{output:?}") };
    tokens.iter().map(|token| token.0).collect()
}

fn usage(cached: usize) -> Value {
    json!({
        "prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

#[tokio::test]
async fn request_has_all_fields_of_the_job() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let capabilities = backend.capabilities();
    assert_eq!(
        (capabilities.max_model_len, capabilities.total_blocks, capabilities.max_running),
        (4096, 100, 8)
    );
    assert!(
        matches!(&capabilities.kv, KvSource::Unknown { why } if why == "it publishes no KV events"),
        "{:?}",
        capabilities.kv
    );
    let structured = Structured {
        constraint: chiasm_backend::Constraint::JsonSchema(r#"{"type":"object"}"#.into()),
        field: "x",
    };
    let sampling = Sampling { structured: Some(structured), ..sampling() };
    let mut running = backend.start(Arc::new(job(sampling))).await.unwrap();
    let request = worker.next_request().await;
    assert_eq!(request.path, "1f/ns/backend/generate");
    assert!(request.control["id"].as_str().unwrap().starts_with("r-1-"), "{:?}", request.control);
    assert_eq!(request.control["payload_codec"], "msgpack");
    let expected = json!({
        "model": "tiny", "token_ids": [1, 2, 3], "eos_token_ids": [2], "annotations": [],
        "routing": {"priority": -3},
        "stop_conditions": {
            "max_tokens": 4, "min_tokens": 1, "ignore_eos": false,
            "stop_token_ids_hidden": [7, 2], "max_thinking_tokens": 3,
        },
        "sampling_options": {
            "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1,
            "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
            "seed": 7, "guided_decoding": {"json": {"type": "object"}},
        },
        "output_options": {"skip_special_tokens": false},
    });
    assert_eq!(request.body, expected);
    let mut connection = request.open_answer().await;
    connection.output(json!({"token_ids": [5], "completion_usage": usage(2)})).await;
    let annotation = json!({"event": "an annotation", "comment": ["of no use"]});
    connection.item(json!({"data": annotation, "complete_final": false})).await;
    connection.output(json!({"token_ids": [6]})).await;
    let last = json!({"token_ids": [], "finish_reason": "length", "completion_usage": usage(2)});
    connection.output(last).await;
    connection.end().await;
    let mut outputs = Vec::new();
    while let Some(output) = timeout(SOON, running.next()).await.unwrap() {
        outputs.push(output.unwrap());
    }
    assert_eq!(outputs.iter().map(tokens).collect::<Vec<_>>(), [vec![5], vec![6], vec![]]);
    let cached: Vec<_> =
        outputs.iter().map(|output| output.prefill.map(|prefill| prefill.cached_tokens)).collect();
    assert_eq!(
        (cached, outputs[2].finish.clone()),
        (vec![Some(2), None, None], Some(Finish::Length))
    );
    drop(running);
    assert!(connection.received().await.is_empty(), "the worker is not told to stop");
}

#[tokio::test]
async fn equal_job_ids_get_distinct_request_ids() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let mut ids = Vec::new();
    for _ in 0..2 {
        let running = backend.start(Arc::new(job(Sampling { n: 2, ..sampling() }))).await.unwrap();
        for _ in 0..2 {
            let id = worker.next_request().await.control["id"].as_str().unwrap().to_owned();
            assert!(id.starts_with("r-1-") && !ids.contains(&id), "{id} of {ids:?}");
            ids.push(id);
        }
        drop(running);
    }
}

#[tokio::test]
async fn withheld_end_token_moves_finish_to_an_empty_output() {
    for (ids, stop, expected, finish) in [
        (json!([5, 2]), json!(null), vec![vec![5, 2]], Finish::Eos),
        (json!([5]), json!(null), vec![vec![5], vec![]], Finish::Eos),
        (json!([5, 7]), json!(7), vec![vec![5, 7]], Finish::StopToken(TokenId(7))),
        (json!([5]), json!(7), vec![vec![5], vec![]], Finish::StopToken(TokenId(7))),
        (json!([]), json!(2), vec![vec![]], Finish::Eos),
    ] {
        let (outputs, error) = run(sampling(), async |connection| {
            let last = json!({"token_ids": ids, "finish_reason": "stop", "stop_reason": stop});
            connection.output(last).await;
            connection.end().await;
        })
        .await;
        assert!(error.is_none(), "{error:?}");
        assert_eq!(
            (
                outputs.iter().map(tokens).collect::<Vec<_>>(),
                outputs.last().unwrap().finish.clone()
            ),
            (expected, Some(finish))
        );
    }
}

#[tokio::test]
async fn choices_are_requests_with_their_own_seeds() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let mut running = backend.start(Arc::new(job(Sampling { n: 2, ..sampling() }))).await.unwrap();
    let mut answers = Vec::new();
    for _ in 0..2 {
        let request = worker.next_request().await;
        let seed = request.body["sampling_options"]["seed"].as_i64().unwrap();
        answers.push((seed, request.open_answer().await));
    }
    answers.sort_by_key(|(seed, _)| *seed);
    assert_eq!(answers.iter().map(|(seed, _)| *seed).collect::<Vec<_>>(), [7, 8]);
    let (_, mut second) = answers.pop().unwrap();
    second.output(json!({"token_ids": [9], "finish_reason": "length"})).await;
    second.end().await;
    let output = timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((output.choice, tokens(&output)), (1, vec![9]));
    running.stop(0);
    assert!(timeout(SOON, running.next()).await.unwrap().is_none());
    let (_, first) = answers.pop().unwrap();
    assert_eq!(timeout(SOON, first.received()).await.unwrap(), TwoPart::encode(KILL, b""));
}

#[tokio::test]
async fn dropped_job_stops_the_worker() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    let connection = worker.next_request().await.open_answer().await;
    // The answer was not read yet.
    drop(running);
    assert_eq!(timeout(SOON, connection.received()).await.unwrap(), TwoPart::encode(KILL, b""));
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    let mut connection = worker.next_request().await.open_answer().await;
    connection.output(json!({"token_ids": [5]})).await;
    timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
    drop(running);
    assert_eq!(timeout(SOON, connection.received()).await.unwrap(), TwoPart::encode(KILL, b""));
    // The worker opens its connection after the job was dropped.
    drop(backend.start(Arc::new(job(sampling()))).await.unwrap());
    let request = worker.next_request().await;
    let connection = request.open_answer().await;
    assert_eq!(timeout(SOON, connection.received()).await.unwrap(), TwoPart::encode(KILL, b""));
}

#[tokio::test]
async fn malformed_answer_fails_only_its_job() {
    let long = [&(1_u64 << 40).to_be_bytes()[..], &[0; 16]].concat();
    for (what, raw) in [
        ("more bytes than the limit", long),
        ("no msgpack", TwoPart::encode(b"", b"\xc1\xc1").to_vec()),
        ("a sentinel before the end", TwoPart::encode(br#""sentinel""#, b"").to_vec()),
        ("nothing", Vec::new()),
    ] {
        let (outputs, error) = run(sampling(), async |connection| {
            connection.output(json!({"token_ids": [5]})).await;
            connection.raw(&raw).await;
            let _ = tokio::io::AsyncWriteExt::shutdown(&mut connection.stream).await;
        })
        .await;
        assert_eq!(outputs.len(), 1, "{what}");
        assert!(matches!(error, Some(JobError::Dead(_))), "{what}: {error:?}");
    }
    let (_, error) = run(sampling(), async |connection| {
        connection.output(json!({"token_ids": [1, 2, 3, 4, 5]})).await;
    })
    .await;
    assert!(
        matches!(&error, Some(JobError::Dead(death)) if death.to_string().contains("more tokens")),
        "{error:?}"
    );
    let (_, error) = run(sampling(), async |connection| connection.end().await).await;
    assert!(matches!(error, Some(JobError::Unfinished)), "{error:?}");
    let (_, error) = run(sampling(), async |connection| {
        connection.output(json!({"token_ids": [5], "finish_reason": "length"})).await;
        connection.output(json!({"token_ids": [6]})).await;
    })
    .await;
    assert!(
        matches!(&error, Some(JobError::Dead(death)) if death.to_string().contains("has ended")),
        "{error:?}"
    );
}

#[tokio::test]
async fn error_of_the_engine_fails_only_its_job() {
    let (_, error) = run(sampling(), async |connection| {
        let data = json!({"event": "error", "comment": ["out of memory"]});
        connection.item(json!({"data": data, "complete_final": false})).await;
    })
    .await;
    assert!(matches!(error, Some(JobError::Failed)), "{error:?}");
    let (_, error) = run(sampling(), async |connection| {
        connection.output(json!({"token_ids": [], "finish_reason": "error: no outputs"})).await;
    })
    .await;
    assert!(matches!(error, Some(JobError::Failed)), "{error:?}");
    let (_, error) = run(Sampling { logprobs: Some(1), ..sampling() }, async |connection| {
        connection.output(json!({"token_ids": [5]})).await;
    })
    .await;
    assert!(
        matches!(&error, Some(JobError::Refused { field, .. }) if field == "logprobs"),
        "{error:?}"
    );
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    let request = worker.next_request().await;
    let _connection = request.open_answer_with(json!({"error": "no such thing"})).await;
    let failed = timeout(SOON, running.next()).await.unwrap().unwrap();
    assert!(matches!(failed, Err(JobError::Failed)), "{failed:?}");
}

#[tokio::test]
async fn unsupported_parameter_is_refused_with_its_field() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let refused = async |job: Job| match backend.start(Arc::new(job)).await {
        Err(JobError::Refused { field, .. }) => field,
        other => panic!("{:?}", other.err()),
    };
    let bias = Sampling { logit_bias: vec![(TokenId(5), 1.0)], ..sampling() };
    assert_eq!(refused(job(bias)).await, "logit_bias");
    assert_eq!(
        refused(job(Sampling { bad_words: vec![vec![TokenId(5)]], ..sampling() })).await,
        "bad_words"
    );
    assert_eq!(
        refused(job(Sampling { prompt_logprobs: Some(1), ..sampling() })).await,
        "prompt_logprobs"
    );
    assert_eq!(
        refused(job(Sampling { allowed_token_ids: vec![TokenId(5)], ..sampling() })).await,
        "allowed_token_ids"
    );
    assert_eq!(
        refused(Job { cache_salt: Some("s".to_owned()), ..job(sampling()) }).await,
        "cache_salt"
    );
    assert_eq!(refused(Job { priority: i64::MIN, ..job(sampling()) }).await, "priority");
    assert_eq!(
        refused(Job { input: Input::Messages("{}".into()), ..job(sampling()) }).await,
        "input"
    );
    assert!(worker.requests.try_recv().is_err(), "no request was sent");
}

/// A picture from a client.
struct Picture;

impl MediaSource for Picture {
    fn tensors(
        &self,
        _: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>> {
        async { Ok(None) }.boxed()
    }

    fn encoded(&self) -> Option<EncodedItem> {
        let bytes = Bytes::from_static(b"picture");
        Some(EncodedItem {
            bytes,
            content: [0; 32],
            media_type: "image/jpeg",
            processor_kwargs: "{}".into(),
            url: None,
        })
    }
}

/// Returns a job with a picture, whose marker 9 is expected to expand to three tokens.
fn with_picture() -> Job {
    let item = JobItem {
        modality: Modality::Image,
        hash: MmHash::new([0xab; 32]),
        placeholder: Placeholder { offset: 1, length: 3, is_embed: None },
        elements: 1,
        source: Arc::new(Picture),
    };
    let tokens = [1, 9, 2].map(TokenId).into();
    let expanded = [1, 9, 9, 9, 2].map(TokenId).into();
    let input = Input::Marked { tokens: Arc::new(tokens), expanded: Arc::new(expanded) };
    Job { input, media: Arc::new([item]), ..job(sampling()) }
}

#[tokio::test]
async fn image_is_sent_as_its_file() {
    let mut worker = FakeWorker::start("").await;
    let refused = worker.connect().await.start(Arc::new(with_picture())).await;
    assert!(matches!(refused, Err(JobError::Refused { field, .. }) if field == "messages"));
    let backend = worker.connect_with(false, true).await;
    for (prompt_tokens, is_expected) in [(5, true), (3, false)] {
        let mut running = backend.start(Arc::new(with_picture())).await.unwrap();
        let request = worker.next_request().await;
        assert_eq!(request.body["token_ids"], json!([1, 9, 2]));
        assert_eq!(
            request.body["multi_modal_data"],
            json!({"image_url": [{"Url": "data:image/jpeg;base64,cGljdHVyZQ=="}]})
        );
        assert_eq!(request.body["multi_modal_uuids"], json!({"image_url": ["ab".repeat(32)]}));
        let mut connection = request.open_answer().await;
        let usage =
            json!({"prompt_tokens": prompt_tokens, "completion_tokens": 1, "total_tokens": 6});
        let last = json!({"token_ids": [5], "finish_reason": "length", "completion_usage": usage});
        connection.output(last).await;
        connection.end().await;
        timeout(SOON, running.next()).await.unwrap().unwrap().unwrap();
        assert_eq!(running.delivered().inline, 1);
        assert_eq!(backend.distrusted().now_or_never().is_none(), is_expected);
    }
}

#[tokio::test]
async fn killed_worker_ends_its_jobs() {
    let mut worker = FakeWorker::start("").await;
    let backend = worker.connect().await;
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    worker.next_request().await;
    worker.kill().await;
    let death = timeout(SOON, backend.ended()).await.unwrap();
    assert!(death.to_string().contains("connecting failed"), "{death}");
    let ended = timeout(SOON, running.next()).await.unwrap().unwrap();
    assert!(matches!(ended, Err(JobError::Dead(_))), "{ended:?}");
    assert!(matches!(backend.start(Arc::new(job(sampling()))).await, Err(JobError::NotTaken(_))));
}

#[tokio::test]
async fn unknown_endpoint_ends_the_backend() {
    let worker = FakeWorker::start("Server unavailable: unknown endpoint").await;
    let backend = worker.connect().await;
    let started = backend.start(Arc::new(job(sampling()))).await;
    assert!(matches!(started, Err(JobError::NotTaken(_))), "{:?}", started.err());
    timeout(SOON, backend.ended()).await.unwrap();
}

#[tokio::test]
async fn refusing_worker_stays_connected() {
    let worker = FakeWorker::start("Server unavailable: too much to do").await;
    let backend = worker.connect().await;
    let started = backend.start(Arc::new(job(sampling()))).await;
    let Err(JobError::NotTaken(why)) = started else { panic!("{:?}", started.err()) };
    assert!(why.to_string().contains("too much to do"), "{why}");
    assert!(backend.ended().now_or_never().is_none());
}

/// Sends a worker two requests, the second over the connection of the first. Returns the outcome of
/// the second request, and the number of requests that arrived.
async fn send_two(served: &'static [usize]) -> (Result<(), JobError>, usize) {
    let mut worker = FakeWorker::closing(served).await;
    let backend = worker.connect().await;
    let _first = backend.start(Arc::new(job(sampling()))).await.unwrap();
    let second = backend.start(Arc::new(job(sampling()))).await.map(drop);
    let mut count = 0;
    while worker.requests.try_recv().is_ok() {
        count += 1;
    }
    (second, count)
}

#[tokio::test]
async fn request_on_closed_connection_is_sent_again() {
    let (second, count) = send_two(&[1, 1, 0]).await;
    assert!(second.is_ok(), "{second:?}");
    assert_eq!(count, 3);
}

#[tokio::test]
async fn second_end_without_acknowledgement_is_a_loss() {
    let (second, count) = send_two(&[1, 0, 1]).await;
    assert!(matches!(second, Err(JobError::Dead(_))), "{second:?}");
    assert_eq!(count, 3);
}

#[tokio::test]
async fn request_that_kills_worker_is_a_loss() {
    let (second, count) = send_two(&[1]).await;
    assert!(matches!(second, Err(JobError::Dead(_))), "{second:?}");
    assert_eq!(count, 2);
}
