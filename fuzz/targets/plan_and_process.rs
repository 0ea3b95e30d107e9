//! Plans and processes images with sizes, kwargs and pixels of every image family. Processing must
//! write every planned byte.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use chiasm_types::{Dtype, TokenId};
use chiasm_vision::{
    Fault, ImageSize, PixelFormat, RgbView, VisionModel, Vocabulary, VocabularyError,
};
use libfuzzer_sys::arbitrary::{Arbitrary, Unstructured};

/// The maximum number of pixels of a processed image. Larger images are only planned.
const MAX_PROCESSED_PIXELS: u64 = 1 << 18;

/// Folders of models in the goldens of `chiasm-vision`.
const MODELS: [&str; 9] = [
    "gemma3/models/gemma_3_4b",
    "internvl/models/internvl3_8b",
    "internvl_chat/models/internvl3_8b",
    "llama4/models/llama_4_scout",
    "llava/models/llava_1_5",
    "llava_next/models/v1_6_mistral",
    "mistral3/models/mistral_small_3_1",
    "pixtral/models/pixtral_12b",
    "qwen_more/models/cosmos_reason2_8b",
];

/// A vocabulary that contains every token.
struct AnyToken;

impl Vocabulary for AnyToken {
    fn id(&self, token: &str) -> Option<TokenId> {
        Some(TokenId(token.len() as u32))
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        Ok(vec![TokenId(text.len() as u32)])
    }
}

static LOADED: LazyLock<Vec<VisionModel>> = LazyLock::new(|| {
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../crates/chiasm-vision/tests/goldens/families");
    let load = |name| VisionModel::from_model_dir(&goldens.join(name), &AnyToken).unwrap().unwrap();
    MODELS.map(load).into()
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // Fails if the data is too short for an input.
    let _ = run(&mut Unstructured::new(data));
});

fn run(data: &mut Unstructured<'_>) -> libfuzzer_sys::arbitrary::Result<()> {
    let model = data.choose(&LOADED)?;
    let size = ImageSize { width: u32::arbitrary(data)?, height: u32::arbitrary(data)? };
    let kwargs = serde_json::from_str(<&str>::arbitrary(data)?).unwrap_or_default();
    let kwargs = match model.parse_kwargs(&kwargs) {
        Ok(kwargs) => kwargs,
        Err(error) => return Ok(assert_eq!(error.fault(), Fault::Request)),
    };
    let plan = match model.plan(size, &kwargs) {
        Ok(plan) => plan,
        Err(error) => return Ok(assert_eq!(error.fault(), Fault::Request)),
    };
    let format = PixelFormat::Normalized(Dtype::BF16);
    if size.area() > MAX_PROCESSED_PIXELS
        || plan.pixel_bytes(format) as u64 > 8 * MAX_PROCESSED_PIXELS
    {
        return Ok(());
    }
    let mut pixels = vec![0; 3 * size.area() as usize];
    data.fill_buffer(&mut pixels)?;
    let image = RgbView::new(size, &pixels).unwrap();
    let outputs = [0x00, 0xFF].map(|initial| {
        let mut output = vec![initial; plan.pixel_bytes(format)];
        model.process(image, &plan, format, &mut output).unwrap();
        output
    });
    assert!(outputs[0] == outputs[1], "some bytes are not written");
    Ok(())
}
