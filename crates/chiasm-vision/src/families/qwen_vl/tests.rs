//! Tests beyond the goldens: limits, refusals, and the absence of panics.

use std::path::Path;

use chiasm_types::Dtype;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::{ImageKwargs, ImageSize, NoVocabulary, PixelFormat, RgbView, VisionError, VisionModel};

/// Loads a model directory with this config.json and these settings of the image processor.
fn load_with(config: &Value, settings: &Value) -> Result<Option<VisionModel>, VisionError> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "config.json", config);
    write(dir.path(), "processor_config.json", &json!({ "image_processor": settings }));
    VisionModel::from_model_dir(dir.path(), &NoVocabulary)
}

fn write(dir: &Path, file: &str, contents: &Value) {
    std::fs::write(dir.join(file), contents.to_string()).unwrap();
}

/// Loads a Qwen2-VL model with these settings and a matching config.json.
fn load(settings: Value) -> Result<VisionModel, VisionError> {
    let vision = json!({
        "patch_size": settings.get("patch_size").unwrap_or(&json!(14)),
        "spatial_merge_size": settings.get("merge_size").unwrap_or(&json!(2)),
        "temporal_patch_size": settings.get("temporal_patch_size").unwrap_or(&json!(2)),
    });
    load_with(&json!({"model_type": "qwen2_vl", "vision_config": vision}), &settings)
        .map(|model| model.unwrap())
}

/// Parses kwargs with these bounds.
fn bounds(model: &VisionModel, min_pixels: Option<u64>, max_pixels: Option<u64>) -> ImageKwargs {
    let kwargs = [("min_pixels", min_pixels), ("max_pixels", max_pixels)];
    let kwargs = kwargs
        .into_iter()
        .filter_map(|(key, value)| Some((key.to_owned(), value?.into())))
        .collect();
    model.parse_kwargs(&kwargs).unwrap()
}

fn size(width: u32, height: u32) -> ImageSize {
    ImageSize { width, height }
}

#[test]
fn model_without_vision_config_is_text_only() {
    for config in
        [json!({"model_type": "qwen2"}), json!({"model_type": "x", "vision_config": null})]
    {
        assert!(load_with(&config, &json!({})).unwrap().is_none());
    }
}

#[test]
fn unknown_family_error_lists_known_families() {
    // Names must match exactly: a longer name that contains a known one is another family.
    for model_type in ["llava_onevision", "qwen2_vl_text", "xqwen3_vl", "Qwen2_VL", ""] {
        let config = json!({"model_type": model_type, "vision_config": {}});
        let error = load_with(&config, &json!({})).unwrap_err();
        assert!(matches!(error, VisionError::UnknownFamily { .. }), "{error}");
        assert!(
            error.to_string().contains("supported: qwen2_vl, qwen2_5_vl, qwen3_vl, "),
            "{error}"
        );
    }
}

#[test]
fn patches_unlike_those_of_the_tower_are_refused() {
    // The default of 14 in transformers is not the patch size of Qwen3-VL's tower.
    let config = json!({"model_type": "qwen3_vl", "vision_config": {}});
    let error = load_with(&config, &json!({})).unwrap_err();
    assert!(matches!(error, VisionError::Setting { key: "patch_size", .. }), "{error}");
    assert!(load_with(&config, &json!({"patch_size": 16})).unwrap().is_some());

    let config = json!({"model_type": "qwen2_vl", "vision_config": {"spatial_merge_size": 4}});
    let error = load_with(&config, &json!({})).unwrap_err();
    assert!(matches!(error, VisionError::Setting { key: "merge_size", .. }), "{error}");
}

