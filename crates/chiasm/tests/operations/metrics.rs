//! `docs/metrics.md` says which metrics a server has, and dashboard and alerts ask for no others.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::{env, fs};

use serde_json::{Value, json};
use yaml_rust2::{Yaml, YamlLoader};

use super::{SOON, serve};
use crate::support::{Server, demo_model};

pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
/// What is above this line in the page is written by people, what is below it by this test.
const MARK: &str = "<!-- made: see crates/chiasm/tests/operations/metrics.rs -->\n";
/// Set to 1, the test writes the page.
const WRITE: &str = "CHIASM_WRITE_DOCS";
const HOW: &str = "CHIASM_WRITE_DOCS=1 cargo test -p chiasm --test testsuite operations::metrics";
/// An image of one pixel.
const IMAGE: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNwaDgAAAKEAYEml6crAAAAAElFTkSuQmCC";

/// What a server says of one metric.
#[derive(Debug, Default)]
struct Metric {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

/// The metrics of Prometheus' text format by their names, which are those of series but for
/// histograms' suffixes.
fn metrics(text: &str) -> BTreeMap<String, Metric> {
    let mut metrics: BTreeMap<String, Metric> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) =
            line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' '))
        {
            metrics.entry(name.to_owned()).or_default().help = help.to_owned();
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '))
        {
            metrics.entry(name.to_owned()).or_default().kind = kind.to_owned();
        } else if let Some((name, labels)) = line.split_once('{') {
            let labels =
                labels.split("\",").filter_map(|label| Some(label.split_once("=\"")?.0.to_owned()));
            let family = family(&metrics, name)
                .unwrap_or_else(|| panic!("{line} has no description"))
                .to_owned();
            let metric = metrics.get_mut(&family).expect("it was just there");
            metric.labels.extend(labels.filter(|label| label != "le"));
        }
    }
    metrics
}

/// The metric that a series of this name belongs to.
fn family<'a>(metrics: &BTreeMap<String, Metric>, name: &'a str) -> Option<&'a str> {
    let of_histogram =
        ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
    let is_histogram =
        |name: &&str| metrics.get(*name).is_some_and(|metric| metric.kind == "histogram");
    of_histogram.filter(is_histogram).or_else(|| metrics.contains_key(name).then_some(name))
}

/// The page's tables: one of the metrics that begin with each of these.
fn tables(metrics: &BTreeMap<String, Metric>) -> String {
    let mut tables = String::new();
    for prefix in ["chiasm_", "vllm:"] {
        tables.push_str("\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n");
        for (name, Metric { kind, help, labels }) in
            metrics.iter().filter(|(name, _)| name.starts_with(prefix))
        {
            let base = name.trim_end_matches("_total");
            let unit = ["seconds", "bytes", "ratio", "blocks", "tokens"]
                .into_iter()
                .find(|unit| base.ends_with(unit));
            let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
            let (unit, labels) = (unit.unwrap_or_default(), labels.join(", "));
            let help = help.trim_end_matches('.').replace('|', "\\|");
            let _ = writeln!(tables, "| `{name}` | {kind} | {unit} | {labels} | {help} |");
        }
    }
    tables
}

/// The text that a server has at `/metrics`.
async fn scraped(server: &Server) -> String {
    let response =
        server.client.get(format!("{}/metrics", server.url)).send().await.expect("metrics");
    response.text().await.expect("text")
}

/// A server that has answered a stream, refused a request, stepped down with an image and lost a
/// trace: it has series of all its metrics.
pub(crate) async fn used() -> Server {
    // Ten kilobytes: no image's tensor fits into that.
    let flags = ["--mm-arena-gb", "0.00001", "--slo-ttft", "1", "--slo-itl", "1"];
    // Nobody listens there, so that spans are counted as lost.
    let server =
        serve(&[&flags[..], &["--otlp-traces-endpoint", "http://127.0.0.1:9"]].concat()).await;
    let body = json!({"model": "m", "prompt": "hello", "max_tokens": 8, "ignore_eos": true, "stream": true});
    server.post("/v1/completions", &body).await.chunks();
    server.post("/v1/completions", &json!({"model": "other", "prompt": "x"})).await.refused(404);
    let content = json!([{"type": "image_url", "image_url": {"url": IMAGE}}]);
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 2});
    server.chat(&body).await.ok();
    server
}

/// Every expression that the dashboard asks for, with the title of its panel.
pub(crate) fn dashboard_queries() -> Vec<(String, String)> {
    let text =
        fs::read_to_string(format!("{ROOT}/deploy/grafana/chiasm.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        let title = panel["title"].as_str().expect("a title").to_owned();
        assert_eq!(panel["type"] == "row", panel["targets"].is_null(), "{title}");
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            queries
                .push((title.clone(), target["expr"].as_str().expect("an expression").to_owned()));
        }
    }
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    for variable in variables.iter().filter(|variable| variable["type"] == "query") {
        let query = variable["query"]["query"].as_str().expect("a query");
        let inner = query
            .strip_prefix("label_values(")
            .and_then(|rest| rest.rsplit_once(','))
            .expect("label_values");
        queries.push((format!("variable {}", variable["name"]), inner.0.to_owned()));
    }
    queries
}

