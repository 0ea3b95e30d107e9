//! A stand-in for SGLang, whose answers each test chooses. Its description is that of a real SGLang
//! 0.5.23.

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

/// The stand-in's answer to requests for tokens, and the requests that it received.
pub(crate) struct ServerState {
    answer: Answer,
    pub(crate) requests: Mutex<Vec<(HeaderMap, Value)>>,
}

/// A stand-in at an address.
pub(crate) struct Server {
    pub(crate) state: Arc<ServerState>,
    url: String,
}

/// The description of a server, which includes its operator's keys.
pub(crate) fn server_info() -> Value {
    json!({
        "version": "0.5.23", "page_size": 16, "max_total_num_tokens": 1600,
        "disable_radix_cache": false, "speculative_algorithm": null,
        "uses_mamba_radix_cache": false, "enable_priority_scheduling": false,
        "schedule_low_priority_values_first": false, "disaggregation_mode": "null",
        "api_key": "secret",
        "kv_events_config": "{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\"}",
        "kv_events": {
            "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "topic": "kv",
            "block_size": 16, "dp_size": 1, "replay_endpoint_port_base": 5558,
        },
        "internal_states": [{"effective_max_running_requests_per_dp": 64}],
    })
}

/// Returns `value` with some of its fields changed.
pub(crate) fn with(mut value: Value, changes: Value) -> Value {
    value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
    value
}

impl Server {
    /// Starts a stand-in that gives this answer to each request.
    pub(crate) async fn with(answer: impl Fn() -> Response + Send + Sync + 'static) -> Self {
        Self::start(
            server_info(),
            json!({"has_image_understanding": true}),
            Box::new(move |_| answer()),
        )
        .await
    }

    /// Starts a stand-in with this description and empty answers.
    pub(crate) async fn with_info(info: Value) -> Self {
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
        let state = Arc::new(ServerState { answer, requests: Mutex::default() });
        let models = json!({"data": [
            {"id": "m", "owned_by": "sglang", "parent": null, "max_model_len": 4096},
        ]});
        let metrics = "sglang:num_running_reqs{tp_rank=\"0\"} 3.0\n\
                       sglang:num_queue_reqs{tp_rank=\"0\"} 1.0\n\
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
        let app = app.with_state(state.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { state, url }
    }

    pub(crate) async fn connect(&self) -> Result<Arc<dyn Backend>, String> {
        self.connect_at(&self.url).await
    }

    /// Connects without stating the kind of the server.
    pub(crate) async fn connect_detected(&self) -> Result<Arc<dyn Backend>, String> {
        self.connect_at(self.url.trim_start_matches("sglang+")).await
    }

    async fn connect_at(&self, url: &str) -> Result<Arc<dyn Backend>, String> {
        let connector = UpstreamConnector::new(url.parse().unwrap(), Arc::from(&b"processor"[..]))
            .map_err(|error| error.to_string())?;
        let connected = connector.connect(WorkerId(0), Arc::new(Unobserved)).await;
        connected.map(|Connected { backend, .. }| backend).map_err(|error| error.to_string())
    }

    /// Runs a job and returns its outputs and its error.
    pub(crate) async fn run(&self, job: Job) -> (Vec<Output>, Option<JobError>) {
        run(&*self.connect().await.unwrap(), job).await
    }

    /// Takes the bodies of the requests received so far.
    pub(crate) fn requests(&self) -> Vec<Value> {
        std::mem::take(&mut *self.state.requests.lock().unwrap())
            .into_iter()
            .map(|(_, body)| body)
            .collect()
    }
}

async fn generate(
    State(state): State<Arc<ServerState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let body: Value = serde_json::from_slice(&body).unwrap();
    if body.get("input_ids").is_none() {
        let message = "Either text, input_ids or input_embeds should be provided.";
        return (StatusCode::BAD_REQUEST, axum::Json(json!({"error": {"message": message}})))
            .into_response();
    }
    state.requests.lock().unwrap().push((headers, body.clone()));
    (state.answer)(&body)
}

/// Returns an answer with these events.
pub(crate) fn events(events: &[Value]) -> Response {
    let text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    format!("{text}data: [DONE]\n\n").into_response()
}

/// Returns an event with these tokens, the number of all tokens so far, and the finish reason. Its
/// prompt has three tokens.
pub(crate) fn event(tokens: &[u32], all: usize, finish: Value) -> Value {
    json!({"text": "…", "output_ids": tokens, "meta_info": {
        "id": "…", "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": all,
        "cached_tokens": 2, "queue_time": 0.25, "weight_version": "default",
    }})
}

pub(crate) fn length() -> Value {
    json!({"type": "length", "length": 4})
}

/// Returns the only event of an answer to a prompt with a picture, with the expanded prompt.
pub(crate) fn picture_event(prompt_tokens: usize, prompt: Value) -> Value {
    let mut event = event(&[5], 1, length());
    event["meta_info"]["prompt_tokens"] = json!(prompt_tokens);
    event["prompt_token_ids"] = prompt;
    event
}

pub(crate) fn tokens(output: &Output) -> Vec<u32> {
    let Content::Tokens { tokens, .. } = &output.content else { panic!("tokens") };
    tokens.iter().map(|token| token.0).collect()
}
