//! Videos for engines of agents, which get the cuts of their files.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm_video::{CutPart, VideoIndex};
use chiasm_vision::{VideoModel, VideoOptions, VideoProperties};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::{FAST, TIMEOUT};
use crate::support::scripted_videos::{ScriptedVideos, video};
use crate::support::{Answer, Server};

/// A release whose videos are planned: that of the scripted processor.
const RELEASE: [&str; 2] = ["--sim-vllm-version", "0.33.0"];

/// Sends a request with a video.
async fn chat(server: &Server) -> Answer {
    let parts = [video(1), json!({"type": "text", "text": "what is it?"})];
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 100,
    });
    server.chat(&body).await
}

/// Returns an engine's description of the video, with a digest of its pixels.
async fn description(server: &Server) -> String {
    let answer = chat(server).await.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
    // The rest is about the engine's cache.
    text.split(';').next().unwrap_or_default().to_owned()
}

/// Returns the file of a content part.
fn file(part: &Value) -> Vec<u8> {
    let url = part["video_url"]["url"].as_str().expect("a URL");
    STANDARD.decode(url.split_once(',').expect("a data URL").1).expect("a file")
}

/// Returns the bytes of the video's cut.
fn cut_bytes(model: &Path) -> usize {
    let model = VideoModel::from_model_dir(model, VideoOptions::default()).expect("a model");
    let file = file(&video(1));
    let index = VideoIndex::read(&file).expect("an index");
    let properties = index.properties();
    let video = VideoProperties {
        frames: properties.frames,
        fps: properties.fps,
        width: properties.width,
        height: properties.height,
    };
    let plan = model.plan(video, model.default_request()).expect("a plan");
    let cut = index.cut(&file, &plan.frames).expect("a cut");
    cut.parts.iter().map(CutPart::len).sum()
}

/// Returns the number of videos sent in a form.
async fn sent(server: &Server, form: &str) -> f64 {
    server.metric(&format!("chiasm_media_sent_items_total{{form=\"{form}\"}}")).await
}

#[tokio::test]
async fn agent_makes_the_tensors_of_a_local_engine_from_the_cut() {
    let videos = ScriptedVideos::new("frames");
    let flags = videos.processor_flags();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let engine = [&["--sim", "1"], &RELEASE[..], &FAST, &flags].concat();
    let model = videos.model();
    let local = Server::start(&[&[&*model, "--served-model-name", "m"], &engine[..]].concat());
    local.wait_ready(1, TIMEOUT).await;
    let expected = description(&local).await;
    assert!(expected.contains("item"), "{expected}");

    let cluster = Cluster::with_model(PathBuf::from(&model));
    let agents = [cluster.agent(1, &[&engine[..], &["--take-tensors"]].concat())];
    let server = cluster.serve(&agents, &flags);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(description(&server).await, expected);
    assert_eq!([sent(&server, "cut").await, sent(&server, "tensors").await], [1.0, 0.0]);
    let bytes = server.metric("chiasm_media_sent_bytes_total").await;
    assert_eq!(bytes, cut_bytes(Path::new(&model)) as f64);
    assert_eq!(server.metric("chiasm_videos_whole_total").await, 0.0);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
    // The engine holds the video now.
    assert_eq!(description(&server).await, expected);
    assert_eq!(server.metric("chiasm_media_sent_bytes_total").await, bytes);
}

#[tokio::test]
async fn request_is_planned_again_if_the_cut_has_other_frames() {
    // The whole file takes 9 tokens, and the planned frames take more.
    let videos = ScriptedVideos::new("whole=9");
    let flags = videos.processor_flags();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let engine = [&["--sim", "1", "--take-tensors"], &RELEASE[..], &FAST, &flags].concat();
    let cluster = Cluster::with_model(PathBuf::from(videos.model()));
    let agents = [cluster.agent(1, &engine)];
    let server = cluster.serve(&agents, &flags);
    server.wait_ready(1, TIMEOUT).await;
    let answer = chat(&server).await.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text");
    assert!(text.contains("(9 tokens"), "{text}");
    assert_eq!(server.metric("chiasm_replanned_requests_total").await, 1.0);
    assert_eq!([sent(&server, "cut").await, sent(&server, "tensors").await], [1.0, 1.0]);
}
