//! Checks that fingerprints cover everything that changes tensors or tokens, and nothing else.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use chiasm_types::{Dtype, TokenId, TokenRun};
use chiasm_vision::{
    ImageKwargs, ImageSize, PixelFormat, RgbView, TensorSpec, VisionModel, Vocabulary,
    VocabularyError,
};
use serde_json::{Map, Value};

use crate::any_token::AnyToken;
use crate::golden;

/// A model directory of the goldens for each `model_type` and vision tower, and the blake3 hash of
/// its fingerprint without kwargs.
///
/// Engines cache tensors, and stores keep KV blocks, under identities made of these fingerprints. A
/// changed digest invalidates all of them for the next version of Chiasm and makes mixed fleets
/// disagree. It must be a deliberate decision that the commit explains.
const DIGESTS: &[(&str, &str)] = &[
    ("models/qwen2_vl", "14239178df1d298bcf19de86f56786d5a984d3a6d4cf35e4d03bd1906de74019"),
    ("models/qwen2_5_vl", "ff2b94c6b8bacfe4979e075b8e41455369c15e651ed86c3793040286ad319df7"),
    ("models/qwen3_vl", "7de758d43174a47d6f82c0753487a3cc37d3d294f3daa870c5a958e3a093c7c8"),
    (
        "families/qwen_more/models/qwen3_vl_30b_a3b",
        "48313a3ec18eb3b92cc811e45348aee2e21aa6ba15cc8b41d772d8350abf927d",
    ),
    (
        "families/qwen_more/models/qwen3_5_27b",
        "78a377d289703312159ff3b47bc0172572b7c1537d4668fecbad814d36db472b",
    ),
    (
        "families/qwen_more/models/qwen3_5_35b_a3b",
        "28348d62dcf068aa9f605d6e3b977f0803831fac5c48b0749db715ec24c4fe71",
    ),
    (
        "families/llava/models/llava_1_5",
        "ee6b986a77b2474572c65dd9a8a03710d50eb64ea9f8d56e2e265fac73207fbb",
    ),
    (
        "families/pixtral/models/pixtral_12b",
        "d4743418a69b62496c12f898e4af99ef7127b5a2b1745ddfb24142c914aa7c7c",
    ),
    (
        "families/llava_next/models/v1_6_mistral",
        "f28fce50fc7cb979d2a276876dd4cf6045c7583322509c479f67419a24d78557",
    ),
    (
        "families/llama4/models/llama_4_scout",
        "c220a673550c66254dd673942f39fff5e573da68366686f99e09754161e5beb2",
    ),
    (
        "families/gemma3/models/gemma_3_4b",
        "e6d71f3c305afb943242963bf57f6cc7dbab378406586e5c4f928c2dbfd99d15",
    ),
    (
        "families/internvl/models/internvl3_8b",
        "ee115d951cd529a922b16ee67150ff7f589d94e9f709953ddcbb59cdf154b457",
    ),
    (
        "families/internvl_chat/models/internvl2_5_1b",
        "b85446e4da325f122ddc2a0a6bb849eb66e0be19db463242e3dd857f6b37f682",
    ),
    (
        "families/mistral3/models/mistral_small_3_1",
        "b3f38f14d61d49bcd9be2caf9fd7754a189a7465d580e730ef581f654d4fc822",
    ),
];

