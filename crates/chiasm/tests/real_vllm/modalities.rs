//! Videos, recordings, rare images and models without a native family: processed by vLLM's own
//! processor, with the answers of `vllm serve`.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, NIGHT};
use serde_json::{Value, json};

use super::constrained::{check_refused_constraints, schema_requests};
use super::environment::{ENGINES, Environment, ROOMY_ARENA_GB, STARTUP_TIMEOUT};
use super::predictions::{assert_cached_as_predicted, wait_settled, workers};
use super::prompts;
use super::requests::{assert_answers_match, greedy_request, image, text};
use super::run_client;
use super::tools::{
    TOOL_FLAGS, check_custom_with_allowed_tools, check_forced_call_of_other_apis, check_tool_loop,
    tool_requests,
};
use crate::support::{Server, scenario_run, video_scenarios};

/// Returns a content part with a file of `tests/clips`. Its extension decides the modality.
pub(crate) fn clip(name: &str) -> Value {
    let path = format!("{}/tests/clips/{name}", env!("CARGO_MANIFEST_DIR"));
    let data = STANDARD.encode(std::fs::read(path).expect("a clip"));
    let modality = match name.rsplit('.').next() {
        Some("mp4" | "webm") => "video",
        Some("wav" | "mp3" | "flac" | "ogg") => "audio",
        _ => "image",
    };
    let field = format!("{modality}_url");
    json!({"type": field, (field.clone()): {"url": format!("data:;base64,{data}")}})
}

/// Returns a recording as an `input_audio` part of OpenAI's API.
fn input_audio(name: &str) -> Value {
    let url = clip(name)["audio_url"]["url"]
        .as_str()
        .map(|url| url.trim_start_matches("data:;base64,").to_owned());
    json!({"type": "input_audio", "input_audio": {"data": url, "format": "wav"}})
}

/// Returns a greedy request of 12 tokens.
pub(crate) fn short_request(content: Value) -> Value {
    greedy_request("m", &content, 12)
}

/// Returns a video as a list of frames, each a JPEG file.
fn frames(jpegs: &[&[u8]]) -> Value {
    let list: Vec<String> = jpegs.iter().map(|jpeg| STANDARD.encode(jpeg)).collect();
    let url = format!("data:video/jpeg;base64,{}", list.join(","));
    json!({"type": "video_url", "video_url": {"url": url}})
}

/// Returns requests with videos, for models that support images too.
fn video_requests() -> Vec<Value> {
    vec![
        short_request(json!([clip("with_sound.mp4"), text("what is this?")])),
        short_request(json!([
            text("compare"),
            clip("silent.mp4"),
            text("and"),
            clip("edit_list.mp4")
        ])),
        short_request(json!([image(DAWN), clip("vp9.webm"), text("what is in"), image(NIGHT)])),
        short_request(json!([clip("gradient.tiff"), text("what is this?")])),
        short_request(json!([frames(&[DAWN.jpeg; 4]), text("what is this?")])),
    ]
}

fn one_video_requests() -> Vec<Value> {
    vec![
        short_request(json!([clip("with_sound.mp4"), text("what is this?")])),
        short_request(json!([image(DAWN), clip("vp9.webm"), text("what is in"), image(NIGHT)])),
    ]
}

fn audio_requests() -> Vec<Value> {
    vec![
        short_request(json!("the quick brown fox jumps over the lazy dog")),
        short_request(json!([clip("mono_16k.wav"), text("what is this?")])),
        short_request(json!([clip("stereo_44k.wav"), text("and"), clip("sound.flac")])),
        short_request(json!([input_audio("mono_16k.wav"), text("what is this?")])),
        short_request(json!([clip("opus.ogg"), text("what is this?")])),
    ]
}

fn omni_requests() -> Vec<Value> {
    let mut requests = audio_requests();
    requests.extend(video_requests());
    requests.push(short_request(json!([
        clip("with_sound.mp4"),
        clip("mono_16k.wav"),
        image(DAWN),
        text("all of it")
    ])));
    // The sound of a video is a second item in the video's own range of tokens.
    for content in [
        json!([clip("with_sound.mp4"), text("what is to be seen and heard?")]),
        json!([
            image(DAWN),
            text("compare"),
            clip("with_sound.mp4"),
            text("and"),
            clip("with_sound.mp4"),
            text("all the time")
        ]),
    ] {
        let mut request = short_request(content);
        request["mm_processor_kwargs"] = json!({"use_audio_in_video": true});
        requests.push(request);
    }
    requests
}

fn image_requests() -> Vec<Value> {
    vec![
        short_request(json!([image(DAWN), text("describe this image briefly.")])),
        short_request(json!([image(NIGHT), text("what is this?")])),
        short_request(json!([clip("gradient.avif"), text("what is this?")])),
    ]
}

/// Returns conversations of several turns, for models whose renderer is vLLM's code.
fn conversation_requests() -> Vec<Value> {
    let mut turns = short_request(json!("the quick brown fox"));
    turns["messages"] = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [text("what is"), image(DAWN), text("this?")]},
        {"role": "assistant", "content": "dawn"},
        {"role": "user", "content": [text("and this?"), image(NIGHT)]},
    ]);
    [image_requests(), vec![short_request(json!("the quick brown fox")), turns]].concat()
}

fn thinking_requests() -> Vec<Value> {
    let mut thinking = short_request(json!("the quick brown fox"));
    thinking["chat_template_kwargs"] = json!({"thinking": true});
    let efforts = ["high", "none"].map(|effort| {
        let mut request = short_request(json!("the quick brown fox"));
        request["reasoning_effort"] = json!(effort);
        request
    });
    [conversation_requests(), one_video_requests(), vec![thinking], efforts.to_vec()].concat()
}

