//! Compares the largest item of a model, and thus the size of vLLM's encoder cache, with the
//! results of `MultiModalBudget`, the class that vLLM's scheduler uses.
//!
//! `python/goldens/make_largest_item_goldens.py` has run it for each of these models and settings.

use std::collections::BTreeMap;

use chiasm_types::TokenId;
use chiasm_vision::{AcceptedMedia, VisionModel, Vocabulary, VocabularyError};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::any_token::AnyToken;
use crate::golden;

#[derive(Deserialize)]
struct Goldens {
    /// The `--max-num-batched-tokens` of all cases.
    step: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    model: String,
    /// The tokens that the tokenizer lacks.
    lacks: Vec<String>,
    context: usize,
    kwargs: Map<String, Value>,
    limits: BTreeMap<String, u32>,
    /// The number of embeddings of the largest item, by modality.
    items: BTreeMap<String, usize>,
    encoder_cache: usize,
    files: BTreeMap<String, Value>,
}

/// A vocabulary with every token except these.
struct Lacking<'a>(&'a [String]);

impl Vocabulary for Lacking<'_> {
    fn id(&self, token: &str) -> Option<TokenId> {
        let lacks = self.0.iter().any(|lacked| lacked == token);
        if lacks { None } else { AnyToken.id(token) }
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        AnyToken.encode(text)
    }
}

/// Loads the model of a case.
fn model(case: &Case) -> VisionModel {
    let dir = tempfile::tempdir().unwrap();
    for (name, contents) in &case.files {
        std::fs::write(dir.path().join(name), contents.to_string()).unwrap();
    }
    let model = VisionModel::from_model_dir(dir.path(), &Lacking(&case.lacks)).unwrap().unwrap();
    model.with_engine_kwargs(case.kwargs.clone()).unwrap()
}

#[test]
fn encoder_cache_size_equals_vllm() {
    let Goldens { step, cases } = golden::json("largest_items.json");
    let mut families = std::collections::BTreeSet::new();
    for case in &cases {
        let model = model(case);
        families.insert(model.family());
        let accepts = |kind: &str| case.limits.get(kind).is_none_or(|limit| *limit > 0);
        let accepted = AcceptedMedia { images: accepts("image"), videos: accepts("video") };
        let name = format!("{} {} {:?} {:?}", case.model, case.context, case.kwargs, case.limits);
        let largest = model.largest_item(case.context, accepted);
        assert_eq!(largest, case.items.values().copied().max().unwrap_or(0), "{name}");
        if let Some(&image) = case.items.get("image") {
            let images = AcceptedMedia { images: true, videos: false };
            assert_eq!(model.largest_item(case.context, images), image, "images of {name}");
        }
        let cache = if largest == 0 { 0 } else { largest.max(step) };
        assert_eq!(cache, case.encoder_cache, "the cache of {name}");
    }
    assert_eq!(families.len(), 12, "{families:?}");
}

#[test]
fn extreme_pixel_bounds_limit_the_largest_item() {
    let Goldens { cases, .. } = golden::json("largest_items.json");
    let case = cases.into_iter().find(|case| case.model == "qwen25vl").unwrap();
    for max_pixels in [1, u64::MAX] {
        let kwargs = Map::from_iter([("max_pixels".to_owned(), max_pixels.into())]);
        let model = model(&case).with_engine_kwargs(kwargs).unwrap();
        let largest = model.largest_item(case.context, AcceptedMedia::ALL);
        assert!((1..=i32::MAX as usize).contains(&largest), "{max_pixels}: {largest}");
    }
}
