//! vLLM's own processor with simulated engines, whose answers describe the items with a digest.
//!
//! `cargo xtask test` sets up the environment and runs these tests.
//! `CHIASM_TEST_FAMILIES=llava,gemma3` compares these image families.
#![cfg(target_os = "linux")]

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::{Answer, Process, Server, chiasm, free_port, scenario_run, wait_for};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, NIGHT, SNOW};
use futures_util::future::join_all;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

const STARTUP_TIMEOUT: Duration = Duration::from_secs(120);

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run `cargo xtask test`"))
}

/// Starts a server of a test model with two simulated engines and vLLM's processor.
async fn serve(model: &str, flags: &[&str]) -> Server {
    serve_from(&models().join(model), flags, &[]).await
}

fn models() -> PathBuf {
    variable("CHIASM_TEST_MODELS").into()
}

/// Starts a server of the model in a folder, with additional flags of engines.
async fn serve_from(model: &Path, flags: &[&str], engine_flags: &[&str]) -> Server {
    let model = model.display().to_string();
    let vllm = variable("CHIASM_TEST_VLLM");
    let server_flags = [
        &model,
        "--served-model-name",
        "m",
        "--sim",
        "2",
        "--sim-speedup",
        "1000000",
        "--port",
        "0",
    ];
    let version = variable("CHIASM_TEST_VLLM_VERSION");
    let version_flags = [
        "--sim-max-model-len",
        "32768",
        "--sim-vllm-version",
        &version,
        "--vllm",
        &vllm,
        "--processors",
        "2",
    ];
    // vLLM's processor of 0.31 normalises pixels. Later ones leave that to the engine. Simulated
    // engines normalise unless this flag is set.
    let normalises = version.starts_with("0.31.");
    let normalise_flags = if normalises { &["--no-mm-device-do-normalize"][..] } else { &[] };
    let dtype_flags = ["--", "--dtype", "bfloat16"];
    let server = Server::start(
        &[&server_flags[..], &version_flags, flags, &dtype_flags, normalise_flags, engine_flags]
            .concat(),
    );
    server.wait_ready(2, STARTUP_TIMEOUT).await;
    server
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/tests/clips/{name}", env!("CARGO_MANIFEST_DIR"))).expect("a clip")
}

fn part(modality: &str, file: &[u8]) -> Value {
    let field = format!("{modality}_url");
    let url = format!("data:;base64,{}", STANDARD.encode(file));
    json!({"type": field, (field.clone()): {"url": url}})
}

fn request(parts: &[Value]) -> Value {
    let text = json!({"type": "text", "text": "what is this?"});
    let content: Vec<&Value> = parts.iter().chain([&text]).collect();
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 200,
        "return_token_ids": true,
    })
}

/// Returns the engine's description of the items, without its cache, and the prompt's token ids.
fn description(answer: &Answer) -> (String, Value) {
    let answer = answer.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
    (text.split(';').next().unwrap_or_default().to_owned(), answer["prompt_token_ids"].clone())
}

/// For each image family, the native processor and vLLM's give the same tokens, and pixels with the
/// same digest.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn native_images_match_vllm_processor() {
    let chosen =
        std::env::var("CHIASM_TEST_FAMILIES").unwrap_or("qwen3vl,llava_next,gemma3".to_owned());
    for model in chosen.split(',') {
        let (native, helped) = tokio::join!(
            serve(model, &["--processor", "native"]),
            serve(model, &["--processor", "vllm"])
        );
        for pictures in [&[DAWN][..], &[NIGHT], &[SNOW, DAWN]] {
            let parts: Vec<Value> =
                pictures.iter().map(|picture| part("image", picture.jpeg)).collect();
            let request = request(&parts);
            let (ours, theirs) = tokio::join!(native.chat(&request), helped.chat(&request));
            assert_eq!(description(&ours), description(&theirs), "{model}");
        }
    }
}

/// The number of videos that were planned, by a server's metrics.
async fn planned_videos(server: &Server) -> f64 {
    server.metric("chiasm_videos_planned_total").await
}

