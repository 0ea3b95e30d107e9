//! A stand-in for SGLang, which does what a test has it do. What it says is what SGLang 0.5.23 was
//! seen to say.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use chiasm_backend::{Backend, Connected, Connector, Content, Job, JobError, Output};
use chiasm_types::WorkerId;
use chiasm_upstream::UpstreamConnector;
use serde_json::{Value, json};

use crate::support::{Unobserved, run};

pub(crate) type Answer = Box<dyn Fn(&Value) -> Response + Send + Sync>;

/// What the stand-in does with a request for tokens, and what it was asked.
pub(crate) struct Stand {
    answer: Answer,
    pub(crate) asked: Mutex<Vec<(HeaderMap, Value)>>,
}

/// A stand-in, and its address.
pub(crate) struct Server {
    pub(crate) stand: Arc<Stand>,
    url: String,
}

/// What a server says of itself; the keys of its operator are among it.
pub(crate) fn server_info() -> Value {
    json!({
        "version": "0.5.23", "page_size": 16, "max_total_num_tokens": 1600, "disable_radix_cache": false,
        "speculative_algorithm": null, "uses_mamba_radix_cache": false, "enable_priority_scheduling": false,
        "schedule_low_priority_values_first": false, "disaggregation_mode": "null", "api_key": "secret",
        "kv_events_config": "{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\"}",
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv",
                      "block_size": 16, "dp_size": 1, "replay_endpoint_port_base": 5558},
        "internal_states": [{"effective_max_running_requests_per_dp": 64}],
    })
}

/// The value with fields of other values.
pub(crate) fn with(mut value: Value, changes: Value) -> Value {
    value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    value
}

impl Server {
    /// One that gives this answer to each request.
    pub(crate) async fn with(answer: impl Fn() -> Response + Send + Sync + 'static) -> Self {
        Self::start(
            server_info(),
            json!({"has_image_understanding": true}),
            Box::new(move |_| answer()),
        )
        .await
    }

    /// One that says this of itself, and nothing interesting else.
    pub(crate) async fn that_is(info: Value) -> Self {
        Self::start(info, json!({}), Box::new(|_| events(&[]))).await
    }

    pub(crate) async fn start(info: Value, model: Value, answer: Answer) -> Self {
        Self::start_with(info, model, answer, true).await
    }

    pub(crate) async fn start_with(
        info: Value,
        model: Value,
        answer: Answer,
        has_metrics: bool,
    ) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let stand = Arc::new(Stand { answer, asked: Mutex::default() });
        let models = json!({"data": [{"id": "m", "parent": null, "max_model_len": 4096}]});
        let metrics = "sglang:num_running_reqs{tp_rank=\"0\"} 3.0\nsglang:num_queue_reqs{tp_rank=\"0\"} 1.0\n\
                       sglang:token_usage{tp_rank=\"0\"} 0.5\n";
        let mut app = Router::new()
            .route("/below/server_info", get(async move || axum::Json(info)))
            .route("/below/model_info", get(async move || axum::Json(model)))
            .route("/below/v1/models", get(async move || axum::Json(models)))
            .route("/below/generate", post(generate));
        if has_metrics {
            app = app.route("/below/metrics", get(async move || metrics));
        }
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("sglang+http://{}/below", listener.local_addr().unwrap());
        let app = app.with_state(stand.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { stand, url }
    }

    pub(crate) async fn connect(&self) -> Result<Arc<dyn Backend>, String> {
        let connector =
            UpstreamConnector::new(self.url.parse().unwrap(), Arc::from(&b"processor"[..]))
                .map_err(|error| error.to_string())?;
        let connected = connector.connect(WorkerId(0), Arc::new(Unobserved)).await;
        connected.map(|Connected { backend, .. }| backend).map_err(|error| error.to_string())
    }

    /// Everything that comes of a job.
    pub(crate) async fn run(&self, job: Job) -> (Vec<Output>, Option<JobError>) {
        run(&*self.connect().await.unwrap(), job).await
    }

    pub(crate) fn asked(&self) -> Vec<Value> {
        std::mem::take(&mut *self.stand.asked.lock().unwrap())
            .into_iter()
            .map(|(_, body)| body)
            .collect()
    }
}

async fn generate(State(stand): State<Arc<Stand>>, headers: HeaderMap, body: Bytes) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap();
    if body.get("input_ids").is_none() {
        let message = "Either text, input_ids or input_embeds should be provided.";
        return (StatusCode::BAD_REQUEST, axum::Json(json!({"error": {"message": message}})))
            .into_response();
    }
    stand.asked.lock().unwrap().push((headers, body.clone()));
    (stand.answer)(&body)
}

/// An answer of these events.
pub(crate) fn events(events: &[Value]) -> Response {
    let text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    format!("{text}data: [DONE]\n\n").into_response()
}

/// An event: the tokens that it tells, how many there are by now, and how the answer ended. Its
/// prompt has three tokens.
pub(crate) fn event(tokens: &[u32], all: usize, finish: Value) -> Value {
    json!({"text": "…", "output_ids": tokens, "meta_info": {
        "id": "…", "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": all, "cached_tokens": 2,
        "queue_time": 0.25, "weight_version": "default"}})
}

pub(crate) fn length() -> Value {
    json!({"type": "length", "length": 4})
}

/// The same of a prompt with a picture, as it was expected to become.
pub(crate) fn of_picture(prompt_tokens: usize, prompt: Value) -> Value {
    let mut told = event(&[5], 1, length());
    told["meta_info"]["prompt_tokens"] = json!(prompt_tokens);
    told["prompt_token_ids"] = prompt;
    told
}

pub(crate) fn tokens(output: &Output) -> Vec<u32> {
    let Content::Tokens { tokens, .. } = &output.content else { panic!("tokens") };
    tokens.iter().map(|token| token.0).collect()
}
