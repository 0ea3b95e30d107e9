//! The size to which an image is resized: `smart_resize` of `transformers` 5.19, float for float.

use crate::{ImageSize, VisionError};

/// Largest ratio of the longer to the shorter side that `smart_resize` takes.
const MAX_RATIO: u32 = 200;

/// Most pixels after resizing: tensors of more elements than 32 bits can count break the engine's
/// kernels, long after every model's context is full.
const MAX_AREA: f64 = i32::MAX as f64;

/// Largest area up to which an f64 counts every pixel, so that Python's division of integers and
/// ours agree.
const EXACT_AREA: u64 = 1 << 53;

/// Both sides become multiples of `factor`, the area comes into `min_pixels..=max_pixels` where one
/// step of scaling reaches it, the aspect ratio stays as close as it can. `factor`, `min_pixels`
/// and `max_pixels` are at least 1.
pub(super) fn smart_resize(
    size: ImageSize,
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
) -> Result<ImageSize, VisionError> {
    let (longer, shorter) = (size.width.max(size.height), size.width.min(size.height));
    if shorter == 0 {
        return Err(VisionError::EmptyImage { size });
    }
    if f64::from(longer) / f64::from(shorter) > f64::from(MAX_RATIO) {
        return Err(VisionError::AspectRatio { size, limit: MAX_RATIO });
    }

    let (height, width, step) = (f64::from(size.height), f64::from(size.width), f64::from(factor));
    if size.area() > EXACT_AREA {
        return Err(VisionError::TooLarge { size, width, height });
    }
    let area = size.area() as f64;
    // Python's round() takes halves to the even neighbour.
    let mut new_height = (height / step).round_ties_even() * step;
    let mut new_width = (width / step).round_ties_even() * step;
    // A side is at most its old size + factor, and an area in whole pixels: exact in u128.
    let rounded_area = new_height as u128 * new_width as u128;
    if rounded_area > u128::from(max_pixels) {
        let beta = (area / max_pixels as f64).sqrt();
        new_height = step.max((height / beta / step).floor() * step);
        new_width = step.max((width / beta / step).floor() * step);
    } else if rounded_area < u128::from(min_pixels) {
        let beta = (min_pixels as f64 / area).sqrt();
        new_height = (height * beta / step).ceil() * step;
        new_width = (width * beta / step).ceil() * step;
    }
    if new_height * new_width > MAX_AREA {
        return Err(VisionError::TooLarge { size, width: new_width, height: new_height });
    }
    // Integers below 2^31, as their product is.
    Ok(ImageSize { width: new_width as u32, height: new_height as u32 })
}

/// The size that stays with `do_resize` off: the image must consist of whole squares of patches
/// already.
pub(super) fn keep(size: ImageSize, factor: u32) -> Result<ImageSize, VisionError> {
    if size.area() == 0 {
        return Err(VisionError::EmptyImage { size });
    }
    if !(size.width.is_multiple_of(factor) && size.height.is_multiple_of(factor)) {
        return Err(VisionError::Indivisible { size, factor });
    }
    if size.area() as f64 > MAX_AREA {
        let (width, height) = (size.width.into(), size.height.into());
        return Err(VisionError::TooLarge { size, width, height });
    }
    Ok(size)
}
