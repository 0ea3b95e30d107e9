//! Times every implementation of the pixel loops that this CPU runs, alternately, and checks that their bits agree:
//! `cargo run --release -p chiasm-vision --example kernels [FAMILY [WIDTHxHEIGHT]]`.
//!
//! Prints a Markdown table: lower quartiles of the rounds in one thread, and their ratios to the scalar reference and to
//! one copy of as many bytes as the stage writes. Only the ratios mean something on a shared machine, and there the
//! slower rounds tell about the neighbours.
//!
//! `whole` is an image to its tensor of 8-bit pixels; `layout` the same for an image that needs no resizing, so that
//! it is the cutting into patches alone, once per element type; `resize` is the difference of the two. That is too
//! little for large images: after a resize, patches are cut from the cache, without one, from memory.

use std::error::Error;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use chiasm_types::Dtype;
use chiasm_vision::{ImageKwargs, ImageSize, Implementation, NoVocabulary, PixelFormat, RgbView, VisionModel};

const ROUNDS: usize = 31;
const SIZES: [(u32, u32); 4] = [(512, 512), (1024, 1024), (1920, 1080), (3840, 2160)];
const FORMATS: [(&str, PixelFormat); 4] = [
    ("u8", PixelFormat::RawU8),
    ("bf16", PixelFormat::Normalized(Dtype::BF16)),
    ("f16", PixelFormat::Normalized(Dtype::F16)),
    ("f32", PixelFormat::Normalized(Dtype::F32)),
];

/// Milliseconds of each round, per implementation; the copy comes last.
type Times = Vec<Vec<f64>>;

fn main() -> Result<(), Box<dyn Error>> {
    let names: Vec<_> = Implementation::available().map(Implementation::name).collect();
    let ratios: Vec<_> = names[1..].iter().map(|name| format!("scalar / {name} | {name} / copy")).collect();
    println!("| model | image | stage | {} ms | copy ms | {} |", names.join(" ms | "), ratios.join(" | "));
    println!("|{}", "---|".repeat(4 + names.len() + 2 * ratios.len()));
    let mut wanted = std::env::args().skip(1);
    let (wanted_family, wanted_size) = (wanted.next(), wanted.next());
    for family in ["qwen2_vl", "qwen3_vl"] {
        for (width, height) in SIZES {
            let size = ImageSize { width, height };
            let is = |wanted: &Option<String>, name: &str| wanted.as_ref().is_none_or(|wanted| wanted == name);
            if is(&wanted_family, family) && is(&wanted_size, &size.to_string()) {
                measure(family, size)?;
            }
        }
    }
    Ok(())
}

fn measure(family: &str, size: ImageSize) -> Result<(), Box<dyn Error>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/models").join(family);
    let mut models = Vec::new();
    for kernels in Implementation::available() {
        let model = VisionModel::from_model_dir(&dir, &NoVocabulary)?.ok_or("the model takes no images")?;
        models.push(model.with_implementation(kernels));
    }
    let resized = models[0].plan(size, &ImageKwargs::default())?.resized;
    let whole = stage(&models, size, PixelFormat::RawU8)?;
    print(family, size, "whole u8", &whole);
    for (name, format) in FORMATS {
        let layout = stage(&models, resized, format)?;
        if format == PixelFormat::RawU8 && resized != size {
            let mut resize: Times = (whole.iter().zip(&layout))
                .map(|(whole, layout)| whole.iter().zip(layout).map(|(whole, layout)| whole - layout).collect())
                .collect();
            resize[models.len()].clone_from(&whole[models.len()]);
            print(family, size, "resize", &resize);
        }
        print(family, size, &format!("layout {name}"), &layout);
    }
    Ok(())
}

fn stage(models: &[VisionModel], size: ImageSize, format: PixelFormat) -> Result<Times, Box<dyn Error>> {
    let plan = models[0].plan(size, &ImageKwargs::default())?;
    let pixels: Vec<u8> = (0..3 * size.area()).map(|index| (index.wrapping_mul(0x9E37_79B9) >> 13) as u8).collect();
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
                return Err(format!("{} differs from scalar for {size}", model.implementation().name()).into());
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
