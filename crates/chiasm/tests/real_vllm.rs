//! Real vLLM engines on CPU with tiny random models. `cargo xtask test` sets up what this needs and runs it.
//!
//! Few tests, one at a time, because an engine takes a while to start and several at once slow each other down. Most of a start
//! is Python importing vLLM. So `vllm serve`, which answers are compared with, and the engines of whatever is not about launching
//! engines come from one process that has imported it; Chiasm attaches to these engines.
//! `CHIASM_TEST_FAMILIES=llava,gemma3` runs these image families only.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

mod support;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, DUSK, NIGHT, Picture, SNOW, STORM};
use chiasm_engine::SocketDir;
use chiasm_engine::launch::{KvEventEndpoints, LaunchSpec};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use support::vllm_serves::{Group, VllmServes};
use support::{Server, free_port, scenario_run, send_signal, wait_for};
use tempfile::TempDir;

/// Engines start one after the other on a small machine.
const STARTUP: Duration = Duration::from_secs(240);
const BLOCK_SIZE: u64 = 32;
/// Holds some five of the pictures, so that engines evict.
const RECEIVER_CACHE_GB: f64 = 0.002;
/// Holds some twelve of the pictures: slots are used again and again.
const ARENA_GB: &str = "0.005";
/// Holds every picture as any family's tensors, of which those in tiles take ten times as much.
const ROOMY_ARENA_GB: &str = "0.1";
/// What a CPU engine with a tiny model needs, also when `vllm serve` starts it.
const ENGINE_FLAGS: &[&str] =
    &["--enforce-eager", "--block-size", "32", "--max-model-len", "4096", "--dtype", "float32"];

/// What `cargo xtask test` provides.
struct Environment {
    vllm: String,
    python: String,
    models: PathBuf,
    /// Where the plugin is installed.
    plugin: String,
}

impl Environment {
    fn read() -> Self {
        let variable =
            |name| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run `cargo xtask test`"));
        Self {
            vllm: variable("CHIASM_TEST_VLLM"),
            python: variable("CHIASM_TEST_PYTHON"),
            models: variable("CHIASM_TEST_MODELS").into(),
            plugin: variable("CHIASM_TEST_PLUGIN"),
        }
    }

    fn model(&self, name: &str) -> String {
        self.models.join(name).display().to_string()
    }

    /// Launches engines with the plugin.
    fn serve(&self, model: &str, engines: &str, flags: &[&str]) -> Server {
        self.serve_in_mode("shm", model, engines, flags)
    }

    fn serve_in_mode(&self, mode: &str, model: &str, engines: &str, flags: &[&str]) -> Server {
        let model = self.model(model);
        let mut args = [model.as_str(), "--engines", engines, "--vllm", &self.vllm].map(str::to_owned).to_vec();
        args.extend(serve_flags(mode, ARENA_GB));
        args.extend([&["--port", "0", "--"], ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned));
        let args: Vec<&str> = args.iter().map(AsRef::as_ref).collect();
        Server::start_with(&args, &[("PYTHONPATH", &self.plugin)])
    }

    /// Attaches to an engine with the plugin, that was started with the flags with which it would have been launched.
    fn attach(&self, mode: &str, arena_gb: &str, model: &str, flags: &[&str]) -> (Server, AttachedEngine) {
        let (sockets, handshake) = (SocketDir::new().expect("a folder"), format!("tcp://127.0.0.1:{}", free_port()));
        let mut spec = LaunchSpec::new("engine", &self.vllm, self.model(model), &handshake);
        spec.receiver_cache_gb = RECEIVER_CACHE_GB;
        spec.kv_events = Some(KvEventEndpoints::ipc(&sockets));
        spec.extra_args = [ENGINE_FLAGS, flags].concat().into_iter().map(str::to_owned).collect();
        let arguments = spec.arguments().expect("flags that engines take");
        let engine = vllm_serves().serve(&arguments[1..], Some(&self.plugin), false);
        let state = tempfile::tempdir().expect("a folder");
        let attach = [self.model(model), "--attach".to_owned(), handshake];
        let keep = ["--state-dir".to_owned(), state.path().display().to_string()];
        let args = [&attach[..], &keep, &serve_flags(mode, arena_gb)].concat();
        let engine = AttachedEngine { _group: engine, _sockets: sockets, _state: state, args };
        (engine.serve(), engine)
    }