/// Videos that are planned from their containers and decoded from cuts give the same tokens as
/// those of vLLM's processor, and tensors with the same digest. An engine that holds a video gets
/// it by name. Qwen2-VL is left out to save time: its items are those of Qwen2.5-VL without
/// `second_per_grid_ts`.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn planned_videos_match_vllm_processor() {
    const CLIPS: [&str; 9] = [
        "h264.mp4",
        "h264_edit.mp4",
        "h264_rotated_90.mp4",
        "h264_vfr.mp4",
        "h264_fragments.mp4",
        "h264_open_gop.mp4",
        "hevc.mkv",
        "hevc_open_gop.mp4",
        "vp9.webm",
    ];
    let is_planned = !variable("CHIASM_TEST_VLLM_VERSION").starts_with("0.31.");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../chiasm-video/tests/clips");
    for model in ["qwen25vl", "qwen3vl"] {
        let (native, helped) =
            tokio::join!(serve(model, &[]), serve(model, &["--processor", "vllm"]));
        let clips = CLIPS.map(|name| std::fs::read(folder.join(name)).expect("a clip"));
        let mut prompts: Vec<Vec<Value>> =
            clips.iter().map(|clip| vec![part("video", clip)]).collect();
        prompts.push(vec![
            part("video", &clips[0]),
            part("image", DAWN.jpeg),
            part("video", &clips[3]),
        ]);
        for (number, parts) in prompts.iter().enumerate() {
            let request = request(parts);
            let (ours, theirs) = tokio::join!(native.chat(&request), helped.chat(&request));
            assert_eq!(description(&ours), description(&theirs), "{model} {number}");
            let again = native.chat(&request).await;
            assert_eq!(description(&again), description(&theirs), "{model} {number}");
            assert_eq!(again.header("x-chiasm-transfer"), "cached");
            assert_eq!(again.header("x-chiasm-worker"), ours.header("x-chiasm-worker"));
            let cached = &again.ok()["usage"]["prompt_tokens_details"]["cached_tokens"];
            assert!(cached.as_u64() > Some(0), "{model} {number}: {cached}");
        }
        // Each prompt twice; the last one has two videos.
        let expected = if is_planned { 2.0 * (CLIPS.len() as f64 + 2.0) } else { 0.0 };
        assert_eq!(planned_videos(&native).await, expected, "{model}");
        assert_eq!(planned_videos(&helped).await, 0.0, "{model}");
        let fallbacks = native.metric("chiasm_videos_whole_total").await;
        assert_eq!(fallbacks > 0.0, !is_planned, "{model}: {fallbacks}");
    }
}

/// Recordings that are planned from their headers give the same tokens as those of vLLM's
/// processor, and tensors with the same digest. An engine that holds a recording gets it by name.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn planned_recordings_match_vllm_processor() {
    const RECORDINGS: [&str; 8] = [
        "tone_16k.flac",
        "tone_44k_stereo.flac",
        "silence_45_seconds.flac",
        "tone_lame_vbr.mp3",
        "tone_vbr_without_tag.mp3",
        "tone_id3.mp3",
        "tone_edit.m4a",
        "tone_44k_stereo.m4a",
    ];
    let is_planned = !variable("CHIASM_TEST_VLLM_VERSION").starts_with("0.31.");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../chiasm-audio/tests/recordings");
    for model in ["qwen2audio", "omni"] {
        let (planning, decoding) =
            tokio::join!(serve(model, &[]), serve(model, &["--processor", "vllm"]));
        let mut files: Vec<Vec<u8>> = RECORDINGS
            .iter()
            .map(|name| std::fs::read(folder.join(name)).expect("a recording"))
            .collect();
        files.extend(["mono_16k.wav", "stereo_44k.wav"].map(file));
        let count = files.len() as f64;
        let parts: Vec<Value> = files.iter().map(|file| part("audio", file)).collect();
        let prompts = parts.chunks(1).chain([&parts[..3]]);
        for (number, parts) in prompts.enumerate() {
            let request = request(parts);
            let (ours, theirs) = tokio::join!(planning.chat(&request), decoding.chat(&request));
            assert_eq!(description(&ours), description(&theirs), "{model} {number}");
            let again = planning.chat(&request).await;
            assert_eq!(description(&again), description(&theirs), "{model} {number}");
            assert_eq!(again.header("x-chiasm-transfer"), "cached");
            assert_eq!(again.header("x-chiasm-worker"), ours.header("x-chiasm-worker"));
        }
        let planned = planning.metric("chiasm_recordings_planned_total").await;
        assert_eq!(planned, if is_planned { count } else { 0.0 }, "{model}");
        let whole = planning.metric("chiasm_recordings_whole_total").await;
        assert_eq!(whole, if is_planned { 0.0 } else { count }, "{model}");
        let option = decoding.metric("chiasm_recordings_whole_total{cause=\"option\"}").await;
        assert_eq!(option, count, "{model}");
    }
}

