//! Videos, recordings, rare images and models without a native family: made by vLLM's own
//! processor, answered as `vllm serve` does.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{DAWN, NIGHT};
use serde_json::{Value, json};

use super::constrained::{constrained_requests, what_an_engine_fails_of_is_refused};
use super::environment::{ENGINES, Environment, ROOMY_ARENA_GB, STARTUP};
use super::predictions::{found_as_predicted, settled, workers};
use super::prompts;
use super::requests::{answers_are_those_of_vllm_serve, image, text};
use super::run_client;
use super::tools::{
    TOOL_FLAGS, an_agent_calls_its_functions, custom_and_allowed_tools_are_forced,
    other_apis_call_alike, tool_requests,
};
use crate::support::scenario_run;

/// A part with a file of `tests/clips`, by the end of whose name the modality is known.
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

/// A recording as OpenAI's API has it.
fn input_audio(name: &str) -> Value {
    let url = clip(name)["audio_url"]["url"]
        .as_str()
        .map(|url| url.trim_start_matches("data:;base64,").to_owned());
    json!({"type": "input_audio", "input_audio": {"data": url, "format": "wav"}})
}

pub(crate) fn ask(content: Value) -> Value {
    json!({
        "model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0,
        "ignore_eos": true, "return_token_ids": true,
    })
}

/// A video as a list of frames, each a JPEG file.
fn frames(jpegs: &[&[u8]]) -> Value {
    let list: Vec<String> = jpegs.iter().map(|jpeg| STANDARD.encode(jpeg)).collect();
    json!({"type": "video_url", "video_url": {"url": format!("data:video/jpeg;base64,{}", list.join(","))}})
}

/// Requests with videos, for models that take images too.
fn video_requests() -> Vec<Value> {
    vec![
        ask(json!([clip("with_sound.mp4"), text("what is this?")])),
        ask(json!([text("compare"), clip("silent.mp4"), text("and"), clip("edit_list.mp4")])),
        ask(json!([image(DAWN), clip("vp9.webm"), text("what is in"), image(NIGHT)])),
        ask(json!([clip("gradient.tiff"), text("what is this?")])),
        ask(json!([frames(&[DAWN.jpeg; 4]), text("what is this?")])),
    ]
}

fn one_video_requests() -> Vec<Value> {
    vec![
        ask(json!([clip("with_sound.mp4"), text("what is this?")])),
        ask(json!([image(DAWN), clip("vp9.webm"), text("what is in"), image(NIGHT)])),
    ]
}

fn audio_requests() -> Vec<Value> {
    vec![
        ask(json!("the quick brown fox jumps over the lazy dog")),
        ask(json!([clip("mono_16k.wav"), text("what is this?")])),
        ask(json!([clip("stereo_44k.wav"), text("and"), clip("sound.flac")])),
        ask(json!([input_audio("mono_16k.wav"), text("what is this?")])),
        ask(json!([clip("opus.ogg"), text("what is this?")])),
    ]
}

fn omni_requests() -> Vec<Value> {
    let mut requests = audio_requests();
    requests.extend(video_requests());
    requests.push(ask(json!([
        clip("with_sound.mp4"),
        clip("mono_16k.wav"),
        image(DAWN),
        text("all of it")
    ])));
    // The sound of a video is a second item on the video's own range.
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
        let mut request = ask(content);
        request["mm_processor_kwargs"] = json!({"use_audio_in_video": true});
        requests.push(request);
    }
    requests
}

fn image_requests() -> Vec<Value> {
    vec![
        ask(json!([image(DAWN), text("describe this image briefly.")])),
        ask(json!([image(NIGHT), text("what is this?")])),
        ask(json!([clip("gradient.avif"), text("what is this?")])),
    ]
}

/// Conversations of several turns, for renderers that are code.
fn written_requests() -> Vec<Value> {
    let mut turns = ask(json!("the quick brown fox"));
    turns["messages"] = json!([
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [text("what is"), image(DAWN), text("this?")]},
        {"role": "assistant", "content": "dawn"},
        {"role": "user", "content": [text("and this?"), image(NIGHT)]},
    ]);
    [image_requests(), vec![ask(json!("the quick brown fox")), turns]].concat()
}