    /// Starts what answers are compared with.
    fn reference(&self, model: &str, flags: &[&str]) -> Reference {
        let (model, port) = (self.model(model), free_port().to_string());
        let own = [model.as_str(), "--served-model-name", "m", "--host", "127.0.0.1", "--port", &port];
        let arguments = [&own[..], ENGINE_FLAGS, &["--trust-request-mm-kwargs"], flags].concat();
        let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
        Reference { url: format!("http://127.0.0.1:{port}"), _server: vllm_serves().serve(&arguments, None, true) }
    }
}

/// Flags of `chiasm serve` that do not depend on where engines come from.
fn serve_flags(mode: &str, arena_gb: &str) -> Vec<String> {
    let cache = RECEIVER_CACHE_GB.to_string();
    let flags = ["--served-model-name", "m", "--receiver-cache-gb", &cache, "--mm-transfer", mode, "--mm-arena-gb"];
    [&flags[..], &[arena_gb, "--allow-private-media"]].concat().into_iter().map(str::to_owned).collect()
}

/// The one process that has imported vLLM. Ends with the tests: then its input does.
fn vllm_serves() -> std::sync::MutexGuard<'static, VllmServes> {
    static ONE: LazyLock<Mutex<VllmServes>> =
        LazyLock::new(|| Mutex::new(VllmServes::start(&Environment::read().python)));
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An engine that a server attaches to. Killed when dropped.
struct AttachedEngine {
    _group: Group,
    _sockets: SocketDir,
    _state: TempDir,
    /// Those of its frontends.
    args: Vec<String>,
}

impl AttachedEngine {
    /// Starts a frontend for it.
    fn serve(&self) -> Server {
        let args: Vec<&str> = self.args.iter().map(AsRef::as_ref).collect();
        Server::start(&args)
    }
}

/// A `vllm serve` that starts.
struct Reference {
    url: String,
    _server: Group,
}

impl Reference {
    /// Waits until it is ready; token ids that it gives for each request, and those of the prompt. Then it ends.
    async fn answers(self, requests: &[Value]) -> Vec<(Value, Value)> {
        let client = support::client();
        let is_healthy = async || client.get(format!("{}/health", self.url)).send().await.is_ok();
        wait_for("vllm serve", STARTUP, is_healthy).await;
        let mut answers = Vec::new();
        for request in requests {
            let response = client
                .post(format!("{}/v1/chat/completions", self.url))
                .header("content-type", "application/json")
                .body(request.to_string())
                .send()
                .await
                .expect("vllm serve answers");
            answers.push(ids(&support::json(response).await));
        }
        answers
    }
}

/// New token ids and prompt token ids of an answer.
fn ids(answer: &Value) -> (Value, Value) {
    let new = answer["choices"][0]["token_ids"].clone();
    assert!(new.as_array().is_some_and(|ids| !ids.is_empty()), "{answer}");
    (new, answer["prompt_token_ids"].clone())
}

