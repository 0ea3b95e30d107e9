//! Image layouts and pixels, exactly as the model's own processor makes them.
//!
//! A [`VisionModel`] is one model's image family with that model's settings. It answers two
//! questions apart:
//!
//! - [`VisionModel::plan`]: how many prompt tokens and which tensors will this image become?
//!   Arithmetic on its size, before any pixel is decoded.
//! - [`VisionModel::process`]: what is in the pixel tensor? Written straight into memory of the
//!   caller, in the bits that the model's processor in `transformers` 5.19 would have produced on a
//!   CPU.
//!
//! ```no_run
//! use chiasm_vision::{ImageKwargs, ImageSize, NoVocabulary, PixelFormat, RgbView, VisionModel};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = "Qwen2-VL-2B-Instruct".as_ref();
//! let model = VisionModel::from_model_dir(dir, &NoVocabulary)?.ok_or("a text-only model")?;
//! let size = ImageSize { width: 280, height: 224 };
//! let plan = model.plan(size, &ImageKwargs::default())?;
//! assert_eq!((plan.grid, plan.tokens), ([1, 16, 20], 80));
//!
//! let pixels = vec![0; 3 * 280 * 224];
//! let mut tensor = vec![0; plan.pixel_bytes(PixelFormat::RawU8)];
//! model.process(RgbView::new(size, &pixels)?, &plan, PixelFormat::RawU8, &mut tensor)?;
//! # Ok(())
//! # }
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `model`, `model_dir` | [`VisionModel`]; what it reads from a model directory |
//! | `family`, `families/` | the trait of a family; one module per family: settings and arithmetic; their table |
//! | `fingerprint` | the settings' part of an item's identity |
//! | `engine_kwargs` | settings for all requests beside those of one |
//! | `settings` | settings that the image processors of all families share |
//! | `vocabulary` | what a family asks the tokenizer |
//! | `size`, `image`, `image_prompt`, `image_plan`, `tensor` | what goes in, what stands for it in a prompt, what is planned, what comes out |
//! | `kernels/` | the pixel loops: resize, normalise, patchify; a scalar reference each, and faster ones of the same bits |
//!
//! The fastest [`Implementation`] of the loops that the CPU runs is found at run time. For
//! debugging, the environment variable `CHIASM_KERNELS` forces another: `scalar`, `avx2`, `avx512`
//! or `neon`.
#![deny(unsafe_code)]

mod engine_kwargs;
mod error;
mod families;
mod family;
mod fingerprint;
mod image;
mod image_plan;
mod image_prompt;
mod kernels;
mod model;
mod model_dir;
mod settings;
mod size;
mod tensor;
mod vocabulary;

pub use error::{Fault, VisionError};
pub use family::ImageKwargs;
pub use image::RgbView;
pub use image_plan::ImagePlan;
pub use image_prompt::ImagePrompt;
#[cfg(feature = "bench")]
pub use kernels::resize_bicubic;
pub use kernels::{Implementation, Parallelism};
pub use model::{TakenKinds, VisionModel};
pub use size::ImageSize;
pub use tensor::{Contents, PixelFormat, TensorSpec};
pub use vocabulary::{NoVocabulary, Vocabulary, VocabularyError};
