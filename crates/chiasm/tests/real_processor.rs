//! vLLM's own processor before simulated engines: no engine has to start, and what an engine saw is
//! in its answer, with a digest. `cargo xtask test` sets up what this needs and runs it.
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

const STARTUP: Duration = Duration::from_secs(120);

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run `cargo xtask test`"))
}

/// Two simulated engines and vLLM's processor.
async fn serve(model: &str, flags: &[&str]) -> Server {
    serve_from(&models().join(model), flags, &[]).await
}

fn models() -> PathBuf {
    variable("CHIASM_TEST_MODELS").into()
}

async fn serve_from(model: &Path, flags: &[&str], of_engines: &[&str]) -> Server {
    let (model, vllm) = (model.display().to_string(), variable("CHIASM_TEST_VLLM"));
    let own = [
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
    let more = [
        "--sim-max-model-len",
        "32768",
        "--sim-vllm-version",
        &version,
        "--vllm",
        &vllm,
        "--processors",
        "2",
    ];
    // The processor of 0.31 normalises what later ones leave to the engine, as simulated engines
    // do.
    let normalised = version.starts_with("0.31.");
    let normalise = if normalised { &["--no-mm-device-do-normalize"][..] } else { &[] };
    let server = Server::start(
        &[&own[..], &more, flags, &["--", "--dtype", "bfloat16"], normalise, of_engines].concat(),
    );
    server.wait_ready(2, STARTUP).await;
    server
}

fn file(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/tests/clips/{name}", env!("CARGO_MANIFEST_DIR"))).expect("a clip")
}

fn part(modality: &str, file: &[u8]) -> Value {
    let field = format!("{modality}_url");
    json!({"type": field, (field.clone()): {"url": format!("data:;base64,{}", STANDARD.encode(file))}})
}

fn request(parts: &[Value]) -> Value {
    let text = json!({"type": "text", "text": "what is this?"});
    let content: Vec<&Value> = parts.iter().chain([&text]).collect();
    json!({
        "model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 200,
        "return_token_ids": true,
    })
}

/// What the engine says that it saw, without what it says of its cache; and the prompt.
fn seen(answer: &Answer) -> (String, Value) {
    let answer = answer.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("text");
    (text.split(';').next().unwrap_or_default().to_owned(), answer["prompt_token_ids"].clone())
}

/// Of each image family, what Chiasm makes of some pictures and what vLLM's processor makes of
/// them: the same tokens, and pixels with the same digest.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn native_images_are_those_of_vllms_processor() {
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
            assert_eq!(seen(&ours), seen(&theirs), "{model}");
        }
    }
}

