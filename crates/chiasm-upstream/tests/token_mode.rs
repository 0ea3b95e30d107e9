//! Token mode against a stand-in for `vllm serve`, whose answers each test chooses.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use chiasm_backend::{
    Backend, Connected, Connector, Constraint, Content, Finish, InputForm, Job, JobError, KvSource,
    LargestItem, MediaForm, Output, PlaceholderForm, Sampling, Structured,
};
use chiasm_types::{MmHash, TokenId, WorkerId};
use chiasm_upstream::{Upstream, UpstreamConnector};
use futures_util::FutureExt;
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};
use support::{DropSignal, SOON, Unobserved, job, run, sampling, with_picture};
use tokio::time::timeout;

const KEY: &str = "secret";

type Answer = Box<dyn Fn() -> Response + Send + Sync>;

/// The stand-in's answer to requests for tokens, and the requests that it received.
struct ServerState {
    answer: Answer,
    requests: Mutex<Vec<(HeaderMap, Value)>>,
    requires_key: bool,
    /// `true` if the server no longer answers requests for its metrics.
    is_slow: AtomicBool,
}

/// Answers as vLLM 0.33 without `--enable-scale-out`.
async fn refuse_tokens() -> Response {
    let message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out \
                   to enable them.";
    let error = json!({"error": {"message": message, "type": "Forbidden", "code": 403}});
    (StatusCode::FORBIDDEN, axum::Json(error)).into_response()
}

/// A stand-in at an address.
struct Server {
    state: Arc<ServerState>,
    url: String,
    serving: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn with(answer: impl Fn() -> Response + Send + Sync + 'static) -> Self {
        Self::start(true, false, Box::new(answer)).await
    }

    async fn start(takes_tokens: bool, requires_key: bool, answer: Answer) -> Self {
        Self::start_with(1, takes_tokens, requires_key, answer).await
    }

    /// Starts a stand-in with `engines` engines, whose numbers begin at 4 if there are several.
    async fn start_with(
        engines: u16,
        takes_tokens: bool,
        requires_key: bool,
        answer: Answer,
    ) -> Self {
        let first = if engines > 1 { 4 } else { 0 };
        let numbers = first..first + engines;
        let _ = rustls::crypto::ring::default_provider().install_default();
        let state = Arc::new(ServerState {
            answer,
            requests: Mutex::default(),
            requires_key,
            is_slow: AtomicBool::new(false),
        });
        let metrics = numbers.clone().map(|number| {
            let running = number - first + 3;
            let config = "block_size=\"16\",num_gpu_blocks=\"100\"";
            format!(
                "vllm:num_requests_running{{engine=\"{number}\"}} {running}.0\n\
                 vllm:kv_cache_usage_perc{{engine=\"{number}\"}} 0.5\n\
                 vllm:cache_config_info{{engine=\"{number}\",{config}}} 1.0\n"
            )
        });
        let metrics: String = metrics.collect();
        let models = json!({"data": [
            {"id": "lora", "owned_by": "vllm", "parent": "m", "max_model_len": null},
            {"id": "m", "owned_by": "vllm", "parent": null, "max_model_len": 4096},
        ]});
        let sources = numbers.map(|number| {
            let [endpoint, replay] =
                [5557, 5558].map(|port| format!("tcp://*:{}", port + 10 * number));
            let source = json!({
                "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint,
                "replay_endpoint": replay, "topic": "",
            });
            (number.to_string(), source)
        });
        let sources = Value::Object(sources.collect());
        let mut app = Router::new()
            .route("/below/version", get(async || axum::Json(json!({"version": "0.33.0"}))))
            .route(
                "/behind/proxy/v1/models",
                get({
                    let models = models.clone();
                    async move || axum::Json(models)
                }),
            )
            .route("/below/v1/models", get(async move || axum::Json(models)))
            .route("/below/metrics", get(async move |state| serve_metrics(state, metrics).await))
            .route("/below/kv_event_sources", get(async move || axum::Json(sources)));
        // Earlier versions of vLLM lack the path without --enable-scale-out.
        let answer_tokens = if takes_tokens { post(generate) } else { post(refuse_tokens) };
        app = app.route("/below/inference/v1/generate", answer_tokens);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("vllm+http://{}/below", listener.local_addr().unwrap());
        let app = app.with_state(state.clone());
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { state, url, serving }
    }

