//! Compares plans and pixels with those of `transformers` for the same images
//! (`python/goldens/make_vision_goldens.py`).

use std::collections::BTreeMap;

use chiasm_types::Dtype;
use chiasm_vision::{
    Contents, Fault, ImageKwargs, ImageSize, Implementation, NoVocabulary, PixelFormat, RgbView,
    VisionError, VisionModel,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::fixture_image::FixtureImage;
use crate::golden;

#[derive(Deserialize)]
struct Index {
    models: BTreeMap<String, GoldenModel>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct GoldenModel {
    error: Option<String>,
}

#[derive(Deserialize)]
struct Case {
    model: String,
    image: FixtureImage,
    #[serde(default)]
    kwargs: Map<String, Value>,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Outcome {
    Error { error: String },
    Tensors(Box<Tensors>),
}

#[derive(Deserialize)]
struct Tensors {
    grid: [u32; 3],
    tokens: usize,
    shape: Vec<usize>,
    uint8: String,
    float32: String,
    float16: String,
    bfloat16: String,
    #[serde(default)]
    whole: Whole,
}

#[derive(Default, Deserialize)]
struct Whole {
    uint8: Option<String>,
    float32: Option<String>,
}

fn index() -> Index {
    golden::json("index.json")
}

fn load(name: &str) -> Result<VisionModel, VisionError> {
    let dir = golden::path("models").join(name);
    VisionModel::from_model_dir(&dir, &NoVocabulary)
        .map(|model| model.expect("every model of the goldens takes images"))
}

#[test]
fn model_directory_loads_iff_transformers_loads_it() {
    let models = index().models;
    assert!(models.len() >= 50, "only {} models", models.len());
    for (name, golden) in models {
        match (load(&name), golden.error) {
            (Ok(_), None) => {}
            (Err(error), Some(_)) => assert_eq!(error.fault(), Fault::Model, "{name}: {error}"),
            (Ok(_), Some(error)) => panic!("{name} loads, but transformers raises {error}"),
            (Err(error), None) => panic!("{name}: {error}"),
        }
    }
}

#[test]
fn processed_images_equal_transformers() {
    let Index { models, cases } = index();
    assert!(cases.len() >= 440, "only {} cases", cases.len());
    let loads: Vec<_> =
        models.iter().filter(|(_, golden)| golden.error.is_none()).map(|(name, _)| name).collect();
    for kernels in Implementation::available() {
        let load = |name| {
            load(name)
                .unwrap_or_else(|error| panic!("{name}: {error}"))
                .with_implementation(kernels)
        };
        let models: BTreeMap<_, _> = loads.iter().map(|name| (name.as_str(), load(name))).collect();
        let mut differences = Vec::new();
        for case in &cases {
            if let Err(difference) = check(&models[case.model.as_str()], case) {
                let FixtureImage { kind, width, height, seed } = &case.image;
                let model = &case.model;
                let kwargs = &case.kwargs;
                differences.push(format!(
                    "{model} {kind} {width}x{height} #{seed} {kwargs:?}: {difference}"
                ));
            }
        }
        let count = differences.len();
        let name = kernels.name();
        assert!(
            differences.is_empty(),
            "{name}: {count} of {} differ:\n{}",
            cases.len(),
            differences.join("\n")
        );
    }
}

/// Compares the plan and tensors of a case with the golden.
fn check(model: &VisionModel, case: &Case) -> Result<(), String> {
    let size = ImageSize { width: case.image.width, height: case.image.height };
    let kwargs = model.parse_kwargs(&case.kwargs).map_err(|error| error.to_string())?;
    let (golden, plan) = match (&case.outcome, model.plan(size, &kwargs)) {
        (Outcome::Error { .. }, Err(error)) if error.fault() == Fault::Request => return Ok(()),
        (Outcome::Error { error }, _) => return Err(format!("transformers raises {error:?}")),
        (Outcome::Tensors(golden), Ok(plan)) => (golden, plan),
        (Outcome::Tensors(_), Err(error)) => return Err(error.to_string()),
    };
    if (plan.grid, plan.tokens) != (golden.grid, golden.tokens) {
        return Err(format!(
            "grid {:?} and {} tokens, not {:?} and {}",
            plan.grid, plan.tokens, golden.grid, golden.tokens
        ));
    }
    let [placeholder] = plan.placeholder.as_slice() else {
        return Err("the placeholder is not one run of tokens".into());
    };
    assert_eq!(
        (placeholder.token, placeholder.count, placeholder.embeds),
        (model.prompt().marker[0], golden.tokens, true)
    );

    let pixels = case.image.pixels();
    let image = RgbView::new(size, &pixels).map_err(|error| error.to_string())?;
    for (format, golden_hash, whole) in [
        (PixelFormat::RawU8, &golden.uint8, &golden.whole.uint8),
        (PixelFormat::Normalized(Dtype::F32), &golden.float32, &golden.whole.float32),
        (PixelFormat::Normalized(Dtype::F16), &golden.float16, &None),
        (PixelFormat::Normalized(Dtype::BF16), &golden.bfloat16, &None),
    ] {
        let [pixel_values, grid] = &plan.tensors(format)[..] else {
            return Err("the image does not have two tensors".into());
        };
        assert_eq!((pixel_values.name, grid.name), ("pixel_values", "image_grid_thw"));
        assert_eq!((pixel_values.dtype, &pixel_values.shape), (format.dtype(), &golden.shape));
        let grid_bytes =
            golden.grid.iter().flat_map(|&side| i64::from(side).to_le_bytes()).collect();
        assert_eq!((grid.dtype, &grid.contents), (Dtype::I64, &Contents::Small(grid_bytes)));

        // A non-zero pattern, because every byte must be written.
        let mut tensor = vec![0xA5; plan.pixel_bytes(format)];
        model.process(image, &plan, format, &mut tensor).map_err(|error| error.to_string())?;
        if let Some(file) = whole {
            let whole = golden::bytes(&format!("tensors/{file}"));
            if let Some(at) = tensor.iter().zip(&whole).position(|(ours, golden)| ours != golden) {
                return Err(format!("{format:?} differs from {file} from byte {at} on"));
            }
        }
        if blake3::hash(&tensor).to_hex().as_str() != golden_hash {
            return Err(format!("{format:?} differs"));
        }
    }
    Ok(())
}

#[test]
fn resized_sizes_equal_smart_resize() {
    #[derive(Deserialize)]
    struct Plans {
        plans: Vec<[u64; 7]>,
    }
    let plans = golden::json::<Plans>("plans.json").plans;
    assert!(plans.len() >= 3000, "only {} plans", plans.len());
    let by_factor = [(28, load("qwen2_vl").unwrap()), (32, load("qwen3_vl").unwrap())];
    for row in plans {
        let [factor, width, height, min_pixels, max_pixels, new_width, new_height] = row;
        let (_, model) = by_factor.iter().find(|(known, _)| *known == factor).unwrap();
        let kwargs = [("min_pixels", min_pixels), ("max_pixels", max_pixels)]
            .map(|(key, value)| (key.to_owned(), Value::from(value)));
        let kwargs = model.parse_kwargs(&kwargs.into_iter().collect()).unwrap();
        let size = ImageSize { width: width as u32, height: height as u32 };
        match model.plan(size, &kwargs) {
            Ok(plan) => {
                let resized = (u64::from(plan.resized.width), u64::from(plan.resized.height));
                assert_eq!(resized, (new_width, new_height), "{row:?}");
            }
            Err(VisionError::AspectRatio { .. }) => {
                assert_eq!((new_width, new_height), (0, 0), "{row:?}");
            }
            Err(error) => {
                assert!(new_width * new_height > i32::MAX as u64, "{row:?}: {error}");
            }
        }
    }
}

#[test]
fn only_effective_settings_change_the_fingerprint() {
    let none = ImageKwargs::default();
    let two = load("qwen2_vl").unwrap();
    let mut seen = vec![("qwen2_vl".to_owned(), two.fingerprint(&none))];
    for name in
        ["qwen2_5_vl", "qwen3_vl", "old_qwen2_vl_hub", "no_resize", "no_rescale", "other_patches"]
    {
        let fingerprint = load(name).unwrap().fingerprint(&none);
        for (other, seen_fingerprint) in &seen {
            assert_ne!(&fingerprint, seen_fingerprint, "{name} and {other}");
        }
        seen.push((name.to_owned(), fingerprint));
    }
    for same in ["old_qwen2_vl", "type_fast", "type_missing", "only_type"] {
        assert_eq!(load(same).unwrap().fingerprint(&none), two.fingerprint(&none), "{same}");
    }
    let kwargs = |text: &str| two.parse_kwargs(&serde_json::from_str(text).unwrap()).unwrap();
    let effective = kwargs(r#"{"min_pixels": 3136}"#);
    assert_eq!(two.fingerprint(&effective), two.fingerprint(&none));
    let other = kwargs(r#"{"min_pixels": 3137}"#);
    assert_ne!(two.fingerprint(&other), two.fingerprint(&none));
}
