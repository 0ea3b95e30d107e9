//! A model that plans videos, clips, and a scripted processor in place of vLLM's.

#[path = "../../../chiasm-pipeline/tests/fixtures/video_model.rs"]
mod video_model;

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
pub use video_model::clip;
use video_model::{VIDEO_SERVER, write_model};

/// The release that the scripted processor says it is of.
pub const RELEASE: &str = "0.33.0";

/// A folder with a model and a `vllm` command.
pub struct VideoFolder(TempDir);

impl VideoFolder {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let model = folder.path().join("model");
        fs::create_dir(&model).expect("a folder");
        write_model(&model);
        // The Python of a command is beside it.
        fs::write(folder.path().join("vllm"), "").expect("written");
        std::os::unix::fs::symlink(VIDEO_SERVER, folder.path().join("python3")).expect("a link");
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
