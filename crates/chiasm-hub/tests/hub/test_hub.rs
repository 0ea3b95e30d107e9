//! A small hub on loopback with the API of the real one.
//!
//! It serves the description of a model, files in git, and linked files, which are redirected to
//! another path with ETags and ranges. It records its requests and can misbehave.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use chiasm_hub::{
    HubError, HubRequest, HubSettings, Progress, Snapshot, WantedFiles, Weights, fetch,
};
use futures_util::stream;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};
use tempfile::TempDir;

pub const REPO: &str = "owner/tiny";
pub const COMMIT: &str = "1111111111111111111111111111111111111111";

/// The ways in which the hub misbehaves.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Closes connections after this number of bytes of a linked file, this number of times.
    pub cut: Option<(usize, usize)>,
    /// Ignores ranges.
    pub no_ranges: bool,
    /// Sends other bytes of the same length for linked files.
    pub other_bytes: bool,
    /// Sends an endless body without a length for linked files.
    pub endless: bool,
    /// The announced size of linked files.
    pub announced_size: Option<u64>,
    /// The status and the error code of every response.
    pub status: Option<(u16, &'static str)>,
    /// The target of redirects for linked files.
    pub redirect: Option<String>,
    /// The name of an additional file in the description.
    pub extra_name: Option<String>,
    /// The ETag of files in git.
    pub etag: Option<&'static str>,
    /// The `Content-Range` of partial responses.
    pub content_range: Option<&'static str>,
    /// Leaves out sizes and hashes in the description, as some mirrors do.
    pub names_only: bool,
}

/// The mutable state of a hub.
pub struct HubState {
    pub files: BTreeMap<&'static str, Vec<u8>>,
    pub faults: Faults,
    pub requests: Vec<String>,
}

/// A hub, and an empty home folder of a user.
pub struct TestHub {
    address: SocketAddr,
    pub state: Arc<Mutex<HubState>>,
    pub home: TempDir,
}

type SharedState = State<Arc<Mutex<HubState>>>;

impl TestHub {
    pub async fn start() -> Self {
        let weights = (0..3_000_000_u32).flat_map(|n| n.to_le_bytes()).take(3 << 20).collect();
        let files = BTreeMap::from([
            ("config.json", br#"{"model_type": "tiny"}"#.to_vec()),
            ("chat_templates/default.jinja", b"{{ messages }}".to_vec()),
            ("tokenizer.json", b"{}".to_vec()),
            ("model.safetensors", weights),
            ("modeling.py", b"print()".to_vec()),
            ("README.md", b"# Tiny".to_vec()),
        ]);
        let state = HubState { files, faults: Faults::default(), requests: Vec::new() };
        let state = Arc::new(Mutex::new(state));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let routes = Router::new()
            .route("/api/models/{owner}/{name}/revision/{revision}", get(describe))
            .route("/{owner}/{name}/resolve/{revision}/{*path}", get(resolve))
            .route("/linked/{*path}", get(linked))
            .with_state(state.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Self { address, state, home: tempfile::tempdir().expect("a folder") }
    }

    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().expect("not poisoned").faults = faults;
    }

    /// Returns the requests since the last call.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().expect("not poisoned").requests)
    }

    /// Returns the bytes of a file in the model.
    pub fn file(&self, path: &str) -> Vec<u8> {
        self.state.lock().expect("not poisoned").files[path].clone()
    }

    pub fn cache(&self) -> std::path::PathBuf {
        self.home.path().join("hub")
    }

    pub fn request(&self, revision: &str, weights: bool) -> HubRequest {
        let variable = |name: &str| match name {
            "HF_HOME" => Some(self.home.path().into()),
            "HF_ENDPOINT" => Some(format!("http://{}", self.address).into()),
            _ => None,
        };
        let settings = HubSettings {
            retry_pause: Duration::from_millis(1),
            ..HubSettings::from_variables(&variable).expect("settings")
        };
        HubRequest {
            repo: REPO.parse().expect("an id"),
            revision: revision.parse().expect("a revision"),
            wanted: WantedFiles { weights: weights.then_some(Weights::AsVllmChooses), code: false },
            settings,
        }
    }

    pub async fn fetch(&self, revision: &str, weights: bool) -> Result<Snapshot, HubError> {
        fetch(&self.request(revision, weights), &Progress::default()).await
    }

    pub async fn fetch_offline(&self, revision: &str, weights: bool) -> Result<Snapshot, HubError> {
        let mut request = self.request(revision, weights);
        request.settings.offline = true;
        fetch(&request, &Progress::default()).await
    }

    /// Returns the paths of all files and links in the home folder.
    pub fn home_files(&self) -> Vec<String> {
        let mut paths = Vec::new();
        walk(self.home.path(), self.home.path(), &mut paths);
        paths.sort();
        paths
    }
}

fn walk(root: &std::path::Path, folder: &std::path::Path, paths: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        if entry.file_type().expect("a type").is_dir() {
            walk(root, &entry.path(), paths);
        } else {
            paths.push(entry.path().strip_prefix(root).expect("below it").display().to_string());
        }
    }
}

fn is_linked(path: &str) -> bool {
    path.ends_with(".safetensors")
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(digest(&SHA256, bytes).as_ref())
}

pub fn git_sha1(bytes: &[u8]) -> String {
    let mut context = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    context.update(format!("blob {}\0", bytes.len()).as_bytes());
    context.update(bytes);
    hex(context.finish().as_ref())
}

