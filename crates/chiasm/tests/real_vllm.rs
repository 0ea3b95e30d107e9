//! Real vLLM engines on CPU with tiny random models. `cargo xtask test` sets up the environment and
//! runs these tests.
//!
//! There are few tests, run one at a time: an engine takes a while to start, and several at once
//! slow each other down. Most of a start is Python's import of vLLM. So one process that has
//! imported vLLM forks `vllm serve`, whose answers are the reference, and all engines except those
//! of tests about launching; Chiasm attaches to them.
//!
//! `CHIASM_TEST_FAMILIES=llava,gemma3` restricts the tests to these image families.

mod adapters;
mod constrained;
mod environment;
mod groups;
mod modalities;
mod predictions;
mod processes;
mod prompts;
mod requests;
mod roles;
mod tools;
mod upgrade;
mod upstream;

use std::process::Command;
use std::time::Duration;

use chiasm::scenarios::STORM;
use serde_json::{Value, json};

use self::environment::{
    ARENA_GB, BLOCK_SIZE, ENGINES, Environment, ROOMY_ARENA_GB, STARTUP_TIMEOUT,
};
use self::processes::{PROCESSES, descendants, engine_process, is_alive};
use self::requests::{assert_answers_match, comparable_requests, family_requests, image, text};
use crate::support::{Server, scenario_run, send_signal, wait_for};

/// Kills the engine that has the only request. Checks that the request moves to the other engine
/// and that the killed engine is replaced.
async fn check_engine_replacement(server: &Server, process: &str) {
    let content = json!([image(STORM), text("the quick brown fox")]);
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 600,
        "ignore_eos": true,
        "temperature": 0,
    });
    let running = async || {
        server.metric("chiasm_worker_running_requests{worker=\"worker_0\"}").await
            + server.metric("chiasm_worker_running_requests{worker=\"worker_1\"}").await
    };
    let moved = server.metric("chiasm_retries_total").await;
    let (answer, after) = tokio::join!(server.chat(&body), async {
        wait_for("running request", STARTUP_TIMEOUT, async || running().await == 1.0).await;
        let busy = match server.metric("chiasm_worker_running_requests{worker=\"worker_0\"}").await
        {
            1.0 => "worker_0",
            _ => "worker_1",
        };
        send_signal(engine_process(server, busy, process), "KILL");
        wait_for("worker to leave", Duration::from_secs(20), async || {
            server.ready_workers().await == 1
        })
        .await
    });
    // Milliseconds on an idle machine. An engine that is merely silent is detected after 60 s
    // (--engine-hang-timeout).
    assert!(after < Duration::from_secs(10), "the death of {process} was detected after {after:?}");
    answer.ok();
    assert_eq!(
        server.metric("chiasm_retries_total").await,
        moved + 1.0,
        "the killed engine's request moved"
    );
    server.wait_ready(2, STARTUP_TIMEOUT).await;
    for worker in ["worker_0", "worker_1"] {
        assert!(PROCESSES.iter().all(|process| is_alive(engine_process(server, worker, process))));
    }
}

/// Runs scripts with the official client packages.
fn check_client_packages(environment: &Environment, server: &Server) {
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/images/dawn.jpg");
    let openai = format!("{}/v1", server.url);
    for (script, args) in [
        ("openai_client.py", &[openai.as_str(), picture][..]),
        ("openai_responses.py", &[&openai, picture]),
        ("anthropic_client.py", &[&server.url, "m", picture]),
    ] {
        run_client(&environment.python, script, args);
    }
}

/// Runs a script of the tests' folder and asserts that its exit status is 0.
fn run_client(python: &str, script: &str, args: &[&str]) {
    let script = format!("{}/tests/{script}", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(python).arg(script).args(args).output().expect("python runs");
    let streams =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}", streams.concat());
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn launched_engines_match_vllm_serve() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let requests = comparable_requests();

    let server = environment.serve("qwen2vl", "2", &[]);
    let vllm_serve = environment.reference("qwen2vl", &[]);
    let reference = vllm_serve.answers(&requests).await;
    server.wait_ready(2, STARTUP_TIMEOUT).await;
    assert_answers_match(&server, &requests, &reference).await;
    let answers = scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await;
    // The requests again. The engines' receiver caches still hold some of the images.
    assert_answers_match(&server, &requests, &reference).await;
    // The total does not depend on how the router broke ties, but the share of each mode does.
    let cached = transfers(&server, "cached").await;
    let shm = transfers(&server, "shm").await;
    assert!(cached + shm >= 20.0, "{cached} cached, {shm} in shared memory");
    assert!(cached >= 4.0 && shm >= 4.0, "{cached} cached, {shm} in shared memory");
    assert_eq!(transfers(&server, "inline").await, 0.0, "every slot came back in time");
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0, "the mirrors are exact");
    check_client_packages(&environment, &server);
    for process in PROCESSES {
        check_engine_replacement(&server, process).await;
    }
    // The new engines have new arenas. Answers are still correct.
    assert_answers_match(&server, &requests, &reference).await;
    assert_eq!(transfers(&server, "inline").await, 0.0);
    let family = descendants(server.pid());
    assert!(family.len() > 4, "engines are children: {family:?}");
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
    // Helpers outside the engines' process groups end when they notice it.
    wait_for("the end of all processes", Duration::from_secs(10), async || {
        !family.iter().any(|&pid| is_alive(pid))
    })
    .await;

    upstream::check_two_servers(&environment, vllm_serve, &answers).await;
    check_other_transfer_modes(&environment, &answers).await;

    check_engine(&environment, "qwen3vl", &requests, &[]).await;
}