/// A `vllm` command in `folder` whose processor is that of the tested vLLM, says that it is of
/// another release, and finds no Landlock.
fn vllm_of(release: &str, folder: &Path) -> String {
    let python =
        chiasm_processor::python_of(Path::new(&variable("CHIASM_TEST_VLLM"))).expect("a Python");
    let code = format!(
        "import runpy, vllm, chiasm_processor.sandbox as sandbox; vllm.__version__ = '{release}'; \
         sandbox._landlock_version = lambda: 0; \
         runpy.run_module('chiasm_processor', run_name='__main__', alter_sys=True)"
    );
    // In place of -B -m chiasm_processor.
    let script = format!("#!/bin/sh\nshift 3\nexec {} -B -c \"{code}\" \"$@\"\n", python.display());
    let (stand_in, vllm) = (folder.join("python3"), folder.join("vllm"));
    std::fs::write(&stand_in, script).expect("a stand-in for Python");
    std::fs::set_permissions(&stand_in, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    std::fs::write(&vllm, "").expect("a stand-in for vLLM");
    vllm.display().to_string()
}

/// Engines of two releases of vLLM get what the processor of their own release has made, or nothing
/// of that kind.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn each_release_has_a_processor_of_its_own() {
    const OTHER: &str = "0.99.1";
    let (model, vllm) = (models().join("omni").display().to_string(), variable("CHIASM_TEST_VLLM"));
    let version = variable("CHIASM_TEST_VLLM_VERSION");
    let recordings = ["mono_16k.wav", "sound.flac", "opus.ogg", "vorbis.ogg"]
        .map(|name| part("audio", &file(name)));
    let folder = tempfile::tempdir().expect("a folder");
    let other_vllm = vllm_of(OTHER, folder.path());
    for has_other in [false, true] {
        let places = [(); 2].map(|()| format!("tcp://127.0.0.1:{}", free_port()));
        let own = [&model[..], "--served-model-name", "m", "--port", "0", "--vllm", &vllm];
        let attach = ["--policy", "round-robin", "--attach", &places[0], "--attach", &places[1]];
        let other = if has_other { &["--processor-vllm", &other_vllm][..] } else { &[] };
        let server =
            Server::start(&[&own[..], &attach, other, &["--", "--dtype", "bfloat16"]].concat());
        let engine = |place: &str, version: &str| {
            let args = [
                "sim-engine",
                "--handshake",
                place,
                "--model",
                &model,
                "--sim-vllm-version",
                version,
            ];
            let speed = ["--sim-speedup", "1000000", "--sim-max-model-len", "32768"];
            Process(chiasm(&[&args[..], &speed].concat()).spawn().expect("an engine"))
        };
        let mut engines = vec![engine(&places[0], &version), engine(&places[1], OTHER)];
        server.wait_ready(2, STARTUP).await;

        let text = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4});
        let workers_of = async |requests: &[Value]| {
            let answers = join_all(requests.iter().map(|request| server.chat(request))).await;
            answers
                .iter()
                .map(|answer| (answer.ok(), answer.header("x-chiasm-worker")).1)
                .collect::<BTreeSet<_>>()
        };
        let both = BTreeSet::from(["worker_0", "worker_1"].map(str::to_owned));
        let first = BTreeSet::from(["worker_0".to_owned()]);
        let heard = recordings.clone().map(|recording| request(&[recording]));
        assert_eq!(workers_of(&[text.clone(), text]).await, both);
        assert_eq!(workers_of(&heard).await, if has_other { both } else { first });
        assert_eq!(
            server.lines_logged("engines of this vLLM get nothing"),
            usize::from(!has_other)
        );

        assert_eq!(server.lines_logged("without a lock around it"), usize::from(has_other));

        // The other release alone.
        engines.remove(0).end();
        wait_for("the engine's end", STARTUP, async || server.ready_workers().await == 1).await;
        let answer = server.chat(&heard[0]).await;
        match has_other {
            true => drop(answer.ok()),
            false => assert_eq!(answer.refused(503), "messages[0].content[0].audio_url"),
        }
    }

    let lock =
        ["--sim", "1", "--port", "0", "--vllm", &other_vllm, "--processor-sandbox", "require"];
    let refused = chiasm(&[&["serve", &model][..], &lock].concat()).output().expect("its end");
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains("this kernel has no Landlock"),
        "{refused:?}"
    );
    assert!(!refused.status.success());
}

