//! Tiny random models for the real engines, made with `transformers` of the vLLM environment.

use std::fs;
use std::path::{Path, PathBuf};

use crate::child;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::setup::Setup;
use crate::vllm_env::{self, VllmEnv};

const FOLDER: &str = "python/models";
const SCRIPT: &str = "python/models/make_tiny_models.py";
/// The names of the models, which have one directory each.
pub(crate) const MODELS: [&str; 19] = [
    "qwen2vl",
    "qwen25vl",
    "qwen3vl",
    "qwen3vl_moe",
    "qwen35",
    "llava",
    "llava_next",
    "gemma3",
    "llama4",
    "pixtral",
    "mistral3",
    "internvl",
    "internvl_chat",
    "qwen2audio",
    "omni",
    "llavaov",
    "paligemma",
    "minicpmv46",
    "mistral_small",
];

/// The names of their LoRA adapters, which have one directory each.
const ADAPTERS: [&str; 2] = ["qwen25vl-lora-a", "qwen25vl-lora-b"];

/// Makes the models unless they exist; returns the directory that contains their directories.
pub(crate) fn ensure(setup: &Setup, env: &VllmEnv) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(SCRIPT)?;
    // The contents of the files depend on the version of transformers as well as on the script.
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    add_python_sources(&setup.workspace.root.join(FOLDER), &mut inputs)?;
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "models", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |path| {
            let has = |folder: &&str, file: &str| path.join(folder).join(file).is_file();
            MODELS.iter().all(|model| has(model, "config.json"))
                && ADAPTERS.iter().all(|adapter| has(adapter, "adapter_config.json"))
        },
        |path, lock| {
            setup.output.print_line(&format!("making {}", path.display()))?;
            let mut python = env.python_command();
            // -B: no __pycache__ beside the script.
            python.arg("-B").arg(&script).arg(path).stdin(lock.as_stdin()?);
            child::run(&mut python, SCRIPT, &setup.output, &setup.cancel)
        },
    )?;
    Ok(dir.path().to_owned())
}

/// Adds the name and contents of each Python file below a folder to `inputs`, in the order of
/// names.
pub(crate) fn add_python_sources(folder: &Path, inputs: &mut Vec<Vec<u8>>) -> Result<(), Error> {
    let read = || {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()
    };
    let mut paths = read().map_err(Error::io("list", folder))?;
    paths.sort();
    for path in paths {
        if path.is_dir() {
            add_python_sources(&path, inputs)?;
        } else if path.extension().is_some_and(|extension| extension == "py") {
            inputs.push(path.file_name().unwrap_or_default().as_encoded_bytes().to_vec());
            inputs.push(fs::read(&path).map_err(Error::io("read", &path))?);
        }
    }
    Ok(())
}
