//! Compares sizes, tiles and token counts of many random image sizes with the functions of
//! `transformers` and vLLM (`python/goldens/make_family_goldens.py`).

use std::collections::BTreeMap;
use std::path::Path;

use chiasm_vision::{ImageKwargs, ImagePlan, ImageSize, VisionError, VisionModel};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::any_token::AnyToken;
use crate::golden;

#[derive(Deserialize)]
struct Plans<T> {
    plans: Vec<T>,
}

/// Reads the golden plans of a family.
fn plans<T: DeserializeOwned>(family: &str) -> Vec<T> {
    let Plans { plans } = golden::json::<Plans<T>>(&format!("families/{family}/plans.json"));
    assert!(plans.len() >= 800, "only {} plans of {family}", plans.len());
    plans
}

/// Loads a model of the goldens with changes in its files: file, JSON pointer and value.
fn load_with(family: &str, name: &str, changes: &[(&str, &str, Value)]) -> VisionModel {
    let source = golden::path("families").join(family).join("models").join(name);
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "preprocessor_config.json", "processor_config.json"] {
        let Some(mut contents) = read(&source.join(file)) else { continue };
        for (_, pointer, value) in changes.iter().filter(|(changed, ..)| *changed == file) {
            let (parent, key) = pointer.rsplit_once('/').unwrap();
            let parent = contents.pointer_mut(parent).and_then(Value::as_object_mut).unwrap();
            parent.insert(key.to_owned(), value.clone());
        }
        std::fs::write(dir.path().join(file), contents.to_string()).unwrap();
    }
    VisionModel::from_model_dir(dir.path(), &AnyToken).unwrap().unwrap()
}

/// Reads a JSON file; `None` if it is missing.
fn read(path: &Path) -> Option<Value> {
    Some(serde_json::from_slice(&std::fs::read(path).ok()?).unwrap())
}

/// One model per setting, loaded on first use.
struct Models<K>(BTreeMap<K, VisionModel>);

impl<K: Ord> Models<K> {
    fn get(&mut self, key: K, load: impl FnOnce() -> VisionModel) -> &VisionModel {
        self.0.entry(key).or_insert_with(load)
    }
}

fn plan(model: &VisionModel, width: u32, height: u32, kwargs: &ImageKwargs) -> ImagePlan {
    let plan = model.plan(ImageSize { width, height }, kwargs);
    plan.unwrap_or_else(|error| panic!("{} {width}x{height}: {error}", model.family()))
}

fn kwargs(model: &VisionModel, kwargs: Value) -> ImageKwargs {
    model.parse_kwargs(kwargs.as_object().unwrap()).unwrap()
}

#[test]
fn llava_next_plans_equal_goldens() {
    let mut models = Models(BTreeMap::new());
    for row in plans::<(String, u32, u32, usize, u32, u32, u32, u32)>("llava_next") {
        let (name, width, height, tokens, grid_width, grid_height, resized_width, resized_height) =
            row.clone();
        let model = models.get(name.clone(), || load_with("llava_next", &name, &[]));
        let plan = plan(model, width, height, &ImageKwargs::default());
        let tile = grid_width / plan.grid[2];
        let ours = (
            plan.tokens,
            tile * plan.grid[2],
            tile * plan.grid[1],
            plan.resized.width,
            plan.resized.height,
        );
        assert_eq!(
            ours,
            (tokens, grid_width, grid_height, resized_width, resized_height),
            "{row:?}"
        );
    }
}

#[test]
fn llama4_plans_equal_goldens() {
    let mut models = Models(BTreeMap::new());
    for row in plans::<[u32; 8]>("llama4") {
        let [width, height, tiles, to_max, columns, rows, resized_width, resized_height] = row;
        let model = models.get((tiles, to_max), || {
            let changes =
                [("max_patches", json!(tiles)), ("resize_to_max_canvas", json!(to_max == 1))]
                    .map(|(key, value)| ("preprocessor_config.json", format!("/{key}"), value));
            let changes =
                changes.each_ref().map(|(file, key, value)| (*file, key.as_str(), value.clone()));
            load_with("llama4", "llama_4_scout", &changes)
        });
        let plan = plan(model, width, height, &ImageKwargs::default());
        let ours = [plan.grid[2], plan.grid[1], plan.resized.width, plan.resized.height];
        assert_eq!(ours, [columns, rows, resized_width, resized_height], "{row:?}");
    }
}

