//! Checks with random input that no size, setting or kwarg makes a family panic, and that tensors
//! match their plans.

use std::sync::LazyLock;

use chiasm_types::Dtype;
use chiasm_vision::{Fault, ImageSize, PixelFormat, RgbView, VisionModel};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::any_token::AnyToken;
use crate::golden;

static MODELS: LazyLock<Vec<VisionModel>> = LazyLock::new(|| {
    let families = [
        "gemma3/gemma_3_4b",
        "internvl/internvl3_8b",
        "internvl_chat/internvl3_8b",
        "llama4/llama_4_scout",
        "llava/llava_1_5",
        "llava/square_size",
        "llava_next/v1_6_mistral",
        "mistral3/mistral_small_3_1",
        "pixtral/pixtral_12b",
        "qwen_more/cosmos_reason2_8b",
    ];
    let dir = |name: &str| {
        let (family, model) = name.split_once('/').unwrap();
        golden::path("families").join(family).join("models").join(model)
    };
    let load = |name| VisionModel::from_model_dir(&dir(name), &AnyToken).unwrap().unwrap();
    families.map(load).into()
});

const KEYS: [&str; 20] = [
    "size",
    "crop_size",
    "do_resize",
    "do_center_crop",
    "resample",
    "min_pixels",
    "max_pixels",
    "resize_to_max_canvas",
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
    "crop_to_patches",
    "min_patches",
    "max_patches",
    "min_dynamic_patch",
    "max_dynamic_patch",
    "dynamic_image_size",
    "use_thumbnail",
    "nonsense",
];

fn values() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        (0..2000_i64).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
    ];
    let sides = (0..3000_u64, 0..3000_u64);
    prop_oneof![
        number,
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
        "[a-z]{0,4}".prop_map(Value::from),
        sides.clone().prop_map(|(height, width)| json!({"height": height, "width": width})),
        sides
            .clone()
            .prop_map(|(short, long)| json!({"shortest_edge": short, "longest_edge": long})),
        sides.clone().prop_map(|(edge, _)| json!({"shortest_edge": edge})),
        sides.clone().prop_map(|(edge, _)| json!({"longest_edge": edge})),
        sides.prop_map(|(height, width)| json!([height, width])),
    ]
}

fn kwargs() -> impl Strategy<Value = Map<String, Value>> {
    let entries = prop::collection::vec((prop::sample::select(&KEYS[..]), values()), 0..3);
    entries.prop_map(|entries| {
        entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    })
}

fn sides() -> impl Strategy<Value = u32> {
    prop_oneof![0..4_u32, 1..1200_u32, 1..70_000_u32, any::<u32>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn random_kwargs_give_a_plan_or_a_request_error(
        model in 0..10_usize,
        width in sides(),
        height in sides(),
        kwargs in kwargs(),
    ) {
        let model = &MODELS[model];
        let kwargs = match model.parse_kwargs(&kwargs) {
            Ok(kwargs) => kwargs,
            Err(error) => {
                prop_assert_eq!(error.fault(), Fault::Request, "{}", error);
                return Ok(());
            }
        };
        let size = ImageSize { width, height };
        let plan = match model.plan(size, &kwargs) {
            Ok(plan) => plan,
            Err(error) => {
                prop_assert_eq!(error.fault(), Fault::Request, "{}", error);
                return Ok(());
            }
        };
        let embedding_runs = plan.placeholder.iter().filter(|run| run.embeds);
        let embeddings: usize = embedding_runs.map(|run| run.count).sum();
        prop_assert!(plan.tokens == embeddings && embeddings > 0);
        let pixels = &plan.tensors(PixelFormat::RawU8)[0];
        let elements: usize = pixels.shape.iter().product();
        prop_assert_eq!(elements, plan.pixel_bytes(PixelFormat::RawU8));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn process_writes_every_byte_of_the_tensor(
        model in 0..10_usize,
        (width, height) in prop_oneof![
            (1..300_u32, 1..300_u32),
            (1..4_u32, 1..1500_u32),
            (1..1500_u32, 1..4_u32),
        ],
    ) {
        let model = &MODELS[model];
        let size = ImageSize { width, height };
        let kwargs = model.parse_kwargs(&Map::new()).unwrap();
        let Ok(plan) = model.plan(size, &kwargs) else { return Ok(()) };
        let pixels: Vec<u8> = (0..3 * size.area())
            .map(|index| (index.wrapping_mul(0x9E37_79B9) >> 13) as u8)
            .collect();
        let image = RgbView::new(size, &pixels).unwrap();
        // The previous contents of the buffer must not affect the tensor.
        let tensors = [0x00, 0xFF].map(|fill| {
            let mut out = vec![fill; plan.pixel_bytes(PixelFormat::Normalized(Dtype::BF16))];
            model.process(image, &plan, PixelFormat::Normalized(Dtype::BF16), &mut out).unwrap();
            out
        });
        prop_assert!(tensors[0] == tensors[1], "{size}");
    }
}
