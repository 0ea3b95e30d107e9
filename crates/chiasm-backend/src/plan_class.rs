use std::sync::Arc;

use chiasm_types::{BlockSize, VllmVersion};

/// Everything that decides how a prompt is expanded and keyed for a worker. Workers of equal
/// classes can be given one plan of a request; a request is planned and keyed once per class that
/// is present in the fleet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanClass {
    /// The processor that decides tokens and tensors of media items, in bytes that stand for its
    /// name, version and settings. Part of every item's identity.
    pub processor: Arc<[u8]>,
    /// Which media items that vLLM's own processor makes the worker takes.
    pub vllm_items: VllmItems,
    /// What stands for a media item in the prompt that the worker is given.
    pub placeholders: PlaceholderForm,
    /// How the blocks of a prompt are named.
    pub keys: KeyScheme,
    /// Tokens per block.
    pub block_size: BlockSize,
}

impl PlanClass {
    /// Everything of a class and of one item's settings that changes the item's tensors: what its
    /// identity is made of beside its content. `fingerprint` is the settings' own.
    pub fn identify(processor: &[u8], fingerprint: &[u8]) -> Vec<u8> {
        let mut identity = Vec::with_capacity(8 + processor.len() + fingerprint.len());
        identity.extend_from_slice(&(processor.len() as u64).to_le_bytes());
        identity.extend_from_slice(processor);
        identity.extend_from_slice(fingerprint);
        identity
    }
}

/// Media items that vLLM's own processor makes, by the release of vLLM: one may write or shape them
/// otherwise than another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VllmItems {
    /// Those of any release.
    Any,
    /// Those of the release that computes.
    Of(VllmVersion),
    /// None.
    None,
}

impl VllmItems {
    /// What an engine takes that says this of itself: `vLLM 0.32.0`. Builds that tell no release,
    /// and other engines, take any.
    pub fn of_engine(engine: &str) -> Self {
        engine.strip_prefix("vLLM ").and_then(VllmVersion::parse).map_or(Self::Any, Self::Of)
    }
}

/// What stands for a media item in the prompt that a worker is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaceholderForm {
    /// The item's own tokens stand in the prompt, as many as the engine computes.
    Expanded,
    /// The template's one marker: the worker expands it itself.
    Marker,
    /// The worker writes them itself from the client's own messages, and has its own names of
    /// items. The backend learns these from what the worker tells of its KV cache; for that it is
    /// given what each request is expected to become ([`Forward::prompt`](crate::Forward::prompt)).
    Learned,
}

/// How the blocks of a prompt are named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyScheme {
    /// Our own 127-bit keys, from tokens and media identities (`chiasm-kv`).
    Chiasm,
    /// The same function of a request's text, four bytes in place of a token, and of the hashes of
    /// its media items: for workers that are given requests as they come.
    Text,
    /// SGLang's own hashes of its blocks, as `chiasm_kv::EngineHashing::Sglang` makes them.
    Sglang,
    /// Those of SGLang 0.5.22, as `chiasm_kv::EngineHashing::SglangNarrow` makes them.
    SglangNarrow,
    /// Dynamo's own hashes of its workers' blocks, as `chiasm_kv::EngineHashing::Dynamo` makes
    /// them.
    Dynamo,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_is_part_of_an_items_identity() {
        assert_ne!(PlanClass::identify(b"a", b"bc"), PlanClass::identify(b"ab", b"c"));
        assert_ne!(PlanClass::identify(b"a", b"x"), PlanClass::identify(b"b", b"x"));
        assert_ne!(PlanClass::identify(b"", b"x"), PlanClass::identify(b"x", b""));
    }
}
