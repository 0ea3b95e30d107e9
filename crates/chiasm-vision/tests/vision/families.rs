//! Compares placeholders and tensors of every family with those of vLLM's processor for the same
//! images (`python/goldens/make_family_goldens.py`).

use std::collections::BTreeMap;

use chiasm_types::{Dtype, TensorField};
use chiasm_vision::{
    Contents, Fault, ImagePlan, ImageSize, PixelFormat, RgbView, TensorSpec, VisionError,
    VisionModel,
};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::fixture_image::FixtureImage;
use crate::golden;
use crate::golden_model::GoldenModel;

const FAMILIES: [&str; 9] = [
    "gemma3",
    "internvl",
    "internvl_chat",
    "llama4",
    "llava",
    "llava_next",
    "mistral3",
    "pixtral",
    "qwen_more",
];

/// The models that vLLM loads but we refuse.
///
/// vLLM cannot serve most of them either: its processor or its engine fails on the first image. The
/// others have a setting that we do not implement.
const REFUSED: &[&str] = &[
    "gemma3/no_resize",
    "gemma3/shorter_sequence",
    "gemma3/shortest_edge",
    "gemma3/siglip_processor",
    "internvl/defaults",
    "internvl/no_resize",
    "internvl/shorter_sequence",
    "llama4/no_normalize",
    "llama4/no_rescale",
    "llama4/no_rescale_no_normalize",
    "llama4/no_resize",
    "llama4/tile_not_square",
    "llava/box",
    "llava/do_pad",
    "llava/hamming",
    "llava/nearest",
    "llava/null_crop_size",
    "llava/null_resample",
    "llava/null_size",
    "llava/nulls",
    "llava/size_without_edge",
    "llava_next/crop_smaller_than_size",
    "llava_next/defaults",
    "llava_next/odd_pinpoints",
    "llava_next/pinpoints_differ",
    "llava_next/type_clip",
    "mistral3/defaults",
    "mistral3/height_and_width",
    "mistral3/merge_in_config_only",
    "mistral3/no_resize",
    "pixtral/height_and_width",
    "pixtral/no_resize",
    "pixtral/patch_size_in_old_file_only",
    "pixtral/smaller_edge",
];

/// The models that we load but vLLM refuses, for reasons unrelated to images.
const ONLY_OURS: &[&str] = &["internvl/new_file", "qwen_more/qwen3_vl_moe_no_type"];

#[derive(Deserialize)]
struct Cases {
    models: BTreeMap<String, GoldenModel>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    model: String,
    image: FixtureImage,
    #[serde(default)]
    kwargs: Map<String, Value>,
    error: Option<String>,
    #[serde(default)]
    engine_refuses: bool,
    #[serde(default)]
    placeholder: Vec<(u32, usize, bool)>,
    // serde_json keeps the order.
    #[serde(default)]
    tensors: Map<String, Value>,
}

#[derive(Deserialize)]
struct GoldenTensor {
    dtype: String,
    shape: Vec<usize>,
    field: String,
    keep_on_cpu: bool,
    values: Option<Value>,
    uint8: Option<String>,
    float32: Option<String>,
    float16: Option<String>,
    bfloat16: Option<String>,
}

/// Reads the golden cases of a family.
fn cases(family: &str) -> Cases {
    golden::json(&format!("families/{family}/cases.json"))
}

fn load(family: &str, name: &str, vocabulary: &GoldenModel) -> Result<VisionModel, VisionError> {
    let dir = golden::path("families").join(family).join("models").join(name);
    VisionModel::from_model_dir(&dir, vocabulary)
        .map(|model| model.expect("every model of the goldens takes images"))
}

#[test]
fn model_directory_loads_if_vllm_loads_it() {
    let mut refused = Vec::new();
    let mut only_ours = Vec::new();
    for family in FAMILIES {
        for (name, golden) in cases(family).models {
            let full = format!("{family}/{name}");
            match (load(family, &name, &golden), &golden.error) {
                (Ok(model), None) => {
                    assert_eq!(
                        model.engine_normalizes_since().is_some(),
                        golden.device_normalizes,
                        "{full}"
                    )
                }
                (Err(error), None) => {
                    assert_eq!(error.fault(), Fault::Model, "{full}: {error}");
                    eprintln!("{full}: {error}");
                    refused.push(full);
                }
                (Err(error), Some(_)) => assert_eq!(error.fault(), Fault::Model, "{full}: {error}"),
                (Ok(_), Some(error)) => {
                    eprintln!("{full} loads, but vLLM raises {error}");
                    only_ours.push(full);
                }
            }
        }
    }
    assert_eq!(refused, REFUSED);
    assert_eq!(only_ours, ONLY_OURS);
}