fn image(picture: Picture) -> Value {
    let url = format!("data:image/jpeg;base64,{}", STANDARD.encode(picture.jpeg));
    json!({"type": "image_url", "image_url": {"url": url}})
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// Requests that are answered the same by `vllm serve`: greedy, 16 tokens.
fn comparable_requests() -> Vec<Value> {
    let ask = |content: Value| {
        json!({
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 16, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        })
    };
    let mut with_system = ask(json!("the quick brown fox"));
    with_system["messages"] = json!([
        {"role": "system", "content": "you are a helpful assistant"},
        {"role": "user", "content": "describe the lazy dog briefly"},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": [text("and äöü 日本 🙂?")]},
    ]);
    let mut small = ask(json!([image(DUSK), text("describe this image briefly.")]));
    small["mm_processor_kwargs"] = json!({"max_pixels": 50176, "min_pixels": 3136});
    let mut penalised = ask(json!("the quick brown fox jumps"));
    penalised["repetition_penalty"] = json!(1.3);
    penalised["min_tokens"] = json!(4);
    vec![
        ask(json!("the quick brown fox jumps over the lazy dog")),
        with_system,
        ask(json!([image(DAWN), text("describe this image briefly.")])),
        ask(json!([text("describe"), image(SNOW), text("and"), image(NIGHT)])),
        ask(json!([image(DAWN), image(DAWN), text("the same image")])),
        small,
        penalised,
    ]
}

async fn answers_are_those_of_vllm_serve(server: &Server, requests: &[Value], reference: &[(Value, Value)]) {
    for (request, (new, prompt)) in requests.iter().zip(reference) {
        let answer = server.chat(request).await;
        let (our_new, our_prompt) = ids(&answer.ok());
        assert_eq!(our_prompt, *prompt, "prompt tokens of {}", request["messages"]);
        assert_eq!(our_new, *new, "new tokens of {}", request["messages"]);
    }
}

/// Process ids of `root` and all its descendants, from /proc.
fn descendants(root: u32) -> Vec<u32> {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // "pid (command) state parent …"; the command may have spaces and parentheses
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(pid);
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(children.get(&pid).into_iter().flatten());
        next += 1;
    }
    found
}

fn is_alive(pid: u32) -> bool {
    // A zombie is dead: nobody has asked how it ended yet.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('Z')))
}

/// A process of a worker's latest engine, by the name that vLLM gives it. By default the EngineCore has a worker process.
fn engine_process(server: &Server, worker: &str, name: &str) -> u32 {
    let group =
        server.logged(&format!("engine process started worker={worker} process_group=")).parse().expect("a process id");
    let is_named = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|command| command.starts_with(name.as_bytes()))
    };
    descendants(group).into_iter().find(is_named).unwrap_or_else(|| panic!("{worker} has no {name}"))
}

const PROCESSES: [&str; 2] = ["VLLM::EngineCore", "VLLM::Worker"];

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
        let busy = match server.metric("chiasm_worker_running_requests{worker=\"worker_0\"}").await {
            1.0 => "worker_0",
            _ => "worker_1",
        };
        send_signal(engine_process(server, busy, process), "KILL");
        wait_for("worker to leave", Duration::from_secs(10), async || server.ready_workers().await == 1).await
    });
    assert!(after < Duration::from_secs(1), "it took {after:?} to notice the death of {process}");
    answer.ok();
    assert_eq!(server.metric("chiasm_retries_total").await, moved + 1.0, "the killed engine's request moved");
    server.wait_ready(2, STARTUP).await;
    for worker in ["worker_0", "worker_1"] {
        assert!(PROCESSES.iter().all(|process| is_alive(engine_process(server, worker, process))));
    }
}

