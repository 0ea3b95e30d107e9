//! The model directory and the picture that are part of the binary, unpacked to a temporary folder.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::error::CliError;
use crate::scenarios::DAWN;

macro_rules! model_files {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../assets/model/", $name)) as &[u8])),+]
    };
}

/// The configuration and tokenizer of a tiny Qwen2-VL, without weights.
const MODEL: &[(&str, &[u8])] = model_files![
    "chat_template.jinja",
    "config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

pub(super) struct Bundle {
    dir: TempDir,
    picture: PathBuf,
}

impl Bundle {
    pub(super) fn unpack() -> Result<Self, CliError> {
        let dir = TempDir::with_prefix("chiasm-demo-")
            .map_err(|error| CliError::file(&std::env::temp_dir(), error))?;
        let picture = dir.path().join(DAWN.name);
        for (name, bytes) in MODEL.iter().copied().chain([(DAWN.name, DAWN.jpeg)]) {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).map_err(|error| CliError::file(&path, error))?;
        }
        Ok(Self { dir, picture })
    }

    pub(super) fn model_dir(&self) -> &Path {
        self.dir.path()
    }

    pub(super) fn picture(&self) -> &Path {
        &self.picture
    }
}