/// Returns the response of a hub that refuses every request.
fn refusal(state: &HubState) -> Option<Response> {
    let (status, code) = state.faults.status?;
    let status = StatusCode::from_u16(status).expect("a status");
    Some((status, [("x-error-code", code)], "").into_response())
}

async fn describe(
    State(state): SharedState,
    Path((owner, name, revision)): Path<(String, String, String)>,
    uri: Uri,
) -> Response {
    let mut state = state.lock().expect("not poisoned");
    state.requests.push(format!("describe {revision}"));
    assert_eq!(uri.query(), Some("blobs=true"));
    if let Some(refusal) = refusal(&state) {
        return refusal;
    }
    if format!("{owner}/{name}") != REPO {
        return (StatusCode::NOT_FOUND, [("x-error-code", "RepoNotFound")], "").into_response();
    }
    if !["main", "refs/pr/1", COMMIT].contains(&revision.as_str()) {
        return (StatusCode::NOT_FOUND, [("x-error-code", "RevisionNotFound")], "").into_response();
    }
    let faults = &state.faults;
    let mut siblings: Vec<Value> =
        state.files.iter().map(|(path, bytes)| sibling(path, bytes, faults)).collect();
    siblings.extend(faults.extra_name.iter().map(|name| json!({"rfilename": name})));
    json!({"id": REPO, "sha": COMMIT, "siblings": siblings}).to_string().into_response()
}

fn sibling(path: &str, bytes: &[u8], faults: &Faults) -> Value {
    if faults.names_only {
        return json!({"rfilename": path});
    }
    if !is_linked(path) {
        return json!({"rfilename": path, "size": bytes.len(), "blobId": git_sha1(bytes)});
    }
    let size = faults.announced_size.unwrap_or(bytes.len() as u64);
    let pointer = git_sha1(format!("pointer to {}", sha256(bytes)).as_bytes());
    let lfs = json!({"sha256": sha256(bytes), "size": size, "pointerSize": 134});
    json!({"rfilename": path, "size": size, "blobId": pointer, "lfs": lfs})
}

async fn resolve(
    State(state): SharedState,
    method: Method,
    headers: HeaderMap,
    Path((owner, name, revision, path)): Path<(String, String, String, String)>,
) -> Response {
    let mut state = state.lock().expect("not poisoned");
    let authorized = if headers.contains_key("authorization") { " with token" } else { "" };
    state.requests.push(format!("{method} {path}{authorized}"));
    if let Some(refusal) = refusal(&state) {
        return refusal;
    }
    assert_eq!((format!("{owner}/{name}").as_str(), revision.as_str()), (REPO, COMMIT));
    let Some(bytes) = state.files.get(path.as_str()) else {
        return (StatusCode::NOT_FOUND, [("x-error-code", "EntryNotFound")], "").into_response();
    };
    if !is_linked(&path) {
        let etag =
            format!("\"{}\"", state.faults.etag.map_or_else(|| git_sha1(bytes), str::to_owned));
        return ([("etag", etag), ("x-repo-commit", COMMIT.to_owned())], bytes.clone())
            .into_response();
    }
    let size = state.faults.announced_size.unwrap_or(bytes.len() as u64);
    let redirect = state.faults.redirect.clone();
    let headers = [
        ("location", redirect.unwrap_or_else(|| format!("/linked/{path}?signature=secret"))),
        ("x-repo-commit", COMMIT.to_owned()),
        ("x-linked-etag", format!("\"{}\"", sha256(bytes))),
        ("x-linked-size", size.to_string()),
        ("etag", "\"of the redirect itself\"".to_owned()),
    ];
    (StatusCode::FOUND, headers, "").into_response()
}

/// Serves the bytes of linked files.
async fn linked(
    State(state): SharedState,
    headers: HeaderMap,
    Path(path): Path<String>,
) -> Response {
    let mut state = state.lock().expect("not poisoned");
    let from = headers.get("range").and_then(|range| {
        range.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    });
    state.requests.push(format!("linked {path} from {}", from.unwrap_or(0_usize)));
    let mut bytes = state.files[path.as_str()].clone();
    let faults = &mut state.faults;
    if faults.other_bytes {
        bytes.reverse();
    }
    if faults.endless {
        let part = Bytes::from(vec![7; 1 << 16]);
        return Body::from_stream(stream::repeat_with(move || {
            Ok::<_, std::io::Error>(part.clone())
        }))
        .into_response();
    }
    let total = bytes.len();
    let from = from.filter(|_| !faults.no_ranges).unwrap_or(0);
    let rest = bytes.split_off(from);
    let length = rest.len();
    let body = match &mut faults.cut {
        Some((after, times)) if *times > 0 => {
            *times -= 1;
            let first = Bytes::from(rest[..(*after).min(rest.len())].to_vec());
            // The sent bytes have to arrive before the connection closes.
            let cut = async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Err(std::io::Error::other("cut"))
            };
            Body::from_stream(futures_util::StreamExt::chain(
                stream::iter([Ok(first)]),
                stream::once(cut),
            ))
        }
        _ => Body::from(rest),
    };
    let content_range = faults.content_range;
    let response = Response::builder().header("content-length", length);
    let response = match from {
        0 => response.status(StatusCode::OK),
        _ => response.status(StatusCode::PARTIAL_CONTENT).header(
            "content-range",
            content_range
                .map_or_else(|| format!("bytes {from}-{}/{total}", total - 1), str::to_owned),
        ),
    };
    response.body(body).expect("a response")
}
