//! Videos for engines of agents, which get the cuts of their files.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chiasm_video::{CutPart, VideoIndex};
use chiasm_vision::{VideoModel, VideoOptions, VideoProperties};
use serde_json::json;

use super::cluster::Cluster;
use super::{FAST, TIMEOUT};
use crate::support::Server;
use crate::support::videos::{RELEASE, VideoFolder, clip};

const CLIP: &str = "h264.mp4";

/// Returns an engine's description of the clip, with a digest of its pixels.
async fn description(server: &Server) -> String {
    let url = format!("data:video/mp4;base64,{}", BASE64_STANDARD.encode(clip(CLIP)));
    let parts = [
        json!({"type": "video_url", "video_url": {"url": url}}),
        json!({"type": "text", "text": "what is it?"}),
    ];
    let body = json!({
        "model": "m",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": 100,
    });
    let answer = server.chat(&body).await.ok();
    let text = answer["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
    // The rest is about the engine's cache.
    text.split(';').next().unwrap_or_default().to_owned()
}

/// Returns the bytes of the clip's cut.
fn cut_bytes(folder: &VideoFolder) -> usize {
    let model =
        VideoModel::from_model_dir(&folder.model(), VideoOptions::default()).expect("a model");
    let file = clip(CLIP);
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

#[tokio::test]
async fn agent_makes_the_tensors_of_a_local_engine_from_the_cut() {
    let folder = VideoFolder::new();
    let vllm = folder.vllm();
    let engine =
        [&["--sim", "1", "--sim-vllm-version", RELEASE, "--vllm", &vllm], &FAST[..]].concat();
    let model = folder.model().display().to_string();
    let local = Server::start(&[&[&*model, "--served-model-name", "m"], &engine[..]].concat());
    local.wait_ready(1, TIMEOUT).await;
    let expected = description(&local).await;
    assert!(expected.contains("item"), "{expected}");

    let cluster = Cluster::with_model(folder.model());
    let agents = [cluster.agent(1, &[&engine[..], &["--take-tensors"]].concat())];
    let server = cluster.serve(&agents, &["--vllm", &vllm]);
    server.wait_ready(1, TIMEOUT).await;
    assert_eq!(description(&server).await, expected);
    let sent = async |form: &str| {
        server.metric(&format!("chiasm_media_sent_items_total{{form=\"{form}\"}}")).await
    };
    assert_eq!([sent("cut").await, sent("tensors").await], [1.0, 0.0]);
    let bytes = server.metric("chiasm_media_sent_bytes_total").await;
    assert_eq!(bytes, cut_bytes(&folder) as f64);
    assert_eq!(server.metric("chiasm_videos_whole_total").await, 0.0);
    assert_eq!(server.metric("chiasm_mm_transfer_fallback_total").await, 0.0);
    // The engine holds the video now.
    assert_eq!(description(&server).await, expected);
    assert_eq!(server.metric("chiasm_media_sent_bytes_total").await, bytes);
}