/// Engines of agents get the tensors that the processor of their frontend has made, bit by bit
/// those of an engine beside it; those of an agent that takes none get no such items.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn engines_of_agents_get_what_the_processor_of_their_frontend_has_made() {
    let (model, vllm) = (models().join("omni").display().to_string(), variable("CHIASM_TEST_VLLM"));
    let (version, folder) =
        (variable("CHIASM_TEST_VLLM_VERSION"), tempfile::tempdir().expect("a folder"));
    let state = folder.path().display().to_string();
    let [taking, other] = [(); 2].map(|()| format!("127.0.0.1:{}", free_port()));
    let agent_command = |address: &str, flags: &[&str]| {
        let (host, port) = address.rsplit_once(':').expect("an address");
        let own =
            ["agent", &model, "--host", host, "--port", port, "--state-dir", &state, "--sim", "1"];
        let sim = [
            "--sim-speedup",
            "1000000",
            "--sim-max-model-len",
            "32768",
            "--sim-vllm-version",
            &version,
        ];
        chiasm(&[&own[..], &sim, flags].concat())
    };
    let agent = |address: &str, flags: &[&str]| {
        Process(agent_command(address, flags).spawn().expect("an agent"))
    };
    let _agents = [agent(&taking, &["--take-tensors"]), agent(&other, &[])];
    let own = ["--state-dir", &state, "--served-model-name", "m", "--port", "0", "--vllm", &vllm];
    let start = |agents: &str| {
        Server::start(
            &[&[&model, "--agents", agents][..], &own, &["--", "--dtype", "bfloat16"]].concat(),
        )
    };
    let (remote, local) = (start(&format!("{taking},{other}")), serve("omni", &[]).await);
    remote.wait_ready(2, STARTUP).await;

    let clips = [("video", "with_sound.mp4"), ("audio", "sound.flac"), ("image", "gradient.tiff")];
    let clips = clips.map(|(modality, name)| part(modality, &file(name)));
    for parts in [&clips[..1], &clips[1..2], &clips[2..], &clips] {
        let request = request(parts);
        let (far, near) = (remote.chat(&request).await, local.chat(&request).await);
        assert_eq!(seen(&far), seen(&near));
        let again = remote.chat(&request).await;
        assert_eq!(
            (seen(&again), again.header("x-chiasm-transfer").as_str()),
            (seen(&near), "cached")
        );
        assert_eq!(far.header("x-chiasm-worker"), again.header("x-chiasm-worker"));
    }
    assert_eq!(remote.lines_logged("(--take-tensors)"), 1);

    // The same by NIXL, over what it finds and over TCP alone.
    let nixl = variable("CHIASM_TEST_NIXL");
    for transports in [&[][..], &[("UCX_TLS", "tcp")]] {
        let reading = format!("127.0.0.1:{}", free_port());
        let mut agent = agent_command(&reading, &["--take-tensors", "--nixl-library", &nixl]);
        let _agent = Process(agent.envs(transports.iter().copied()).spawn().expect("an agent"));
        let lend = [&model, "--agents", &reading, "--nixl-library", &nixl];
        let lending = Server::start_with(
            &[&lend[..], &own, &["--", "--dtype", "bfloat16"]].concat(),
            transports,
        );
        lending.wait_ready(1, STARTUP).await;
        let request = request(&clips);
        assert_eq!(seen(&lending.chat(&request).await), seen(&local.chat(&request).await));
        assert!(lending.metric("chiasm_media_lent_bytes_total").await > 0.0);
        assert_eq!(lending.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
    }

    let text =
        json!({"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4});
    let workers = join_all((0..8).map(|_| remote.chat(&text))).await;
    let workers: BTreeSet<_> =
        workers.iter().map(|answer| (answer.ok(), answer.header("x-chiasm-worker")).1).collect();
    assert_eq!(workers.len(), 2, "both agents take text");

    let none = start(&other);
    none.wait_ready(1, STARTUP).await;
    let refused = none.chat(&request(&clips[1..2])).await;
    assert_eq!(refused.refused(503), "messages[0].content[0].audio_url");
    assert!(refused.text.contains("--take-tensors"), "{}", refused.text);
}

/// One processor makes a new video once for all who want it at the same time; later requests need
/// neither it nor the bytes.
async fn a_video_is_made_once(server: &Server) {
    let request = request(&[part("video", &file("with_sound.mp4")), part("image", DAWN.jpeg)]);
    let made = server.metric("chiasm_media_decoded_total").await;
    let answers = join_all((0..20).map(|_| server.chat(&request))).await;
    let first = seen(&answers[0]);
    assert!(first.0.starts_with("2 items "), "{first:?}");
    assert!(answers.iter().all(|answer| seen(answer) == first));
    let more = server.metric("chiasm_media_decoded_total").await - made;
    // The image, and the video for each of two engines at most.
    assert!(more <= 4.0, "{more} items were made");
    let again = server.chat(&request).await;
    assert_eq!((seen(&again), again.header("x-chiasm-transfer").as_str()), (first, "cached"));
}

/// DeepSeek's conversations have no chat template.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn conversations_of_a_text_model_are_written_by_vllms_code() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(models().join("qwen2vl").join(name), folder.path().join(name))
            .expect("a tokenizer");
    }
    let config = json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 500, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 64,
    });
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("a configuration");
    let server = serve_from(folder.path(), &[], &["--tokenizer-mode", "deepseek_v32"]).await;
    let tokenizer = chiasm_prompt::Tokenizer::from_model_dir(folder.path()).expect("the tokenizer");
    let ask = |messages: Value, thinking: bool| {
        json!({
            "model": "m", "messages": messages, "max_tokens": 4, "return_token_ids": true,
            "chat_template_kwargs": {"thinking": thinking},
        })
    };
    let messages = json!([{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]);
    for (thinking, end) in [(false, "</think>"), (true, "<think>")] {
        let answer = server.chat(&ask(messages.clone(), thinking)).await;
        let text = format!("<｜begin▁of▁sentence｜>be kind<｜User｜>hello<｜Assistant｜>{end}");
        let expected: Vec<u32> =
            tokenizer.encode(&text, false).expect("tokens").iter().map(|token| token.0).collect();
        assert_eq!(answer.ok()["prompt_token_ids"], json!(expected));
    }
    let long = json!([{"role": "user", "content": "long ".repeat(100_000)}]);
    assert_eq!(server.chat(&ask(long, false)).await.refused(400), "messages");
    let picture = json!([{"role": "user", "content": [part("image", DAWN.jpeg)]}]);
    assert_eq!(
        server.chat(&ask(picture, false)).await.refused(400),
        "messages[0].content[0].image_url"
    );
    let call = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function": {"name": 3}}]},
    ]);
    assert_eq!(server.chat(&ask(call, false)).await.refused(400), "messages");
    assert!(server.terminate(Duration::from_secs(30)).await, "SIGTERM ends it with exit code 0");
}

