//! Layouts and pixels of images and videos, exactly as the model's own processor makes them.
//!
//! A [`VisionModel`] is one model's image family with that model's settings. It works in two steps:
//!
//! - [`VisionModel::plan`] computes the prompt tokens and the form of the tensors of an image. It
//!   needs only the image's size, before any pixel is decoded. `chiasm_prompt::expand` puts the
//!   tokens into the prompt.
//! - [`VisionModel::process`] writes the pixel tensor into the caller's memory. The bits are those
//!   that the model's processor in `transformers` 5.19 produces on a CPU.
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
//! A [`VideoModel`] does the same for videos, with an engine's flags: [`VideoModel::plan`] picks
//! the frames and computes tokens and tensors from a file's number of frames, their rate and size;
//! [`VideoModel::process_frame`] writes one frame's pixels. What is not known to equal vLLM is
//! [`VideoPlanError`].
//!
//! | module | contents |
//! |---|---|
//! | `model`, `model_dir` | [`VisionModel`]; the settings in a model directory |
//! | `family` | the trait of a family |
//! | `families/` | one module per family: settings, sizes, numbers of tokens; their table |
//! | `fingerprint` | the part of an item's identity that encodes the settings |
//! | `engine_kwargs` | merging of settings for all requests with those of one request |
//! | `settings` | settings that the image processors of all families share |
//! | `vocabulary` | the interface of the tokenizer that families use |
//! | `size`, `image` | the input |
//! | `image_prompt` | the representation of an image in a prompt |
//! | `image_plan` | the plan of an image |
//! | `tensor` | the output |
//! | `video/` | the plan of a video, before a frame is decoded |
//! | `kernels/` | resize, normalise, patchify: a scalar reference, and faster code of the same bits |
//!
//! The fastest [`Implementation`] of the pixel loops that the CPU supports is selected at run time.
//! The environment variable `CHIASM_KERNELS` forces another one, for debugging: `scalar`, `avx2`,
//! `avx512` or `neon`.
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
mod video;
mod vocabulary;

pub use error::{Fault, VisionError};
pub use family::ImageKwargs;
pub use image::RgbView;
pub use image_plan::ImagePlan;
pub use image_prompt::ImagePrompt;
#[cfg(feature = "bench")]
pub use kernels::resize_bicubic;
pub use kernels::{Implementation, Parallelism};
pub use model::{AcceptedMedia, VisionModel};
pub use size::ImageSize;
pub use tensor::{Contents, PixelFormat, TensorSpec};
pub use video::{
    PruningMethod, VideoLoader, VideoModel, VideoOptions, VideoPiece, VideoPlan, VideoPlanError,
    VideoProperties, VideoPruning, VideoRequest,
};
pub use vocabulary::{NoVocabulary, Vocabulary, VocabularyError};