#[test]
fn unsupported_settings_are_refused_by_name() {
    for (settings, name) in [
        (json!({"resample": 2}), "resample"),
        (json!({"patch_size": 100_000}), "patch_size"),
        (json!({"merge_size": 0}), "merge_size"),
        (json!({"do_resize": 1}), "do_resize"),
        (json!({"min_pixels": 1.5}), "min_pixels"),
        (json!({"size": 224}), "size"),
        (json!({"rescale_factor": 0}), "rescale_factor"),
        (json!({"image_mean": [0.5, 0.5]}), "image_mean"),
        (json!({"image_std": [0.5, "a", 0.5]}), "image_std"),
        (json!({"image_std": [0.5, 0, 0.5]}), "image_std"),
    ] {
        let error = load(settings.clone()).unwrap_err();
        assert!(
            matches!(error, VisionError::Setting { key, .. } if key == name),
            "{settings}: {error}"
        );
    }
}

#[test]
fn invalid_json_files_are_refused_by_path() {
    let dir = tempfile::tempdir().unwrap();
    let load = || VisionModel::from_model_dir(dir.path(), &NoVocabulary).unwrap_err().to_string();
    assert!(load().contains("config.json"));
    write(dir.path(), "config.json", &json!([]));
    assert!(load().contains("config.json is not a JSON object"));
    write(dir.path(), "config.json", &json!({"model_type": "qwen2_vl", "vision_config": {}}));
    assert!(load().contains("neither a processor_config.json"));
    std::fs::write(dir.path().join("preprocessor_config.json"), "{").unwrap();
    assert!(load().contains("preprocessor_config.json is not a JSON object"));
}

#[test]
fn model_reports_the_facts_of_its_family() {
    let model = load(json!({})).unwrap();
    assert_eq!(model.family(), "qwen2_vl");
    assert_eq!(model.prompt().marker[0].0, 151_655);
    assert_eq!(model.prompt().text, "<|vision_start|><|image_pad|><|vision_end|>");
    assert!(model.engine_normalizes_since().is_some());
}

#[test]
fn extreme_sizes_or_bounds_are_refused() {
    let model = load(json!({})).unwrap();
    let none = ImageKwargs::default();
    let plan = |width, height, kwargs: &ImageKwargs| model.plan(size(width, height), kwargs);
    for (width, height) in [(0, 0), (0, 9), (9, 0), (0, u32::MAX)] {
        assert!(matches!(plan(width, height, &none), Err(VisionError::EmptyImage { .. })));
    }
    assert!(plan(200, 1, &none).is_ok());
    assert!(matches!(plan(201, 1, &none), Err(VisionError::AspectRatio { limit: 200, .. })));
    assert!(matches!(plan(1, u32::MAX, &none), Err(VisionError::AspectRatio { .. })));
    assert!(matches!(plan(u32::MAX, u32::MAX, &none), Err(VisionError::TooLarge { .. })));
    for min_pixels in [1 << 32, 1 << 53, u64::MAX] {
        let kwargs = bounds(&model, Some(min_pixels), Some(u64::MAX));
        assert!(matches!(plan(100, 100, &kwargs), Err(VisionError::TooLarge { .. })));
    }
    let kwargs = bounds(&model, Some(1), Some(u64::MAX));
    assert_eq!(plan(100, 100, &kwargs).unwrap().resized, size(112, 112));
    assert!(matches!(plan(60_000, 60_000, &kwargs), Err(VisionError::TooLarge { .. })));
}

#[test]
fn process_refuses_mismatched_arguments() {
    let model = load(json!({})).unwrap();
    let plan = model.plan(size(28, 28), &bounds(&model, Some(1), None)).unwrap();
    let pixels = vec![0; 3 * 28 * 28];
    let image = RgbView::new(size(28, 28), &pixels).unwrap();
    let mut out = vec![0; plan.pixel_bytes(PixelFormat::RawU8)];
    assert_eq!(out.len(), 4 * 1176);
    model.process(image, &plan, PixelFormat::RawU8, &mut out).unwrap();

    let short = &mut out[1..];
    let result = model.process(image, &plan, PixelFormat::RawU8, short);
    assert!(matches!(result, Err(VisionError::OutputLength { expected: 4704, found: 4703 })));
    let result = model.process(image, &plan, PixelFormat::Normalized(Dtype::F16), &mut out);
    assert!(matches!(result, Err(VisionError::OutputLength { expected: 9408, found: 4704 })));
    let result = model.process(image, &plan, PixelFormat::Normalized(Dtype::U8), &mut out);
    assert!(matches!(result, Err(VisionError::NotAFloat(Dtype::U8))));
    let turned = RgbView::new(size(14, 56), &pixels).unwrap();
    let result = model.process(turned, &plan, PixelFormat::RawU8, &mut out);
    assert!(matches!(result, Err(VisionError::SizeMismatch { .. })));
}

