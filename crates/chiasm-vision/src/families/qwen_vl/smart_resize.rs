//! The size of the resized image: `smart_resize` of `transformers` 5.19, with the same float
//! operations.

use crate::{ImageSize, VisionError};

/// The largest ratio of the longer to the shorter side that `smart_resize` accepts.
pub(crate) const MAX_RATIO: u32 = 200;

/// The maximum number of pixels after resizing.
///
/// The engine's kernels fail on tensors with more elements than 32 bits can count. The context of
/// any model is full long before that.
pub(crate) const MAX_AREA: f64 = i32::MAX as f64;

/// The largest area up to which an f64 represents every integer, so that our division equals
/// Python's division of integers.
const MAX_EXACT_AREA: u64 = 1 << 53;

/// Returns a size whose sides are multiples of `factor`, with nearly the same aspect ratio.
///
/// The area is within `min_pixels..=max_pixels` if one scaling step can reach it. `factor`,
/// `min_pixels` and `max_pixels` are at least 1.
///
/// # Errors
/// [`VisionError::EmptyImage`], [`VisionError::AspectRatio`] and [`VisionError::TooLarge`].
pub(crate) fn smart_resize(
    size: ImageSize,
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
) -> Result<ImageSize, VisionError> {
    let longer = size.width.max(size.height);
    let shorter = size.width.min(size.height);
    if shorter == 0 {
        return Err(VisionError::EmptyImage { size });
    }
    if f64::from(longer) / f64::from(shorter) > f64::from(MAX_RATIO) {
        return Err(VisionError::AspectRatio { size, limit: MAX_RATIO });
    }

    let height = f64::from(size.height);
    let width = f64::from(size.width);
    let step = f64::from(factor);
    if size.area() > MAX_EXACT_AREA {
        return Err(VisionError::TooLarge { size, width, height });
    }
    let area = size.area() as f64;
    // Python's round() rounds halves to even.
    let mut new_height = (height / step).round_ties_even() * step;
    let mut new_width = (width / step).round_ties_even() * step;
    // A side is at most its old length + factor, so the area in whole pixels is exact in u128.
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
    // Both are integers below 2^31, because their product is.
    Ok(ImageSize { width: new_width as u32, height: new_height as u32 })
}

/// Returns the unchanged size of an image that is not resized, for `do_resize` off.
///
/// # Errors
/// [`VisionError::Indivisible`] if the image does not consist of whole squares of patches,
/// [`VisionError::EmptyImage`] and [`VisionError::TooLarge`].
pub(super) fn without_resize(size: ImageSize, factor: u32) -> Result<ImageSize, VisionError> {
    if size.area() == 0 {
        return Err(VisionError::EmptyImage { size });
    }
    if !(size.width.is_multiple_of(factor) && size.height.is_multiple_of(factor)) {
        return Err(VisionError::Indivisible { size, factor });
    }
    if size.area() as f64 > MAX_AREA {
        return Err(VisionError::TooLarge {
            size,
            width: size.width.into(),
            height: size.height.into(),
        });
    }
    Ok(size)
}
