//! Times every implementation of the pixel loops that this CPU runs, alternately, and checks that
//! their bits agree: `cargo run --release -p chiasm-vision --example kernels [FAMILY
//! [WIDTHxHEIGHT]]`.
//!
//! Prints a Markdown table: lower quartiles of the rounds in one thread, and their ratios to the
//! scalar reference and to one copy of as many bytes as the stage writes. Only the ratios mean
//! something on a shared machine, and there the slower rounds tell about the neighbours.
//!
//! `whole` is an image to its tensor. For the families that keep an image's shape, `layout` is the
//! same for an image that needs no resizing: the cutting into patches alone. `resize` is the
//! difference of the two, which is too little for large images: after a resize, patches are cut
//! from the cache, without one, from memory.

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use chiasm_types::{Dtype, TokenId};
use chiasm_vision::{
    ImageKwargs, ImageSize, Implementation, PixelFormat, RgbView, VisionModel, Vocabulary,
    VocabularyError,
};

const ROUNDS: usize = 31;
const SIZES: [(u32, u32); 4] = [(512, 512), (1024, 1024), (1920, 1080), (3840, 2160)];
const FORMATS: [(&str, PixelFormat); 3] = [
    ("u8", PixelFormat::RawU8),
    ("bf16", PixelFormat::Normalized(Dtype::BF16)),
    ("f32", PixelFormat::Normalized(Dtype::F32)),
];
/// Families, where their settings lie among the goldens, and whether an image of the right size is
/// not resized.
const FAMILIES: [(&str, &str, bool); 5] = [
    ("qwen2_vl", "models/qwen2_vl", true),
    ("qwen3_vl", "models/qwen3_vl", true),
    ("llava", "families/llava/models/llava_1_5", false),
    ("llama4", "families/llama4/models/llama_4_scout", false),
    ("internvl_chat", "families/internvl_chat/models/defaults", false),
];

/// Some token for each text: pixels do not depend on it.
struct AnyVocabulary;

impl Vocabulary for AnyVocabulary {
    fn id(&self, _token: &str) -> Option<TokenId> {
        Some(TokenId(0))
    }

    fn encode(&self, _text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        Ok(vec![TokenId(0)])
    }
}

/// Milliseconds of each round, per implementation; the copy comes last.
type Times = Vec<Vec<f64>>;

fn main() -> Result<(), Box<dyn Error>> {
    let names: Vec<_> = Implementation::available().map(Implementation::name).collect();
    let ratios: Vec<_> =
        names[1..].iter().map(|name| format!("scalar / {name} | {name} / copy")).collect();
    println!(
        "| model | image | stage | {} ms | copy ms | {} |",
        names.join(" ms | "),
        ratios.join(" | ")
    );
    println!("|{}", "---|".repeat(4 + names.len() + 2 * ratios.len()));
    let mut wanted = std::env::args().skip(1);
    let (wanted_family, wanted_size) = (wanted.next(), wanted.next());
    for (family, dir, keeps_shape) in FAMILIES {
        for (width, height) in SIZES {
            let size = ImageSize { width, height };
            let is = |wanted: &Option<String>, name: &str| {
                wanted.as_ref().is_none_or(|wanted| wanted == name)
            };
            if is(&wanted_family, family) && is(&wanted_size, &size.to_string()) {
                measure(family, dir, keeps_shape, size)?;
            }
        }
    }
    Ok(())
}

fn measure(
    family: &str,
    dir: &str,
    keeps_shape: bool,
    size: ImageSize,
) -> Result<(), Box<dyn Error>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(dir);
    let mut models = Vec::new();
    for kernels in Implementation::available() {
        let model = VisionModel::from_model_dir(&dir, &AnyVocabulary)?
            .ok_or("the model takes no images")?;
        models.push(model.with_implementation(kernels));
    }
    let resized = models[0].plan(size, &ImageKwargs::default())?.resized;
    for (name, format) in FORMATS {
        let whole = stage(&models, size, format)?;
        print(family, size, &format!("whole {name}"), &whole);
        if !keeps_shape || resized == size {
            continue;
        }
        let layout = stage(&models, resized, format)?;
        print(family, size, &format!("layout {name}"), &layout);
        if format == PixelFormat::RawU8 {
            let mut resize: Times = (whole.iter().zip(&layout))
                .map(|(whole, layout)| {
                    whole.iter().zip(layout).map(|(whole, layout)| whole - layout).collect()
                })
                .collect();
            resize[models.len()].clone_from(&whole[models.len()]);
            print(family, size, "resize", &resize);
        }
    }
    Ok(())
}

fn stage(
    models: &[VisionModel],
    size: ImageSize,
    format: PixelFormat,
) -> Result<Times, Box<dyn Error>> {
    let plan = models[0].plan(size, &ImageKwargs::default())?;
    let pixels: Vec<u8> =
        (0..3 * size.area()).map(|index| (index.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect();
    let image = RgbView::new(size, &pixels)?;
    let mut out = vec![0; plan.pixel_bytes(format)];
    models[0].process(image, &plan, format, &mut out)?;
    let expected = out.clone();
    let mut times = vec![Vec::with_capacity(ROUNDS); models.len() + 1];
    for _ in 0..ROUNDS {
        for (model, times) in models.iter().zip(&mut times) {
            out.fill(0);
            let start = Instant::now();
            model.process(image, &plan, format, black_box(&mut out))?;
            times.push(start.elapsed().as_secs_f64() * 1e3);
            if out != expected {
                return Err(format!(
                    "{} differs from scalar for {size}",
                    model.implementation().name()
                )
                .into());
            }
        }
        let start = Instant::now();
        black_box(&mut out).copy_from_slice(black_box(&expected));
        times[models.len()].push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}

fn quartile(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 4]
}

fn print(family: &str, size: ImageSize, stage: &str, times: &Times) {
    let quartiles: Vec<_> = times.iter().map(|times| quartile(times)).collect();
    let copy = quartiles[quartiles.len() - 1];
    let absolute: Vec<_> = quartiles.iter().map(|time| format!("{time:.2}")).collect();
    let ratios: Vec<_> = quartiles[1..quartiles.len() - 1]
        .iter()
        .map(|time| format!("{:.1} | {:.2}", quartiles[0] / time, time / copy))
        .collect();
    println!("| {family} | {size} | {stage} | {} | {} |", absolute.join(" | "), ratios.join(" | "));
}
