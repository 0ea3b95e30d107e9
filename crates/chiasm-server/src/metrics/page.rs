//! Holds `docs/metrics.md` against the metrics that there are.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use chiasm_backend::Finish;
use chiasm_backend::fake::Script;
use chiasm_otlp::{Exporter, Headers};
use http_body_util::BodyExt;

use super::*;
use crate::connections::Connection;
use crate::stand::Stand;
use crate::{layers, routes};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
/// Between these is what is written by this test.
const BEGIN: &str = "<!-- metrics -->\n";
const END: &str = "<!-- end of metrics -->\n";
/// Set to write the page.
const WRITE: &str = "CHIASM_WRITE_DOCS";

/// The sources that register metrics.
const SOURCES: [&str; 6] = [
    include_str!("../metrics.rs"),
    include_str!("fleet.rs"),
    include_str!("objectives.rs"),
    include_str!("../door_metrics.rs"),
    include_str!("../connections/metrics.rs"),
    include_str!("../cpu/metrics.rs"),
];
/// Metrics that the process's collector adds.
const OF_PROCESS: usize = 6;

/// A frontend's metrics after something of everything has happened.
async fn everything() -> String {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let Stand { frontend, backends } = Stand::of(1).await;
    let exporter = Exporter::start("http://127.0.0.1:9".parse().unwrap(), Headers::default(), "s", "1").unwrap();
    let objectives = Objectives { first_token: Some(Duration::ZERO), between_tokens: Some(Duration::ZERO) };
    let frontend =
        Arc::into_inner(frontend).unwrap().with_traces(Traces::new(exporter, 1.0)).with_objectives(objectives);
    let frontend = Arc::new(frontend);
    backends[0].next_job(Script::tokens(&[40, 41]).finish(Finish::Length));
    let body = r#"{"prompt": "a", "stream": true, "max_tokens": 2}"#;
    let request = Request::post("/v1/completions").header("host", "h").header("content-type", "application/json");
    let connection = Arc::new(Connection::from_peer(Ipv4Addr::LOCALHOST.into()));
    let app = routes::router(frontend.clone());
    let answer = layers::answer(app, frontend.clone(), connection, request.body(Body::from(body)).unwrap()).await;
    drop(answer.into_body().collect().await);
    let metrics = &frontend.metrics;
    metrics.overlap_found(1, 2, Knowledge::Exact);
    for stage in [Stage::Fetch, Stage::Plan, Stage::Process, Stage::HandOff, Stage::Queue, Stage::Prefill] {
        metrics.stage(stage, Duration::ZERO);
    }
    metrics.refused(400, "code");
    metrics.retried(Retry::Lost);
    metrics.engine_died(WorkerId(0));
    metrics.delivered(Delivered { cached: 1, shared_memory: 1, inline: 1 });
    metrics.stepped_down("cause", &"why");
    metrics.render(&frontend).unwrap()
}

/// The table's rows: name, type, labels, meaning.
fn rows(text: &str) -> Vec<String> {
    let mut rows = Vec::new();
    for described in text.split("# HELP ").skip(1) {
        let (name, rest) = described.split_once(' ').unwrap();
        let (help, rest) = rest.split_once('\n').unwrap();
        let kind = rest.strip_prefix(&format!("# TYPE {name} ")).unwrap().lines().next().unwrap();
        let suffix = if kind == "counter" { "_total" } else { "" };
        let samples = rest.lines().filter(|line| !line.starts_with('#'));
        let labels = samples
            .filter_map(|line| line.split_once('{')?.1.split_once('}'))
            .flat_map(|(labels, _)| labels.split("\",").map(str::to_owned).collect::<Vec<_>>());
        let names: BTreeSet<String> = labels
            .filter_map(|label| Some(label.split_once('=')?.0.to_owned()))
            .filter(|label| label != "le")
            .collect();
        let labels = names.iter().map(|label| format!("`{label}`")).collect::<Vec<_>>().join(", ");
        rows.push(format!("| `{name}{suffix}` | {kind} | {labels} | {} |", help.trim_end_matches('.')));
    }
    rows
}

#[tokio::test]
async fn the_page_of_metrics_has_all_of_them() {
    let rows = rows(&everything().await);
    let registered: usize = SOURCES
        .iter()
        .map(|source| {
            source.matches(".register(\"").count()
                + source.matches(".register(\n").count()
                + source.matches(".register_with_unit(").count()
        })
        .sum();
    assert_eq!(
        rows.len(),
        registered + OF_PROCESS,
        "`everything` must use each metric once: one that never was is not told"
    );
    let table = format!("{BEGIN}\n| metric | type | labels | is |\n|---|---|---|---|\n{}\n\n{END}", rows.join("\n"));
    let page = std::fs::read_to_string(Path::new(PAGE)).unwrap();
    let (before, rest) = page.split_once(BEGIN).expect("the page has a place for the table");
    let (_, after) = rest.split_once(END).expect("the table has an end");
    let right = format!("{before}{table}{after}");
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(PAGE, &right).unwrap();
    }
    assert!(
        page == right || std::env::var_os(WRITE).is_some(),
        "docs/metrics.md is out of date: run this test with {WRITE}=1"
    );
}
