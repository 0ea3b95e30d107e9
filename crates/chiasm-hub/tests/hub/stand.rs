//! A small hub on loopback that speaks as the real one: the description of a model, files of git's
//! own, and files that are linked to another host with redirects, ETags and ranges. It counts what
//! it is asked for, and can be told to misbehave.

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
use chiasm_hub::{HubError, HubRequest, HubSettings, Progress, Snapshot, Wanted, Weights, fetch};
use futures_util::stream;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};
use tempfile::TempDir;

pub const REPO: &str = "owner/tiny";
pub const COMMIT: &str = "1111111111111111111111111111111111111111";

/// What the hub does otherwise than it should.
#[derive(Clone, Debug, Default)]
pub struct Manners {
    /// Ends connections after so many bytes of a linked file, for so many times.
    pub cut: Option<(usize, usize)>,
    /// Takes no notice of ranges.
    pub no_ranges: bool,
    /// Sends other bytes of the same length for linked files.
    pub other_bytes: bool,
    /// Sends the bytes of linked files without an end and without a length.
    pub endless: bool,
    /// Says these lengths of linked files in the description.
    pub said_size: Option<u64>,
    /// The status and the error code of every answer.
    pub status: Option<(u16, &'static str)>,
    /// Redirects linked files to this.
    pub redirect: Option<String>,
    /// Calls a file this.
    pub extra_name: Option<String>,
    /// The ETag of files of git's own.
    pub etag: Option<&'static str>,
    /// The `Content-Range` of parts of files.
    pub content_range: Option<&'static str>,
    /// Tells neither sizes nor hashes in the description, as some mirrors.
    pub names_only: bool,
}

pub struct World {
    pub files: BTreeMap<&'static str, Vec<u8>>,
    pub manners: Manners,
    pub asked: Vec<String>,
}

/// A hub and an empty home of a user.
pub struct Hub {
    address: SocketAddr,
    pub world: Arc<Mutex<World>>,
    pub home: TempDir,
}

type Shared = State<Arc<Mutex<World>>>;

impl Hub {
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
        let world =
            Arc::new(Mutex::new(World { files, manners: Manners::default(), asked: Vec::new() }));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let routes = Router::new()
            .route("/api/models/{owner}/{name}/revision/{revision}", get(describe))
            .route("/{owner}/{name}/resolve/{revision}/{*path}", get(resolve))
            .route("/linked/{*path}", get(linked))
            .with_state(world.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Self { address, world, home: tempfile::tempdir().expect("a folder") }
    }

    pub fn misbehave(&self, manners: Manners) {
        self.world.lock().expect("not poisoned").manners = manners;
    }

