//! Real vLLM engines on CPU with tiny random models. `cargo xtask test` sets up what this needs and
//! runs it.
//!
//! Few tests, one at a time, because an engine takes a while to start and several at once slow each
//! other down. Most of a start is Python importing vLLM. So `vllm serve`, which answers are
//! compared with, and the engines of whatever is not about launching engines come from one process
//! that has imported it; Chiasm attaches to these engines. `CHIASM_TEST_FAMILIES=llava,gemma3` runs
//! these image families only.

mod adapters;
mod constrained;
mod environment;
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

use self::environment::{ARENA_GB, BLOCK_SIZE, ENGINES, Environment, ROOMY_ARENA_GB, STARTUP};
use self::processes::{PROCESSES, descendants, engine_process, is_alive};
use self::requests::{
    answers_are_those_of_vllm_serve, comparable_requests, family_requests, image, text,
};
use crate::support::{Server, scenario_run, send_signal, wait_for};

/// Kills the engine that has the only request, which then moves to the other one.
async fn a_killed_engine_is_replaced(server: &Server, process: &str) {
    let body = json!({
        "model": "m", "messages": [{"role": "user", "content": [image(STORM), text("the quick brown fox")]}],
        "max_tokens": 600, "ignore_eos": true, "temperature": 0,
    });
    let running = async || {
        server.metric("chiasm_worker_running_requests{worker=\"worker_0\"}").await
            + server.metric("chiasm_worker_running_requests{worker=\"worker_1\"}").await
    };
    let moved = server.metric("chiasm_retries_total").await;
    let (answer, after) = tokio::join!(server.chat(&body), async {
        wait_for("running request", STARTUP, async || running().await == 1.0).await;
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
    // Milliseconds on an idle machine. An engine that is merely silent is found after 60 s
    // (--engine-hang-timeout).
    assert!(after < Duration::from_secs(10), "it took {after:?} to notice the death of {process}");
    answer.ok();
    assert_eq!(
        server.metric("chiasm_retries_total").await,
        moved + 1.0,
        "the killed engine's request moved"
    );
    server.wait_ready(2, STARTUP).await;
    for worker in ["worker_0", "worker_1"] {
        assert!(PROCESSES.iter().all(|process| is_alive(engine_process(server, worker, process))));
    }
}

fn the_packages_of_clients_work(environment: &Environment, server: &Server) {
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

/// Runs a script of the tests' folder, which fails by its exit status.
fn run_client(python: &str, script: &str, args: &[&str]) {
    let script = format!("{}/tests/{script}", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(python).arg(script).args(args).output().expect("python runs");
    let told =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}", told.concat());
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn real_engines_do_what_is_promised() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let requests = comparable_requests();

    let server = environment.serve("qwen2vl", "2", &[]);
    let vllm_serve = environment.reference("qwen2vl", &[]);
    let reference = vllm_serve.answers(&requests).await;
    server.wait_ready(2, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    let answers = scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await;
    // Now with images from the engines' receiver caches, which by now have evicted some.
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    // How many travel does not depend on which engine ties went to; how many of them in which way
    // does.
    let (cached, shm) = (travelled(&server, "cached").await, travelled(&server, "shm").await);
    assert!(cached + shm >= 20.0, "{cached} cached, {shm} in shared memory");
    assert!(cached >= 4.0 && shm >= 4.0, "{cached} cached, {shm} in shared memory");
    assert_eq!(travelled(&server, "inline").await, 0.0, "every slot came back in time");
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0, "the mirrors are exact");
    the_packages_of_clients_work(&environment, &server);
    for process in PROCESSES {
        a_killed_engine_is_replaced(&server, process).await;
    }
    // The new engines have new arenas, and the answers are still right.
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    assert_eq!(travelled(&server, "inline").await, 0.0);
    let family = descendants(server.pid());
    assert!(family.len() > 4, "engines are children: {family:?}");
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
    let left: Vec<_> = family.into_iter().filter(|&pid| is_alive(pid)).collect();
    assert!(left.is_empty(), "left behind: {left:?}");

    upstream::two_servers_are_predicted_exactly(&environment, vllm_serve, &answers).await;
    other_modes_give_the_same_answers(&environment, &answers).await;

    one_engine_answers_as_vllm_serve(&environment, "qwen3vl", &requests, &[]).await;
}

/// Items that travelled in this way.
async fn travelled(server: &Server, mode: &str) -> f64 {
    server.metric(&format!("chiasm_mm_transfer_total{{mode=\"{mode}\"}}")).await
}

async fn other_modes_give_the_same_answers(environment: &Environment, answers: &[String]) {
    for (mode, flags) in [
        // Without a worker process: that one gets copies from the engine, here the model reads the
        // slots themselves.
        ("auto", &["--distributed-executor-backend", "uni"][..]),
        ("inline", &[]),
        ("off", &[]),
    ] {
        // Off is how engines are launched too: without a cache.
        let (server, attached) = match mode {
            "off" => (environment.serve_in_mode(mode, "qwen2vl", "1", flags), None),
            _ => {
                let (server, engine) = environment.attach(mode, ARENA_GB, "qwen2vl", flags);
                (server, Some(engine))
            }
        };
        server.wait_ready(1, STARTUP).await;
        assert_eq!(scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await, answers, "{mode}");
        let (cached, shm, inline) = (
            travelled(&server, "cached").await,
            travelled(&server, "shm").await,
            travelled(&server, "inline").await,
        );
        let as_promised = match mode {
            "auto" => cached > 0.0 && shm > 0.0 && inline == 0.0,
            "inline" => cached > 0.0 && shm == 0.0 && inline > 0.0,
            _ => cached == 0.0 && shm == 0.0 && inline > 0.0,
        };
        assert!(as_promised, "{mode}: {cached} cached, {shm} in shared memory, {inline} inline");
        assert!(
            server.terminate(Duration::from_secs(60)).await,
            "SIGTERM ends it with exit code 0"
        );
        drop(attached);
    }
}

async fn one_engine_answers_as_vllm_serve(
    environment: &Environment,
    model: &str,
    requests: &[Value],
    flags: &[&str],
) {
    // Both start at the same time.
    let reference = environment.reference(model, flags);
    let (mut server, engine) = environment.attach("shm", ROOMY_ARENA_GB, model, flags);
    let vllm_serve = reference;
    let reference = vllm_serve.answers(requests).await;
    upstream::a_server_answers_through_us_as_by_itself(
        environment,
        model,
        &vllm_serve,
        requests,
        &reference,
    )
    .await;
    drop(vllm_serve);
    server.wait_ready(1, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, requests, &reference).await;
    // The next frontend takes the engine over, with all that it holds, and gives it other shared
    // memory.
    server.end_by("KILL");
    let server = engine.serve();
    server.wait_ready(1, STARTUP).await;
    server.logged("took over an engine");
    answers_are_those_of_vllm_serve(&server, requests, &reference).await;
    assert_eq!(travelled(&server, "inline").await, 0.0);
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
}

/// The other image families, one engine each: the same prompt tokens and the same new tokens as
/// `vllm serve`.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn every_image_family_answers_as_vllm_serve_does() {
    // One after the other with the test above: engines slow each other down.
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
        // Beside a text model that also takes videos, vLLM fails every request with kwargs.
        ("internvl_chat", json!({}), &["--trust-remote-code"]),
        ("qwen3vl_moe", json!({"max_pixels": 50176}), &[]),
        // Its linear attention runs in bfloat16 only.
        ("qwen35", json!({"max_pixels": 50176}), &["--dtype", "bfloat16"]),
    ] {
        if chosen.as_ref().is_some_and(|chosen| !chosen.split(',').any(|name| name == model)) {
            continue;
        }
        one_engine_answers_as_vllm_serve(&environment, model, &family_requests(&kwargs), flags)
            .await;
    }
}
