//! Images as tensors in shared memory: that they are what Dynamo's worker for vLLM reads, and that
//! nothing of them stays.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use base64::Engine;
use chiasm::scenarios::{self, DAWN, PICTURES, Picture};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::mocker::{Mocker, planes};
use super::{NAMESPACE, SOON};
use crate::support::etcd::Etcd;
use crate::support::origin::Origin;
use crate::support::{Process, Server, chiasm, demo_model, wait_for};

/// A frontend that gives images to workers of this machine as tensors.
fn frontend(etcd: &Etcd, model: &Path, tensors: &str, more: &[&str]) -> Server {
    let (model, url) = (
        model.display().to_string(),
        format!("dynamo+etcd://{}/{NAMESPACE},{tensors}", etcd.server()),
    );
    let args = [&model, "--served-model-name", "m", "--upstream", &url, "--allow-private-media"];
    Server::start(&[&args, more].concat())
}

fn url(picture: &Picture) -> String {
    format!(
        "data:image/jpeg;base64,{}",
        base64::engine::general_purpose::STANDARD.encode(picture.jpeg)
    )
}

fn ask(pictures: &[&Picture], tokens: u32) -> Value {
    let image =
        |picture: &&Picture| json!({"type": "image_url", "image_url": {"url": url(picture)}});
    let mut content: Vec<Value> = pictures.iter().map(image).collect();
    content.push(json!({"type": "text", "text": "What is there?"}));
    json!({"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "ignore_eos": true})
}

/// What a frontend has in shared memory. It has no engines, so all of it is tensors for workers.
fn segments(pid: u32) -> Vec<PathBuf> {
    let ours = format!("chiasm.{pid}.");
    let all = std::fs::read_dir("/dev/shm").expect("shared memory").flatten();
    all.filter(|entry| entry.file_name().to_string_lossy().starts_with(&ours))
        .map(|entry| entry.path())
        .collect()
}

/// Looks for what a frontend has in shared memory, over and over, and keeps the largest number.
struct Watch {
    most: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
    looking: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    fn start(pid: u32) -> Self {
        let (most, stop) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let looking = std::thread::spawn({
            let (most, stop) = (most.clone(), stop.clone());
            move || {
                while !stop.load(Relaxed) {
                    most.fetch_max(segments(pid).len(), Relaxed);
                    std::thread::sleep(Duration::from_micros(200));
                }
            }
        });
        Self { most, stop, looking: Some(looking) }
    }

    fn most(mut self) -> usize {
        self.stop.store(true, Relaxed);
        self.looking.take().expect("it looks").join().expect("it looked");
        self.most.load(Relaxed)
    }
}

async fn nothing_left(pid: u32) {
    wait_for("empty shared memory", SOON, async || segments(pid).is_empty()).await;
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn the_ten_scenarios_leave_nothing_in_shared_memory() {
    let etcd = Etcd::start().await;
    let _mockers = [Mocker::start(&etcd, NAMESPACE), Mocker::start(&etcd, NAMESPACE)];
    let server = frontend(&etcd, &demo_model(), "tensors", &[]);
    server.wait_ready(2, SOON).await;
    let (origin, watch) = (Origin::start().await, Watch::start(server.pid()));
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
    // Many at once, all of them whole.
    let mut clients = JoinSet::new();
    for number in 0..24 {
        let request = server.client.post(format!("{}/v1/chat/completions", server.url));
        let pictures =
            [&PICTURES[number % PICTURES.len()], &PICTURES[(number + 1) % PICTURES.len()]];
        let request =
            request.header("content-type", "application/json").body(ask(&pictures, 16).to_string());
        clients.spawn(async move { request.send().await.expect("an answer").status() });
    }
    while let Some(status) = clients.join_next().await {
        assert_eq!(status.expect("no panic"), 200);
    }
    let most = watch.most();
    assert!(images >= 10 && most >= 2, "{images} requests with images, {most} segments at a time");
    nothing_left(server.pid()).await;
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn tensors_go_with_their_request_and_those_of_a_killed_frontend_with_the_next_one() {
    let etcd = Etcd::start().await;
    let mocker = Mocker::start(&etcd, NAMESPACE);
    let mut server = frontend(&etcd, &demo_model(), "tensors", &[]);
    server.wait_ready(1, SOON).await;
    mocker.signal("STOP");
    // Nobody reads it and its client leaves.
    let waiting = |server: &Server| {
        let request = server.client.post(format!("{}/v1/chat/completions", server.url));
        tokio::spawn(
            request
                .header("content-type", "application/json")
                .body(ask(&[&DAWN], 4).to_string())
                .send(),
        )
    };
    let client = waiting(&server);
    wait_for("tensors", SOON, async || !segments(server.pid()).is_empty()).await;
    client.abort();
    nothing_left(server.pid()).await;

    let client = waiting(&server);
    wait_for("tensors", SOON, async || !segments(server.pid()).is_empty()).await;
    let pid = server.pid();
    server.end_by("KILL");
    drop(client);
    assert!(!segments(pid).is_empty(), "nobody could remove them");
    let _next = frontend(&etcd, &demo_model(), "tensors", &[]);
    nothing_left(pid).await;
    mocker.signal("CONT");
}

#[tokio::test]
#[ignore = "needs Dynamo and etcd"]
async fn what_finds_no_room_goes_as_it_came_and_is_counted() {
    let etcd = Etcd::start().await;
    let _mocker = Mocker::start(&etcd, NAMESPACE);
    let server = frontend(&etcd, &demo_model(), "tensors", &["--dynamo-tensors-gb", "0.000001"]);
    server.wait_ready(1, SOON).await;
    let answer = server.chat(&ask(&[&DAWN], 4)).await;
    answer.ok();
    assert_eq!(answer.header("x-chiasm-transfer"), "inline");
    assert_eq!(
        server.metric("chiasm_mm_transfer_fallback_total{cause=\"parcels_full\"}").await,
        1.0
    );
    assert_eq!(segments(server.pid()).len(), 0);
}

/// A worker that reads tensors with Dynamo's own code and holds them against vLLM's own processor.
fn checking_worker(
    etcd: &Etcd,
    python: &Path,
    model: &Path,
    dtype: &str,
    report: &Path,
) -> Process {
    let dynamo = std::env::var_os("CHIASM_TEST_DYNAMO")
        .expect("CHIASM_TEST_DYNAMO has to name the Python with Dynamo");
    let site = Command::new(dynamo)
        .args(["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"])
        .output();
    let site = String::from_utf8(site.expect("Dynamo's Python runs").stdout).expect("a path");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dynamo/tensors_worker.py");
    let mut worker = Command::new(python);
    worker.arg("-B").arg(script).arg(site.trim()).arg(model).arg(dtype);
    worker.arg(format!("{NAMESPACE}.backend.generate")).arg(report);
    worker.env("ETCD_ENDPOINTS", format!("http://{}", etcd.server())).env("ETCD_LEASE_TTL", "10");
    planes(&mut worker);
    worker.stdin(Stdio::null()).stdout(Stdio::null());
    Process(worker.spawn().expect("the worker starts"))
}

#[tokio::test]
#[ignore = "needs Dynamo, etcd and vLLM"]
async fn dynamo_reads_what_vllm_s_own_processor_makes() {
    let (Some(python), Some(models)) =
        (std::env::var_os("CHIASM_TEST_PYTHON"), std::env::var_os("CHIASM_TEST_MODELS"))
    else {
        eprintln!(
            "not run: CHIASM_TEST_PYTHON names no Python with vLLM, or CHIASM_TEST_MODELS no tiny models, so that nothing has \
             compared tensors with those of vLLM's own processor"
        );
        return;
    };
    for (name, dtype, tensors) in [
        ("qwen25vl", "bfloat16", "tensors"),
        ("gemma3", "bfloat16", "tensors=bfloat16"),
        ("pixtral", "float32", "tensors=float32"),
    ] {
        let (etcd, folder) = (Etcd::start().await, tempfile::tempdir().expect("a folder"));
        let (model, report) = (Path::new(&models).join(name), folder.path().join("report"));
        let _worker = checking_worker(&etcd, Path::new(&python), &model, dtype, &report);
        let server = frontend(&etcd, &model, tensors, &[]);
        server.wait_ready(1, Duration::from_secs(180)).await;
        server.chat(&ask(&[&DAWN], 1)).await.ok();
        server.chat(&ask(&[&PICTURES[0], &PICTURES[1], &PICTURES[0]], 1)).await.ok();
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
            // The whole identity, not the 64 bits of routing hashes.
            assert_eq!(line["hashes"][0].as_str().expect("a name").len(), 64, "{name}: {line}");
        }
        assert_eq!(server.metric("chiasm_distrusted_workers_total").await, 0.0, "{name}");
        nothing_left(server.pid()).await;
    }
    // What the worker runs the model in is not told.
    let model = Path::new(&models).join("gemma3").display().to_string();
    let refused =
        chiasm(&["serve", &model, "--upstream", "dynamo+etcd://127.0.0.1:1/x,tensors"]).output();
    let refused = refused.expect("it runs");
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && words.contains("say tensors=bfloat16"), "{words}");
}
