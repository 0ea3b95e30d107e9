//! Paths. What surrounds all of them is in `layers`.

use std::sync::Arc;

use axum::Json;
use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use chiasm_fleet::adapters::ServedAdapter;
use serde_json::{Value, json};

use crate::endpoints::completions::check_model;
use crate::endpoints::{completions, lora, messages, responses, tokenize};
use crate::error::HttpError;
use crate::frontend::Frontend;
use crate::paths::{
    CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, LOAD_LORA, MESSAGES, RESPONSES, TOKENIZE, UNLOAD_LORA,
};
use crate::{forward, page, workers};

/// The whole HTTP interface.
pub(crate) fn router(frontend: Arc<Frontend>) -> Router {
    let changing = match frontend.adapters_may_change {
        true => Router::new().route(LOAD_LORA, post(lora::load)).route(UNLOAD_LORA, post(lora::unload)),
        false => Router::new(),
    };
    let page = match &frontend.page {
        Some(_) => page::router(),
        None => Router::new(),
    };
    changing
        .merge(page)
        .merge(if frontend.forwards { forwarding() } else { answering() })
        .route("/v1/responses/{id}", get(responses::not_kept).delete(responses::not_kept))
        .route("/v1/responses/{id}/input_items", get(responses::not_kept))
        .route("/v1/responses/{id}/cancel", post(responses::not_kept))
        .route(TOKENIZE, post(tokenize::tokenize))
        .route(DETOKENIZE, post(tokenize::detokenize))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/version", get(version))
        .route("/ready", get(ready))
        .route("/workers", get(workers))
        .route("/metrics", get(metrics))
        .fallback(async || HttpError::no_such_path())
        .method_not_allowed_fallback(async || HttpError::method_not_allowed())
        .with_state(frontend)
}

/// What is asked of the model, and answered here.
fn answering() -> Router<Arc<Frontend>> {
    Router::new()
        .route(CHAT, post(completions::chat))
        .route(COMPLETIONS, post(completions::completions))
        .route(RESPONSES, post(responses::create))
        .route(MESSAGES, post(messages::messages))
        .route(COUNT_TOKENS, post(messages::count_tokens))
}

/// The same, answered by servers that are given requests as they come.
fn forwarding() -> Router<Arc<Frontend>> {
    let paths = [CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS];
    paths.into_iter().fold(Router::new(), |router, path| {
        router.route(path, post(async move |state, request| forward::forward(path, state, request).await))
    })
}

async fn models(State(frontend): State<Arc<Frontend>>) -> Json<Value> {
    let adapters = frontend.pipeline.fleet.adapters().all();
    let of_adapters = adapters.iter().map(|adapter| served_adapter(&frontend, adapter));
    let all: Vec<Value> = std::iter::once(served_model(&frontend)).chain(of_adapters).collect();
    Json(json!({"object": "list", "data": all}))
}

/// The model of this name, which may have slashes in it, be it as `/` or as `%2F`.
async fn model(
    State(frontend): State<Arc<Frontend>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, HttpError> {
    let Path(id) = id.map_err(|_| HttpError::no_such_path())?;
    let adapter = check_model(&frontend, Some(&id))?;
    Ok(Json(adapter.map_or_else(|| served_model(&frontend), |adapter| served_adapter(&frontend, &adapter))))
}

fn served_model(frontend: &Frontend) -> Value {
    json!({
        "id": frontend.pipeline.model.name,
        "object": "model",
        "created": frontend.pipeline.fleet.created(),
        "owned_by": "chiasm",
        "root": frontend.pipeline.model.root,
        "parent": null,
        "max_model_len": frontend.pipeline.fleet.max_model_len(),
    })
}

/// A LoRA adapter, with where it is and what it belongs to, as vLLM tells it.
fn served_adapter(frontend: &Frontend, adapter: &ServedAdapter) -> Value {
    let mut card = served_model(frontend);
    card["id"] = adapter.name.as_str().into();
    card["root"] = adapter.root.as_str().into();
    card["parent"] = frontend.pipeline.model.name.as_str().into();
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
async fn ready(State(frontend): State<Arc<Frontend>>) -> Response {
    if frontend.is_draining() {
        return HttpError::unavailable("going_down", "the server is going down").into_response();
    }
    if !frontend.pipeline.fleet.can_answer() {
        return HttpError::unavailable("no_engine", "no engine is ready").into_response();
    }
    let Some(workers) = frontend.pipeline.fleet.taking_workers() else {
        let why = "no engine takes new requests: their agents are drained";
        return HttpError::unavailable("engines_drained", why).into_response();
    };
    if frontend.pipeline.helpers.as_ref().is_some_and(|helpers| helpers.is_missed()) {
        return HttpError::unavailable("processor_unavailable", "vLLM's processor is not ready").into_response();
    }
    Json(json!({"workers": workers})).into_response()
}

/// Every worker that can take requests, and what is known of it.
async fn workers(State(frontend): State<Arc<Frontend>>) -> Json<Value> {
    Json(workers::report(&frontend.pipeline.fleet))
}

async fn metrics(State(frontend): State<Arc<Frontend>>, headers: HeaderMap) -> Response {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|accepted| accepted.to_str().ok());
    let is_open = accepted.into_iter().any(|accepted| accepted.contains("application/openmetrics-text"));
    match frontend.metrics.render(&frontend) {
        Ok(text) if is_open => {
            ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
                .into_response()
        }
        Ok(text) => {
            let text = plain_metrics(&text);
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
        }
        Err(error) => HttpError::internal(error.to_string()).into_response(),
    }
}

/// OpenMetrics as Prometheus' older text format, which has a counter's whole name in its description, and neither units nor an
/// end.
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
