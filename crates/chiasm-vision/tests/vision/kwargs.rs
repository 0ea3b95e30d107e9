//! Compares the effect of a request's `mm_processor_kwargs` with vLLM
//! (`python/goldens/make_vision_kwargs_goldens.py`).

use chiasm_vision::{Fault, ImageKwargs, ImageSize, NoVocabulary, VisionError, VisionModel};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::golden;

#[derive(Deserialize)]
struct Goldens {
    image: [u32; 2],
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Row {
    model: String,
    kwargs: Map<String, Value>,
    /// The grid; `None` if vLLM fails.
    grid: Option<[u32; 3]>,
    #[serde(default)]
    tokens: usize,
}

fn load(name: &str) -> VisionModel {
    VisionModel::from_model_dir(&golden::path("models").join(name), &NoVocabulary).unwrap().unwrap()
}

fn parse(model: &VisionModel, kwargs: Value) -> Result<ImageKwargs, VisionError> {
    model.parse_kwargs(kwargs.as_object().unwrap())
}

#[test]
fn kwargs_have_the_same_effect_as_in_vllm() {
    let Goldens { image: [width, height], rows } = golden::json("kwargs.json");
    assert!(rows.len() >= 99, "only {} rows", rows.len());
    let size = ImageSize { width, height };
    for Row { model, kwargs, grid, tokens } in rows {
        let ours = load(&model);
        let plan = ours.parse_kwargs(&kwargs).and_then(|kwargs| ours.plan(size, &kwargs));
        match (plan, grid) {
            (Ok(plan), Some(grid)) => {
                assert_eq!((plan.grid, plan.tokens), (grid, tokens), "{model} {kwargs:?}");
            }
            (Err(error), None) => assert_eq!(error.fault(), Fault::Request, "{model} {kwargs:?}"),
            (Ok(_), None) => panic!("{model} {kwargs:?}: vLLM refuses them"),
            (Err(error), Some(_)) => panic!("{model} {kwargs:?}: {error}"),
        }
    }
}

#[test]
fn unknown_keys_are_refused_by_name() {
    let model = load("qwen2_vl");
    for (kwargs, name) in [
        (json!({"patch_size": 28}), "patch_size"),
        (json!({"min_pixels": 1000, "images_kwargs": {}}), "images_kwargs"),
        (json!({"size": {"shortest_edge": 1, "longest_edge": 2, "height": 3}}), "size.height"),
    ] {
        let Err(error @ VisionError::UnknownKwarg { .. }) = parse(&model, kwargs) else {
            panic!("{name} is accepted")
        };
        assert!(
            error.to_string().starts_with(&format!("mm_processor_kwargs.{name} is")),
            "{error}"
        );
    }
}

#[test]
fn invalid_areas_are_refused_by_name() {
    let model = load("qwen3_vl");
    for value in [
        json!(0),
        json!(-1),
        json!(1.0),
        json!("1"),
        json!(true),
        json!(null),
        json!([1]),
        json!(1e30),
    ] {
        for (kwargs, name) in [
            (json!({"min_pixels": value}), "min_pixels"),
            (json!({"max_pixels": value}), "max_pixels"),
            (json!({"size": {"shortest_edge": value}}), "size.shortest_edge"),
            (json!({"size": {"longest_edge": value}}), "size.longest_edge"),
        ] {
            let parsed = parse(&model, kwargs);
            assert!(
                matches!(parsed, Err(VisionError::InvalidKwarg { key, .. }) if key == name),
                "{name}: {value}"
            );
        }
    }
}
