//! The paths that tell of the server: health, readiness, metrics, models and workers.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use chiasm_fleet::adapters::ServedAdapter;
use chiasm_pipeline::Pipeline;
use serde_json::{Value, json};

use crate::draining::Draining;
use crate::endpoints::find_model;
use crate::error::HttpError;
use crate::log_counts::LogCounts;
use crate::metrics::{Metrics, Scraped};
use crate::slots::Slots;
use crate::traces::Traces;
use crate::workers;

/// The state that these paths share.
pub(crate) struct StatusState {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) traces: Option<Arc<Traces>>,
    pub(crate) draining: Draining,
    /// Returns the counts of the process's log.
    pub(crate) log_counts: Option<Box<dyn Fn() -> LogCounts + Send + Sync>>,
}

impl StatusState {
    /// Writes all metrics in Prometheus' text format.
    ///
    /// # Errors
    /// A metric can't be written.
    pub(crate) fn render(&self) -> Result<String, std::fmt::Error> {
        self.metrics.render(&Scraped {
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
    let of_adapters = adapters.iter().map(|adapter| served_adapter(&state, adapter));
    let all: Vec<Value> = std::iter::once(served_model(&state)).chain(of_adapters).collect();
    Json(json!({"object": "list", "data": all}))
}

/// The model of this name, which may have slashes in it, be it as `/` or as `%2F`.
async fn model(
    State(state): State<Arc<StatusState>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, HttpError> {
    let Path(id) = id.map_err(|_| HttpError::no_such_path())?;
    let adapter = find_model(&state.pipeline, Some(&id))?;
    Ok(Json(
        adapter.map_or_else(|| served_model(&state), |adapter| served_adapter(&state, &adapter)),
    ))
}

fn served_model(state: &StatusState) -> Value {
    json!({
        "id": state.pipeline.model.name,
        "object": "model",
        "created": state.pipeline.fleet.created(),
        "owned_by": "chiasm",
        "root": state.pipeline.model.root,
        "parent": null,
        "max_model_len": state.pipeline.fleet.max_model_len(),
    })
}

/// A LoRA adapter, with where it is and what it belongs to, as vLLM tells it.
fn served_adapter(state: &StatusState, adapter: &ServedAdapter) -> Value {
    let mut card = served_model(state);
    card["id"] = adapter.name.as_str().into();
    card["root"] = adapter.root.as_str().into();
    card["parent"] = state.pipeline.model.name.as_str().into();
    card
}

/// The process lives.
async fn health() -> &'static str {
    "ok\n"
}

/// What this is, in vLLM's form.
async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// At least one worker takes new requests and answers, and the process is not about to end.
async fn ready(State(state): State<Arc<StatusState>>) -> Response {
    if state.draining.has_begun() {
        return HttpError::unavailable("going_down", "the server is going down").into_response();
    }
    if !state.pipeline.fleet.can_answer() {
        return HttpError::unavailable("no_engine", "no engine is ready").into_response();
    }
    let Some(workers) = state.pipeline.fleet.taking_workers() else {
        let why = "no engine takes new requests: their agents are drained";
        return HttpError::unavailable("engines_drained", why).into_response();
    };
    if state.pipeline.helpers.as_ref().is_some_and(|helpers| helpers.is_missed()) {
        return HttpError::unavailable("processor_unavailable", "vLLM's processor is not ready")
            .into_response();
    }
    Json(json!({"workers": workers})).into_response()
}

/// Every worker that can take requests, and what is known of it.
async fn workers(State(state): State<Arc<StatusState>>) -> Json<Value> {
    Json(workers::report(&state.pipeline.fleet))
}

async fn metrics(State(state): State<Arc<StatusState>>, headers: HeaderMap) -> Response {
    let accepted =
        headers.get_all(header::ACCEPT).iter().filter_map(|accepted| accepted.to_str().ok());
    let is_open =
        accepted.into_iter().any(|accepted| accepted.contains("application/openmetrics-text"));
    match state.render() {
        Ok(text) if is_open => (
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

/// OpenMetrics as Prometheus' older text format, which has a counter's whole name in its
/// description, and neither units nor an end.
fn plain_metrics(open: &str) -> String {
    let mut plain = String::with_capacity(open.len());
    // The description that waits for its type.
    let mut help = None;
    for line in open.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, text] => help = Some((name, text)),
            ["#", "TYPE", name, kind] => {
                let suffix = if kind == "counter" { "_total" } else { "" };
                if let Some((_, text)) = help.take().filter(|(of, _)| *of == name) {
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
    fn counters_have_their_whole_names_in_the_older_format() {
        let open = "# HELP a_b Of b.\n# TYPE a_b counter\na_b_total{x=\"1 2\"} 3\n# HELP c_seconds C.\n# TYPE c_seconds gauge\n\
                    # UNIT c_seconds seconds\nc_seconds 1.5\n# EOF\n";
        let plain = "# HELP a_b_total Of b.\n# TYPE a_b_total counter\na_b_total{x=\"1 2\"} 3\n# HELP c_seconds C.\n\
                     # TYPE c_seconds gauge\nc_seconds 1.5\n";
        assert_eq!(plain_metrics(open), plain);
    }
}