async fn the_openai_package_works(environment: &Environment, server: &Server) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/openai_client.py");
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/images/dawn.jpg");
    let output = Command::new(&environment.python)
        .args([script, &format!("{}/v1", server.url), picture])
        .output()
        .expect("python runs");
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Held by a test that runs engines.
static ENGINES: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn real_engines_do_what_is_promised() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let requests = comparable_requests();

    let server = environment.serve("qwen2vl", "2", &[]);
    let reference = environment.reference("qwen2vl", &[]).answers(&requests).await;
    server.wait_ready(2, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    let answers = scenario_run::play_all(&server, "m", BLOCK_SIZE, 8).await;
    // Now with images from the engines' receiver caches, which by now have evicted some.
    answers_are_those_of_vllm_serve(&server, &requests, &reference).await;
    // How many travel does not depend on which engine ties went to; how many of them in which way does.
    let (cached, shm) = (travelled(&server, "cached").await, travelled(&server, "shm").await);
    assert!(cached + shm >= 20.0, "{cached} cached, {shm} in shared memory");
    assert!(cached >= 4.0 && shm >= 4.0, "{cached} cached, {shm} in shared memory");
    assert_eq!(travelled(&server, "inline").await, 0.0, "every slot came back in time");
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0, "the mirrors are exact");
    the_openai_package_works(&environment, &server).await;
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

    other_modes_give_the_same_answers(&environment, &answers).await;

    for model in ["qwen25vl", "qwen3vl"] {
        one_engine_answers_as_vllm_serve(&environment, model, &requests, &[]).await;
    }
}

/// Items that travelled in this way.
async fn travelled(server: &Server, mode: &str) -> f64 {
    server.metric(&format!("chiasm_mm_transfer_total{{mode=\"{mode}\"}}")).await
}

async fn other_modes_give_the_same_answers(environment: &Environment, answers: &[String]) {
    for (mode, flags) in [
        // Without a worker process: that one gets copies from the engine, here the model reads the slots themselves.
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
        let (cached, shm, inline) =
            (travelled(&server, "cached").await, travelled(&server, "shm").await, travelled(&server, "inline").await);
        let as_promised = match mode {
            "auto" => cached > 0.0 && shm > 0.0 && inline == 0.0,
            "inline" => cached > 0.0 && shm == 0.0 && inline > 0.0,
            _ => cached == 0.0 && shm == 0.0 && inline > 0.0,
        };
        assert!(as_promised, "{mode}: {cached} cached, {shm} in shared memory, {inline} inline");
        assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
        drop(attached);
    }
}

async fn one_engine_answers_as_vllm_serve(environment: &Environment, model: &str, requests: &[Value], flags: &[&str]) {
    // Both start at the same time.
    let reference = environment.reference(model, flags);
    let (mut server, engine) = environment.attach("shm", ROOMY_ARENA_GB, model, flags);
    let reference = reference.answers(requests).await;
    server.wait_ready(1, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, requests, &reference).await;
    // The next frontend takes the engine over, with all that it holds, and gives it other shared memory.
    server.end_by("KILL");
    let server = engine.serve();
    server.wait_ready(1, STARTUP).await;
    server.logged("took over an engine");
    answers_are_those_of_vllm_serve(&server, requests, &reference).await;
    assert_eq!(travelled(&server, "inline").await, 0.0);
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0);
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
}

/// The other image families, one engine each: the same prompt tokens and the same new tokens as `vllm serve`.
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
        one_engine_answers_as_vllm_serve(&environment, model, &family_requests(&kwargs), flags).await;
    }
}

/// Models with one kind of attention and with several (windows, chunks, linear), each with a cache so small that blocks are
/// evicted all the time: the engine finds exactly the blocks that it was predicted to have.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn engines_find_the_blocks_that_they_were_predicted_to_have() {
    let _alone = ENGINES.lock().await;
    let environment = Environment::read();
    let chosen = std::env::var("CHIASM_TEST_FAMILIES").ok();
    for (model, blocks, flags) in [
        ("qwen2vl", "60", &[][..]),
        ("gemma3", "80", &[]),
        ("llama4", "400", &[]),
        ("qwen35", "60", &["--dtype", "bfloat16"]),
    ] {
        if chosen.as_ref().is_some_and(|chosen| !chosen.split(',').any(|name| name == model)) {
            continue;
        }
        let small = ["--num-gpu-blocks-override", blocks, "--max-model-len", "1024"];
        let (server, _engine) = environment.attach("shm", ARENA_GB, model, &[&small, flags].concat());
        server.wait_ready(1, STARTUP).await;
        predictions_come_true(&server, model).await;
        assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
    }
}

