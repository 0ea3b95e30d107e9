//! How prompts are keyed for the workers of a class.

use chiasm_backend::{KeyScheme, PlanClass};
use chiasm_kv::{BlockKey, EngineHashing, MediaSpan, PromptBlocks, block_keys};
use chiasm_types::{MmHash, Placeholder};

/// How the engines of a class hash their blocks, if that is what the blocks are known by.
fn hashing(scheme: KeyScheme) -> Option<EngineHashing> {
    match scheme {
        KeyScheme::Sglang => Some(EngineHashing::Sglang),
        KeyScheme::SglangNarrow => Some(EngineHashing::SglangNarrow),
        KeyScheme::Dynamo => Some(EngineHashing::Dynamo),
        KeyScheme::Chiasm | KeyScheme::Text => None,
    }
}

/// Returns the scheme of a worker's block keys, for the index.
pub(crate) fn index_scheme(scheme: KeyScheme) -> chiasm_kv::KeyScheme {
    hashing(scheme).map_or(chiasm_kv::KeyScheme::Content, EngineHashing::scheme)
}

/// Returns the keys of a prompt's full blocks, as workers of the class have them.
pub fn keys_for(class: &PlanClass, prompt: &PromptBlocks<'_>) -> Vec<BlockKey> {
    match hashing(class.keys) {
        Some(hashing) => hashing.keys(prompt, class.block_size),
        None => block_keys(prompt, class.block_size),
    }
}

/// Returns the spans of an item at its place from which the class makes keys: one span, or for
/// SGLang one for each run of tokens that embed, as it keeps the other tokens of a placeholder as
/// they are.
pub fn spans(class: &PlanClass, hash: MmHash, at: &Placeholder) -> Vec<MediaSpan> {
    let span = |offset, length| MediaSpan { hash, offset, length };
    let Some(mask) = at.is_embed.as_ref().filter(|_| hashing(class.keys).is_some()) else {
        return vec![span(at.offset, at.length)];
    };
    let runs = mask.chunk_by(|one, other| one == other).scan(at.offset, |end, run| {
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
    fn an_item_is_where_the_scheme_has_it() {
        let class = |keys| PlanClass {
            processor: Arc::from(&b"x"[..]),
            vllm_items: VllmItems::Any,
            placeholders: PlaceholderForm::Marker,
            keys,
            block_size: BlockSize::new(16).unwrap(),
        };
        let hash = MmHash::new([1; 32]);
        let places = |keys, is_embed| {
            let spans = spans(&class(keys), hash, &Placeholder { offset: 5, length: 6, is_embed });
            spans.iter().map(|span| (span.offset, span.length)).collect::<Vec<_>>()
        };
        let rows = || Some(vec![false, true, true, false, true, false]);
        assert_eq!(places(KeyScheme::Chiasm, rows()), [(5, 6)]);
        assert_eq!(places(KeyScheme::Sglang, rows()), [(6, 2), (9, 1)]);
        assert_eq!(places(KeyScheme::Sglang, None), [(5, 6)]);
    }
}
