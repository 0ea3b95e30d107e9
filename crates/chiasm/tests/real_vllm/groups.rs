//! Groups of engines that step together: data and expert parallelism on CPUs.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::environment::{
    ARENA_GB, BLOCK_SIZE, ENGINE_FLAGS, ENGINES, Environment, STARTUP_TIMEOUT, serve_flags,
};
use super::processes::{PROCESSES, descendants, engine_process, is_alive};
use super::requests::{assert_answers_match, family_requests};
use crate::support::{Server, scenario_run, send_signal, wait_for};

const MODEL: &str = "qwen3vl_moe";
const SIZE: u64 = 2;
/// The time within which all engines of a group have ended after one of them.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// The engines of a group give the answers of one engine. Each has a prefix cache of its own, which
/// the router knows. The end of one ends all, and nothing of them is remembered.
///
/// `CHIASM_TEST_GROUP_KILLS=30` kills as many engines as that, half of them while they are idle.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn group_matches_one_engine_and_restarts_as_a_whole() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let plugins = install_plugin();
    let requests = family_requests(&json!({"max_pixels": 50176}));
    let one = environment.serve(MODEL, "1", &[]);
    one.wait_ready(1, STARTUP_TIMEOUT).await;
    let mut reference = Vec::new();
    for request in &requests {
        reference.push(one.chat(request).await.ok());
    }
    drop(one);

    let server = serve(&environment, plugins.path());
    server.wait_ready(SIZE, STARTUP_TIMEOUT).await;
    assert_answers_match(&server, &requests, &reference).await;
    scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await;
    let inline = server.metric("chiasm_mm_transfer_total{mode=\"inline\"}").await;
    assert_eq!(inline, 0.0, "images reach engines through shared memory");
    assert!(server.metric("chiasm_mm_transfer_total{mode=\"shm\"}").await > 0.0);

    let kills = std::env::var("CHIASM_TEST_GROUP_KILLS").map_or(2, |kills| kills.parse().unwrap());
    for round in 0..kills {
        kill_one(&server, &requests[0], round).await;
        server.wait_ready(SIZE, STARTUP_TIMEOUT).await;
        assert_answers_match(&server, &requests[..1], &reference[..1]).await;
    }
    scenario_run::play_all_again("after", &server, "m", BLOCK_SIZE, 8).await;
    let family = descendants(server.pid());
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
    wait_for("the end of all processes", Duration::from_secs(10), async || {
        !family.iter().any(|&pid| is_alive(pid))
    })
    .await;
}

/// Installs the plugin for CPUs in a folder for `PYTHONPATH`.
fn install_plugin() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let info = folder.path().join("cpu_ep-0.1.dist-info");
    std::fs::create_dir(&info).expect("a folder");
    let write = |path: &Path, text: &str| std::fs::write(path, text).expect("a file");
    write(&folder.path().join("cpu_ep.py"), include_str!("cpu_ep.py"));
    write(&info.join("METADATA"), "Metadata-Version: 2.1\nName: cpu-ep\nVersion: 0.1\n");
    let entry_point = "[vllm.general_plugins]\ncpu_ep = cpu_ep:register\n";
    write(&info.join("entry_points.txt"), entry_point);
    folder
}

/// Starts a server with one group of engines.
fn serve(environment: &Environment, plugins: &Path) -> Server {
    let [(name, plugin)] = environment.variables();
    let path = format!("{plugin}:{}", plugins.display());
    let variables =
        [(name, path.as_str()), ("GLOO_SOCKET_IFNAME", "lo"), ("VLLM_HOST_IP", "127.0.0.1")];
    let mut args =
        [environment.model(MODEL).as_str(), "--engines", "1", "--vllm", &environment.vllm]
            .map(str::to_owned)
            .to_vec();
    args.extend(serve_flags("shm", ARENA_GB));
    args.extend(["--port", "0", "--"].map(str::to_owned));
    args.extend(ENGINE_FLAGS.iter().map(|&flag| flag.to_owned()));
    let group = ["--data-parallel-size", &SIZE.to_string(), "--enable-expert-parallel"];
    args.extend(group.map(str::to_owned));
    let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
    Server::start_with(&args, &variables)
}

/// Kills an engine: one that is idle, or one that computes beside a request of the other. Waits
/// until the whole group has ended.
async fn kill_one(server: &Server, request: &Value, round: usize) {
    let names = ["worker_0", "worker_1"];
    let engines = names.map(|worker| engine_process(server, worker, PROCESSES[0]));
    let is_idle = round.is_multiple_of(2);
    let kill_rank = async {
        let mut killed = round / 2 % 2;
        if !is_idle {
            let is_running = async || server.metric("chiasm_worker_running_requests").await == 1.0;
            wait_for("a running request", END_TIMEOUT, is_running).await;
            // The one without the request, which steps along.
            let second = "chiasm_worker_running_requests{worker=\"worker_1\"}";
            killed = usize::from(server.metric(second).await == 0.0);
        }
        send_signal(engines[killed], "KILL");
        wait_for("the end of the group", END_TIMEOUT, async || {
            server.ready_workers().await == 0 && !engines.iter().any(|&engine| is_alive(engine))
        })
        .await;
    };
    if is_idle {
        kill_rank.await;
    } else {
        let mut long = request.clone();
        long["max_tokens"] = json!(1000);
        long["ignore_eos"] = json!(true);
        let (answer, ()) = tokio::join!(server.chat(&long), kill_rank);
        assert_eq!(answer.status, 503, "there is no other engine");
    }
}