    async fn connect(&self, options: &str) -> Result<Arc<dyn Backend>, String> {
        let upstream = format!("{}{options}", self.url).parse().unwrap();
        self.connect_to(upstream, LargestItem::unknown()).await
    }

    /// Connects with a model whose largest item is `largest_item`.
    async fn connect_to(
        &self,
        upstream: Upstream,
        largest_item: LargestItem,
    ) -> Result<Arc<dyn Backend>, String> {
        let connector = UpstreamConnector::new(upstream, Arc::from(&b"processor"[..]));
        let connector = connector.map_err(|error| error.to_string())?;
        let connector = connector.with_largest_item(largest_item);
        let connected = connector.connect(WorkerId(0), Arc::new(Unobserved)).await;
        connected.map(|Connected { backend, .. }| backend).map_err(|error| error.to_string())
    }

    /// Runs a job and returns its outputs and its error.
    async fn run(&self, job: Job) -> (Vec<Output>, Option<JobError>) {
        run(&*self.connect("").await.unwrap(), job).await
    }

    /// Takes the requests received so far.
    fn requests(&self) -> Vec<(HeaderMap, Value)> {
        std::mem::take(&mut *self.state.requests.lock().unwrap())
    }
}

async fn serve_metrics(State(state): State<Arc<ServerState>>, metrics: String) -> String {
    if state.is_slow.load(Relaxed) { std::future::pending().await } else { metrics }
}