/// Prompts that share beginnings, some with an image, one after the other.
async fn predictions_come_true(server: &Server, model: &str) {
    // The same prompts in every run: a failure comes again.
    let mut random = SmallRng::seed_from_u64(1);
    let mut words = |count: usize| -> Vec<u32> { (0..count).map(|_| random.random_range(10..200)).collect() };
    let beginnings: Vec<Vec<u32>> = [90, 200, 310, 420, 530, 640].map(&mut words).into();
    let worker = async || -> Value {
        let report = server.client.get(format!("{}/workers", server.url)).send().await.expect("an answer");
        support::json(report).await["workers"][0].clone()
    };
    let settled = async || {
        let worker = worker().await;
        worker["knowledge"] == "exact" && worker["promised_blocks"] == 0
    };
    wait_for("exact knowledge", STARTUP, &settled).await;
    let block_size = worker().await["block_size"].as_u64().expect("a block size") as usize;
    let mut found_at_all = 0;
    for turn in 0..48 {
        let (answer, max_tokens) = (["short", "long"][turn % 2], [1, 30][turn % 2]);
        let response = if turn % 6 == 5 {
            let content = json!([image([DAWN, SNOW, NIGHT][turn / 6 % 3]), text(answer)]);
            let messages = json!([{"role": "user", "content": content}]);
            server
                .chat(&json!({"model": "m", "messages": messages, "max_tokens": max_tokens, "ignore_eos": true}))
                .await
        } else {
            let beginning = &beginnings[turn * 5 % 6];
            let shared = beginning.len() * (1 + turn % 3) / 3;
            let prompt = [&beginning[..shared], &words([0, 7, 100][turn % 3])].concat();
            let body = json!({"model": "m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true});
            server.post("/v1/completions", &body).await
        };
        let usage = response.ok()["usage"].clone();
        let tokens = |count: &Value| count.as_u64().expect("a number of tokens") as usize;
        let found = tokens(&usage["prompt_tokens_details"]["cached_tokens"]) / block_size;
        let overlap = response.header("x-chiasm-overlap");
        let overlap: usize = overlap.split('/').next().and_then(|blocks| blocks.parse().ok()).expect("blocks");
        // The last token of a prompt is computed in any case.
        let predicted = overlap.min((tokens(&usage["prompt_tokens"]) - 1) / block_size);
        assert_eq!(predicted, found, "{model}, request {turn}");
        found_at_all += found;
        wait_for("confirmed blocks", STARTUP, &settled).await;
    }
    assert!(found_at_all > 0, "{model}");
    let worker = worker().await;
    let count = |name: &str| worker["index"][name].as_u64();
    assert_eq!((count("unknown_parents"), count("unknown_removals")), (Some(0), Some(0)), "{worker}");
    for too in ["high", "low"] {
        let name = format!("chiasm_overlap_error_blocks_total{{too=\"{too}\",state=\"exact\"}}");
        assert_eq!(server.metric(&name).await, 0.0, "{model}: too {too}");
    }
}

/// Requests that every image family takes, the last with `mm_processor_kwargs` if there are any.
fn family_requests(kwargs: &Value) -> Vec<Value> {
    let ask = |content: Value| {
        json!({
            "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        })
    };
    let mut requests = vec![
        ask(json!("the quick brown fox jumps over the lazy dog")),
        ask(json!([image(DAWN), text("describe this image briefly.")])),
        ask(json!([text("describe"), image(SNOW), text("and"), image(NIGHT)])),
        ask(json!([image(DAWN), image(DAWN), text("the same image")])),
        ask(json!([text("what is in"), image(DUSK)])),
    ];
    if kwargs.as_object().is_some_and(|kwargs| !kwargs.is_empty()) {
        let mut changed = ask(json!([image(DUSK), text("describe this image briefly.")]));
        changed["mm_processor_kwargs"] = kwargs.clone();
        requests.push(changed);
    }
    requests
}