#[test]
fn processed_images_equal_vllm() {
    let mut differences = Vec::new();
    let mut count = 0;
    for family in FAMILIES {
        let Cases { models, cases } = cases(family);
        let load = |name: &String, golden| {
            load(family, name, golden).ok().map(|model| (name.clone(), model))
        };
        let models: BTreeMap<_, _> =
            models.iter().filter_map(|(name, golden)| load(name, golden)).collect();
        for case in cases {
            let Some(model) = models.get(&case.model) else { continue };
            count += 1;
            if let Err(difference) = check(model, &case) {
                let Case {
                    model, image: FixtureImage { kind, width, height, seed }, kwargs, ..
                } = &case;
                let kwargs = Value::Object(kwargs.clone());
                differences.push(format!(
                    "{family}/{model} {kind} {width}x{height} #{seed} {kwargs}: {difference}"
                ));
            }
        }
    }

    assert!(count >= 800, "only {count} cases");
    assert!(
        differences.is_empty(),
        "{} of {count} differ:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// Returns `true` for forms of `size` that vLLM accepts but we refuse: both edges for LLaVA, height
/// and width for Mistral 3.
fn is_unsupported_size(kwargs: &Map<String, Value>) -> bool {
    let has = |key| {
        kwargs.get("size").and_then(Value::as_object).is_some_and(|size| size.contains_key(key))
    };
    has("longest_edge") && has("shortest_edge") || has("height")
}

/// Compares the plan and tensors of a case with the golden.
fn check(model: &VisionModel, case: &Case) -> Result<(), String> {
    let size = ImageSize { width: case.image.width, height: case.image.height };
    let kwargs = match model.parse_kwargs(&case.kwargs) {
        Ok(kwargs) => kwargs,
        // Keys that are not implemented are refused.
        Err(VisionError::UnknownKwarg { .. }) => return Ok(()),
        Err(VisionError::InvalidKwarg { key: "size", .. }) if is_unsupported_size(&case.kwargs) => {
            return Ok(());
        }
        Err(error) if case.error.is_some() && error.fault() == Fault::Request => return Ok(()),
        Err(error) => return Err(error.to_string()),
    };
    let plan = match (model.plan(size, &kwargs), &case.error) {
        (Err(error), Some(_)) if error.fault() == Fault::Request => return Ok(()),
        (Err(error), None) if case.engine_refuses && error.fault() == Fault::Request => {
            return Ok(());
        }
        (Err(error), _) => return Err(error.to_string()),
        (Ok(_), Some(error)) => return Err(format!("vLLM raises {error}")),
        (Ok(_), None) if case.engine_refuses => return Err("vLLM's engine would refuse it".into()),
        (Ok(plan), None) => plan,
    };
    let mut runs: Vec<(u32, usize, bool)> = Vec::new();
    for run in &plan.placeholder {
        match runs.last_mut() {
            Some(last) if (last.0, last.2) == (run.token.0, run.embeds) => last.1 += run.count,
            _ => runs.push((run.token.0, run.count, run.embeds)),
        }
    }
    if runs != case.placeholder {
        return Err(format!("placeholder {runs:?}, not {:?}", case.placeholder));
    }
    let tensors = plan.tensors(PixelFormat::Normalized(Dtype::F32));
    let names: Vec<_> = tensors.iter().map(|tensor| tensor.name).collect();
    if !names.iter().eq(case.tensors.keys()) {
        return Err(format!("tensors {names:?}, not {:?}", case.tensors.keys()));
    }
    for (tensor, golden) in tensors.iter().zip(case.tensors.values()) {
        let golden = GoldenTensor::deserialize(golden).unwrap();
        check_tensor(model, case, &plan, tensor, &golden)
            .map_err(|error| format!("{}: {error}", tensor.name))?;
    }
    Ok(())
}

/// Compares a tensor of a case with the golden.
fn check_tensor(
    model: &VisionModel,
    case: &Case,
    plan: &ImagePlan,
    tensor: &TensorSpec,
    golden: &GoldenTensor,
) -> Result<(), String> {
    let field = match tensor.field {
        TensorField::Flat { rows, .. } => {
            assert_eq!(Some(&rows), tensor.shape.first());
            ("flat", false)
        }
        TensorField::Batched { keep_on_cpu } => ("batched", keep_on_cpu),
        TensorField::Shared { keep_on_cpu } => ("shared", keep_on_cpu),
    };
    if (field, &tensor.shape) != ((golden.field.as_str(), golden.keep_on_cpu), &golden.shape) {
        return Err(format!(
            "{field:?} {:?}, not {:?}",
            tensor.shape,
            (&golden.field, golden.keep_on_cpu, &golden.shape)
        ));
    }
    match &tensor.contents {
        Contents::Small(bytes) => {
            let values: Vec<i64> =
                bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
            let expected = golden.values.as_ref().expect("values of a small tensor");
            let expected: Vec<i64> = match expected {
                Value::Array(values) => {
                    values.iter().map(|value| value.as_i64().unwrap()).collect()
                }
                value => vec![value.as_i64().unwrap()],
            };
            if (values.as_slice(), golden.dtype.as_str())
                != (expected.as_slice(), tensor.dtype.torch_name())
            {
                return Err(format!("{values:?}, not {expected:?} as {}", golden.dtype));
            }
        }
        Contents::Pixels => {
            let pixels = case.image.pixels();
            let image = RgbView::new(plan.original, &pixels).unwrap();
            for (format, hash) in [
                (PixelFormat::RawU8, &golden.uint8),
                (PixelFormat::Normalized(Dtype::F32), &golden.float32),
                (PixelFormat::Normalized(Dtype::F16), &golden.float16),
                (PixelFormat::Normalized(Dtype::BF16), &golden.bfloat16),
            ] {
                let Some(hash) = hash else { continue };
                let mut out = vec![0xA5; plan.pixel_bytes(format)];
                model.process(image, plan, format, &mut out).map_err(|error| error.to_string())?;
                if blake3::hash(&out).to_hex().as_str() != hash {
                    return Err(format!("{format:?} differs"));
                }
            }
        }
    }
    Ok(())
}
