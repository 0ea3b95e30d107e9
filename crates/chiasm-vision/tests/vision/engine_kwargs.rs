//! Checks that settings for all requests (`--mm-processor-kwargs`) act like those of a request, and
//! that a request's kwargs override them.

use std::collections::BTreeMap;

use chiasm_types::Dtype;
use chiasm_vision::{
    Fault, ImageKwargs, ImageSize, NoVocabulary, PixelFormat, RgbView, VisionError, VisionModel,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::any_token::AnyToken;
use crate::fixture_image::FixtureImage;
use crate::golden;
use crate::golden_model::GoldenModel;

const QWEN2: &str = "models/qwen2_vl";
const QWEN3: &str = "models/qwen3_vl";
const LLAVA: &str = "families/llava/models/llava_1_5";
const GEMMA3: &str = "families/gemma3/models/gemma_3_4b";
const INTERNVL: &str = "families/internvl/models/internvl3_8b";

/// A model, the engine's kwargs, a request's kwargs, and request kwargs with the same effect
/// without engine kwargs.
///
/// Plans and fingerprints must be equal. `engine_kwargs.json` has vLLM's results for more kwargs.
const MERGED: &[(&str, &str, &str, &str)] = &[
    (QWEN2, r#"{"min_pixels": 9000}"#, "{}", r#"{"min_pixels": 9000}"#),
    (
        QWEN2,
        r#"{"min_pixels": 9000}"#,
        r#"{"max_pixels": 50000}"#,
        r#"{"min_pixels": 9000, "max_pixels": 50000}"#,
    ),
    (QWEN2, r#"{"min_pixels": 9000}"#, r#"{"min_pixels": 8000}"#, r#"{"min_pixels": 8000}"#),
    (
        QWEN2,
        r#"{"min_pixels": 9000}"#,
        r#"{"size": {"shortest_edge": 5000, "longest_edge": 60000}}"#,
        r#"{"min_pixels": 9000, "max_pixels": 60000}"#,
    ),
    (
        QWEN2,
        r#"{"size": {"shortest_edge": 9000, "longest_edge": 60000}}"#,
        r#"{"size": {"shortest_edge": 5000}}"#,
        r#"{"min_pixels": 5000, "max_pixels": 60000}"#,
    ),
    (
        QWEN2,
        r#"{"size": {"shortest_edge": 9000, "longest_edge": 60000}}"#,
        r#"{"max_pixels": 40000}"#,
        r#"{"min_pixels": 9000, "max_pixels": 40000}"#,
    ),
    (
        QWEN3,
        r#"{"size": {"shortest_edge": 9000}}"#,
        r#"{"size": {"longest_edge": 60000}}"#,
        r#"{"min_pixels": 9000, "max_pixels": 60000}"#,
    ),
    (
        QWEN3,
        r#"{"max_pixels": 60000}"#,
        r#"{"size": {"longest_edge": 50000}}"#,
        r#"{"max_pixels": 50000}"#,
    ),
    (QWEN3, r#"{"max_pixels": 60000}"#, r#"{"size": null}"#, r#"{"max_pixels": 60000}"#),
    (QWEN3, r#"{"size": {"longest_edge": 60000}}"#, r#"{"size": null}"#, "{}"),
    (
        LLAVA,
        r#"{"resample": 2}"#,
        r#"{"do_center_crop": false}"#,
        r#"{"resample": 2, "do_center_crop": false}"#,
    ),
    (
        LLAVA,
        r#"{"size": 400}"#,
        r#"{"size": {"height": 336, "width": 336}}"#,
        r#"{"size": {"height": 336, "width": 336}}"#,
    ),
    (
        GEMMA3,
        r#"{"do_pan_and_scan": true, "pan_and_scan_max_num_crops": 2}"#,
        r#"{"pan_and_scan_min_crop_size": 100}"#,
        r#"{"do_pan_and_scan": true, "pan_and_scan_max_num_crops": 2, "pan_and_scan_min_crop_size": 100}"#,
    ),
    (GEMMA3, r#"{"do_pan_and_scan": true}"#, r#"{"do_pan_and_scan": false}"#, "{}"),
    (INTERNVL, r#"{"crop_to_patches": false}"#, r#"{"crop_to_patches": true}"#, "{}"),
    (
        INTERNVL,
        r#"{"max_patches": 4}"#,
        r#"{"min_patches": 2}"#,
        r#"{"max_patches": 4, "min_patches": 2}"#,
    ),
];

fn load(name: &str) -> VisionModel {
    VisionModel::from_model_dir(&golden::path(name), &AnyToken).unwrap().unwrap()
}

fn object(text: &str) -> Map<String, Value> {
    serde_json::from_str(text).unwrap()
}

#[test]
fn request_kwargs_override_engine_kwargs() {
    for (name, engine, request, merged) in MERGED {
        let plain = load(name);
        let engine_wide = load(name).with_engine_kwargs(object(engine)).unwrap();
        let expected = plain.parse_kwargs(&object(merged)).unwrap();
        let found = engine_wide.parse_kwargs(&object(request)).unwrap();
        assert!(
            engine_wide.fingerprint(&found) == plain.fingerprint(&expected),
            "{name} {engine} {request}"
        );
        let size = ImageSize { width: 700, height: 200 };
        let found = engine_wide.plan(size, &found).ok();
        let expected = plain.plan(size, &expected).ok();
        assert_eq!(found, expected, "{name} {engine} {request}");
    }
}

#[derive(Deserialize)]
struct Goldens {
    image: FixtureImage,
    models: BTreeMap<String, GoldenModel>,
    rows: Vec<Row>,
}

/// The index of the model, the engine's kwargs, a request's kwargs; the placeholder, the shape of
/// the pixels and the start of their hash, or `None` if vLLM refuses the request.
#[derive(Deserialize)]
struct Row(usize, Map<String, Value>, Map<String, Value>, Option<Item>);

type Item = (Vec<(u32, usize, bool)>, Vec<usize>, String);

/// Returns the item that a model makes of an image.
fn item(
    model: &VisionModel,
    image: &FixtureImage,
    pixels: &[u8],
    request: &Map<String, Value>,
) -> Result<Item, VisionError> {
    let kwargs = model.parse_kwargs(request)?;
    let size = ImageSize { width: image.width, height: image.height };
    let plan = model.plan(size, &kwargs)?;
    let format = PixelFormat::Normalized(Dtype::F32);
    let mut out = vec![0; plan.pixel_bytes(format)];
    model.process(RgbView::new(size, pixels)?, &plan, format, &mut out)?;
    let mut runs: Vec<(u32, usize, bool)> = Vec::new();
    for run in &plan.placeholder {
        match runs.last_mut() {
            Some(last) if (last.0, last.2) == (run.token.0, run.embeds) => last.1 += run.count,
            _ => runs.push((run.token.0, run.count, run.embeds)),
        }
    }
    let tensors = plan.tensors(format);
    let hash = blake3::hash(&out).to_hex()[..16].to_owned();
    Ok((runs, tensors[0].shape.clone(), hash))
}

#[test]
fn engine_and_request_kwargs_merge_as_in_vllm() {
    let Goldens { image, models, rows } = golden::json("engine_kwargs.json");
    let models: Vec<_> = models.iter().collect();
    let pixels = image.pixels();
    let mut differences = Vec::new();
    let mut equal = 0;
    for Row(index, engine, request, expected) in rows {
        let (name, vocabulary) = models[index];
        let model = VisionModel::from_model_dir(&golden::path(name), vocabulary).unwrap().unwrap();
        let Ok(model) = model.with_engine_kwargs(engine.clone()) else {
            // vLLM must fail without kwargs of a request. Some requests repair what is wrong.
            assert!(!request.is_empty() || expected.is_none(), "{name} {engine:?}");
            continue;
        };
        match (item(&model, &image, &pixels, &request), expected) {
            (Ok(found), Some(expected)) if found == expected => equal += 1,
            (Err(error), None) if error.fault() == Fault::Request => {}
            (found, expected) => {
                let engine = Value::Object(engine);
                let request = Value::Object(request);
                differences.push(format!("{name} {engine} {request}: {found:?}, not {expected:?}"));
            }
        }
    }
    assert!(differences.is_empty(), "{} differ:\n{}", differences.len(), differences.join("\n"));
    assert!(equal >= 1200, "only {equal} rows");
}

#[test]
fn engine_kwargs_act_like_request_kwargs() {
    #[derive(Deserialize)]
    struct Goldens {
        rows: Vec<Row>,
    }
    #[derive(Deserialize)]
    struct Row {
        model: String,
        kwargs: Map<String, Value>,
    }
    let none = ImageKwargs::default();
    let size = ImageSize { width: 500, height: 300 };
    for Row { model, kwargs } in golden::json::<Goldens>("kwargs.json").rows {
        let load = || {
            VisionModel::from_model_dir(&golden::path("models").join(&model), &NoVocabulary)
                .unwrap()
                .unwrap()
        };
        let plain = load();
        match (plain.parse_kwargs(&kwargs), load().with_engine_kwargs(kwargs.clone())) {
            (Ok(request), Ok(engine_wide)) => {
                assert_eq!(
                    plain.plan(size, &request).ok(),
                    engine_wide.plan(size, &none).ok(),
                    "{model} {kwargs:?}"
                );
                assert!(
                    engine_wide.default_fingerprint() == plain.fingerprint(&request),
                    "{model} {kwargs:?}"
                );
                assert!(engine_wide.fingerprint(&none) == engine_wide.default_fingerprint());
            }
            (Err(request), Err(engine_wide)) => {
                assert_eq!(request.to_string(), engine_wide.to_string())
            }
            (request, engine_wide) => panic!("{model} {kwargs:?}: {request:?} but {engine_wide:?}"),
        }
    }
}

#[test]
fn unknown_engine_kwargs_are_refused() {
    let error = load(QWEN2).with_engine_kwargs(object(r#"{"do_normalize": false}"#)).unwrap_err();
    assert!(
        matches!(error, VisionError::UnknownKwarg { ref key, .. } if key == "do_normalize"),
        "{error}"
    );
    let error = load("families/llava_next/models/v1_6_mistral")
        .with_engine_kwargs(object(r#"{"size": 1}"#))
        .unwrap_err();
    assert!(error.to_string().contains("this model supports none"), "{error}");
}