/// Creates a `vllm` command in `folder`. Its processor is that of the tested vLLM, but reports
/// `release` as its version and finds no Landlock.
fn create_fake_vllm(release: &str, folder: &Path) -> String {
    let python =
        chiasm_processor::find_python(Path::new(&variable("CHIASM_TEST_VLLM"))).expect("a Python");
    let code = format!(
        "import runpy, vllm, chiasm_processor.sandbox as sandbox; vllm.__version__ = '{release}'; \
         sandbox._landlock_version = lambda: 0; \
         runpy.run_module('chiasm_processor', run_name='__main__', alter_sys=True)"
    );
    // Replaces the arguments `-B -m chiasm_processor`.
    let script = format!("#!/bin/sh\nshift 3\nexec {} -B -c \"{code}\" \"$@\"\n", python.display());
    let fake_python = folder.join("python3");
    let vllm = folder.join("vllm");
    std::fs::write(&fake_python, script).expect("a fake Python");
    std::fs::set_permissions(&fake_python, std::fs::Permissions::from_mode(0o755)).expect("a mode");
    std::fs::write(&vllm, "").expect("a fake vLLM");
    vllm.display().to_string()
}

/// Engines of two vLLM releases get items from the processor of their own release. Without such a
/// processor, an engine gets no requests with these items.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn engines_get_items_of_their_releases_processor() {
    const OTHER_VERSION: &str = "0.99.1";
    let model = models().join("omni").display().to_string();
    let vllm = variable("CHIASM_TEST_VLLM");
    let version = variable("CHIASM_TEST_VLLM_VERSION");
    let recordings = ["mono_16k.wav", "sound.flac", "opus.ogg", "vorbis.ogg"]
        .map(|name| part("audio", &file(name)));
    let folder = tempfile::tempdir().expect("a folder");
    let other_vllm = create_fake_vllm(OTHER_VERSION, folder.path());
    for has_other in [false, true] {
        let addresses = [(); 2].map(|()| format!("tcp://127.0.0.1:{}", free_port()));
        let args = [&model[..], "--served-model-name", "m", "--port", "0", "--vllm", &vllm];
        let attach =
            ["--policy", "round-robin", "--attach", &addresses[0], "--attach", &addresses[1]];
        let other = if has_other { &["--processor-vllm", &other_vllm][..] } else { &[] };
        let server =
            Server::start(&[&args[..], &attach, other, &["--", "--dtype", "bfloat16"]].concat());
        let engine = |address: &str, version: &str| {
            let args = [
                "sim-engine",
                "--handshake",
                address,
                "--model",
                &model,
                "--sim-vllm-version",
                version,
            ];
            let speed = ["--sim-speedup", "1000000", "--sim-max-model-len", "32768"];
            Process(chiasm(&[&args[..], &speed].concat()).spawn().expect("an engine"))
        };
        let mut engines =
            vec![engine(&addresses[0], &version), engine(&addresses[1], OTHER_VERSION)];
        server.wait_ready(2, STARTUP_TIMEOUT).await;

        let messages = json!([{"role": "user", "content": "hello"}]);
        let text = json!({"model": "m", "messages": messages, "max_tokens": 4});
        let used_workers = async |requests: &[Value]| {
            let answers = join_all(requests.iter().map(|request| server.chat(request))).await;
            answers
                .iter()
                .map(|answer| (answer.ok(), answer.header("x-chiasm-worker")).1)
                .collect::<BTreeSet<_>>()
        };
        let both = BTreeSet::from(["worker_0", "worker_1"].map(str::to_owned));
        let first = BTreeSet::from(["worker_0".to_owned()]);
        let audio_requests = recordings.clone().map(|recording| request(&[recording]));
        assert_eq!(used_workers(&[text.clone(), text]).await, both);
        assert_eq!(used_workers(&audio_requests).await, if has_other { both } else { first });
        assert_eq!(
            server.count_logged("engines of this vLLM release get no items"),
            usize::from(!has_other)
        );

        assert_eq!(server.count_logged("outside of a sandbox"), usize::from(has_other));

        // The other release alone.
        engines.remove(0).end();
        wait_for("the engine's end", STARTUP_TIMEOUT, async || server.ready_workers().await == 1)
            .await;
        let answer = server.chat(&audio_requests[0]).await;
        if has_other {
            answer.ok();
        } else {
            assert_eq!(answer.refused(503), "messages[0].content[0].audio_url");
        }
    }

    let sandbox =
        ["--sim", "1", "--port", "0", "--vllm", &other_vllm, "--processor-sandbox", "require"];
    let output = chiasm(&[&["serve", &model][..], &sandbox].concat()).output().expect("an exit");
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("this kernel has no Landlock"),
        "{output:?}"
    );
    assert!(!output.status.success());
}

