//! Groups of engines that step together, with simulated engines in place of vLLM's.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Server, chiasm, demo_model, scenario_run, send_signal, wait_for};

const TIMEOUT: Duration = Duration::from_secs(60);
const SIZE: u64 = 3;
const BLOCK: u64 = 16;

/// A copy of the demo's model whose configuration has experts.
fn model_with_experts() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(demo_model()).expect("a model").flatten() {
        std::fs::copy(file.path(), folder.path().join(file.file_name())).expect("a copy");
    }
    let path = folder.path().join("config.json");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    config["num_experts"] = json!(8);
    std::fs::write(&path, config.to_string()).expect("a file");
    folder
}

/// Starts a server that launches a group of engines.
fn serve(model: &Path, flags: &[&str]) -> Server {
    let model = model.display().to_string();
    let vllm = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in_vllm.sh");
    let args = [&model, "--served-model-name", "m", "--engines", "1", "--vllm", vllm];
    let size = SIZE.to_string();
    let group = ["--port", "0", "--", "--data-parallel-size", &size, "--enable-expert-parallel"];
    let variables =
        [("CHIASM_TEST_BINARY", env!("CARGO_BIN_EXE_chiasm")), ("CHIASM_TEST_SPEEDUP", "20")];
    Server::start_with(&[&args[..], flags, &group].concat(), &variables)
}

/// Returns the process ids of the ranks' latest engines.
fn engines(server: &Server) -> Vec<u32> {
    let rank = |rank| {
        let line = format!("engine process started worker=worker_{rank} process_group=");
        server.wait_for_log(&line).parse().expect("a process id")
    };
    (0..SIZE).map(rank).collect()
}

fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

/// Waits until the engines have ended, and a new group is ready.
async fn wait_replaced(server: &Server, engines: &[u32]) {
    wait_for("the end of all engines", TIMEOUT, async || {
        !engines.iter().any(|&pid| is_running(pid))
    })
    .await;
    server.wait_ready(SIZE, TIMEOUT).await;
    for (new, old) in self::engines(server).iter().zip(engines) {
        assert_ne!(new, old);
    }
}

#[tokio::test]
async fn end_of_one_engine_restarts_its_group() {
    let model = model_with_experts();
    let flags = ["--engine-timeout", "1", "--engine-hang-timeout", "3", "--allow-private-media"];
    let server = serve(model.path(), &flags);
    server.wait_ready(SIZE, TIMEOUT).await;
    scenario_run::play_all(&server, "m", BLOCK, 8).await;

    // Idle engines notice nothing of the end of another one.
    let first = engines(&server);
    send_signal(first[1], "KILL");
    wait_replaced(&server, &first).await;
    scenario_run::play_all_again("killed while idle", &server, "m", BLOCK, 8).await;

    let second = engines(&server);
    let long = json!({"model": "m", "prompt": "a", "max_tokens": 4000, "ignore_eos": true});
    let (answer, ()) = tokio::join!(server.post("/v1/completions", &long), async {
        let running = async || server.metric("chiasm_worker_running_requests").await == 1.0;
        wait_for("a running request", TIMEOUT, running).await;
        send_signal(second[2], "KILL");
        wait_replaced(&server, &second).await;
    });
    assert_eq!(answer.status, 503, "there is no other group: {}", answer.text);

    // A stopped engine answers no probe.
    let third = engines(&server);
    // Not a child of this process, so it can't be waited for.
    let stopped = Command::new("kill").args(["-STOP", &third[0].to_string()]).status();
    assert!(stopped.expect("kill").success());
    wait_replaced(&server, &third).await;
    scenario_run::play_all_again("stopped", &server, "m", BLOCK, 8).await;
    assert!(server.terminate(TIMEOUT).await, "SIGTERM ends it with exit code 0");
}

#[tokio::test]
async fn simulated_engines_form_a_group_inside_this_process() {
    let model = demo_model().display().to_string();
    let args = [&model, "--served-model-name", "m", "--sim", "1", "--allow-private-media"];
    let group = ["--port", "0", "--", "--data-parallel-size", "3"];
    let server = Server::start(&[&args[..], &group].concat());
    server.wait_ready(SIZE, TIMEOUT).await;
    scenario_run::play_all(&server, "m", BLOCK, 8).await;
}

#[test]
fn unsupported_flags_are_refused_by_name() {
    let dense = demo_model().display().to_string();
    let experts = model_with_experts();
    let experts = experts.path().display().to_string();
    let launch = ["--engines", "1"];
    let prefill = ["--sim", "prefill=1,decode=1"];
    for (model, engines, group, expected) in [
        (&dense, ["--attach", "tcp://127.0.0.1:1"], &[][..], "Chiasm starts all engines"),
        (&dense, prefill, &[], "compute whole requests"),
        (&dense, ["--sim", "1"], &["--enable-lora"], "apply the wrong adapter"),
        (&experts, launch, &["--device-ids", "0,1"], "taken in order from CUDA_VISIBLE_DEVICES"),
        (&experts, launch, &["--distributed-executor-backend", "ray"], "Ray chooses the GPUs"),
        (&experts, launch, &["--config", "/dev/null"], "give them after --"),
    ] {
        let args = ["serve", model, "--vllm", "/bin/true", "--port", "0"];
        let group = [&["--", "--data-parallel-size", "2"][..], group].concat();
        let output = chiasm(&[&args[..], &engines, &group].concat()).output().expect("chiasm");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(expected), "{group:?}: {error}");
    }
    for (model, flags, group, expected) in [
        (&dense, &[][..], &[][..], "Use --engines 2 instead"),
        (&experts, &[], &["--enable-elastic-ep"], "can't change while they run"),
        (&experts, &[], &["--enable-fault-tolerance"], "starts again as a whole"),
        (&experts, &[], &["--enable-lora"], "apply the wrong adapter"),
        (&experts, &["--lora-modules", "a=/adapter"], &[], "apply the wrong adapter"),
        (&experts, &["--keep-engines", "60"], &[], "a group ends with this process"),
        (&experts, &["--share-gpu"], &[], "start at the same time"),
        (&experts, &[], &["--data-parallel-backend", "ray"], "Chiasm starts all engines"),
        (&experts, &["--gpus-per-engine", "3"], &[], "can't be divided among the 2 engines"),
        (&experts, &[], &["--data-parallel-size", "65"], "must be from 1 to 64"),
    ] {
        let args = ["serve", model, "--engines", "1", "--vllm", "/bin/true", "--port", "0"];
        let args = [&args[..], flags, &["--", "--data-parallel-size", "2"], group].concat();
        let output = chiasm(&args).output().expect("chiasm");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(expected), "{args:?}: {error}");
    }
}
