//! The client and the launcher with a real vLLM on CPU and a tiny random Qwen2-VL.
//!
//! Needs `CHIASM_TEST_VLLM` (the program), `CHIASM_TEST_VLLM_VERSION` and `CHIASM_TEST_MODELS` (a
//! directory with `qwen2vl`), so these tests are ignored unless `cargo xtask test` runs them. They
//! run one engine at a time; a start takes about 20 s.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chiasm_engine::launch::{EngineProcess, KvEventEndpoints, LaunchSpec};
use chiasm_engine::wire::{
    EngineCoreOutput, EngineCoreRequest, FinishReason, MmFeature, MmField, MmItem, SamplingParams,
    Value, WireTensor, version,
};
use chiasm_engine::{
    ClientOptions, CountedRows, DeathCause, EngineClient, EngineEndpoints, EngineError,
    OutputStream, SocketDir,
};
use chiasm_types::{Dtype, Placeholder, TokenId};
use zeromq::{Socket, SocketRecv, SubSocket};

const START_TIMEOUT: Duration = Duration::from_secs(240);
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

const IMAGE_TOKEN: u32 = 343;

fn setting(name: &str) -> PathBuf {
    std::env::var_os(name).unwrap_or_else(|| panic!("set {name}")).into()
}

struct Engine {
    client: EngineClient,
    process: EngineProcess,
    _dir: SocketDir,
}

