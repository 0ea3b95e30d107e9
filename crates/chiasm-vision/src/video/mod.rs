//! Planning videos before any frame is decoded.
//!
//! Follows vLLM 0.32 and 0.33 with `transformers` 5.19 and 5.20, in its three steps:
//!
//! 1. A loader picks the frames to decode (`vllm/multimodal/video.py`): [`VideoLoader`].
//! 2. The video processor may pick again, then resizes the frames (`video_processing_*.py`).
//! 3. The model's class in vLLM counts tokens and writes the placeholder.
//!
//! [`VideoModel::plan`] computes all of them from the number of frames, their rate and their size.
//! Whatever is not known to equal vLLM is a [`VideoPlanError`]; vLLM's own processor makes such a
//! video.
//!
//! | module | contents |
//! |---|---|
//! | `model` | [`VideoModel`]: the entry point |
//! | `properties` | [`VideoProperties`]: the input |
//! | `options`, `kwargs` | the settings of an engine and of a request |
//! | `loader`, `sampling` | the frames that are decoded |
//! | `resampling` | the frames that Qwen's video processors keep of them |
//! | `settings` | the video processor's settings in a model directory |
//! | `qwen`, `qwen_resize`, `llava` | the families |
//! | `placeholder` | the text and tokens that represent a video in a prompt |
//! | `plan` | [`VideoPlan`] |
//! | `process` | the pixel tensor, one frame at a time |
//! | `error` | [`VideoPlanError`] |

mod error;
mod kwargs;
mod llava;
mod loader;
mod model;
mod options;
mod placeholder;
mod plan;
mod process;
mod properties;
mod qwen;
mod qwen_resize;
mod resampling;
mod sampling;
mod settings;

pub use error::VideoPlanError;
pub use loader::VideoLoader;
pub use model::{VideoModel, VideoRequest};
pub use options::{PruningMethod, VideoOptions, VideoPruning};
pub use placeholder::VideoPiece;
pub use plan::VideoPlan;
pub use properties::VideoProperties;