/// Engines of agents get the tensors of their frontend's processor, bit-identical to those for a
/// local engine. Engines of an agent without `--take-tensors` get no such items.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn agents_get_tensors_of_the_frontends_processor() {
    let model = models().join("omni").display().to_string();
    let vllm = variable("CHIASM_TEST_VLLM");
    let version = variable("CHIASM_TEST_VLLM_VERSION");
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().display().to_string();
    let [taking, other] = [(); 2].map(|()| format!("127.0.0.1:{}", free_port()));
    let agent_command = |address: &str, flags: &[&str]| {
        let (host, port) = address.rsplit_once(':').expect("an address");
        let args =
            ["agent", &model, "--host", host, "--port", port, "--state-dir", &state, "--sim", "1"];
        let sim = [
            "--sim-speedup",
            "1000000",
            "--sim-max-model-len",
            "32768",
            "--sim-vllm-version",
            &version,
        ];
        chiasm(&[&args[..], &sim, flags].concat())
    };
    let agent = |address: &str, flags: &[&str]| {
        Process(agent_command(address, flags).spawn().expect("an agent"))
    };
    let _agents = [agent(&taking, &["--take-tensors"]), agent(&other, &[])];
    let flags = ["--state-dir", &state, "--served-model-name", "m", "--port", "0", "--vllm", &vllm];
    let start = |agents: &str| {
        Server::start(
            &[&[&model, "--agents", agents][..], &flags, &["--", "--dtype", "bfloat16"]].concat(),
        )
    };
    let remote = start(&format!("{taking},{other}"));
    let local = serve("omni", &[]).await;
    remote.wait_ready(2, STARTUP_TIMEOUT).await;

    let clips = [("video", "with_sound.mp4"), ("audio", "sound.flac"), ("image", "gradient.tiff")];
    let clips = clips.map(|(modality, name)| part(modality, &file(name)));
    for parts in [&clips[..1], &clips[1..2], &clips[2..], &clips] {
        let request = request(parts);
        let far = remote.chat(&request).await;
        let near = local.chat(&request).await;
        assert_eq!(description(&far), description(&near));
        let again = remote.chat(&request).await;
        assert_eq!(
            (description(&again), again.header("x-chiasm-transfer").as_str()),
            (description(&near), "cached")
        );
        assert_eq!(far.header("x-chiasm-worker"), again.header("x-chiasm-worker"));
    }
    assert_eq!(remote.count_logged("(--take-tensors)"), 1);

    // The same with NIXL, over the transports that it detects and over TCP alone.
    let nixl = variable("CHIASM_TEST_NIXL");
    for transports in [&[][..], &[("UCX_TLS", "tcp")]] {
        let address = format!("127.0.0.1:{}", free_port());
        let mut agent = agent_command(&address, &["--take-tensors", "--nixl-library", &nixl]);
        let _agent = Process(agent.envs(transports.iter().copied()).spawn().expect("an agent"));
        let nixl_flags = [&model, "--agents", &address, "--nixl-library", &nixl];
        let frontend = Server::start_with(
            &[&nixl_flags[..], &flags, &["--", "--dtype", "bfloat16"]].concat(),
            transports,
        );
        frontend.wait_ready(1, STARTUP_TIMEOUT).await;
        let request = request(&clips);
        let remote = description(&frontend.chat(&request).await);
        assert_eq!(remote, description(&local.chat(&request).await));
        assert!(frontend.metric("chiasm_media_lent_bytes_total").await > 0.0);
        assert_eq!(frontend.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
    }

    let text =
        json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4});
    let answers = join_all((0..8).map(|_| remote.chat(&text))).await;
    let workers: BTreeSet<_> =
        answers.iter().map(|answer| (answer.ok(), answer.header("x-chiasm-worker")).1).collect();
    assert_eq!(workers.len(), 2, "both agents get text requests");

    let without_tensors = start(&other);
    without_tensors.wait_ready(1, STARTUP_TIMEOUT).await;
    let refused = without_tensors.chat(&request(&clips[1..2])).await;
    assert_eq!(refused.refused(503), "messages[0].content[0].audio_url");
    assert!(refused.text.contains("--take-tensors"), "{}", refused.text);
}