    /// What it was asked for since this was asked last.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.world.lock().expect("not poisoned").asked)
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
            wanted: Wanted { weights: weights.then_some(Weights::AsVllmChooses), code: false },
            settings,
        }
    }

    pub async fn fetch(&self, revision: &str, weights: bool) -> Result<Snapshot, HubError> {
        fetch(&self.request(revision, weights), &Progress::default()).await
    }

    pub async fn offline(&self, revision: &str, weights: bool) -> Result<Snapshot, HubError> {
        let mut request = self.request(revision, weights);
        request.settings.offline = true;
        fetch(&request, &Progress::default()).await
    }

    /// The paths of all files below its home, links as what they link to.
    pub fn found(&self) -> Vec<String> {
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

fn refusal(world: &World) -> Option<Response> {
    let (status, code) = world.manners.status?;
    let status = StatusCode::from_u16(status).expect("a status");
    Some((status, [("x-error-code", code)], "").into_response())
}

async fn describe(
    State(world): Shared,
    Path((owner, name, revision)): Path<(String, String, String)>,
    uri: Uri,
) -> Response {
    let mut world = world.lock().expect("not poisoned");
    world.asked.push(format!("describe {revision}"));
    assert_eq!(uri.query(), Some("blobs=true"));
    if let Some(refusal) = refusal(&world) {
        return refusal;
    }
    if format!("{owner}/{name}") != REPO {
        return (StatusCode::NOT_FOUND, [("x-error-code", "RepoNotFound")], "").into_response();
    }
    if !["main", "refs/pr/1", COMMIT].contains(&revision.as_str()) {
        return (StatusCode::NOT_FOUND, [("x-error-code", "RevisionNotFound")], "").into_response();
    }
    let manners = &world.manners;
    let mut siblings: Vec<Value> =
        world.files.iter().map(|(path, bytes)| sibling(path, bytes, manners)).collect();
    siblings.extend(manners.extra_name.iter().map(|name| json!({"rfilename": name})));
    json!({"id": REPO, "sha": COMMIT, "siblings": siblings}).to_string().into_response()
}

fn sibling(path: &str, bytes: &[u8], manners: &Manners) -> Value {
    if manners.names_only {
        return json!({"rfilename": path});
    }
    if !is_linked(path) {
        return json!({"rfilename": path, "size": bytes.len(), "blobId": git_sha1(bytes)});
    }
    let size = manners.said_size.unwrap_or(bytes.len() as u64);
    let pointer = git_sha1(format!("pointer to {}", sha256(bytes)).as_bytes());
    let lfs = json!({"sha256": sha256(bytes), "size": size, "pointerSize": 134});
    json!({"rfilename": path, "size": size, "blobId": pointer, "lfs": lfs})
}

async fn resolve(
    State(world): Shared,
    method: Method,
    headers: HeaderMap,
    Path((owner, name, revision, path)): Path<(String, String, String, String)>,
) -> Response {
    let mut world = world.lock().expect("not poisoned");
    let authorized = if headers.contains_key("authorization") { " with token" } else { "" };
    world.asked.push(format!("{method} {path}{authorized}"));
    if let Some(refusal) = refusal(&world) {
        return refusal;
    }
    assert_eq!((format!("{owner}/{name}").as_str(), revision.as_str()), (REPO, COMMIT));
    let Some(bytes) = world.files.get(path.as_str()) else {
        return (StatusCode::NOT_FOUND, [("x-error-code", "EntryNotFound")], "").into_response();
    };
    if !is_linked(&path) {
        let etag =
            format!("\"{}\"", world.manners.etag.map_or_else(|| git_sha1(bytes), str::to_owned));
        return ([("etag", etag), ("x-repo-commit", COMMIT.to_owned())], bytes.clone())
            .into_response();
    }
    let size = world.manners.said_size.unwrap_or(bytes.len() as u64);
    let headers = [
        (
            "location",
            world
                .manners
                .redirect
                .clone()
                .unwrap_or_else(|| format!("/linked/{path}?signature=secret")),
        ),
        ("x-repo-commit", COMMIT.to_owned()),
        ("x-linked-etag", format!("\"{}\"", sha256(bytes))),
        ("x-linked-size", size.to_string()),
        ("etag", "\"of the redirect itself\"".to_owned()),
    ];
    (StatusCode::FOUND, headers, "").into_response()
}

/// Where linked files are.
async fn linked(State(world): Shared, headers: HeaderMap, Path(path): Path<String>) -> Response {
    let mut world = world.lock().expect("not poisoned");
    let from = headers.get("range").and_then(|range| {
        range.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()
    });
    world.asked.push(format!("linked {path} from {}", from.unwrap_or(0_usize)));
    let mut bytes = world.files[path.as_str()].clone();
    let manners = &mut world.manners;
    if manners.other_bytes {
        bytes.reverse();
    }
    if manners.endless {
        let part = Bytes::from(vec![7; 1 << 16]);
        return Body::from_stream(stream::repeat_with(move || {
            Ok::<_, std::io::Error>(part.clone())
        }))
        .into_response();
    }
    let (total, from) = (bytes.len(), from.filter(|_| !manners.no_ranges).unwrap_or(0));
    let rest = bytes.split_off(from);
    let length = rest.len();
    let body = match &mut manners.cut {
        Some((after, times)) if *times > 0 => {
            *times -= 1;
            let first = Bytes::from(rest[..(*after).min(rest.len())].to_vec());
            // Time for what was sent to arrive before the connection ends.
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
    let content_range = manners.content_range;
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