/// Generates sides: small ones, arbitrary ones, and the largest.
fn side() -> impl Strategy<Value = u32> {
    prop_oneof![0..300_u32, 1..70_000_u32, any::<u32>(), Just(u32::MAX)]
}

/// Generates optional bounds of the area.
fn pixels() -> impl Strategy<Value = Option<u64>> {
    proptest::option::of(prop_oneof![1..2_000_000_u64, 1..=u64::MAX, Just(u64::MAX)])
}

proptest! {
    #[test]
    fn random_plans_are_consistent(
        (width, height) in (side(), side()),
        (min_pixels, max_pixels) in (pixels(), pixels()),
        (patch, merge, temporal) in (1..=1024_u32, 1..=1024_u32, 1..=1024_u32),
        is_common in any::<bool>(),
        do_resize in any::<bool>(),
    ) {
        let (patch, merge, temporal) =
            if is_common { (14, 2, 2) } else { (patch, merge, temporal) };
        let model = load(json!({
            "patch_size": patch,
            "merge_size": merge,
            "temporal_patch_size": temporal,
            "do_resize": do_resize,
        })).unwrap();
        let kwargs = bounds(&model, min_pixels, max_pixels);
        let Ok(plan) = model.plan(size(width, height), &kwargs) else { return Ok(()) };
        let [frames, rows, columns] = plan.grid;
        prop_assert_eq!(frames, 1);
        prop_assert_eq!((columns * patch, rows * patch), (plan.resized.width, plan.resized.height));
        prop_assert!(rows > 0 && columns > 0 && rows % merge == 0 && columns % merge == 0);
        let patches = u64::from(rows) * u64::from(columns);
        prop_assert_eq!(plan.tokens as u64 * u64::from(merge * merge), patches);
        for format in [PixelFormat::RawU8, PixelFormat::Normalized(Dtype::F32)] {
            let tensors = plan.tensors(format);
            let elements: usize = tensors[0].shape.iter().product();
            prop_assert_eq!(elements * tensors[0].dtype.size(), plan.pixel_bytes(format));
            prop_assert_eq!(elements as u64, 3 * u64::from(temporal) * plan.resized.area());
        }
    }

    /// Every byte of the tensor is written, and none beyond it.
    #[test]
    fn flat_image_stays_flat(
        (width, height) in (1..200_u32, 1..200_u32),
        (min_pixels, max_pixels) in (1..60_000_u64, 1..60_000_u64),
        (patch, merge, temporal) in (1..20_u32, 1..4_u32, 1..4_u32),
        value in any::<u8>(),
    ) {
        let model = load(json!({
            "patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal,
            "do_rescale": false, "do_normalize": false,
        })).unwrap();
        let kwargs = bounds(&model, Some(min_pixels), Some(max_pixels));
        let plan = model.plan(size(width, height), &kwargs).unwrap();
        let pixels = vec![value; 3 * (width * height) as usize];
        let image = RgbView::new(size(width, height), &pixels).unwrap();
        let mut raw = vec![!value; plan.pixel_bytes(PixelFormat::RawU8)];
        model.process(image, &plan, PixelFormat::RawU8, &mut raw).unwrap();
        prop_assert!(raw.iter().all(|&byte| byte.abs_diff(value) <= 1));

        let format = PixelFormat::Normalized(Dtype::F32);
        let mut floats = vec![0xFF; plan.pixel_bytes(format)];
        model.process(image, &plan, format, &mut floats).unwrap();
        for (bytes, &value) in floats.chunks_exact(4).zip(&raw) {
            prop_assert_eq!(f32::from_le_bytes(bytes.try_into().unwrap()), f32::from(value));
        }
    }
}
