//! A real Prometheus scrapes a server and evaluates the queries of the dashboard and the alerts.
//!
//! `CHIASM_TEST_PROMETHEUS` is the path of Prometheus' folder.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use serde_json::{Value, json};

use super::TIMEOUT;
use super::metrics::{ROOT, dashboard_queries, serve_with_all_metrics};
use crate::support::{Process, Server, client, demo_model, free_port, wait_for};

/// A Prometheus that scrapes one server.
struct Prometheus {
    _process: Process,
    _folder: tempfile::TempDir,
    url: String,
    client: reqwest::Client,
}

fn program(name: &str) -> PathBuf {
    let folder = env::var_os("CHIASM_TEST_PROMETHEUS");
    Path::new(
        &folder.expect("CHIASM_TEST_PROMETHEUS must be the folder with prometheus and promtool"),
    )
    .join(name)
}

/// Runs promtool, which must succeed.
fn promtool(arguments: &[&str]) {
    let output = Command::new(program("promtool")).args(arguments).output().expect("promtool");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Prometheus {
    /// Starts Prometheus with the configuration of `deploy/prometheus`, but with this server as
    /// target and a short scrape interval.
    fn start(server: &Server) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let example = fs::read_to_string(format!("{ROOT}/deploy/prometheus/prometheus.yml"))
            .expect("the example");
        let target = server.url.strip_prefix("http://").expect("http");
        let configuration = example.replace("127.0.0.1:8000", target).replace("15s", "500ms");
        assert!(
            configuration.contains(target) && configuration.contains("500ms"),
            "{configuration}"
        );
        let path = folder.path().join("prometheus.yml");
        fs::write(&path, configuration).expect("the configuration");
        fs::copy(format!("{ROOT}/deploy/prometheus/alerts.yml"), folder.path().join("alerts.yml"))
            .expect("the alerts");
        let address = format!("127.0.0.1:{}", free_port());
        let child = Command::new(program("prometheus"))
            .arg(format!("--config.file={}", path.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("prometheus starts");
        Self {
            _process: Process(child),
            _folder: folder,
            url: format!("http://{address}"),
            client: client(),
        }
    }

    /// Calls Prometheus' API. Returns `None` while Prometheus starts.
    async fn get(&self, path: &str) -> Option<Value> {
        let answer = self.client.get(format!("{}/api/v1/{path}", self.url)).send().await.ok()?;
        serde_json::from_str(&answer.text().await.ok()?).ok()
    }

    /// Returns the number of samples in the current result of an expression.
    async fn samples(&self, expression: &str) -> Result<usize, String> {
        let encoded: String = expression.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let answer = self.get(&format!("query?query={encoded}")).await.ok_or("no answer")?;
        let result = answer["data"]["result"].as_array().ok_or_else(|| answer.to_string())?;
        Ok(result.len())
    }
}

/// Replaces Grafana's variables in an expression as Grafana does when all values are selected.
fn fill_variables(expression: &str) -> String {
    let values = BTreeMap::from([
        ("$__rate_interval", "1m"),
        ("$job", ".*"),
        ("$instance", ".*"),
        ("$worker", ".*"),
    ]);
    let filled =
        values.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value));
    assert!(!filled.contains('$'), "{filled}");
    filled
}

#[test]
#[ignore = "needs Prometheus: cargo xtask test"]
fn promtool_accepts_shipped_configuration() {
    promtool(&["check", "rules", &format!("{ROOT}/deploy/prometheus/alerts.yml")]);
    promtool(&["check", "config", &format!("{ROOT}/deploy/prometheus/prometheus.yml")]);
}

#[tokio::test]
#[ignore = "needs Prometheus: cargo xtask test"]
async fn prometheus_evaluates_dashboard_queries() {
    let server = serve_with_all_metrics().await;
    let prometheus = Prometheus::start(&server);
    // A rate needs two samples.
    let twice = "count_over_time(chiasm_workers[1m]) > 2";
    wait_for("samples", TIMEOUT, async || prometheus.samples(twice).await == Ok(1)).await;
    for (title, expression) in dashboard_queries() {
        let samples = prometheus.samples(&fill_variables(&expression)).await;
        let samples = samples.unwrap_or_else(|error| panic!("{title}: {error}"));
        assert!(samples > 0, "{title} shows nothing: {expression}");
    }
    let rules = async || {
        prometheus.get("rules").await.map(|answer| answer["data"]["groups"][0]["rules"].clone())
    };
    let are_evaluated = |rules: &Value| {
        rules.as_array().is_some_and(|rules| rules.iter().all(|rule| rule["health"] != "unknown"))
    };
    wait_for("rules", TIMEOUT, async || rules().await.as_ref().is_some_and(are_evaluated)).await;
    let rules = rules().await.expect("rules");
    for rule in rules.as_array().expect("rules") {
        assert_eq!((&rule["health"], &rule["state"]), (&json!("ok"), &json!("inactive")), "{rule}");
    }
}

#[tokio::test]
#[ignore = "needs Prometheus: cargo xtask test"]
async fn frontend_without_workers_raises_an_alert() {
    let model = demo_model().display().to_string();
    let address = format!("tcp://127.0.0.1:{}", free_port());
    let server = Server::start(&[&model, "--served-model-name", "m", "--attach", &address]);
    let prometheus = Prometheus::start(&server);
    let pending = "ALERTS{alertname=\"ChiasmNoWorkers\"}";
    wait_for("the alert", TIMEOUT, async || prometheus.samples(pending).await == Ok(1)).await;
}
