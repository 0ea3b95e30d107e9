//! Pixels of an encoded image, as vLLM hands them to a model's processor.

mod bmp;
mod gif;
mod jpeg;
mod orient;
mod pixel;
mod png;
mod webp;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::container::Header;
use crate::image::oriented;
use crate::{EncodedImage, ImageFormat, MediaError, RgbImage, probe};

/// Decodes an image to packed RGB with its orientation applied. CPU-heavy: not for async threads.
///
/// Equal, bit for bit, to `vllm.multimodal.media.ImageMediaIO().load_bytes(bytes)` of vLLM 0.32 with Pillow 13. Memory
/// stays in the order of ten bytes per pixel, and [`EncodedImage::from_bytes`] has limited their number.
///
/// # Errors
/// [`MediaError::Corrupt`] and [`MediaError::UnsupportedVariant`]. A file whose data breaks off or is inconsistent is an
/// error here. vLLM meets the same error in Pillow, ignores it while it looks for the orientation, and may then go on with
/// the part that was decoded; that is not imitated. Of broken JPEG data that libjpeg only warns about, one scan that
/// ends too early is filled up as libjpeg does; the rest is an error. A JPEG file that only lacks its end marker is read.
pub fn decode(image: &EncodedImage) -> Result<RgbImage, MediaError> {
    let header = probe::probe(&image.bytes)?;
    let agrees = header.format() == image.format && oriented(&header) == (image.orientation, image.width, image.height);
    if !agrees {
        return Err(MediaError::Corrupt { format: image.format, reason: "it differs from what was probed" });
    }
    let format = header.format();
    // A decoder that panics over a file must not take the caller's thread with it.
    let decoded = catch_unwind(AssertUnwindSafe(|| stored_pixels(&image.bytes, &header)));
    let pixels = decoded.unwrap_or_else(|_| {
        tracing::error!(%format, content = %image.content, "an image decoder panicked");
        Err(MediaError::Corrupt { format, reason: "it cannot be decoded" })
    })?;
    let (width, height) = header.stored_size();
    let (width, height, pixels) = orient::apply(header.orientation(), width, height, pixels);
    Ok(RgbImage { width, height, pixels })
}

/// RGB rows as stored, before orientation.
fn stored_pixels(bytes: &[u8], header: &Header<'_>) -> Result<Vec<u8>, MediaError> {
    match header {
        Header::Png(header) => png::decode(header),
        Header::Jpeg(header) => jpeg::decode(bytes, header),
        Header::WebP(header) => webp::decode(header),
        Header::Gif(header) => gif::decode(header),
        Header::Bmp(header) => bmp::decode(bytes, header),
    }
}

/// An empty buffer with room for an image; an error where the machine refuses the memory.
fn room(format: ImageFormat, size: (u32, u32), bytes_per_pixel: usize) -> Result<Vec<u8>, MediaError> {
    let too_large = MediaError::UnsupportedVariant { format, reason: "it needs more memory than there is" };
    let length = (size.0 as usize).checked_mul(size.1 as usize).and_then(|pixels| pixels.checked_mul(bytes_per_pixel));
    let Some(length) = length else {
        return Err(too_large);
    };
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(length).map_err(|_| too_large)?;
    Ok(buffer)
}

/// The same, filled with zeros.
fn buffer(format: ImageFormat, size: (u32, u32), bytes_per_pixel: usize) -> Result<Vec<u8>, MediaError> {
    let mut buffer = room(format, size, bytes_per_pixel)?;
    buffer.resize(size.0 as usize * size.1 as usize * bytes_per_pixel, 0);
    Ok(buffer)
}