/// Returns the number of items transferred in `mode`.
async fn transfers(server: &Server, mode: &str) -> f64 {
    server.metric(&format!("chiasm_mm_transfer_total{{mode=\"{mode}\"}}")).await
}

/// Checks that other modes of `--mm-transfer` give the same answers to the scenarios.
async fn check_other_transfer_modes(environment: &Environment, answers: &[String]) {
    for (mode, flags) in [
        // Without a worker process, the model reads slots directly. A worker process gets copies
        // from the engine.
        ("auto", &["--distributed-executor-backend", "uni"][..]),
        ("inline", &[]),
        ("off", &[]),
    ] {
        // The engine must be launched with the mode "off", too: it then has no cache.
        let (server, attached) = if mode == "off" {
            (environment.serve_in_mode(mode, "qwen2vl", "1", flags), None)
        } else {
            let (server, engine) = environment.attach(mode, ARENA_GB, "qwen2vl", flags);
            (server, Some(engine))
        };
        server.wait_ready(1, STARTUP_TIMEOUT).await;
        assert_eq!(scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await, answers, "{mode}");
        let cached = transfers(&server, "cached").await;
        let shm = transfers(&server, "shm").await;
        let inline = transfers(&server, "inline").await;
        let is_expected = match mode {
            "auto" => cached > 0.0 && shm > 0.0 && inline == 0.0,
            "inline" => cached > 0.0 && shm == 0.0 && inline > 0.0,
            _ => cached == 0.0 && shm == 0.0 && inline > 0.0,
        };
        assert!(is_expected, "{mode}: {cached} cached, {shm} in shared memory, {inline} inline");
        assert!(
            server.terminate(Duration::from_secs(60)).await,
            "SIGTERM ends it with exit code 0"
        );
        drop(attached);
    }
}

/// Checks an attached engine, and `vllm serve` as an upstream, against `vllm serve` alone.
async fn check_engine(environment: &Environment, model: &str, requests: &[Value], flags: &[&str]) {
    // `vllm serve` and the engine start at the same time.
    let vllm_serve = environment.reference(model, flags);
    let (mut server, engine) = environment.attach("shm", ROOMY_ARENA_GB, model, flags);
    let reference = vllm_serve.answers(requests).await;
    upstream::check_server(environment, model, &vllm_serve, requests, &reference).await;
    drop(vllm_serve);
    server.wait_ready(1, STARTUP_TIMEOUT).await;
    assert_answers_match(&server, requests, &reference).await;
    // The next frontend takes the engine over with its caches, and gives it new shared memory.
    server.signal_and_wait("KILL");
    let server = engine.serve();
    server.wait_ready(1, STARTUP_TIMEOUT).await;
    server.wait_for_log("took over an engine");
    assert_answers_match(&server, requests, &reference).await;
    assert_eq!(transfers(&server, "inline").await, 0.0);
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
}

/// The other image families, one engine each, give the same prompt tokens and the same new tokens
/// as `vllm serve`.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn image_families_match_vllm_serve() {
    // Serialized with the other tests: engines slow each other down.
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let chosen = std::env::var("CHIASM_TEST_FAMILIES").ok();
    for (model, kwargs, flags) in [
        ("llava", json!({}), &[][..]),
        ("llava_next", json!({}), &[]),
        ("gemma3", json!({"do_pan_and_scan": true, "pan_and_scan_min_crop_size": 32}), &[]),
        ("llama4", json!({"resize_to_max_canvas": true}), &[]),
        ("pixtral", json!({}), &[]),
        ("mistral3", json!({"size": {"longest_edge": 84}}), &[]),
        ("internvl", json!({"max_patches": 3}), &[]),
        // vLLM fails every request with kwargs for a model that also takes videos.
        ("internvl_chat", json!({}), &["--trust-remote-code"]),
        ("qwen3vl_moe", json!({"max_pixels": 50176}), &[]),
        // The model's linear attention runs in bfloat16 only.
        ("qwen35", json!({"max_pixels": 50176}), &["--dtype", "bfloat16"]),
    ] {
        if chosen.as_ref().is_some_and(|chosen| !chosen.split(',').any(|name| name == model)) {
            continue;
        }
        check_engine(&environment, model, &family_requests(&kwargs), flags).await;
    }
}