fn thinking_requests() -> Vec<Value> {
    let mut thinking = ask(json!("the quick brown fox"));
    thinking["chat_template_kwargs"] = json!({"thinking": true});
    let efforts = ["high", "none"].map(|effort| {
        let mut request = ask(json!("the quick brown fox"));
        request["reasoning_effort"] = json!(effort);
        request
    });
    [written_requests(), one_video_requests(), vec![thinking], efforts.to_vec()].concat()
}

/// How an item is written depends on how many of its modality come before it, and it was made by
/// itself.
fn numbered_requests() -> Vec<Value> {
    vec![
        ask(json!([image(DAWN), text("describe this image briefly.")])),
        ask(json!([text("compare"), image(NIGHT), text("and"), image(DAWN)])),
        ask(json!([image(NIGHT), image(NIGHT), text("the same image")])),
        ask(json!([clip("silent.mp4"), text("what is this?")])),
        ask(json!([image(DAWN), clip("silent.mp4"), text("what is in"), image(NIGHT)])),
        ask(json!([
            clip("with_sound.mp4"),
            text("and"),
            clip("silent.mp4"),
            text("and"),
            clip("edit_list.mp4")
        ])),
    ]
}

/// One engine for each model.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn every_modality_is_answered_as_by_vllm_serve() {
    let _alone = ENGINES.lock().await;
    let chosen = std::env::var("CHIASM_TEST_FAMILIES").ok();
    for (model, requests, flags) in [
        (
            "qwen25vl",
            [video_requests(), constrained_requests(), tool_requests()].concat(),
            &TOOL_FLAGS[..],
        ),
        ("qwen3vl", video_requests(), &[]),
        ("qwen2audio", audio_requests(), &[]),
        ("omni", omni_requests(), &[]),
        // Two videos in one prompt end this model's engine, whoever asks. Its conversations are
        // written by vLLM's code here.
        ("llavaov", thinking_requests(), &["--tokenizer-mode", "deepseek_v32"]),
        // It is read from Mistral's own files, as vLLM prefers them.
        ("mistral_small", written_requests(), &[]),
        ("paligemma", image_requests(), &[]),
        // Its linear attention runs in bfloat16 only.
        ("minicpmv46", numbered_requests(), &["--dtype", "bfloat16"]),
    ] {
        if chosen.as_ref().is_none_or(|chosen| chosen.split(',').any(|name| name == model)) {
            is_answered_as_by_vllm_serve(model, &requests, flags).await;
        }
    }
}

/// Chiasm has a family of its own for this model, whose tensors the generic classes do not take.
#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn models_of_the_transformers_backend_are_answered_as_by_vllm_serve() {
    let _alone = ENGINES.lock().await;
    is_answered_as_by_vllm_serve("llava", &image_requests(), &["--model-impl", "transformers"])
        .await;
}

/// The prompt tokens and the new tokens are those of `vllm serve`, and the engine finds what it was
/// predicted to have.
async fn is_answered_as_by_vllm_serve(model: &str, requests: &[Value], flags: &[&str]) {
    let environment = Environment::read();
    let reference = environment.reference(model, flags);
    let (server, _engine) = environment.attach("shm", ROOMY_ARENA_GB, model, flags);
    // Of prompts one model tells enough.
    let told = if model == "qwen25vl" { prompts::told_by(&reference).await } else { Vec::new() };
    let reference = reference.answers(requests).await;
    server.wait_ready(1, STARTUP).await;
    answers_are_those_of_vllm_serve(&server, requests, &reference).await;
    let block_size =
        workers(&server).await[0]["block_size"].as_u64().expect("a block size") as usize;
    for request in requests {
        settled(&server).await;
        found_as_predicted(&server.chat(request).await, block_size, model);
    }
    if model == "qwen25vl" {
        prompts::as_told_by_vllm_serve(&server, &told, &environment.version).await;
        what_an_engine_fails_of_is_refused(&server).await;
        an_agent_calls_its_functions(&server).await;
        other_apis_call_alike(&server).await;
        custom_and_allowed_tools_are_forced(&server).await;
        run_client(
            &environment.clients_python,
            "clients/langchain_forced.py",
            &[&format!("{}/v1", server.url)],
        );
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