#[test]
fn internvl_plans_equal_goldens() {
    let mut models = Models(BTreeMap::new());
    for row in plans::<[u32; 7]>("internvl") {
        let [width, height, tile, min, max, columns, rows] = row;
        let model = models.get((tile, min, max), || {
            let tokens = (tile / 14 / 2).pow(2);
            load_with(
                "internvl",
                "internvl3_8b",
                &[
                    ("config.json", "/vision_config/image_size", json!(tile)),
                    ("processor_config.json", "/image_seq_length", json!(tokens)),
                    ("preprocessor_config.json", "/size", json!({"height": tile, "width": tile})),
                    ("preprocessor_config.json", "/min_patches", json!(min)),
                    ("preprocessor_config.json", "/max_patches", json!(max)),
                ],
            )
        });
        let plan = plan(model, width, height, &ImageKwargs::default());
        assert_eq!([plan.grid[2], plan.grid[1]], [columns, rows], "{row:?}");
    }
}

#[test]
fn internvl_chat_plans_equal_goldens() {
    let mut models = Models(BTreeMap::new());
    let mut ambiguous = 0;
    for row in plans::<[u32; 9]>("internvl_chat") {
        let [width, height, tile, min, max, thumbnail, columns, rows, tiles] = row;
        let model = models.get((tile, min, max, thumbnail), || {
            load_with(
                "internvl_chat",
                "internvl3_8b",
                &[
                    ("config.json", "/vision_config/image_size", json!(tile)),
                    ("config.json", "/min_dynamic_patch", json!(min)),
                    ("config.json", "/max_dynamic_patch", json!(max)),
                    ("config.json", "/dynamic_image_size", json!(true)),
                    ("config.json", "/use_thumbnail", json!(thumbnail == 1)),
                ],
            )
        });
        let plan = match model.plan(ImageSize { width, height }, &ImageKwargs::default()) {
            // The choice of vLLM depends on the order of a Python set.
            Err(VisionError::AmbiguousTiles { .. }) if min > 1 => {
                ambiguous += 1;
                continue;
            }
            plan => plan.unwrap_or_else(|error| panic!("{row:?}: {error}")),
        };
        let tile_tokens = (tile as usize / 14 / 2).pow(2);
        assert_eq!([plan.grid[2], plan.grid[1]], [columns, rows], "{row:?}");
        assert_eq!(plan.tokens, tiles as usize * tile_tokens, "{row:?}");
    }
    assert!(ambiguous < 10, "{ambiguous} rows are refused");
}

#[test]
fn pixtral_family_plans_equal_goldens() {
    let mut models = Models(BTreeMap::new());
    for (family, name) in [("pixtral", "pixtral_12b"), ("mistral3", "mistral_small_3_1")] {
        for row in plans::<[u32; 8]>(family) {
            let [longest, patch, width, height, resized_width, resized_height, columns, rows] = row;
            let model = models.get((family, longest, patch), || {
                let merge = if family == "mistral3" { 2 } else { 1 };
                load_with(
                    family,
                    name,
                    &[
                        ("config.json", "/vision_config/image_size", json!(longest)),
                        ("config.json", "/vision_config/patch_size", json!(patch / merge)),
                        ("processor_config.json", "/patch_size", json!(patch / merge)),
                        ("preprocessor_config.json", "/size", json!({"longest_edge": longest})),
                    ],
                )
            });
            let size = ImageSize { width, height };
            if columns == 0 || rows == 0 {
                assert!(model.plan(size, &ImageKwargs::default()).is_err(), "{row:?}");
                continue;
            }
            let plan = plan(model, width, height, &ImageKwargs::default());
            let ours = [plan.resized.width, plan.resized.height, plan.grid[2], plan.grid[1]];
            assert_eq!(ours, [resized_width, resized_height, columns, rows], "{family} {row:?}");
        }
    }
}

#[test]
fn gemma3_plans_equal_goldens() {
    let model = load_with("gemma3", "gemma_3_4b", &[]);
    for row in plans::<(u32, u32, u32, u32, f64, Vec<[u32; 2]>)>("gemma3") {
        let (width, height, min_size, max_crops, ratio, crops) = row.clone();
        let kwargs = kwargs(
            &model,
            json!({
                "do_pan_and_scan": true,
                "pan_and_scan_min_crop_size": min_size,
                "pan_and_scan_max_num_crops": max_crops,
                "pan_and_scan_min_ratio_to_activate": ratio,
            }),
        );
        let plan = model.plan(ImageSize { width, height }, &kwargs);
        if crops.iter().any(|crop| crop.contains(&0)) {
            assert!(plan.is_err(), "{row:?}");
            continue;
        }
        let squares = plan.unwrap_or_else(|error| panic!("{row:?}: {error}")).grid[2];
        assert_eq!(squares as usize, 1 + crops.len(), "{row:?}");
    }
    assert!(model.parse_kwargs(&Map::new()).is_ok());
}