/// Kwargs that equal the settings of the model.
const NO_CHANGE: &[(&str, &str)] = &[
    ("models/qwen2_vl", r#"{"min_pixels": 3136}"#),
    ("models/qwen2_vl", r#"{"size": {"shortest_edge": 3136, "longest_edge": 1003520}}"#),
    (
        "families/llava/models/llava_1_5",
        r#"{"size": 336, "crop_size": {"height": 336, "width": 336}}"#,
    ),
    (
        "families/llava/models/llava_1_5",
        r#"{"resample": 3, "do_resize": true, "do_center_crop": true}"#,
    ),
    ("families/llama4/models/llama_4_scout", r#"{"resize_to_max_canvas": false}"#),
    ("families/gemma3/models/gemma_3_4b", r#"{"do_pan_and_scan": false}"#),
    (
        "families/gemma3/models/gemma_3_4b",
        r#"{"pan_and_scan_min_crop_size": 9, "pan_and_scan_max_num_crops": 9}"#,
    ),
    (
        "families/internvl/models/internvl3_8b",
        r#"{"crop_to_patches": true, "min_patches": 1, "max_patches": 12}"#,
    ),
    (
        "families/internvl_chat/models/internvl2_5_1b",
        r#"{"max_dynamic_patch": 12, "use_thumbnail": true}"#,
    ),
    ("families/mistral3/models/mistral_small_3_1", r#"{"size": {"longest_edge": 1540}}"#),
];

/// Kwargs that change each setting that a request may change.
const CHANGE: &[(&str, &str)] = &[
    ("models/qwen2_vl", r#"{"min_pixels": 3137}"#),
    ("models/qwen2_vl", r#"{"max_pixels": 50000}"#),
    ("models/qwen3_vl", r#"{"size": {"shortest_edge": 70000}}"#),
    ("families/llava/models/llava_1_5", r#"{"size": {"shortest_edge": 400}}"#),
    ("families/llava/models/llava_1_5", r#"{"size": {"height": 336, "width": 336}}"#),
    ("families/llava/models/llava_1_5", r#"{"crop_size": 300}"#),
    ("families/llava/models/llava_1_5", r#"{"do_resize": false}"#),
    ("families/llava/models/llava_1_5", r#"{"do_center_crop": false}"#),
    ("families/llava/models/llava_1_5", r#"{"resample": 2}"#),
    ("families/llama4/models/llama_4_scout", r#"{"resize_to_max_canvas": true}"#),
    ("families/gemma3/models/gemma_3_4b", r#"{"do_pan_and_scan": true}"#),
    (
        "families/gemma3/models/gemma_3_4b",
        r#"{"do_pan_and_scan": true, "pan_and_scan_min_crop_size": 100}"#,
    ),
    (
        "families/gemma3/models/gemma_3_4b",
        r#"{"do_pan_and_scan": true, "pan_and_scan_max_num_crops": 3}"#,
    ),
    (
        "families/gemma3/models/gemma_3_4b",
        r#"{"do_pan_and_scan": true, "pan_and_scan_min_ratio_to_activate": 1.3}"#,
    ),
    ("families/internvl/models/internvl3_8b", r#"{"crop_to_patches": false}"#),
    ("families/internvl/models/internvl3_8b", r#"{"min_patches": 2}"#),
    ("families/internvl/models/internvl3_8b", r#"{"max_patches": 6}"#),
    ("families/internvl_chat/models/internvl2_5_1b", r#"{"min_dynamic_patch": 2}"#),
    ("families/internvl_chat/models/internvl2_5_1b", r#"{"max_dynamic_patch": 6}"#),
    ("families/internvl_chat/models/internvl2_5_1b", r#"{"dynamic_image_size": false}"#),
    ("families/internvl_chat/models/internvl2_5_1b", r#"{"use_thumbnail": false}"#),
    ("families/mistral3/models/mistral_small_3_1", r#"{"size": {"longest_edge": 800}}"#),
];

/// Changes of model directories that the goldens do not have as separate cases.
const EDITS: &[(&str, &str)] = &[
    ("models/qwen2_vl", r#"{"patch_size": 28}"#),
    ("models/qwen2_vl", r#"{"merge_size": 4, "spatial_merge_size": 4}"#),
    ("models/qwen2_vl", r#"{"temporal_patch_size": 1}"#),
    ("models/qwen2_vl", r#"{"image_token_id": 77}"#),
    ("models/qwen2_vl", r#"{"image_mean": [0.5, 0.4578275, 0.40821073]}"#),
    ("models/qwen2_vl", r#"{"image_mean": [0.48145466, 0.5, 0.40821073]}"#),
    ("models/qwen2_vl", r#"{"image_mean": [0.48145466, 0.4578275, 0.5]}"#),
    ("families/llava/models/llava_1_5", r#"{"image_token_index": 77}"#),
    ("families/llava/models/llava_1_5", r#"{"image_size": 672, "patch_size": 28}"#),
    ("families/llava_next/models/v1_6_mistral", r#"{"image_token_index": 77}"#),
    (
        "families/llava_next/models/v1_6_mistral",
        r#"{"image_grid_pinpoints": [[672, 672], [336, 1008]]}"#,
    ),
    (
        "families/llama4/models/llama_4_scout",
        r#"{"size": {"height": 672, "width": 672}, "image_size": 672, "patch_size": 28}"#,
    ),
    ("families/gemma3/models/gemma_3_4b", r#"{"image_seq_length": 64, "mm_tokens_per_image": 64}"#),
    ("families/pixtral/models/pixtral_12b", r#"{"image_token_index": 77}"#),
    ("families/mistral3/models/mistral_small_3_1", r#"{"image_token_index": 77}"#),
];

/// Image sizes on which different settings have visible effects: small, upright, long, large,
/// square.
const SIZES: [[u32; 2]; 8] = [
    [30, 41],
    [336, 336],
    [300, 901],
    [1000, 320],
    [640, 200],
    [640, 480],
    [1600, 1200],
    [97, 2000],
];

/// The maximum number of pixels of images that are also processed. Settings that change only pixels
/// have an effect on all of them.
const MAX_PROCESSED_PIXELS: u64 = 2_000;

/// A tokenizer that differs from [`AnyToken`] in one token, and records the looked-up texts.
#[derive(Default)]
struct OneChangedToken {
    changed: Option<String>,
    lookups: RefCell<BTreeSet<String>>,
}

impl Vocabulary for OneChangedToken {
    fn id(&self, token: &str) -> Option<TokenId> {
        self.lookups.borrow_mut().insert(token.to_owned());
        AnyToken.id(token).map(|id| {
            if self.changed.as_deref() == Some(token) { TokenId(id.0 + 5000) } else { id }
        })
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        self.lookups.borrow_mut().insert(text.to_owned());
        let is_changed = self.changed.as_deref() == Some(text);
        AnyToken.encode(text).map(|ids| if is_changed { vec![TokenId(1), TokenId(2)] } else { ids })
    }
}

fn load_from(dir: &Path, vocabulary: &dyn Vocabulary) -> Option<VisionModel> {
    // Refused models are covered by the tests in `families`.
    VisionModel::from_model_dir(dir, vocabulary)
        .ok()
        .map(|model| model.expect("every model of the goldens takes images"))
}

fn load(name: &str) -> VisionModel {
    load_from(&golden::path(name), &AnyToken).unwrap_or_else(|| panic!("{name} is refused"))
}

fn parse(model: &VisionModel, kwargs: &str) -> ImageKwargs {
    model.parse_kwargs(&serde_json::from_str(kwargs).unwrap()).unwrap()
}

#[test]
fn fingerprint_digests_are_stable() {
    let none = ImageKwargs::default();
    let found: Vec<_> = DIGESTS
        .iter()
        .map(|(name, _)| (*name, blake3::hash(&load(name).fingerprint(&none)).to_hex().to_string()))
        .collect();
    let expected: Vec<_> =
        DIGESTS.iter().map(|(name, digest)| (*name, (*digest).to_owned())).collect();
    assert_eq!(found, expected);
}

#[test]
fn ineffective_kwargs_keep_the_fingerprint() {
    for (name, kwargs) in NO_CHANGE {
        let model = load(name);
        assert_eq!(
            model.fingerprint(&parse(&model, kwargs)),
            model.fingerprint(&ImageKwargs::default()),
            "{name} {kwargs}"
        );
    }
}

#[test]
fn effective_kwargs_give_distinct_fingerprints() {
    let mut seen = BTreeMap::new();
    for (name, kwargs) in CHANGE {
        let model = load(name);
        let default = model.fingerprint(&ImageKwargs::default());
        let changed = model.fingerprint(&parse(&model, kwargs));
        assert_ne!(changed, default, "{name} {kwargs}");
        if let Some(other) = seen.insert(changed, kwargs) {
            panic!("{name}: {kwargs} and {other} have one fingerprint");
        }
    }
}

/// The result of processing an image: everything that is sent to an engine.
#[derive(Debug, PartialEq)]
enum Outcome {
    Refused(String),
    Image {
        grid: [u32; 3],
        placeholder: Vec<TokenRun>,
        tensors: Vec<TensorSpec>,
        pixels: Option<blake3::Hash>,
    },
}

/// Plans an image and, if it is small, processes it.
fn outcome([width, height]: [u32; 2], model: &VisionModel, kwargs: &ImageKwargs) -> Outcome {
    let size = ImageSize { width, height };
    let plan = match model.plan(size, kwargs) {
        Ok(plan) => plan,
        Err(error) => return Outcome::Refused(error.to_string()),
    };
    let format = PixelFormat::Normalized(Dtype::F32);
    let pixels = (size.area() <= MAX_PROCESSED_PIXELS).then(|| {
        let pixels: Vec<u8> =
            (0..3 * size.area()).map(|index| (index * index / 97) as u8).collect();
        let mut tensor = vec![0; plan.pixel_bytes(format)];
        model.process(RgbView::new(size, &pixels).unwrap(), &plan, format, &mut tensor).unwrap();
        blake3::hash(&tensor)
    });
    Outcome::Image {
        grid: plan.grid,
        tensors: plan.tensors(format),
        placeholder: plan.placeholder,
        pixels,
    }
}

/// Loads every model of the goldens, and real ones with one token or setting changed.
fn models() -> Vec<(String, VisionModel)> {
    let families = golden::path("families");
    let mut dirs = vec![golden::path("models")];
    dirs.extend(
        std::fs::read_dir(families).unwrap().map(|entry| entry.unwrap().path().join("models")),
    );
    let mut models = Vec::new();
    for dir in dirs
        .iter()
        .flat_map(|dir| std::fs::read_dir(dir).unwrap())
        .map(|entry| entry.unwrap().path())
    {
        let name = dir.display().to_string();
        let vocabulary = OneChangedToken::default();
        let Some(model) = load_from(&dir, &vocabulary) else { continue };
        models.push((name.clone(), model));
        if !DIGESTS.iter().any(|(real, _)| dir.ends_with(real)) {
            continue;
        }
        for token in vocabulary.lookups.into_inner() {
            let vocabulary =
                OneChangedToken { changed: Some(token.clone()), ..OneChangedToken::default() };
            models.push((
                format!("{name} with another {token:?}"),
                load_from(&dir, &vocabulary).unwrap(),
            ));
        }
    }
    for (name, settings) in EDITS {
        let model = load_edited(&golden::path(name), &serde_json::from_str(settings).unwrap());
        models.push((format!("{name} with {settings}"), model));
    }
    models
}

/// Loads the model of a directory with these settings replaced wherever its files have them.
fn load_edited(dir: &Path, settings: &Map<String, Value>) -> VisionModel {
    let copy = tempfile::tempdir().unwrap();
    let mut changes = 0;
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let mut file: Value =
            serde_json::from_slice(&std::fs::read(entry.path()).unwrap()).unwrap();
        changes += edit(&mut file, settings);
        std::fs::write(copy.path().join(entry.file_name()), file.to_string()).unwrap();
    }
    assert!(changes > 0, "{} has none of {settings:?}", dir.display());
    load_from(copy.path(), &AnyToken)
        .unwrap_or_else(|| panic!("{} is refused with {settings:?}", dir.display()))
}

/// Replaces these settings in a JSON value, recursively. Returns the number of changes.
fn edit(value: &mut Value, settings: &Map<String, Value>) -> usize {
    let Some(object) = value.as_object_mut() else { return 0 };
    let changes = object.iter_mut().map(|(key, value)| match settings.get(key) {
        Some(changed) => {
            value.clone_from(changed);
            1
        }
        None => edit(value, settings),
    });
    changes.sum()
}

/// Returns all kwargs in the goldens and in the tables above.
fn all_kwargs() -> Vec<Map<String, Value>> {
    let tables =
        CHANGE.iter().chain(NO_CHANGE).map(|(_, kwargs)| serde_json::from_str(kwargs).unwrap());
    let mut all: Vec<Map<String, Value>> = std::iter::once(Map::new()).chain(tables).collect();
    for entry in std::fs::read_dir(golden::path("families")).unwrap().map(Result::unwrap) {
        let name = entry.file_name();
        let cases: Value = golden::json(&format!("families/{}/cases.json", name.to_str().unwrap()));
        let kwargs = cases["cases"]
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|case| case["kwargs"].as_object().cloned());
        all.extend(kwargs);
    }
    let text = |kwargs: &Map<String, Value>| Value::Object(kwargs.clone()).to_string();
    all.sort_by_key(text);
    all.dedup_by_key(|kwargs| text(kwargs));
    all
}

#[test]
fn equal_fingerprints_give_equal_outcomes() {
    let models = models();
    let all_kwargs = all_kwargs();
    let mut by_fingerprint: BTreeMap<Vec<u8>, Vec<(String, &VisionModel, ImageKwargs)>> =
        BTreeMap::new();
    for (name, model) in &models {
        for kwargs in &all_kwargs {
            let Ok(parsed) = model.parse_kwargs(kwargs) else { continue };
            let name = format!("{name} {}", Value::Object(kwargs.clone()));
            by_fingerprint
                .entry(model.fingerprint(&parsed))
                .or_default()
                .push((name, model, parsed));
        }
    }
    assert!(by_fingerprint.len() >= 500, "only {} fingerprints", by_fingerprint.len());
    for group in by_fingerprint.values() {
        let Some(((first_name, first, first_kwargs), others)) = group.split_first() else {
            continue;
        };
        for size in SIZES {
            let expected = outcome(size, first, first_kwargs);
            for (name, model, kwargs) in others {
                assert_eq!(
                    outcome(size, model, kwargs),
                    expected,
                    "{name} and {first_name}, {size:?}"
                );
            }
        }
    }
}
