//! The largest image and video that vLLM takes the model to be given (`Qwen2VLProcessingInfo` in
//! its `qwen2_vl.py`, `Qwen3VLProcessingInfo` in its `qwen3_vl.py`).

use serde_json::Value;

use crate::ImageSize;
use crate::model_dir::ModelDir;

/// `_MAX_FRAMES_PER_VIDEO` in vLLM's `qwen2_vl.py`.
const MOST_FRAMES: usize = 14;
/// Largest ratio of the longer to the shorter side.
const MAX_RATIO: u64 = 200;
/// `Qwen3VLVideoProcessor.size["longest_edge"]`, for a model that says nothing of it.
const VIDEO_PIXELS: u64 = 32 * 32 * 768;
/// Larger images are refused, whatever a model's settings are: no number of squares is beyond it
/// that has to be factorised.
const MAX_AREA: u64 = i32::MAX as u64;

/// The size of most squares of `factor` pixels that are not too many pixels and not too long
/// (`get_image_size_with_most_features`).
pub(super) fn image(factor: u32, max_pixels: u64) -> ImageSize {
    let area = u64::from(factor).pow(2);
    let most = max_pixels.min(MAX_AREA) / area.max(1);
    // vLLM goes on with one square if there is no room for any.
    let sides = |squares: u64| {
        let short =
            (1..=squares.isqrt()).rev().find(|side| squares.is_multiple_of(*side)).unwrap_or(1);
        (short, squares / short)
    };
    let fits = |&(short, long): &(u64, u64)| long <= MAX_RATIO * short;
    let (short, long) = (1..=most).rev().map(sides).find(fits).unwrap_or((1, 1));
    ImageSize { width: factor * long as u32, height: factor * short as u32 }
}

/// Embeddings of an image of whole squares.
pub(super) fn embeddings(size: ImageSize, factor: u32) -> usize {
    (size.width / factor) as usize * (size.height / factor) as usize
}

/// Embeddings of the longest video of frames of so many, of which `temporal` are one deep, that
/// fits into a context (`get_num_frames_with_most_features`, `get_max_video_tokens`). It has one
/// frame at least.
pub(super) fn longest_video(context: usize, frame: usize, temporal: usize) -> usize {
    let (frame, temporal) = (frame.max(1), temporal.max(1));
    let frames = (context / frame * temporal).clamp(1, MOST_FRAMES);
    frames.div_ceil(temporal) * frame
}

/// What the model's directory says of videos. What can't be understood is taken for the default:
/// vLLM makes them, and says what is wrong.
pub(super) fn video_pixels(dir: &ModelDir) -> u64 {
    let size = dir.video_processor.as_ref().and_then(|processor| processor.get("size"));
    size.and_then(|size| size.get("longest_edge")).and_then(Value::as_u64).unwrap_or(VIDEO_PIXELS)
}
