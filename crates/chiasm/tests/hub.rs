//! Models by their ids on the Hugging Face hub, with a mock hub on loopback.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::{Server, chiasm, demo_model, wait_for};
use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;
use tempfile::TempDir;

const ID: &str = "owner/demo";
const COMMIT: &str = "2222222222222222222222222222222222222222";
const TIMEOUT: Duration = Duration::from_secs(20);

/// The state of the mock hub.
struct HubState {
    files: BTreeMap<String, Vec<u8>>,
    requests: Mutex<usize>,
}

/// A mock hub with the demo's model, and a user's empty home.
struct MockHub {
    home: TempDir,
    endpoint: String,
    state: Arc<HubState>,
}

impl MockHub {
    async fn start() -> Self {
        let mut files = BTreeMap::from([("model.safetensors".to_owned(), vec![7; 100_000])]);
        for entry in fs::read_dir(demo_model()).expect("the demo's model").flatten() {
            let name = entry.file_name().into_string().expect("text");
            files.insert(name, fs::read(entry.path()).expect("a file"));
        }
        let state = Arc::new(HubState { files, requests: Mutex::new(0) });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let routes = Router::new()
            .route("/api/models/{owner}/{name}/revision/{revision}", get(describe))
            .route("/owner/demo/resolve/{commit}/{*path}", get(resolve))
            .with_state(state.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Self { home: tempfile::tempdir().expect("a folder"), endpoint, state }
    }

    /// Returns the user's environment variables.
    fn variables(&self) -> Vec<(&str, &str)> {
        vec![("HF_HOME", self.home.path().to_str().expect("text")), ("HF_ENDPOINT", &self.endpoint)]
    }

    fn snapshot(&self) -> PathBuf {
        self.home.path().join("hub/models--owner--demo/snapshots").join(COMMIT)
    }

    /// Returns the number of requests so far.
    fn requests(&self) -> usize {
        *self.state.requests.lock().expect("not poisoned")
    }

    /// Runs `chiasm serve`, which must fail. Returns its stderr.
    fn run_failing(&self, args: &[&str], variables: &[(&str, &str)]) -> String {
        let mut command = chiasm(&["serve"]);
        command
            .args(args)
            .args(["--sim", "1", "--port", "0"])
            .envs(self.variables())
            .envs(variables.iter().copied());
        let output = command.output().expect("chiasm runs");
        assert!(!output.status.success());
        String::from_utf8(output.stderr).expect("text")
    }
}

async fn describe(
    State(state): State<Arc<HubState>>,
    Path((owner, name, revision)): Path<(String, String, String)>,
) -> Response {
    *state.requests.lock().expect("not poisoned") += 1;
    match (format!("{owner}/{name}").as_str(), revision.as_str()) {
        (ID, "main" | "v1") => {}
        (ID, _) => {
            return (StatusCode::NOT_FOUND, [("x-error-code", "RevisionNotFound")]).into_response();
        }
        ("owner/gated", _) => {
            return (StatusCode::UNAUTHORIZED, [("x-error-code", "GatedRepo")]).into_response();
        }
        _ => return (StatusCode::UNAUTHORIZED, [("x-error-code", "RepoNotFound")]).into_response(),
    }
    let siblings: Vec<_> = state.files.keys().map(|path| json!({"rfilename": path})).collect();
    json!({"sha": COMMIT, "siblings": siblings}).to_string().into_response()
}

async fn resolve(
    State(state): State<Arc<HubState>>,
    Path((commit, path)): Path<(String, String)>,
) -> Response {
    *state.requests.lock().expect("not poisoned") += 1;
    assert_eq!(commit, COMMIT);
    let etag = format!("\"etag-of-{path}\"");
    ([("etag", etag), ("x-repo-commit", commit)], state.files[&path].clone()).into_response()
}

#[tokio::test(flavor = "multi_thread")]
async fn model_is_served_by_its_hub_id() {
    let hub = MockHub::start().await;
    let args = [ID, "--sim", "1", "--sim-speedup", "1000"];
    let server = Server::start_with(&args, &hub.variables());
    server.wait_ready(1, TIMEOUT).await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let body = json!({"model": ID, "messages": messages, "max_tokens": 8});
    let answer = server.chat(&body).await.ok();
    assert_eq!(answer["model"], ID);
    assert!(hub.snapshot().join("tokenizer.json").is_file());
    assert!(
        !hub.snapshot().join("model.safetensors").exists(),
        "simulated engines need no weights"
    );
    assert!(server.wait_for_log("the model is in the hub's cache").contains(COMMIT));
    drop(server);

    let requests = hub.requests();
    let variables =
        [hub.variables(), vec![("HF_HUB_OFFLINE", "1"), ("CHIASM_REVISION", "main")]].concat();
    let server = Server::start_with(&args, &variables);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(hub.requests(), requests, "offline");
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_get_the_snapshot_with_its_weights() {
    let hub = MockHub::start().await;
    let vllm = hub.home.path().join("vllm");
    let argument = hub.home.path().join("argument");
    fs::write(
        &vllm,
        format!(
            "#!/bin/sh\necho \"$2\" > {0}.new && mv {0}.new {0}\nexec sleep 60\n",
            argument.display()
        ),
    )
    .expect("a script");
    fs::set_permissions(&vllm, fs::Permissions::from_mode(0o755)).expect("a script");
    let vllm = vllm.to_str().expect("text");
    let _server = Server::start_with(
        &[ID, "--vllm", vllm, "--engines", "1", "--revision", "v1"],
        &hub.variables(),
    );
    wait_for("engine", TIMEOUT, async || argument.exists()).await;
    assert_eq!(
        fs::read_to_string(&argument).expect("a path").trim(),
        hub.snapshot().to_str().expect("text")
    );
    assert_eq!(
        fs::read(hub.snapshot().join("model.safetensors")).expect("weights"),
        hub.state.files["model.safetensors"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_models_are_refused_with_the_reason() {
    let hub = MockHub::start().await;
    for (args, variables, reason) in [
        (&["owner/typo"][..], &[][..], "has no model owner/typo"),
        (&["owner/gated"], &[], "set HF_TOKEN"),
        (&["owner/gated"], &[("HF_TOKEN", "secret")], "has no access"),
        (&[ID, "--revision", "v2"], &[], "no revision 'v2'"),
        (&[ID], &[("HF_HUB_OFFLINE", "1")], "HF_HUB_OFFLINE is set"),
        (&[ID], &[("HF_ENDPOINT", "ftp://hub")], "HF_ENDPOINT has to be"),
        (&["./typo"], &[], "neither a directory"),
    ] {
        let stderr = hub.run_failing(args, variables);
        assert!(
            stderr.contains("error: ") && stderr.contains(reason) && !stderr.contains("secret"),
            "{args:?}: {stderr}"
        );
    }
    assert!(!hub.snapshot().exists());
}