/// Checks that a new video is processed once for concurrent requests, and that later requests use
/// the engine's cache.
async fn check_video_is_processed_once(server: &Server) {
    let request = request(&[part("video", &file("with_sound.mp4")), part("image", DAWN.jpeg)]);
    let before = server.metric("chiasm_media_decoded_total").await;
    let answers = join_all((0..20).map(|_| server.chat(&request))).await;
    let first = description(&answers[0]);
    assert!(first.0.starts_with("2 items "), "{first:?}");
    assert!(answers.iter().all(|answer| description(answer) == first));
    let processed = server.metric("chiasm_media_decoded_total").await - before;
    // The image and the video, at most once for each of two engines.
    assert!(processed <= 4.0, "{processed} items were processed");
    let again = server.chat(&request).await;
    assert_eq!(
        (description(&again), again.header("x-chiasm-transfer").as_str()),
        (first, "cached")
    );
}

/// DeepSeek's models have no chat template, so vLLM's code renders their conversations.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn vllm_code_renders_text_conversations() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(models().join("qwen2vl").join(name), folder.path().join(name))
            .expect("a tokenizer");
    }
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 500,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("a configuration");
    let server = serve_from(folder.path(), &[], &["--tokenizer-mode", "deepseek_v32"]).await;
    let tokenizer = chiasm_prompt::Tokenizer::from_model_dir(folder.path()).expect("the tokenizer");
    let body = |messages: Value, thinking: bool| {
        json!({
            "model": "m",
            "messages": messages,
            "max_tokens": 4,
            "return_token_ids": true,
            "chat_template_kwargs": {"thinking": thinking},
        })
    };
    let messages = json!([
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]);
    for (thinking, end) in [(false, "</think>"), (true, "<think>")] {
        let answer = server.chat(&body(messages.clone(), thinking)).await;
        let text = format!("<｜begin▁of▁sentence｜>be kind<｜User｜>hello<｜Assistant｜>{end}");
        let expected: Vec<u32> =
            tokenizer.encode(&text, false).expect("tokens").iter().map(|token| token.0).collect();
        assert_eq!(answer.ok()["prompt_token_ids"], json!(expected));
    }
    let long = json!([{"role": "user", "content": "long ".repeat(100_000)}]);
    assert_eq!(server.chat(&body(long, false)).await.refused(400), "messages");
    let picture = json!([{"role": "user", "content": [part("image", DAWN.jpeg)]}]);
    assert_eq!(
        server.chat(&body(picture, false)).await.refused(400),
        "messages[0].content[0].image_url"
    );
    let call = json!({"id": "1", "type": "function", "function": {"name": 3}});
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
    ]);
    assert_eq!(server.chat(&body(messages, false)).await.refused(400), "messages");
    assert!(server.terminate(Duration::from_secs(30)).await, "SIGTERM ends it with exit code 0");
}

/// Returns a WAV file of silence with 8,000 bytes per second.
fn silence(seconds: u32) -> Vec<u8> {
    let length = 8000 * seconds;
    let header = [16, 1 << 16 | 1, 8000, 8000, 8 << 16 | 1].map(u32::to_le_bytes).concat();
    let riff = (36 + length).to_le_bytes();
    let data = length.to_le_bytes();
    [b"RIFF", &riff[..], b"WAVEfmt ", &header, b"data", &data, &vec![0x80; length as usize]]
        .concat()
}

