//! Images as tensors in shared memory: Dynamo's worker for vLLM can read them, and they are removed
//! afterwards.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use base64::Engine;
use chiasm::scenarios::{self, DAWN, PICTURES, Picture};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::mocker::{Mocker, set_planes};
use super::{NAMESPACE, TIMEOUT};
use crate::support::etcd::Etcd;
use crate::support::origin::Origin;
use crate::support::{Process, Server, chiasm, demo_model, wait_for};

/// Starts a frontend that passes images to workers as tensors in shared memory.
fn frontend(etcd: &Etcd, model: &Path, tensors: &str, flags: &[&str]) -> Server {
    let model = model.display().to_string();
    let url = format!("dynamo+etcd://{}/{NAMESPACE},{tensors}", etcd.server());
    let args = [&model, "--served-model-name", "m", "--upstream", &url, "--allow-private-media"];
    Server::start(&[&args, flags].concat())
}

fn url(picture: &Picture) -> String {
    format!(
        "data:image/jpeg;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(picture.jpeg)
    )
}

fn body(pictures: &[&Picture], tokens: u32) -> Value {
    let image =
        |picture: &&Picture| json!({"type": "image_url", "image_url": {"url": url(picture)}});
    let mut content: Vec<Value> = pictures.iter().map(image).collect();
    content.push(json!({"type": "text", "text": "What is there?"}));
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "ignore_eos": true,
    })
}

/// Returns a frontend's files in shared memory. It has no engines, so all are tensors for workers.
fn segments(pid: u32) -> Vec<PathBuf> {
    let prefix = format!("chiasm.{pid}.");
    let entries = std::fs::read_dir("/dev/shm").expect("shared memory").flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        .map(|entry| entry.path())
        .collect()
}

