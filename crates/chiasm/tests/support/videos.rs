//! A model that plans videos, clips, and a scripted processor in place of vLLM's.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;
use tempfile::TempDir;

use super::demo_model;

/// The release that the scripted processor says it is of.
pub const RELEASE: &str = "0.33.0";

/// The fork server that takes the place of Python: the pixels of a frame are its position in the
/// file.
const SERVER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm-pipeline/tests/video_server.py");
const CLIPS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm-video/tests/clips");

/// Reads a clip of `chiasm-video`.
pub fn clip(name: &str) -> Vec<u8> {
    fs::read(Path::new(CLIPS).join(name)).expect("a clip")
}

/// A folder with a model and a `vllm` command.
pub struct VideoFolder(TempDir);

impl VideoFolder {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        fs::create_dir(&model).expect("a folder");
        for file in fs::read_dir(demo_model()).expect("the demo's model") {
            let path = file.expect("a file").path();
            fs::copy(&path, model.join(path.file_name().expect("a name"))).expect("a copy");
        }
        let template = model.join("chat_template.jinja");
        let text = fs::read_to_string(&template).expect("a template");
        let branch = "{%- elif part.type == 'text' -%}";
        assert!(text.contains(branch));
        let video =
            "{%- elif part.type == 'video' -%}\n<|vision_start|><|video_pad|><|vision_end|>\n";
        fs::write(&template, text.replace(branch, &format!("{video}{branch}"))).expect("written");
        let settings = json!({
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": {"shortest_edge": 3136, "longest_edge": 1_003_520},
        });
        fs::write(model.join("video_preprocessor_config.json"), settings.to_string())
            .expect("written");
        // The Python of a command is beside it.
        fs::write(folder.path().join("vllm"), "").expect("written");
        std::os::unix::fs::symlink(SERVER, folder.path().join("python3")).expect("a link");
        Self(folder)
    }

    /// Returns the folder of the model.
    pub fn model(&self) -> PathBuf {
        self.0.path().join("model")
    }

    /// Returns the path of the `vllm` command.
    pub fn vllm(&self) -> String {
        self.0.path().join("vllm").display().to_string()
    }
}
