//! How prompts are keyed for the workers of a class.

use chiasm_backend::{KeyScheme, PlanClass};
use chiasm_kv::{BlockKey, EngineHashing, PromptBlocks, block_keys};

/// How the engines of a class hash their blocks, if that is what the blocks are known by.
fn hashing(scheme: KeyScheme) -> Option<EngineHashing> {
    match scheme {
        KeyScheme::Sglang => Some(EngineHashing::Sglang),
        KeyScheme::Dynamo => Some(EngineHashing::Dynamo),
        _ => None,
    }
}

/// What the keys of a worker's blocks are made of, for the index.
pub(crate) fn index_scheme(scheme: KeyScheme) -> chiasm_kv::KeyScheme {
    hashing(scheme).map_or(chiasm_kv::KeyScheme::Content, EngineHashing::scheme)
}

/// The keys of a prompt's full blocks, as workers of the class have them.
pub(crate) fn keys_for(class: &PlanClass, prompt: &PromptBlocks<'_>) -> Vec<BlockKey> {
    match hashing(class.keys) {
        Some(hashing) => hashing.keys(prompt, class.block_size),
        None => block_keys(prompt, class.block_size),
    }
}
