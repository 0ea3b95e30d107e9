//! Benchmarks every implementation of the pixel loops that this CPU can run, in alternation, and
//! checks that their bits agree.
//!
//! Usage: `cargo run --release -p chiasm-vision --example kernels [FAMILY [WIDTHxHEIGHT]]`.
//!
//! Prints a Markdown table of lower quartiles of the rounds in one thread, with ratios to the
//! scalar reference and to a copy of the stage's output bytes. On a shared machine only the ratios
//! are meaningful, and the slower rounds depend on other load.
//!
//! `whole` is the time from an image to its tensor. For families that keep an image's aspect ratio,
//! `layout` is the same for an image that needs no resize: only cutting into patches. `resize` is
//! the difference of the two. It is too small for large images: after a resize, patches are cut
//! from the cache, and without one from memory.

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
/// A family to benchmark.
struct BenchFamily {
    name: &'static str,
    /// The model directory below the goldens.
    dir: &'static str,
    /// `true` if an image of the right size is not resized.
    keeps_shape: bool,
}

const FAMILIES: [BenchFamily; 5] = [
    BenchFamily { name: "qwen2_vl", dir: "models/qwen2_vl", keeps_shape: true },
    BenchFamily { name: "qwen3_vl", dir: "models/qwen3_vl", keeps_shape: true },
    BenchFamily { name: "llava", dir: "families/llava/models/llava_1_5", keeps_shape: false },
    BenchFamily { name: "llama4", dir: "families/llama4/models/llama_4_scout", keeps_shape: false },
    BenchFamily {
        name: "internvl_chat",
        dir: "families/internvl_chat/models/defaults",
        keeps_shape: false,
    },
];

/// A vocabulary with the same token for every text: pixels do not depend on tokens.
struct AnyVocabulary;

impl Vocabulary for AnyVocabulary {
    fn id(&self, _token: &str) -> Option<TokenId> {
        Some(TokenId(0))
    }

    fn encode(&self, _text: &str) -> Result<Vec<TokenId>, VocabularyError> {
        Ok(vec![TokenId(0)])
    }
}

/// The time of each round in milliseconds, by implementation; the copy comes last.
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
    let mut arguments = std::env::args().skip(1);
    let family_filter = arguments.next();
    let size_filter = arguments.next();
    let matches =
        |filter: &Option<String>, name: &str| filter.as_ref().is_none_or(|filter| filter == name);
    for family in &FAMILIES {
        for (width, height) in SIZES {
            let size = ImageSize { width, height };
            if matches(&family_filter, family.name) && matches(&size_filter, &size.to_string()) {
                measure(family, size)?;
            }
        }
    }
    Ok(())
}

/// Benchmarks all stages of a family for images of one size, and prints their rows.
fn measure(family: &BenchFamily, size: ImageSize) -> Result<(), Box<dyn Error>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens").join(family.dir);
    let mut models = Vec::new();
    for kernels in Implementation::available() {
        let model = VisionModel::from_model_dir(&dir, &AnyVocabulary)?
            .ok_or("the model takes no images")?;
        models.push(model.with_implementation(kernels));
    }
    let resized = models[0].plan(size, &ImageKwargs::default())?.resized;
    for (name, format) in FORMATS {
        let whole = time_rounds(&models, size, format)?;
        print_row(family.name, size, &format!("whole {name}"), &whole);
        if !family.keeps_shape || resized == size {
            continue;
        }
        let layout = time_rounds(&models, resized, format)?;
        print_row(family.name, size, &format!("layout {name}"), &layout);
        if format == PixelFormat::RawU8 {
            let mut resize: Times = (whole.iter().zip(&layout))
                .map(|(whole, layout)| {
                    whole.iter().zip(layout).map(|(whole, layout)| whole - layout).collect()
                })
                .collect();
            resize[models.len()].clone_from(&whole[models.len()]);
            print_row(family.name, size, "resize", &resize);
        }
    }
    Ok(())
}

/// Times all implementations and a copy of the tensor, and checks that the tensors are equal.
fn time_rounds(
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

/// Returns the lower quartile.
fn lower_quartile(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 4]
}

/// Prints one row of the table.
fn print_row(family: &str, size: ImageSize, stage: &str, times: &Times) {
    let quartiles: Vec<_> = times.iter().map(|times| lower_quartile(times)).collect();
    let copy = quartiles[quartiles.len() - 1];
    let absolute: Vec<_> = quartiles.iter().map(|time| format!("{time:.2}")).collect();
    let ratios: Vec<_> = quartiles[1..quartiles.len() - 1]
        .iter()
        .map(|time| format!("{:.1} | {:.2}", quartiles[0] / time, time / copy))
        .collect();
    println!("| {family} | {size} | {stage} | {} | {} |", absolute.join(" | "), ratios.join(" | "));
}