/// Every alert with its expression and its runbook.
fn alerts() -> Vec<(String, String, String)> {
    let text =
        fs::read_to_string(format!("{ROOT}/deploy/prometheus/alerts.yml")).expect("the alerts");
    let documents = YamlLoader::load_from_str(&text).expect("YAML");
    let rules = documents[0]["groups"]
        .as_vec()
        .expect("groups")
        .iter()
        .flat_map(|group| group["rules"].as_vec());
    let text = |value: &Yaml| value.as_str().expect("text").to_owned();
    let alert = |rule: &Yaml| {
        (text(&rule["alert"]), text(&rule["expr"]), text(&rule["annotations"]["runbook"]))
    };
    rules.flatten().map(alert).collect()
}

/// The names in an expression that begin like those of metrics of ours.
fn names(expression: &str) -> impl Iterator<Item = &str> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | ':')));
    words.filter(|word| word.starts_with("chiasm_") || word.starts_with("vllm:"))
}

#[tokio::test]
async fn the_page_of_metrics_is_what_a_server_has() {
    let server = used().await;
    let metrics = metrics(&scraped(&server).await);
    let described = |(name, metric): (&String, &Metric)| {
        assert!(!metric.help.is_empty() && !metric.kind.is_empty(), "{name}");
        // A counter's name says that it is one (https://prometheus.io/docs/practices/naming).
        assert_eq!(metric.kind == "counter", name.ends_with("_total"), "{name}");
        name.starts_with("chiasm_") || name.starts_with("vllm:")
    };
    assert!(metrics.len() > 60 && metrics.iter().all(described), "{metrics:?}");
    let path = format!("{ROOT}/docs/metrics.md");
    let kept = fs::read_to_string(&path).expect("the page");
    let (written, _) =
        kept.split_once(MARK).expect("the line between what people and what this test write");
    let made = format!("{written}{MARK}{}", tables(&metrics));
    if env::var_os(WRITE).is_some_and(|value| value == "1") {
        fs::write(&path, &made).expect("the page can be written");
    }
    let kept = fs::read_to_string(&path).expect("the page");
    let differs = made
        .lines()
        .zip(kept.lines().chain(std::iter::repeat("")))
        .find(|(made, kept)| made != kept);
    assert!(
        made == kept,
        "docs/metrics.md is not what a server says, from {differs:?} on; write it again by: {HOW}"
    );
}

#[tokio::test]
async fn dashboard_alerts_and_pages_name_metrics_that_there_are() {
    let server = used().await;
    let metrics = metrics(&scraped(&server).await);
    let queries = dashboard_queries();
    let alerts = alerts();
    assert!(
        queries.len() > 40 && alerts.len() > 10,
        "{} queries, {} alerts",
        queries.len(),
        alerts.len()
    );
    let alerts = alerts.into_iter().map(|(alert, expression, _)| (alert, expression));
    for (of, expression) in queries.into_iter().chain(alerts) {
        for name in names(&expression) {
            assert!(family(&metrics, name).is_some(), "{of} asks for {name}, which no server has");
        }
    }
    assert_eq!(
        names("rate(chiasm_a_total{x=\"y\"}[1m]) / up").collect::<Vec<_>>(),
        ["chiasm_a_total"]
    );
}

#[test]
fn every_alert_has_a_section_for_whoever_is_called() {
    for (alert, _, runbook) in alerts() {
        let (page, anchor) =
            runbook.split_once('#').unwrap_or_else(|| panic!("{alert}: {runbook}"));
        let text = fs::read_to_string(format!("{ROOT}/{page}"))
            .unwrap_or_else(|error| panic!("{alert}: {error}"));
        let headings = text
            .lines()
            .filter_map(|line| Some(line.strip_prefix("## ")?.to_lowercase().replace(' ', "-")));
        assert!(
            headings.into_iter().any(|heading| heading == anchor),
            "{alert}: {page} has no {anchor}"
        );
    }
}

#[tokio::test]
async fn what_vllm_calls_by_its_name_is_the_same_number() {
    let model = demo_model().display().to_string();
    let server = Server::start(&[&model, "--served-model-name", "a\"b", "--sim", "2"]);
    server.wait_ready(2, SOON).await;
    let body = json!({"model": "a\"b", "prompt": "hello", "max_tokens": 5, "ignore_eos": true});
    server.post("/v1/completions", &body).await.ok();
    let label = "{model_name=\"a\\\"b\"";
    for (vllm, ours, least) in [
        ("generation_tokens_total", "completion_tokens_total", 5.0),
        ("prompt_tokens_total", "prompt_tokens_total", 1.0),
        ("prefix_cache_queries_total", "prompt_tokens_total", 1.0),
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count", 1.0),
        ("inter_token_latency_seconds_count", "inter_token_latency_seconds_count", 1.0),
        ("e2e_request_latency_seconds_count", "request_duration_seconds_count", 1.0),
    ] {
        let told = server.metric(&format!("vllm:{vllm}{label}")).await;
        assert_eq!(told, server.metric(&format!("chiasm_{ours}")).await, "{vllm}");
        assert!(told >= least, "{vllm}: {told}");
    }
    let length = format!("vllm:request_success_total{label},finished_reason=\"length\"}}");
    assert_eq!(server.metric(&length).await, 1.0);
    assert_eq!(server.metric("vllm:num_requests_running").await, 0.0);
    let cache = scraped(&server).await;
    let cache = cache
        .lines()
        .find(|line| line.starts_with("vllm:cache_config_info{"))
        .expect("both engines are alike");
    assert!(cache.contains("block_size=\"16\"") && cache.ends_with(" 1"), "{cache}");
}