/// A WAV file of 8,000 bytes a second.
fn silence(seconds: u32) -> Vec<u8> {
    let length = 8000 * seconds;
    let header = [16, 1 << 16 | 1, 8000, 8000, 8 << 16 | 1].map(u32::to_le_bytes).concat();
    let (riff, data) = ((36 + length).to_le_bytes(), length.to_le_bytes());
    [b"RIFF", &riff[..], b"WAVEfmt ", &header, b"data", &data, &vec![0x80; length as usize]]
        .concat()
}

/// Files as attackers and bad networks make them.
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
        // Cut off.
        0 => bytes.truncate(random.random_range(0..bytes.len())),
        // Headers that lie: sizes, durations, rates.
        1 => {
            let head = bytes.len().min(600);
            (0..12).for_each(|_| {
                bytes[random.random_range(0..head)] = [0, 0x7F, 0xFF][random.random_range(0..3)]
            });
        }
        // Damaged anywhere.
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
        // The tables at the end of an mp4, and whatever is there in others.
        _ => {
            let (length, tail) = (bytes.len(), bytes.len().min(2000));
            (0..30)
                .for_each(|_| bytes[length - 1 - random.random_range(0..tail)] = random.random());
        }
    }
    (modality, bytes)
}

/// Memory of items that a process has open.
fn open_items(server: &Server) -> usize {
    let files =
        std::fs::read_dir(format!("/proc/{}/fd", server.pid())).expect("its files").flatten();
    let names = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    names.filter(|name| name.to_string_lossy().contains("chiasm-item")).count()
}

/// Each costs its own request an error at most, and leaves nothing.
async fn hostile_files_cost_their_own_requests(server: &Server) {
    const FILES: u64 = 200;
    let (mut taken, mut refused) = (0, 0);
    for first in (0..FILES).step_by(8) {
        let answers = join_all((first..first + 8).map(|seed| async move {
            let (modality, bytes) = hostile(seed);
            (seed, modality, server.chat(&request(&[part(modality, &bytes)])).await)
        }));
        for (seed, modality, answer) in answers.await {
            match answer.status {
                200 => taken += 1,
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
    println!("{taken} of the files were read, {refused} refused");
    assert!(taken >= 20 && refused >= 80, "{taken} read, {refused} refused");
    assert_eq!(server.ready_workers().await, 2, "no engine was reached by what is broken");
    // Each of two processes keeps some for its next items.
    wait_for("items' memory to be given back", STARTUP, async || open_items(server) <= 4).await;
    let held =
        server.metric("chiasm_held_bytes").await - server.metric("chiasm_media_cache_bytes").await;
    assert!(held <= 0.0, "{held} bytes are held beside the cache");
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn videos_and_audio_are_made_once_and_hostile_ones_cost_nobody_else() {
    let server = serve(
        "omni",
        &["--processor-timeout", "10", "--allow-private-media", "--max-audio-seconds", "20"],
    )
    .await;
    a_video_is_made_once(&server).await;
    for modality in ["video", "audio"] {
        scenario_run::play_all_with(modality, &server, "m", 16, 8).await;
    }
    hostile_files_cost_their_own_requests(&server).await;
    a_video_is_made_once(&server).await;
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