/// A thread that polls the number of a frontend's segments and keeps the maximum.
struct SegmentMonitor {
    max: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl SegmentMonitor {
    fn start(pid: u32) -> Self {
        let max = Arc::<AtomicUsize>::default();
        let stop = Arc::<AtomicBool>::default();
        let thread = std::thread::spawn({
            let max = max.clone();
            let stop = stop.clone();
            move || {
                while !stop.load(Relaxed) {
                    max.fetch_max(segments(pid).len(), Relaxed);
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        Self { max, stop, thread: Some(thread) }
    }

    /// Stops the thread and returns the maximum.
    fn stop(mut self) -> usize {
        self.stop.store(true, Relaxed);
        self.thread.take().expect("a running thread").join().expect("no panic");
        self.max.load(Relaxed)
    }
}

async fn wait_no_segments(pid: u32) {
    wait_for("empty shared memory", TIMEOUT, async || segments(pid).is_empty()).await;
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn scenarios_leave_shared_memory_empty() {
    let etcd = Etcd::start().await;
    let _mockers = [Mocker::start(&etcd, NAMESPACE), Mocker::start(&etcd, NAMESPACE)];
    let server = frontend(&etcd, &demo_model(), "tensors", &[]);
    server.wait_ready(2, TIMEOUT).await;
    let origin = Origin::start().await;
    let monitor = SegmentMonitor::start(server.pid());
    let mut images = 0;
    for scenario in scenarios::all() {
        for turn in &scenario.turns {
            let answer = server.chat(&turn.body("m", &origin.url(), 8)).await;
            answer.ok();
            let has_images = turn.images() > 0;
            assert_eq!(answer.header("x-chiasm-transfer"), if has_images { "shm" } else { "none" });
            images += usize::from(has_images);
        }
    }
    // Many requests at once, all of which must succeed.
    let mut clients = JoinSet::new();
    for number in 0..24 {
        let request = server.client.post(format!("{}/v1/chat/completions", server.url));
        let pictures =
            [&PICTURES[number % PICTURES.len()], &PICTURES[(number + 1) % PICTURES.len()]];
        let request = request
            .header("content-type", "application/json")
            .body(body(&pictures, 16).to_string());
        clients.spawn(async move { request.send().await.expect("an answer").status() });
    }
    while let Some(status) = clients.join_next().await {
        assert_eq!(status.expect("no panic"), 200);
    }
    let max = monitor.stop();
    assert!(images >= 10 && max >= 2, "{images} requests with images, {max} segments at a time");
    wait_no_segments(server.pid()).await;
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn tensors_are_removed_after_cancel_or_kill() {
    let etcd = Etcd::start().await;
    let mocker = Mocker::start(&etcd, NAMESPACE);
    let mut server = frontend(&etcd, &demo_model(), "tensors", &[]);
    server.wait_ready(1, TIMEOUT).await;
    mocker.signal("STOP");
    // The worker is stopped, so requests wait.
    let send = |server: &Server| {
        let request = server.client.post(format!("{}/v1/chat/completions", server.url));
        tokio::spawn(
            request
                .header("content-type", "application/json")
                .body(body(&[&DAWN], 4).to_string())
                .send(),
        )
    };
    let client = send(&server);
    wait_for("tensors", TIMEOUT, async || !segments(server.pid()).is_empty()).await;
    client.abort();
    wait_no_segments(server.pid()).await;

    let client = send(&server);
    wait_for("tensors", TIMEOUT, async || !segments(server.pid()).is_empty()).await;
    let pid = server.pid();
    server.signal_and_wait("KILL");
    drop(client);
    assert!(!segments(pid).is_empty(), "a killed frontend can't remove its tensors");
    let _next = frontend(&etcd, &demo_model(), "tensors", &[]);
    wait_no_segments(pid).await;
    mocker.signal("CONT");
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn images_without_room_are_sent_inline() {
    let etcd = Etcd::start().await;
    let _mocker = Mocker::start(&etcd, NAMESPACE);
    let server = frontend(&etcd, &demo_model(), "tensors", &["--dynamo-tensors-gb", "0.000001"]);
    server.wait_ready(1, TIMEOUT).await;
    let answer = server.chat(&body(&[&DAWN], 4)).await;
    answer.ok();
    assert_eq!(answer.header("x-chiasm-transfer"), "inline");
    assert_eq!(
        server.metric("chiasm_mm_transfer_fallback_total{cause=\"parcels_full\"}").await,
        1.0
    );
    assert_eq!(segments(server.pid()).len(), 0);
}

/// Starts a worker that reads tensors with Dynamo's code and compares them with those of vLLM's own
/// processor.
fn checking_worker(
    etcd: &Etcd,
    python: &Path,
    model: &Path,
    dtype: &str,
    report: &Path,
) -> Process {
    let dynamo = std::env::var_os("CHIASM_TEST_DYNAMO")
        .expect("CHIASM_TEST_DYNAMO must be the path of a Python with Dynamo");
    let site = Command::new(dynamo)
        .args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        .output();
    let site = String::from_utf8(site.expect("Dynamo's Python runs").stdout).expect("a path");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dynamo/tensors_worker.py");
    let mut worker = Command::new(python);
    worker.arg("-B").arg(script).arg(site.trim()).arg(model).arg(dtype);
    worker.arg(format!("{NAMESPACE}.backend.generate")).arg(report);
    worker.env("ETCD_ENDPOINTS", format!("http://{}", etcd.server())).env("ETCD_LEASE_TTL", "10");
    set_planes(&mut worker);
    worker.stdin(Stdio::null()).stdout(Stdio::null());
    Process(worker.spawn().expect("the worker starts"))
}

#[tokio::test]
#[ignore = "needs Dynamo, etcd and vLLM"]
async fn dynamo_tensors_match_vllm_processor() {
    let python = std::env::var_os("CHIASM_TEST_PYTHON");
    let models = std::env::var_os("CHIASM_TEST_MODELS");
    let Some((python, models)) = python.zip(models) else {
        eprintln!(
            "skipped: CHIASM_TEST_PYTHON and CHIASM_TEST_MODELS must be set to compare tensors \
             with those of vLLM's own processor"
        );
        return;
    };
    for (name, dtype, tensors) in [
        ("qwen25vl", "bfloat16", "tensors"),
        ("gemma3", "bfloat16", "tensors=bfloat16"),
        ("pixtral", "float32", "tensors=float32"),
    ] {
        let etcd = Etcd::start().await;
        let folder = tempfile::tempdir().expect("a folder");
        let model = Path::new(&models).join(name);
        let report = folder.path().join("report");
        let _worker = checking_worker(&etcd, Path::new(&python), &model, dtype, &report);
        let server = frontend(&etcd, &model, tensors, &[]);
        server.wait_ready(1, Duration::from_secs(180)).await;
        server.chat(&body(&[&DAWN], 1)).await.ok();
        server.chat(&body(&[&PICTURES[0], &PICTURES[1], &PICTURES[0]], 1)).await.ok();
        let lines = std::fs::read_to_string(&report).expect("a report");
        let lines: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!(lines.len(), 2, "{name}: {lines:?}");
        for (line, items) in lines.iter().zip([1, 3]) {
            assert_eq!(
                (&line["received"], &line["items"]),
                (&json!(true), &json!(items)),
                "{name}: {line}"
            );
            assert_eq!(line["differences"], json!([]), "{name}: {line}");
            assert!(line["elements"].as_u64().expect("a number") > 1000, "{name}: {line}");
            // The complete mm_hash, not the 64 bits of routing hashes.
            assert_eq!(line["hashes"][0].as_str().expect("a name").len(), 64, "{name}: {line}");
        }
        assert_eq!(server.metric("chiasm_distrusted_workers_total").await, 0.0, "{name}");
        wait_no_segments(server.pid()).await;
    }
    // Workers don't report the model's dtype, so the flag must name it.
    let model = Path::new(&models).join("gemma3").display().to_string();
    let output =
        chiasm(&["serve", &model, "--upstream", "dynamo+etcd://127.0.0.1:1/x,tensors"]).output();
    let output = output.expect("chiasm runs");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && stderr.contains("give tensors=bfloat16"), "{stderr}");
}
