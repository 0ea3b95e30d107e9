//! The largest image and video that vLLM expects (`Qwen2VLProcessingInfo` in its `qwen2_vl.py`,
//! `Qwen3VLProcessingInfo` in its `qwen3_vl.py`).

use serde_json::Value;

use crate::ImageSize;
use crate::model_dir::ModelDir;

/// `_MAX_FRAMES_PER_VIDEO` in vLLM's `qwen2_vl.py`.
const MAX_FRAMES: usize = 14;
/// The largest ratio of the longer to the shorter side.
const MAX_RATIO: u64 = 200;
/// The default `Qwen3VLVideoProcessor.size["longest_edge"]`.
const DEFAULT_VIDEO_PIXELS: u64 = 32 * 32 * 768;
/// The maximum area in pixels, which bounds the numbers to factorise. Larger images are refused
/// whatever the model's settings are.
const MAX_AREA: u64 = i32::MAX as u64;

/// Returns the image size with the most squares of `factor` by `factor` pixels within the bounds of
/// area and aspect ratio (`get_image_size_with_most_features`).
pub(super) fn largest_image(factor: u32, max_pixels: u64) -> ImageSize {
    let area = u64::from(factor).pow(2);
    let max_squares = max_pixels.min(MAX_AREA) / area.max(1);
    // vLLM uses one square if the bounds allow none.
    let sides = |squares: u64| {
        let short =
            (1..=squares.isqrt()).rev().find(|side| squares.is_multiple_of(*side)).unwrap_or(1);
        (short, squares / short)
    };
    let fits = |&(short, long): &(u64, u64)| long <= MAX_RATIO * short;
    let (short, long) = (1..=max_squares).rev().map(sides).find(fits).unwrap_or((1, 1));
    ImageSize { width: factor * long as u32, height: factor * short as u32 }
}

/// Returns the number of embeddings of an image of whole squares.
pub(super) fn embeddings(size: ImageSize, factor: u32) -> usize {
    (size.width / factor) as usize * (size.height / factor) as usize
}

/// Returns the number of embeddings of the longest video that fits into a context
/// (`get_num_frames_with_most_features`, `get_max_video_tokens`).
///
/// Every `temporal` frames together have `frame_tokens` embeddings. The video has at least one
/// frame.
pub(super) fn longest_video(context_tokens: usize, frame_tokens: usize, temporal: usize) -> usize {
    let frame_tokens = frame_tokens.max(1);
    let temporal = temporal.max(1);
    let frames = (context_tokens / frame_tokens * temporal).clamp(1, MAX_FRAMES);
    frames.div_ceil(temporal) * frame_tokens
}

/// Reads the maximum number of pixels of a video from the model directory.
///
/// An invalid value means the default: vLLM processes videos and reports invalid settings itself.
pub(super) fn video_pixels(dir: &ModelDir) -> u64 {
    let size = dir.video_processor.as_ref().and_then(|processor| processor.get("size"));
    size.and_then(|size| size.get("longest_edge"))
        .and_then(Value::as_u64)
        .unwrap_or(DEFAULT_VIDEO_PIXELS)
}
