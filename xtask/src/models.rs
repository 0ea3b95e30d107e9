//! Tiny random models for the real engines, made by the environment's own transformers.

use std::fs;
use std::path::PathBuf;

use crate::child;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::vllm_env::{self, Setup, VllmEnv};

const SCRIPT: &str = "python/models/make_tiny_models.py";
/// One directory each.
pub(crate) const MODELS: [&str; 3] = ["qwen2vl", "qwen25vl", "qwen3vl"];

/// Makes the models, or finds them made; returns the directory that holds them by name.
pub(crate) fn ensure(setup: &Setup, env: &VllmEnv) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(SCRIPT)?;
    // transformers decides what the files look like, so its version is an input as much as the script.
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    inputs.push(fs::read(&script).map_err(Error::io("read", &script))?);
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "models", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| MODELS.iter().all(|model| path.join(model).join("config.json").is_file()),
        |path, held| {
            setup.output.say(&format!("making {}", path.display()))?;
            let mut python = env.python_command();
            python.arg(&script).arg(path).stdin(held.as_input()?);
            child::run(&mut python, SCRIPT, &setup.output, &setup.cancel)
        },
    )?;
    Ok(dir.path().to_owned())
}
