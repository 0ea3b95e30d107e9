//! A model with videos whose vLLM is a script, so that videos are planned and decoded without vLLM.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::demo_model;

/// The token that stands for each embedding of a video in the model's prompts.
pub const VIDEO_TOKEN: u64 = 447;

/// The demo's model with videos, and a `vllm` command whose processor is a script.
pub struct ScriptedVideos {
    folder: TempDir,
}

impl ScriptedVideos {
    /// Creates the model and the command. `video_server.py` documents the behaviours.
    pub fn new(behaviour: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        create_model(&folder.path().join("model"));
        let script =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm-pipeline/tests/video_server.py");
        let python = folder.path().join("python3");
        std::fs::write(&python, format!("#!/bin/sh\nexec {script} {behaviour}\n"))
            .expect("a script");
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).expect("a mode");
        std::fs::write(folder.path().join("vllm"), "").expect("a command");
        Self { folder }
    }

    /// Returns the model's folder.
    pub fn model(&self) -> String {
        self.folder.path().join("model").display().to_string()
    }

    /// Returns flags for a frontend with this processor.
    pub fn processor_flags(&self) -> [String; 4] {
        let vllm = self.folder.path().join("vllm").display().to_string();
        ["--vllm", &vllm, "--processor-sandbox", "off"].map(str::to_owned)
    }
}

/// Creates the demo's model with settings and a template of videos.
fn create_model(folder: &Path) {
    std::fs::create_dir(folder).expect("a folder");
    for file in std::fs::read_dir(demo_model()).expect("a folder").flatten() {
        std::fs::copy(file.path(), folder.join(file.file_name())).expect("copied");
    }
    let path = folder.join("chat_template.jinja");
    let template = std::fs::read_to_string(&path).expect("a template");
    let text_branch = "{%- elif part.type == 'text' -%}";
    assert!(template.contains(text_branch), "the template has changed");
    let video_branch =
        "{%- elif part.type == 'video' -%}\n<|vision_start|><|video_pad|><|vision_end|>\n";
    let with_videos = template.replace(text_branch, &format!("{video_branch}{text_branch}"));
    std::fs::write(&path, with_videos).expect("written");
    // A token stands for 28 by 28 pixels of two frames. Each two frames take at least 64 tokens, so
    // that a video takes several blocks.
    let settings = json!({
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": {"shortest_edge": 64 * 28 * 28, "longest_edge": 1024 * 28 * 28},
    });
    std::fs::write(folder.join("video_preprocessor_config.json"), settings.to_string())
        .expect("written");
}

/// Returns a content part with a video that can be planned. Videos with other numbers are other
/// files with the same frames.
pub fn video(number: u64) -> Value {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm-video/tests/clips/h264.mp4");
    let clip = std::fs::read(path).expect("a clip");
    // Decoders ignore this MP4 box.
    let file = [&clip[..], &16_u32.to_be_bytes(), b"free", &number.to_be_bytes()].concat();
    let url = format!("data:video/mp4;base64,{}", STANDARD.encode(file));
    json!({"type": "video_url", "video_url": {"url": url}})
}
