use std::sync::Arc;

use chiasm_types::{BlockSize, VllmVersion};

/// Everything that determines how a prompt is expanded and keyed for a worker.
///
/// Workers of equal classes can share a plan of a request. A request is planned and keyed once per
/// class that is present in the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanClass {
    /// The processor that determines the tokens and tensors of media items, as bytes that encode
    /// its name, version and settings. Part of every item's identity.
    pub processor: Arc<[u8]>,
    /// The items of vLLM's own processor that the worker takes.
    pub vllm_items: VllmItems,
    /// The form of a media item in the worker's prompt.
    pub placeholders: PlaceholderForm,
    /// The scheme of block keys.
    pub keys: KeyScheme,
    /// The number of tokens per block.
    pub block_size: BlockSize,
}

impl PlanClass {
    /// Returns the part of an item's identity that does not depend on its content: everything in
    /// the class and in the item's settings that changes its tensors. `fingerprint` identifies the
    /// settings.
    pub fn item_identity(processor: &[u8], fingerprint: &[u8]) -> Vec<u8> {
        let mut identity = Vec::with_capacity(8 + processor.len() + fingerprint.len());
        identity.extend_from_slice(&(processor.len() as u64).to_le_bytes());
        identity.extend_from_slice(processor);
        identity.extend_from_slice(fingerprint);
        identity
    }
}

/// The items of vLLM's own processor that a worker takes. Releases of vLLM may serialize or shape
/// such items differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VllmItems {
    /// Items of any release.
    Any,
    /// Items of this release, which is the worker's own.
    Release(VllmVersion),
    /// No such items.
    None,
}

impl VllmItems {
    /// Returns the items that an engine takes, by its description, such as `vLLM 0.32.0`. Builds
    /// without a release number and other engines take items of any release.
    pub fn for_engine(engine: &str) -> Self {
        engine.strip_prefix("vLLM ").and_then(VllmVersion::parse).map_or(Self::Any, Self::Release)
    }
}

/// The form of a media item in a worker's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceholderForm {
    /// The item's own tokens, as many as the engine computes.
    Expanded,
    /// The template's single marker, which the worker expands itself.
    Marker,
    /// The worker makes the prompt from the client's own messages and has its own names of items.
    /// The backend learns these names from the worker's KV events. To that end it gets the
    /// predicted prompt of each request
    /// ([`ForwardRequest::prompt`](crate::ForwardRequest::prompt)).
    Learned,
}

/// A scheme of block keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyScheme {
    /// Our own 127-bit keys, from tokens and media identities (`chiasm-kv`).
    Chiasm,
    /// Our own keys, but from a request's text, four bytes per token, and from the hashes of its
    /// media items. Used for workers that get requests unchanged.
    Text,
    /// SGLang's own block hashes, as `chiasm_kv::EngineHashing::Sglang` computes them.
    Sglang,
    /// The block hashes of SGLang 0.5.22, as `chiasm_kv::EngineHashing::SglangNarrow` computes
    /// them.
    SglangNarrow,
    /// Dynamo's own hashes of its workers' blocks, as `chiasm_kv::EngineHashing::Dynamo` computes
    /// them.
    Dynamo,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_identity_depends_on_the_class() {
        assert_ne!(PlanClass::item_identity(b"a", b"bc"), PlanClass::item_identity(b"ab", b"c"));
        assert_ne!(PlanClass::item_identity(b"a", b"x"), PlanClass::item_identity(b"b", b"x"));
        assert_ne!(PlanClass::item_identity(b"", b"x"), PlanClass::item_identity(b"x", b""));
    }
}
