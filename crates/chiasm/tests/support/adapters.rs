//! LoRA adapters for simulated engines, whose answers name the adapter that they used.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::Answer;

/// Creates an adapter's folder. Simulated engines read its rank, as real engines do.
pub fn adapter(parent: &Path, name: &str, rank: u64) -> PathBuf {
    let folder = parent.join(name);
    std::fs::create_dir_all(&folder).expect("a folder");
    let config = json!({"r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}).to_string();
    std::fs::write(folder.join("adapter_config.json"), config).expect("a file");
    std::fs::write(folder.join("adapter_model.safetensors"), name).expect("a file");
    folder
}

/// Returns a chat request whose prompt fills several blocks.
pub fn body(model: &str) -> Value {
    let text = "the quick brown fox jumps over the lazy dog ".repeat(20);
    json!({"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 64})
}

/// Returns the engine's name for the adapter that answered; `None` for the base model.
#[track_caller]
pub fn answered_by(answer: &Answer) -> Option<String> {
    let body = answer.ok();
    let text = body["choices"][0]["message"]["content"].as_str().expect("text");
    text.split_once("; by ").map(|(_, name)| name.trim().to_owned())
}

/// Returns the number of blocks predicted by the router, and of tokens cached in the engine.
pub fn overlap(answer: &Answer) -> (u64, u64) {
    let predicted = answer.header("x-chiasm-overlap");
    let predicted =
        predicted.split('/').next().and_then(|blocks| blocks.parse().ok()).expect("a number");
    let found =
        answer.ok()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number");
    (predicted, found)
}