async fn start(handshake: &str) -> Engine {
    let dir = SocketDir::new().unwrap();
    let options = ClientOptions {
        vocab_size: Some(345),
        receiver_cache_bytes: Some(1 << 28),
        ready_timeout: Some(START_TIMEOUT),
        counted_rows: vec![CountedRows {
            rows_of: "pixel_values".into(),
            grid: "image_grid_thw".into(),
        }],
        ..ClientOptions::default()
    };
    let pending =
        EngineClient::bind(EngineEndpoints::local(handshake, &dir), options).await.unwrap();
    let mut spec = LaunchSpec::new(
        "engine_0",
        setting("CHIASM_TEST_VLLM"),
        setting("CHIASM_TEST_MODELS").join("qwen2vl"),
        &pending.endpoints().handshake,
    );
    spec.receiver_cache_gb = 0.25;
    spec.kv_events = Some(KvEventEndpoints::ipc(&dir));
    spec.extra_args = ["--enforce-eager", "--block-size", "32", "--max-model-len", "4096"]
        .map(String::from)
        .to_vec();
    spec.env = [
        ("VLLM_TARGET_DEVICE", "cpu"),
        ("VLLM_CPU_KVCACHE_SPACE", "1"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    let process = spec.launch().unwrap();
    let client = tokio::select! {
        client = pending.ready() => client.unwrap(),
        report = process.exited() => {
            panic!("the engine ended: {report}\n{}", report.last_lines.join("\n"))
        }
    };
    Engine { client, process, _dir: dir }
}

fn text(id: &str, max_tokens: u32) -> EngineCoreRequest {
    EngineCoreRequest {
        request_id: id.into(),
        prompt_token_ids: (40..140).map(TokenId).collect::<Vec<_>>().into(),
        sampling_params: SamplingParams {
            max_tokens,
            temperature: 0.0,
            ..SamplingParams::default()
        },
        arrival_time: 1.0,
        ..EngineCoreRequest::default()
    }
}

/// Creates a request with an image of 16×20 patches, raw u8, in the middle of its prompt.
fn image(id: &str, with_data: bool) -> EngineCoreRequest {
    let pixels: Vec<u8> =
        (0..320_usize * 1176).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
    let grid: Vec<u8> = [1_i64, 16, 20].iter().flat_map(|extent| extent.to_le_bytes()).collect();
    let pixels = WireTensor::new(Dtype::U8, vec![320, 1176], pixels.into()).unwrap();
    let grid = WireTensor::new(Dtype::I64, vec![3], grid.into()).unwrap();
    let item = MmItem(vec![
        ("pixel_values".into(), MmField::flat(pixels, 320)),
        ("image_grid_thw".into(), MmField::batched(grid, true)),
    ]);
    let mut request = text(id, 4);
    request.prompt_token_ids = (40..80)
        .chain([340])
        .chain([IMAGE_TOKEN; 80])
        .chain([341, 20, 21])
        .map(TokenId)
        .collect::<Vec<_>>()
        .into();
    request.sampling_params.logprobs = Some(2);
    request.mm_features = vec![MmFeature {
        data: with_data.then_some(item),
        modality: "image".into(),
        identifier: "ab".repeat(32),
        position: Placeholder { offset: 41, length: 80, is_embed: None },
        mm_hash: Some("ab".repeat(32)),
    }];
    request
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(STEP_TIMEOUT, future).await.expect("it takes too long")
}

async fn read_all(mut stream: OutputStream) -> Vec<EngineCoreOutput> {
    let mut outputs = Vec::new();
    while let Some(output) = soon(stream.next()).await {
        outputs.push(*output.unwrap());
    }
    outputs
}

fn tokens(outputs: &[EngineCoreOutput]) -> Vec<TokenId> {
    outputs.iter().flat_map(|output| output.new_token_ids.clone()).collect()
}

fn cached(outputs: &[EngineCoreOutput]) -> u64 {
    outputs[0].prefill_stats.as_ref().unwrap().num_cached_tokens
}

/// Returns the process named `VLLM::EngineCore` in the engine's group.
fn engine_core(group: u32) -> u32 {
    let listed = Command::new("ps").args(["-eo", "pid=,pgid=,args="]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let found = listed.lines().find_map(|line| {
        let mut columns = line.split_whitespace();
        let pid: u32 = columns.next()?.parse().ok()?;
        let pgid: u32 = columns.next()?.parse().ok()?;
        (pgid == group && line.contains("EngineCore")).then_some(pid)
    });
    found.unwrap_or_else(|| panic!("no EngineCore in group {group}:\n{listed}"))
}

/// Lists the members of a process group that have not ended.
fn alive(group: u32) -> Vec<String> {
    let listed = Command::new("ps").args(["-eo", "pgid=,stat=,args="]).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let is_member = |line: &&str| {
        let mut columns = line.split_whitespace();
        columns.next() == Some(&group.to_string())
            && !columns.next().unwrap_or("Z").starts_with('Z')
    };
    listed.lines().filter(is_member).map(str::to_owned).collect()
}

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
}

async fn serves(client: &EngineClient) {
    let info = client.info();
    let version = setting("CHIASM_TEST_VLLM_VERSION");
    assert_eq!(info.vllm_version.split('+').next(), version.to_str());
    assert_eq!(version::support(&info.vllm_version), version::Support::Supported);
    assert_eq!((info.max_model_len, info.cache_block_size()), (4096, 32));

    // KV events are published at the reported address.
    let events = info.kv_events_config.as_ref().unwrap();
    let mut subscriber = SubSocket::new();
    subscriber.connect(&events.endpoint).await.unwrap();
    subscriber.subscribe("").await.unwrap();

    // Text, and the same again from the prefix cache.
    let first = read_all(client.submit(text("text-1", 6)).unwrap()).await;
    assert_eq!(tokens(&first).len(), 6);
    assert_eq!(first.last().unwrap().finish_reason, Some(FinishReason::Length));
    assert_eq!(cached(&first), 0);
    let again = read_all(client.submit(text("text-2", 6)).unwrap()).await;
    assert_eq!((tokens(&again), cached(&again)), (tokens(&first), 96));

    let event = soon(subscriber.recv()).await.unwrap().into_vec();
    assert_eq!((event.len(), &event[0][..], event[1].len()), (3, &b""[..], 8));

    // An image as an aux frame, then from the receiver cache.
    let sent = read_all(client.submit(image("image-1", true)).unwrap()).await;
    assert_eq!(tokens(&sent).len(), 4);
    assert_eq!(sent[0].new_logprobs.as_ref().unwrap().width, 3);
    let reset = client.utility("reset_prefix_cache", vec![], STEP_TIMEOUT).await;
    assert_eq!(reset.unwrap(), Value::from(true));
    let from_cache = read_all(client.submit(image("image-2", false)).unwrap()).await;
    assert_eq!((tokens(&from_cache), cached(&from_cache)), (tokens(&sent), 0));

    // After a reset the engine reports the item as missing, and accepts its data again.
    assert_eq!(client.utility("reset_mm_cache", vec![], STEP_TIMEOUT).await.unwrap(), Value::Nil);
    let missed = read_all(client.submit(image("image-3", false)).unwrap()).await;
    assert_eq!(missed[0].finish_reason, Some(FinishReason::Error));
    assert_eq!(missed[0].mm_cache_miss_hashes, ["ab".repeat(32)]);
    client.forget_media(missed[0].mm_cache_miss_hashes.iter().map(String::as_str));
    assert_eq!(
        tokens(&read_all(client.submit(image("image-4", true)).unwrap()).await),
        tokens(&sent)
    );

    let unknown = client.utility("nope", vec![], STEP_TIMEOUT).await;
    assert!(matches!(unknown, Err(EngineError::Utility { .. })));

    // A dropped stream aborts: the engine is idle long before it could generate 3000 tokens.
    let mut long = client.submit(text("long", 3000)).unwrap();
    assert!(soon(long.next()).await.unwrap().is_ok());
    let mut stats = client.stats();
    drop(long);
    soon(stats.wait_for(|stats| stats.num_running_reqs == 0)).await.unwrap();
    assert_eq!(client.open_requests(), 0);
}

/// Checks that invalid requests are refused and the engine stays alive.
async fn refuses(client: &EngineClient) {
    let mut too_long = text("a", 1);
    too_long.prompt_token_ids = vec![TokenId(1); 4096].into();
    let mut no_tokens = text("b", 1);
    no_tokens.sampling_params.max_tokens = 0;
    let mut misfit = image("c", true);
    let item = misfit.mm_features[0].data.as_mut().unwrap();
    let grid: Vec<u8> = [1_i64, 16, 18].iter().flat_map(|extent| extent.to_le_bytes()).collect();
    item.0[1].1 =
        MmField::batched(WireTensor::new(Dtype::I64, vec![3], Bytes::from(grid)).unwrap(), true);
    for request in [too_long, no_tokens, misfit] {
        assert!(matches!(client.submit(request), Err(EngineError::InvalidRequest { .. })));
    }
    assert_eq!(tokens(&read_all(client.submit(text("d", 2)).unwrap()).await).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn real_engine_serves_until_killed_then_restarts() {
    let engine = start("tcp://127.0.0.1:0").await;
    let handshake = engine.client.endpoints().handshake.clone();
    serves(&engine.client).await;
    refuses(&engine.client).await;

    // kill -9 of the EngineCore under load.
    let group = engine.process.pid();
    let mut streams: Vec<_> =
        (0..4).map(|i| engine.client.submit(text(&format!("doomed-{i}"), 3000)).unwrap()).collect();
    for stream in &mut streams {
        assert!(soon(stream.next()).await.unwrap().is_ok());
    }
    let killed = Instant::now();
    kill(engine_core(group));
    let cause = soon(engine.client.closed()).await;
    // The client detects the end by its connection, without a timeout.
    assert!(matches!(cause, DeathCause::Disconnected), "{cause}");
    println!("kill -9 of EngineCore: known after {:?}, {cause}", killed.elapsed());
    for stream in &mut streams {
        while let Some(item) = soon(stream.next()).await {
            assert!(item.is_ok() || item.is_err_and(|error| error.is_dead()));
        }
    }
    let report = engine.process.terminate(Duration::from_secs(15)).await;
    println!("its parent: {report} after {:?}", killed.elapsed());
    assert_eq!(alive(group), Vec::<String>::new());
    drop(engine.client);

    // The next start, on the same handshake address, is ended by SIGTERM during a request.
    let engine = start(&handshake).await;
    assert_eq!(tokens(&read_all(engine.client.submit(text("back", 3)).unwrap()).await).len(), 3);
    let mut running = engine.client.submit(text("running", 3000)).unwrap();
    assert!(soon(running.next()).await.unwrap().is_ok());
    let group = engine.process.pid();
    let terminated = Instant::now();
    let ended = tokio::spawn(engine.process.terminate(Duration::from_secs(30)));
    let mut last = None;
    while let Some(item) = soon(running.next()).await {
        last = Some(item);
    }
    println!(
        "SIGTERM: the request ended with {:?} after {:?}",
        last.map(|last| last.map(|output| output.finish_reason)),
        terminated.elapsed()
    );
    let report = soon(ended).await.unwrap();
    println!("SIGTERM: ended with {report} after {:?}", terminated.elapsed());
    assert!(matches!(
        engine.client.closed().await,
        DeathCause::Disconnected | DeathCause::Reported
    ));
    assert_eq!(alive(group), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn dropping_engine_process_kills_its_group() {
    let engine = start("tcp://127.0.0.1:0").await;
    let group = engine.process.pid();
    engine_core(group);
    let dropped = Instant::now();
    drop(engine.process);
    let cause = soon(engine.client.closed()).await;
    println!("kill of the group: known after {:?}, {cause}", dropped.elapsed());
    assert!(matches!(cause, DeathCause::Disconnected), "{cause}");
    soon(async {
        while !alive(group).is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}
