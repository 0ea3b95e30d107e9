//! Checks that settings for all requests (`--mm-processor-kwargs`) act like those of a request, and
//! that a request's kwargs override them.

use chiasm_vision::{ImageKwargs, ImageSize, NoVocabulary, VisionError, VisionModel};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::any_token::AnyToken;
use crate::golden;

const QWEN2: &str = "models/qwen2_vl";
const QWEN3: &str = "models/qwen3_vl";
const LLAVA: &str = "families/llava/models/llava_1_5";
const GEMMA3: &str = "families/gemma3/models/gemma_3_4b";
const INTERNVL: &str = "families/internvl/models/internvl3_8b";

/// A model, the engine's kwargs, a request's kwargs, and request kwargs with the same effect
/// without engine kwargs.
///
/// The bounds for Qwen are the results of `_merge_and_resolve_mm_processor_kwargs` and
/// `_get_vision_size` of vLLM 0.32.
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
        r#"{"min_pixels": 5000, "max_pixels": 60000}"#,
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