/// Returns requests for a model that numbers items per modality, although each item is processed
/// alone.
fn numbered_requests() -> Vec<Value> {
    vec![
        short_request(json!([image(DAWN), text("describe this image briefly.")])),
        short_request(json!([text("compare"), image(NIGHT), text("and"), image(DAWN)])),
        short_request(json!([image(NIGHT), image(NIGHT), text("the same image")])),
        short_request(json!([clip("silent.mp4"), text("what is this?")])),
        short_request(json!([image(DAWN), clip("silent.mp4"), text("what is in"), image(NIGHT)])),
        short_request(json!([
            clip("with_sound.mp4"),
            text("and"),
            clip("silent.mp4"),
            text("and"),
            clip("edit_list.mp4")
        ])),
    ]
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn modalities_match_vllm_serve() {
    let _alone = ENGINES.lock().await;
    let chosen = std::env::var("CHIASM_TEST_FAMILIES").ok();
    for (model, requests, flags) in [
        ("qwen25vl", [video_requests(), schema_requests(), tool_requests()].concat(), TOOL_FLAGS),
        ("qwen3vl", video_requests(), &[]),
        ("qwen2audio", audio_requests(), &[]),
        ("omni", omni_requests(), &[]),
        // Two videos in one prompt crash this model's engine in any frontend. Its conversations are
        // rendered by vLLM's code here.
        ("llavaov", thinking_requests(), &["--tokenizer-mode", "deepseek_v32"]),
        // Loaded from Mistral's own files, which vLLM prefers.
        ("mistral_small", conversation_requests(), &[]),
        ("paligemma", image_requests(), &[]),
        // The model's linear attention runs in bfloat16 only.
        ("minicpmv46", numbered_requests(), &["--dtype", "bfloat16"]),
    ] {
        if chosen.as_ref().is_none_or(|chosen| chosen.split(',').any(|name| name == model)) {
            check_model(model, &requests, flags).await;
        }
    }
}

/// Chiasm has a native family for this model, whose tensors vLLM's generic classes don't accept.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn transformers_backend_matches_vllm_serve() {
    let _alone = ENGINES.lock().await;
    check_model("llava", &image_requests(), &["--model-impl", "transformers"]).await;
}

/// Checks that the recordings of [`audio_requests`] were planned from their headers, except the one
/// in a format whose length no header tells.
async fn assert_recordings_planned(server: &Server, version: &str) {
    let planned = server.metric("chiasm_recordings_planned_total").await;
    let container = "chiasm_recordings_whole_total{cause=\"container\"}";
    // Plans reproduce vLLM 0.32 and later.
    let expected = if version.starts_with("0.31.") { (0.0, 0.0) } else { (3.0, 1.0) };
    assert_eq!((planned, server.metric(container).await), expected);
}

/// Checks that prompt tokens and new tokens are those of `vllm serve`, and that the engine finds
/// the predicted blocks.
async fn check_model(model: &str, requests: &[Value], flags: &[&str]) {
    let environment = Environment::read();
    let reference = environment.reference(model, flags);
    let (server, _engine) = environment.attach("shm", ROOMY_ARENA_GB, model, flags);
    // Data about prompts is compared for one model only.
    let prompt_data =
        if model == "qwen25vl" { prompts::record(&reference).await } else { Vec::new() };
    let reference = reference.answers(requests).await;
    server.wait_ready(1, STARTUP_TIMEOUT).await;
    assert_answers_match(&server, requests, &reference).await;
    let block_size =
        workers(&server).await[0]["block_size"].as_u64().expect("a block size") as usize;
    for request in requests {
        wait_settled(&server).await;
        assert_cached_as_predicted(&server.chat(request).await, block_size, model);
    }
    if model == "qwen25vl" {
        check_video_scenarios(&server, &environment.version, block_size as u64).await;
        prompts::assert_same(&server, &prompt_data, &environment.version).await;
        check_refused_constraints(&server).await;
        check_tool_loop(&server).await;
        check_forced_call_of_other_apis(&server).await;
        check_custom_with_allowed_tools(&server).await;
        run_client(
            &environment.clients_python,
            "clients/langchain_forced.py",
            &[&format!("{}/v1", server.url)],
        );
    }
    if ["qwen2audio", "omni"].contains(&model) {
        assert_recordings_planned(&server, &environment.version).await;
    }
    if model == "omni" {
        for modality in ["video", "audio"] {
            scenario_run::play_all_with(modality, &server, "m", block_size as u64, 8).await;
        }
    }
    assert_eq!(server.metric("chiasm_mm_transfer_total{mode=\"inline\"}").await, 0.0, "{model}");
    assert_eq!(server.metric("chiasm_mm_cache_misses_total").await, 0.0, "{model}");
    assert!(server.terminate(Duration::from_secs(60)).await, "SIGTERM ends it with exit code 0");
}

/// Checks that videos which are planned before they are decoded are routed as expected.
async fn check_video_scenarios(server: &Server, version: &str, block_size: u64) {
    for scenario in video_scenarios::all() {
        wait_settled(server).await;
        scenario_run::play_requests(scenario.name, &scenario.requests, server, block_size).await;
    }
    let planned = server.metric("chiasm_videos_planned_total").await;
    assert_eq!(planned > 0.0, !version.starts_with("0.31."), "{planned} planned videos");
    assert_eq!(server.metric("chiasm_replanned_requests_total").await, 0.0);
}