/// Returns the modality and bytes of a damaged file, as attackers and bad networks make them.
fn hostile(seed: u64) -> (&'static str, Vec<u8>) {
    const FILES: [(&str, &str); 10] = [
        ("video", "with_sound.mp4"),
        ("video", "silent.mp4"),
        ("video", "vp9.webm"),
        ("video", "edit_list.mp4"),
        ("audio", "mono_16k.wav"),
        ("audio", "sound.mp3"),
        ("audio", "sound.flac"),
        ("audio", "opus.ogg"),
        ("audio", "vorbis.ogg"),
        ("image", "gradient.tiff"),
    ];
    let mut random = SmallRng::seed_from_u64(seed);
    let (modality, name) = FILES[seed as usize % FILES.len()];
    let mut bytes = file(name);
    match seed / FILES.len() as u64 % 5 {
        // Truncated.
        0 => bytes.truncate(random.random_range(0..bytes.len())),
        // False sizes, durations and rates in headers.
        1 => {
            let head = bytes.len().min(600);
            (0..12).for_each(|_| {
                bytes[random.random_range(0..head)] = [0, 0x7F, 0xFF][random.random_range(0..3)]
            });
        }
        // Flipped bits anywhere.
        2 => {
            let length = bytes.len();
            (0..40).for_each(|_| {
                bytes[random.random_range(0..length)] ^= 1 << random.random_range(0..8)
            });
        }
        // Another file from the middle on.
        3 => {
            let other = file(FILES[random.random_range(0..FILES.len())].1);
            bytes.truncate(bytes.len() / 2);
            bytes.extend_from_slice(&other[other.len() / 2..]);
        }
        // Random bytes at the end, where MP4 files have their tables.
        _ => {
            let length = bytes.len();
            let tail = bytes.len().min(2000);
            (0..30)
                .for_each(|_| bytes[length - 1 - random.random_range(0..tail)] = random.random());
        }
    }
    (modality, bytes)
}

/// Returns the number of memory files of items that the server has open.
fn open_items(server: &Server) -> usize {
    let files =
        std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("its files").flatten();
    let names = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    names.filter(|name| name.to_string_lossy().contains("chiasm-item")).count()
}

/// Checks that a hostile file fails at most its own request, and leaks no memory.
async fn check_hostile_files(server: &Server) {
    const FILES: u64 = 200;
    let mut accepted = 0;
    let mut refused = 0;
    for first in (0..FILES).step_by(8) {
        let answers = join_all((first..first + 8).map(|seed| async move {
            let (modality, bytes) = hostile(seed);
            (seed, modality, server.chat(&request(&[part(modality, &bytes)])).await)
        }));
        for (seed, modality, answer) in answers.await {
            match answer.status {
                200 => accepted += 1,
                400 | 413 | 422 | 504 => {
                    let param = answer.refused(answer.status);
                    assert_eq!(
                        param,
                        format!("messages[0].content[0].{modality}_url"),
                        "{seed}: {}",
                        answer.text
                    );
                    refused += 1;
                }
                _ => panic!("{seed}: {} {}", answer.status, answer.text),
            }
        }
    }
    println!("{accepted} of the files were accepted, {refused} refused");
    assert!(accepted >= 20 && refused >= 80, "{accepted} accepted, {refused} refused");
    assert_eq!(server.ready_workers().await, 2, "no engine was harmed");
    // Each of two processes keeps some memory files for its next items.
    wait_for("release of memory files", STARTUP_TIMEOUT, async || open_items(server) <= 4).await;
    let held =
        server.metric("chiasm_held_bytes").await - server.metric("chiasm_media_cache_bytes").await;
    assert!(held <= 0.0, "{held} bytes are held outside the cache");
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn hostile_files_fail_only_their_own_requests() {
    let server = serve(
        "omni",
        &["--processor-timeout", "10", "--allow-private-media", "--max-audio-seconds", "20"],
    )
    .await;
    check_video_is_processed_once(&server).await;
    for modality in ["video", "audio"] {
        scenario_run::play_all_with(modality, &server, "m", 16, 8).await;
    }
    check_hostile_files(&server).await;
    check_video_is_processed_once(&server).await;
    let kwargs = json!({"fps": 1});
    let mut with_kwargs = request(&[part("video", &file("silent.mp4"))]);
    with_kwargs["mm_processor_kwargs"] = kwargs;
    assert_eq!(server.chat(&with_kwargs).await.refused(400), "mm_processor_kwargs");
    let too_long = server.chat(&request(&[part("audio", &silence(21))])).await;
    assert_eq!(too_long.refused(422), "messages[0].content[0].audio_url");
    assert!(too_long.text.contains("--max-audio-seconds"), "{}", too_long.text);
    server.chat(&request(&[part("audio", &silence(19))])).await.ok();
    let many: Vec<Value> = (0..17).map(|_| part("video", &file("silent.mp4"))).collect();
    assert_eq!(
        server.chat(&request(&many)).await.refused(413),
        "messages[0].content[16].video_url"
    );
    assert!(server.terminate(Duration::from_secs(30)).await, "SIGTERM ends it with exit code 0");
}
