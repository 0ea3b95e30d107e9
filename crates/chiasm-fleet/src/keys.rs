//! The block keys of prompts, by plan class.

use chiasm_backend::{KeyScheme, PlanClass};
use chiasm_kv::{BlockKey, EngineHashing, MediaSpan, PromptBlocks, block_keys};
use chiasm_types::{MmHash, Placeholder};

/// Returns the engine's block hashing if the scheme uses engine hashes as block keys.
fn engine_hashing(scheme: KeyScheme) -> Option<EngineHashing> {
    match scheme {
        KeyScheme::Sglang => Some(EngineHashing::Sglang),
        KeyScheme::SglangNarrow => Some(EngineHashing::SglangNarrow),
        KeyScheme::Dynamo => Some(EngineHashing::Dynamo),
        KeyScheme::Chiasm | KeyScheme::Text => None,
    }
}

/// Returns the scheme of a worker's block keys, for the index.
pub(crate) fn index_scheme(scheme: KeyScheme) -> chiasm_kv::KeyScheme {
    engine_hashing(scheme).map_or(chiasm_kv::KeyScheme::Content, EngineHashing::scheme)
}

/// Returns the keys of a prompt's full blocks in the scheme of the class.
pub fn keys_for(class: &PlanClass, prompt: &PromptBlocks<'_>) -> Vec<BlockKey> {
    match engine_hashing(class.keys) {
        Some(hashing) => hashing.keys(prompt, class.block_size),
        None => block_keys(prompt, class.block_size),
    }
}

/// Returns the spans of a media item that go into block keys.
///
/// A placeholder has one span. For schemes with engine hashes, each run of embedding tokens has
/// one, because SGLang leaves the other tokens of a placeholder unchanged.
pub fn spans(class: &PlanClass, hash: MmHash, placeholder: &Placeholder) -> Vec<MediaSpan> {
    let span = |offset, length| MediaSpan { hash, offset, length };
    let mask = placeholder.is_embed.as_ref();
    let Some(mask) = mask.filter(|_| engine_hashing(class.keys).is_some()) else {
        return vec![span(placeholder.offset, placeholder.length)];
    };
    let runs = mask.chunk_by(|a, b| a == b).scan(placeholder.offset, |end, run| {
        *end += run.len();
        Some((*end - run.len(), run))
    });
    runs.filter(|(_, run)| run[0]).map(|(offset, run)| span(offset, run.len())).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use chiasm_backend::{PlaceholderForm, VllmItems};
    use chiasm_types::BlockSize;

    use super::*;

    #[test]
    fn sglang_spans_cover_only_embedding_tokens() {
        let class = |keys| PlanClass {
            processor: Arc::from(&b"x"[..]),
            vllm_items: VllmItems::Any,
            placeholders: PlaceholderForm::Marker,
            keys,
            block_size: BlockSize::new(16).unwrap(),
        };
        let hash = MmHash::new([1; 32]);
        let spans_of = |keys, is_embed| {
            let spans = spans(&class(keys), hash, &Placeholder { offset: 5, length: 6, is_embed });
            spans.iter().map(|span| (span.offset, span.length)).collect::<Vec<_>>()
        };
        let mask = || Some(vec![false, true, true, false, true, false]);
        assert_eq!(spans_of(KeyScheme::Chiasm, mask()), [(5, 6)]);
        assert_eq!(spans_of(KeyScheme::Sglang, mask()), [(6, 2), (9, 1)]);
        assert_eq!(spans_of(KeyScheme::Sglang, None), [(5, 6)]);
    }
}
