//! Videos that are planned from their containers, in front of simulated engines. A script in place
//! of vLLM's processor decodes them.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::adapters::adapter;
use crate::support::scripted_videos::{ScriptedVideos, VIDEO_TOKEN, video};
use crate::support::{Server, scenario_run, video_scenarios};

const TIMEOUT: Duration = Duration::from_secs(30);
/// The block size in tokens.
const BLOCK: u64 = 16;
/// The KV cache of an engine that evicts, in blocks.
const FEW_BLOCKS: &str = "64";
/// The maximum number of tokens of a prompt and its answer on such an engine.
const FEW_TOKENS: &str = "960";
/// The number of words of a prompt that takes most blocks of such an engine.
const FILLER_WORDS: usize = 150;

/// Starts a server with simulated engines.
async fn serve(videos: &ScriptedVideos, engines: &str, workers: u64, flags: &[&str]) -> Server {
    let model = videos.model();
    let args = [&model, "--served-model-name", "m", "--sim", engines, "--allow-private-media"];
    let version = ["--sim-vllm-version", "0.33.0", "--trust-request-mm-kwargs"];
    let processor = videos.processor_flags();
    let processor: Vec<&str> = processor.iter().map(String::as_str).collect();
    let server = Server::start(&[&args[..], &version, &processor, flags].concat());
    server.wait_ready(workers, TIMEOUT).await;
    server
}

/// Asserts that the server has planned all videos so far, and that all predictions were right.
async fn assert_planned(server: &Server) {
    assert!(server.metric("chiasm_videos_planned_total").await > 0.0);
    assert_eq!(server.metric("chiasm_videos_whole_total").await, 0.0);
    assert_eq!(server.metric("chiasm_overlap_error_blocks_total").await, 0.0);
}

#[tokio::test]
async fn scenarios_with_planned_videos_are_routed_as_expected() {
    let videos = ScriptedVideos::new("frames");
    let folder = tempfile::tempdir().expect("a folder");
    let [one, other] = ["one", "other"]
        .map(|name| format!("{name}={}", adapter(folder.path(), name, 8).display()));
    let server = serve(&videos, "2", 2, &["--lora-modules", &one, &other]).await;
    scenario_run::play_all_with("video", &server, "m", BLOCK, 4).await;
    let adapters = video_scenarios::adapters("one", "other");
    for scenario in video_scenarios::all().into_iter().chain([adapters]) {
        scenario_run::play_requests(scenario.name, &scenario.requests, &server, BLOCK).await;
    }
    assert_planned(&server).await;
}

#[tokio::test]
async fn evicted_video_is_computed_again() {
    let videos = ScriptedVideos::new("frames");
    let small = ["--sim-blocks", FEW_BLOCKS, "--sim-max-model-len", FEW_TOKENS];
    let server = serve(&videos, "1", 1, &small).await;
    let scenario = video_scenarios::eviction(FILLER_WORDS);
    scenario_run::play_requests(scenario.name, &scenario.requests, &server, BLOCK).await;
    assert_planned(&server).await;
}

/// Returns a request about a video that shows its prompt.
fn shown_prompt(number: u64, is_streamed: bool) -> Value {
    json!({
        "model": "m",
        "messages": [{"role": "user", "content": [video(number), {"type": "text", "text": "So?"}]}],
        "max_tokens": 4,
        "return_token_ids": true,
        "stream": is_streamed,
        "stream_options": if is_streamed { json!({"include_usage": true}) } else { Value::Null },
    })
}

#[tokio::test]
async fn client_does_not_notice_a_stale_plan() {
    const WHOLE_TOKENS: usize = 9;
    let videos = ScriptedVideos::new(&format!("whole={WHOLE_TOKENS}"));
    let always_split = ["--disturb-weight", "1000", "--hop-weight", "0"];
    for (engines, workers, flags) in
        [("2", 2, &[][..]), ("encode=1,prefill=1,decode=1", 3, &always_split)]
    {
        let server = serve(&videos, engines, workers, flags).await;
        for (number, is_streamed) in [(1, false), (2, true)] {
            let answer = server.chat(&shown_prompt(number, is_streamed)).await;
            let (prompt, usage) = if is_streamed {
                let chunks = answer.chunks();
                let usage = chunks.last().expect("chunks")["usage"].clone();
                (chunks[0]["prompt_token_ids"].clone(), usage)
            } else {
                let body = answer.ok();
                (body["prompt_token_ids"].clone(), body["usage"].clone())
            };
            let prompt = prompt.as_array().expect("a list");
            let shown = prompt.iter().filter(|token| **token == VIDEO_TOKEN).count();
            assert_eq!(shown, WHOLE_TOKENS, "{engines}: {prompt:?}");
            assert_eq!(usage["prompt_tokens"], prompt.len(), "{engines}");
            let details = &usage["prompt_tokens_details"]["multimodal_tokens"];
            assert_eq!(*details, json!({"video": WHOLE_TOKENS}), "{engines}");
            let replanned = server.metric("chiasm_replanned_requests_total").await;
            assert_eq!(replanned, number as f64, "{engines}");
        }
        // No video was read twice.
        assert_eq!(server.metric("chiasm_media_opened_total{how=\"data\"}").await, 2.0);
        let other_frames = "chiasm_videos_whole_total{cause=\"other_frames\"}";
        assert_eq!(server.metric(other_frames).await, 2.0, "{engines}");
        // A repeated request begins with the new plan, whose blocks the engine holds.
        let again = server.chat(&shown_prompt(1, false)).await;
        again.ok();
        assert_eq!(server.metric("chiasm_replanned_requests_total").await, 2.0, "{engines}");
    }
}