async fn generate(
    State(state): State<Arc<ServerState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if state.requires_key
        && headers.get("authorization").is_none_or(|key| key != &format!("Bearer {KEY}"))
    {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let body: Value = serde_json::from_slice(&body).unwrap();
    if body.get("token_ids").is_none() {
        return (StatusCode::BAD_REQUEST, "token_ids: Field required").into_response();
    }
    state.requests.lock().unwrap().push((headers, body));
    (state.answer)()
}

/// Returns an answer with these events.
fn events(events: &[Value]) -> Response {
    let text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    format!("{text}data: [DONE]\n\n").into_response()
}

fn tokens(index: usize, tokens: &[u32], finish: Option<&str>) -> Value {
    let choice = json!({
        "index": index, "token_ids": tokens, "finish_reason": finish, "logprobs": null,
        "stop_reason": null,
    });
    json!({"choices": [choice]})
}

fn usage(cached: usize) -> Value {
    json!({"choices": [], "usage": {
        "prompt_tokens": 4, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": cached},
    }})
}

#[tokio::test]
async fn kind_of_vllm_is_detected() {
    let describe = async |server: &Server, path: &str| {
        let url = server.url.strip_prefix("vllm+").unwrap().replace("/below", path);
        let backend = server.connect_to(url.parse().unwrap(), LargestItem::unknown()).await;
        let capabilities = backend.unwrap().capabilities().clone();
        (capabilities.engine, capabilities.input)
    };
    let server = Server::with(|| StatusCode::OK.into_response()).await;
    let tokens = ("vllm serve 0.33.0, token mode".to_owned(), InputForm::Tokens);
    assert_eq!(describe(&server, "/below").await, tokens);
    // A server without vLLM's own paths is used as a plain OpenAI server.
    let any = ("a server of OpenAI's API".to_owned(), InputForm::Messages);
    assert_eq!(describe(&server, "/behind/proxy").await, any);
    let answer: Answer = Box::new(|| StatusCode::OK.into_response());
    let without_tokens = Server::start(false, false, answer).await;
    let (engine, input) = describe(&without_tokens, "/below").await;
    assert_eq!((engine.as_str(), input), ("vllm serve 0.33.0, chat mode", InputForm::Messages));
}

#[tokio::test]
async fn capabilities_come_from_the_server() {
    let server = Server::with(|| events(&[])).await;
    let backend = server.connect("").await.unwrap();
    let capabilities = backend.capabilities();
    assert_eq!(
        (
            capabilities.max_model_len,
            capabilities.total_blocks,
            capabilities.class.block_size.get()
        ),
        (4096, 100, 16)
    );
    assert_eq!(capabilities.encoder_cache_tokens, 4096, "room for an item as long as the context");
    for (largest_item, cache_tokens) in
        [(LargestItem::known(|context| 4 * context), 16_384), (LargestItem::known(|_| 576), 8192)]
    {
        let backend = server.connect_to(server.url.parse().unwrap(), largest_item).await.unwrap();
        assert_eq!(backend.capabilities().encoder_cache_tokens, cache_tokens);
    }
    assert_eq!(
        (capabilities.class.placeholders, capabilities.media),
        (PlaceholderForm::Marker, MediaForm::Encoded)
    );
    assert_eq!(capabilities.engine, "vllm serve 0.33.0, token mode");
    let KvSource::Events(stream) = &capabilities.kv else { panic!("{:?}", capabilities.kv) };
    assert_eq!(stream.replay_endpoint.as_deref(), Some("tcp://127.0.0.1:5558"));
    let (sender, load) = std::sync::mpsc::channel();
    backend.follow_load(Box::new(move |load| {
        let _ = sender.send(load);
    }));
    let load = tokio::task::spawn_blocking(move || load.recv_timeout(SOON)).await.unwrap().unwrap();
    assert_eq!((load.running, load.waiting, load.kv_usage), (3, 0, 0.5));
}

#[tokio::test]
async fn each_engine_of_a_server_is_a_worker() {
    let answer: Answer = Box::new(|| events(&[tokens(0, &[5], Some("length")), usage(0)]));
    let server = Server::start_with(2, true, false, answer).await;
    let ranks = format!("{},ranks=2", server.url).parse::<Upstream>().unwrap().per_engine();
    assert_eq!(ranks.len(), 2);
    for (rank, upstream) in ranks.into_iter().enumerate() {
        let backend = server.connect_to(upstream, LargestItem::unknown()).await.unwrap();
        let capabilities = backend.capabilities();
        assert_eq!(capabilities.engine, format!("vllm serve 0.33.0, rank {rank} of 2"));
        assert_eq!(capabilities.total_blocks, 50);
        let KvSource::Events(stream) = &capabilities.kv else { panic!("{:?}", capabilities.kv) };
        let replay = format!("tcp://127.0.0.1:{}", 5598 + 10 * rank);
        assert_eq!(stream.replay_endpoint, Some(replay));
        let (_, error) = run(&*backend, job(sampling())).await;
        assert!(error.is_none(), "{error:?}");
        let (headers, _) = server.requests().remove(0);
        // The position among the engines of this server, not the number.
        assert_eq!(headers["x-data-parallel-rank"], rank.to_string());
        let (sender, load) = std::sync::mpsc::channel();
        backend.follow_load(Box::new(move |load| {
            let _ = sender.send(load);
        }));
        let load = tokio::task::spawn_blocking(move || load.recv_timeout(SOON)).await.unwrap();
        assert_eq!(load.unwrap().running, 3 + rank as u64);
    }
    let error = server.connect(",ranks=3").await.unwrap_err();
    assert!(error.contains("has ranks=3, but it has 2 engines"), "{error}");
    // Without their number, the server chooses.
    let backend = server.connect("").await.unwrap();
    let KvSource::Unknown { why } = &backend.capabilities().kv else { panic!("events") };
    assert!(why.contains("mode, ranks=2 after"), "{why}");
    run(&*backend, job(sampling())).await;
    let (headers, _) = server.requests().remove(0);
    assert!(!headers.contains_key("x-data-parallel-rank"));
}

#[tokio::test]
async fn unusable_server_is_refused_with_a_reason() {
    let server = Server::start(false, false, Box::new(|| events(&[]))).await;
    let error = server.connect("").await.unwrap_err();
    assert!(error.contains("--enable-scale-out"), "{error}");
    let server = Server::start(true, true, Box::new(|| events(&[]))).await;
    let error = server.connect("").await.unwrap_err();
    assert!(error.contains("api-key-file"), "{error}");
    let file = std::env::temp_dir().join(format!("chiasm-upstream-{}", std::process::id()));
    std::fs::write(&file, format!("{KEY}\n")).unwrap();
    let connected = server.connect(&format!(",api-key-file={}", file.display())).await;
    std::fs::remove_file(&file).unwrap();
    assert!(connected.is_ok(), "{connected:?}");
    let missing = server.connect(",ca-file=/nowhere").await.unwrap_err();
    assert!(missing.contains("/nowhere"), "{missing}");
    server.serving.abort();
    let mut tries = 0;
    let error = loop {
        match server.connect("").await {
            Err(error) if error.contains("connecting failed") => break error,
            other => assert!(tries < 100, "{other:?}"),
        }
        tries += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(error.contains(&server.url), "{error}");
}

#[tokio::test]
async fn job_becomes_a_request() {
    let server = Server::with(|| events(&[tokens(0, &[5], Some("length")), usage(0)])).await;
    let structured =
        Some(Structured { constraint: Constraint::JsonObject, field: "response_format" });
    let (_, error) =
        server.run(with_picture("{}", Sampling { structured, seed: Some(3), ..sampling() })).await;
    assert!(error.is_none(), "{error:?}");
    let (headers, body) = server.requests().remove(0);
    assert_eq!(
        (headers["x-request-id"].to_str().unwrap(), headers["traceparent"].len()),
        ("r-1", 55)
    );
    assert_eq!(body["token_ids"], json!([1, 9, 2]), "one marker for the picture");
    let uuid = MmHash::new([0xab; 32]).to_string();
    let url = "data:image/jpeg;base64,/9ggcGljdHVyZQ==";
    let part = json!({"type": "image_url", "url": url, "uuid": uuid});
    assert_eq!(body["content_parts"], json!([part]));
    let flags = [&body["stream"], &body["return_token_ids"], &body["cache_salt"]];
    assert_eq!(flags, [&json!(true), &json!(true), &json!("salt")]);
    let params = &body["sampling_params"];
    assert_eq!(
        [&params["n"], &params["max_tokens"], &params["seed"]],
        [&json!(1), &json!(4), &json!(3)]
    );
    let biased = [&params["stop_token_ids"], &params["logit_bias"]];
    assert_eq!(biased, [&json!([7]), &json!({"5": -1.5})]);
    assert_eq!(
        [&params["structured_outputs"], &params["detokenize"]],
        [&json!({"json_object": true}), &json!(false)]
    );
}

#[tokio::test]
async fn last_output_has_the_prefill_of_the_usage() {
    let server = Server::with(|| {
        events(&[
            tokens(1, &[5, 6], None),
            tokens(0, &[5], Some("stop")),
            tokens(1, &[7], Some("length")),
            usage(3),
        ])
    })
    .await;
    let (outputs, error) = server.run(job(Sampling { n: 2, ..sampling() })).await;
    assert!(error.is_none(), "{error:?}");
    let summary = |output: &Output| {
        let Content::Tokens { tokens, .. } = &output.content else { panic!("tokens") };
        (
            output.choice,
            tokens.len(),
            output.finish.clone(),
            output.prefill.map(|prefill| prefill.cached_tokens),
        )
    };
    let summaries: Vec<_> = outputs.iter().map(summary).collect();
    assert_eq!(
        summaries,
        [
            (1, 2, None, None),
            (0, 1, Some(Finish::Eos), None),
            (1, 1, Some(Finish::Length), Some(3))
        ]
    );
}

#[tokio::test]
async fn log_probabilities_have_the_requested_candidates() {
    let content = json!([{"token_id": 5, "logprob": -0.5, "top_logprobs": [
        {"token_id": 5, "logprob": -0.5},
        {"token_id": 6, "logprob": -1.5},
        {"token_id": 7, "logprob": -2.5},
    ]}]);
    let answer = move || {
        let mut one = tokens(0, &[5], Some("length"));
        one["choices"][0]["logprobs"] = json!({"content": content});
        events(&[one])
    };
    let server = Server::with(answer).await;
    let (outputs, _) = server.run(job(Sampling { logprobs: Some(2), ..sampling() })).await;
    let Content::Tokens { logprobs: Some(logprobs), .. } = &outputs[0].content else {
        panic!("{outputs:?}")
    };
    assert_eq!(
        (logprobs[0].token, logprobs[0].top.clone()),
        (TokenId(5), vec![(TokenId(5), -0.5), (TokenId(6), -1.5)])
    );
    let without = Server::with(|| events(&[tokens(0, &[5], Some("length"))])).await;
    let (_, error) = without.run(job(Sampling { logprobs: Some(2), ..sampling() })).await;
    assert!(matches!(error, Some(JobError::Dead(_))), "{error:?}");
}

#[tokio::test]
async fn unexpected_prompt_is_distrusted() {
    for (prompt, is_trusted) in [
        (json!([1, 9, 9, 9, 2]), true),
        (json!([1, 9, 9, 2]), false),
        (json!([1, 9, 9, 8, 2]), false),
    ] {
        let answer = move || {
            let mut first = tokens(0, &[5], Some("length"));
            first["prompt_token_ids"] = prompt.clone();
            events(&[first])
        };
        let server = Server::with(answer).await;
        let backend = server.connect("").await.unwrap();
        let mut running = backend.start(Arc::new(with_picture("{}", sampling()))).await.unwrap();
        while let Some(output) = running.next().await {
            output.unwrap();
        }
        let distrusted = timeout(Duration::from_millis(50), backend.distrusted()).await;
        assert_eq!(distrusted.is_err(), is_trusted, "{distrusted:?}");
    }
}

#[tokio::test]
async fn unsupported_parameter_is_refused_with_its_field() {
    let server = Server::with(|| events(&[])).await;
    let picture_as_tokens = Job { input: job(sampling()).input, ..with_picture("{}", sampling()) };
    for (job, field) in [
        (job(Sampling { bad_words: vec![vec![TokenId(1)]], ..sampling() }), "bad_words"),
        (job(Sampling { prompt_logprobs: Some(1), ..sampling() }), "prompt_logprobs"),
        (with_picture("{\"max_pixels\": 9}", sampling()), "mm_processor_kwargs"),
        (picture_as_tokens, "input"),
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
async fn refusal_status_decides_the_error() {
    for status in [400, 404, 413, 422, 429, 401, 500, 503] {
        let because = json!({"error": {"message": "because"}});
        let code = StatusCode::from_u16(status).unwrap();
        let server =
            Server::with(move || (code, axum::Json(because.clone())).into_response()).await;
        let (_, error) = server.run(job(sampling())).await;
        let error = error.unwrap();
        let is_expected = match status {
            401 => matches!(error, JobError::KeyRefused { status: 401, .. }),
            404 => matches!(error, JobError::UnknownModel { .. }),
            429 => matches!(error, JobError::Overloaded { status: 429, .. }),
            500 | 503 => {
                matches!(&error, JobError::ServerFailed { status: other, .. } if *other == status)
            }
            _ => matches!(&error, JobError::Rejected { status: other, .. } if *other == status),
        };
        assert!(is_expected, "{status}: {error:?}");
        assert!(error.to_string().contains("because"), "{error}");
    }
}

#[tokio::test]
async fn malformed_answer_fails_only_its_job() {
    let raw = |text: &'static str| -> Answer { Box::new(move || text.into_response()) };
    let answer_of = |sent: Vec<Value>| -> Answer { Box::new(move || events(&sent)) };
    for (what, answer) in [
        ("no JSON", raw("data: {\n\ndata: [DONE]\n\n")),
        ("no event", raw("hello")),
        ("nothing", raw("")),
        ("another continuation", answer_of(vec![tokens(1, &[5], None)])),
        ("more than requested", answer_of(vec![tokens(0, &[5; 5], None)])),
        (
            "more after the end",
            answer_of(vec![tokens(0, &[5], Some("length")), tokens(0, &[5], None)]),
        ),
        ("no end", answer_of(vec![tokens(0, &[5], None)])),
        ("an abort", answer_of(vec![tokens(0, &[], Some("abort"))])),
        ("an error", answer_of(vec![json!({"error": {"message": "boom", "code": 500}})])),
        ("negative tokens", raw("data: {\"choices\": [{\"index\": 0, \"token_ids\": [-1]}]}\n\n")),
        (
            "too large an index",
            raw("data: {\"choices\": [{\"index\": 18446744073709551615, \"token_ids\": [1]}]}\n\n"),
        ),
    ] {
        let server = Server::start(true, false, answer).await;
        let (_, error) = server.run(job(sampling())).await;
        let is_known = matches!(
            error,
            Some(
                JobError::Dead(_)
                    | JobError::Failed
                    | JobError::Unfinished
                    | JobError::ServerFailed { .. }
            )
        );
        assert!(is_known, "{what}: {error:?}");
        // Later jobs are not affected.
        assert!(server.connect("").await.is_ok());
    }
}

#[tokio::test]
async fn endless_event_is_refused() {
    let flood = || {
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        Body::from_stream(stream::repeat_with(move || Ok::<_, Infallible>(piece.clone())))
            .into_response()
    };
    let server = Server::with(flood).await;
    let (_, error) = server.run(job(sampling())).await;
    assert!(
        matches!(&error, Some(JobError::Dead(death)) if death.to_string().contains("too long")),
        "{error:?}"
    );
}

#[tokio::test]
async fn stopped_job_closes_its_connection() {
    let (dropped, ended) = std::sync::mpsc::channel();
    let server = Server::with(move || {
        let signal = DropSignal(dropped.clone());
        let event = format!("data: {}\n\n", tokens(0, &[], None));
        // The server notices when it writes.
        let events = stream::unfold((signal, event), |(signal, event)| async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Some((Ok::<_, Infallible>(event.clone()), (signal, event)))
        });
        Body::from_stream(events).into_response()
    })
    .await;
    let backend = server.connect("").await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    assert!(running.next().await.unwrap().is_ok());
    running.stop(0);
    tokio::task::spawn_blocking(move || ended.recv_timeout(SOON).unwrap()).await.unwrap();
    assert!(running.next().await.is_none());
}

#[tokio::test]
async fn stopped_job_ends_without_its_usage() {
    let server = Server::with(|| {
        let last = tokens(0, &[6], Some("length"));
        let both = Bytes::from(format!("data: {}\n\ndata: {last}\n\n", tokens(0, &[5], None)));
        let events = stream::iter([Ok::<_, Infallible>(both)]).chain(stream::pending());
        Body::from_stream(events).into_response()
    })
    .await;
    let backend = server.connect("").await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    assert!(running.next().await.unwrap().is_ok());
    running.stop(0);
    assert!(timeout(SOON, running.next()).await.unwrap().is_none());
}

#[tokio::test]
async fn dead_server_ends_its_jobs() {
    let stuck =
        || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>()).into_response();
    let server = Server::with(stuck).await;
    let backend = server.connect("").await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    // Stands for a machine that is switched off. Ending the stand-in would not do: the tasks of its
    // connections would keep answering.
    backend.declare_dead(chiasm_backend::DeathReason::new("it was unplugged"));
    assert!(matches!(timeout(SOON, running.next()).await.unwrap(), Some(Err(JobError::Dead(_)))));
    assert!(matches!(backend.start(Arc::new(job(sampling()))).await, Err(JobError::NotTaken(_))));
    assert_eq!(backend.ended().await.to_string(), "it was unplugged");
}

/// A server that does not answer metrics calls is silent. Its streams and its backend stay.
#[tokio::test(start_paused = true)]
async fn slow_server_keeps_its_streams() {
    let server = Server::with(|| {
        let first = Bytes::from(format!("data: {}\n\n", tokens(0, &[5], None)));
        let events = stream::iter([Ok::<_, Infallible>(first)]).chain(stream::pending());
        Body::from_stream(events).into_response()
    })
    .await;
    let backend = server.connect("").await.unwrap();
    let mut running = backend.start(Arc::new(job(sampling()))).await.unwrap();
    assert!(running.next().await.unwrap().is_ok());
    server.state.is_slow.store(true, Relaxed);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(backend.silent_for() >= Duration::from_secs(50), "{:?}", backend.silent_for());
    assert!(running.next().now_or_never().is_none());
    assert!(backend.ended().now_or_never().is_none());
}
