//! The size of the frames after resizing, by `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor`.

use super::settings::QwenSettings;
use super::{VideoPlanError, VideoProperties};
use crate::ImageSize;
use crate::families::qwen_vl::smart_resize::{MAX_AREA, MAX_RATIO, smart_resize};

/// Returns the frame size of Qwen2-VL: each frame has the bounds of an image.
///
/// `frames` is the number of frames before the last one is repeated.
pub(super) fn by_frame(
    settings: &QwenSettings,
    video: VideoProperties,
    frames: u64,
) -> Result<ImageSize, VideoPlanError> {
    let factor = settings.patch * settings.merge;
    let mut max_pixels = settings.max_pixels;
    if settings.caps_frames {
        let factor = f64::from(factor);
        let total_pixels = (settings.max_video_tokens as f64 * factor * factor * 0.9) as u64;
        let share = total_pixels * u64::from(settings.temporal) / frames;
        max_pixels = max_pixels.min(share).max(floor_pixels(settings));
    }
    Ok(smart_resize(video.size(), factor, settings.min_pixels, max_pixels)?)
}

/// Returns the frame size of Qwen3-VL: the bounds apply to the volume of all frames.
pub(super) fn by_volume(
    settings: &QwenSettings,
    video: VideoProperties,
    frames: u64,
) -> Result<ImageSize, VideoPlanError> {
    let factor = u64::from(settings.patch * settings.merge);
    let mut max_pixels = settings.max_pixels;
    if settings.caps_frames {
        let cap = settings.max_video_tokens.saturating_mul(factor * factor);
        let frame_pixels = cap.min(max_pixels / frames).max(floor_pixels(settings));
        max_pixels = frame_pixels.saturating_mul(frames);
    }
    volume_resize(video, frames, settings.temporal, factor, [settings.min_pixels, max_pixels])
}

/// Returns `int(size.shortest_edge * 1.05)`, the least that a capped frame may have.
fn floor_pixels(settings: &QwenSettings) -> u64 {
    (settings.min_pixels as f64 * 1.05) as u64
}

/// Follows `smart_resize` in `video_processing_qwen3_vl.py`, with the same float operations.
fn volume_resize(
    video: VideoProperties,
    frames: u64,
    temporal: u32,
    factor: u64,
    [min_pixels, max_pixels]: [u64; 2],
) -> Result<ImageSize, VideoPlanError> {
    if frames < u64::from(temporal) {
        return Err(video.problem("has fewer sampled frames than a patch"));
    }
    let step = factor as f64;
    let mut height = f64::from(video.height);
    let mut width = f64::from(video.width);
    if height < step || width < step {
        let scale = (step / height).max(step / width);
        height = (height * scale).trunc();
        width = (width * scale).trunc();
    }
    if height < 1.0 || width < 1.0 || height.max(width) / height.min(width) > f64::from(MAX_RATIO) {
        return Err(video.problem("is too elongated"));
    }
    // Python's round() rounds halves to even.
    let mut new_height = (height / step).round_ties_even() * step;
    let mut new_width = (width / step).round_ties_even() * step;
    let temporal = f64::from(temporal);
    let new_frames = (frames as f64 / temporal).round_ties_even() * temporal;
    let volume = frames as f64 * height * width;
    let new_volume = new_frames * new_height * new_width;
    // Below 2^53, Python's integers and f64 agree.
    if volume.max(new_volume) >= (1_u64 << 53) as f64 {
        return Err(video.problem("is too large"));
    }
    if new_volume > max_pixels as f64 {
        let beta = (volume / max_pixels as f64).sqrt();
        new_height = step.max((height / beta / step).floor() * step);
        new_width = step.max((width / beta / step).floor() * step);
    } else if new_volume < min_pixels as f64 {
        let beta = (min_pixels as f64 / volume).sqrt();
        new_height = (height * beta / step).ceil() * step;
        new_width = (width * beta / step).ceil() * step;
    }
    if new_height < step || new_width < step || new_height * new_width > MAX_AREA {
        return Err(video.problem("would be resized to nothing or to too much"));
    }
    Ok(ImageSize { width: new_width as u32, height: new_height as u32 })
}
