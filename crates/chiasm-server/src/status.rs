//! The status paths: health, readiness, metrics, models and workers.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use chiasm_backend::Capabilities;
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_pipeline::Pipeline;
use serde_json::{Value, json};

use crate::draining::Draining;
use crate::endpoints::find_model;
use crate::error::HttpError;
use crate::log_counts::LogCounts;
use crate::metrics::{Metrics, ScrapeState};
use crate::slots::Slots;
use crate::traces::Traces;
use crate::workers;

/// The shared state of these paths.
pub(crate) struct StatusState {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) traces: Option<Arc<Traces>>,
    pub(crate) draining: Draining,
    /// A function that returns the counts of the process's log.
    pub(crate) log_counts: Option<Box<dyn Fn() -> LogCounts + Send + Sync>>,
}

impl StatusState {
    /// Renders all metrics in Prometheus' text format.
    ///
    /// # Errors
    /// Fails if a metric can't be written.
    pub(crate) fn render(&self) -> Result<String, std::fmt::Error> {
        self.metrics.render(&ScrapeState {
            pipeline: &self.pipeline,
            slots: self.slots.limit(),
            log: self.log_counts.as_ref().map(|counts| counts()).unwrap_or_default(),
            spans: self.traces.as_ref().map(|traces| traces.counts()),
        })
    }
}

/// Returns the routes.
pub(crate) fn router(state: Arc<StatusState>) -> Router {
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(version))
        .route("/ready", get(ready))
        .route("/workers", get(workers))
        .route("/metrics", get(metrics))
        .with_state(state)
}

async fn models(State(state): State<Arc<StatusState>>) -> Json<Value> {
    let adapters = state.pipeline.fleet.adapters().all();
    let adapters = adapters.iter().map(|adapter| adapter_card(&state, adapter));
    let cards: Vec<Value> = std::iter::once(model_card(&state)).chain(adapters).collect();
    Json(json!({"object": "list", "data": cards}))
}

/// Returns the model or adapter of this name. The name may have slashes in it, as `/` or as `%2F`.
async fn model(
    State(state): State<Arc<StatusState>>,
    uri: Uri,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, HttpError> {
    let Path(id) = id.map_err(|_| HttpError::no_such_path(uri.path()))?;
    let adapter = find_model(&state.pipeline, Some(&id))?;
    Ok(Json(adapter.map_or_else(|| model_card(&state), |adapter| adapter_card(&state, &adapter))))
}

fn model_card(state: &StatusState) -> Value {
    json!({
        "id": state.pipeline.model.name,
        "object": "model",
        "created": state.pipeline.fleet.created(),
        "owned_by": "chiasm",
        "root": state.pipeline.model.root,
        "parent": null,
        "max_model_len": known_context(state),
    })
}

/// Returns the maximum number of tokens of prompt and answer together; `None` if it is unknown.
fn known_context(state: &StatusState) -> Option<usize> {
    let context = state.pipeline.fleet.max_model_len();
    context.filter(|tokens| *tokens < Capabilities::UNLIMITED_TOKENS)
}

/// Returns a LoRA adapter with its path and its base model, in vLLM's format.
fn adapter_card(state: &StatusState, adapter: &ServedAdapter) -> Value {
    let mut card = model_card(state);
    card["id"] = adapter.name.as_str().into();
    card["root"] = adapter.root.as_str().into();
    card["parent"] = state.pipeline.model.name.as_str().into();
    card
}

/// Answers if the process is alive.
async fn health() -> &'static str {
    "ok\n"
}

/// Returns the version, in vLLM's format.
async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// Succeeds if at least one worker answers and takes new requests, and the process is not about to
/// end.
async fn ready(State(state): State<Arc<StatusState>>) -> Response {
    if state.draining.has_begun() {
        return HttpError::unavailable("going_down", "the server is shutting down").into_response();
    }
    if !state.pipeline.fleet.can_answer() {
        return HttpError::unavailable("no_engine", "no engine is ready").into_response();
    }
    let Some(workers) = state.pipeline.fleet.accepting_workers() else {
        let why = "no engine accepts new requests: all agents are drained";
        return HttpError::unavailable("engines_drained", why).into_response();
    };
    if state.pipeline.vllm_processors.as_ref().is_some_and(|processors| processors.is_missing()) {
        return HttpError::unavailable("processor_unavailable", "vLLM's processor is not ready")
            .into_response();
    }
    Json(json!({"workers": workers})).into_response()
}

/// Returns the state of every worker that can take requests.
async fn workers(State(state): State<Arc<StatusState>>) -> Json<Value> {
    Json(workers::report(&state.pipeline.fleet))
}

async fn metrics(State(state): State<Arc<StatusState>>, headers: HeaderMap) -> Response {
    let accepts_open_metrics = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|accepted| accepted.to_str().ok())
        .any(|accepted| accepted.contains("application/openmetrics-text"));
    match state.render() {
        Ok(text) if accepts_open_metrics => (
            [(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")],
            text,
        )
            .into_response(),
        Ok(text) => {
            let text = plain_metrics(&text);
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
                .into_response()
        }
        Err(error) => HttpError::internal(error.to_string()).into_response(),
    }
}

/// Converts OpenMetrics to Prometheus' older text format, in which a counter's description has its
/// whole name, and which has neither units nor an end marker.
fn plain_metrics(open: &str) -> String {
    let mut plain = String::with_capacity(open.len());
    // The description whose type has not been read yet.
    let mut help = None;
    for line in open.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, text] => help = Some((name, text)),
            ["#", "TYPE", name, kind] => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                if let Some((_, text)) = help.take().filter(|(described, _)| *described == name) {
                    plain.push_str(&format!("# HELP {name}{suffix} {text}\n"));
                }
                plain.push_str(&format!("# TYPE {name}{suffix} {kind}\n"));
            }
            ["#", ..] => {}
            _ => {
                plain.push_str(line);
                plain.push('\n');
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_format_has_full_counter_names() {
        let open = "# HELP a_b Of b.\n# TYPE a_b counter\na_b_total{x=\"1 2\"} 3\n\
                    # HELP c_seconds C.\n# TYPE c_seconds gauge\n\
                    # UNIT c_seconds seconds\nc_seconds 1.5\n# EOF\n";
        let plain = "# HELP a_b_total Of b.\n# TYPE a_b_total counter\na_b_total{x=\"1 2\"} 3\n\
                     # HELP c_seconds C.\n# TYPE c_seconds gauge\nc_seconds 1.5\n";
        assert_eq!(plain_metrics(open), plain);
    }
}
