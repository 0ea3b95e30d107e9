//! Image decoding, to the pixels that vLLM passes to a model's processor. Resizing is in the crate
//! `chiasm-vision`, `kernels/resize`.
//!
//! Each decoder is the fastest that yields Pillow's pixels, or within a tenth of the fastest. The
//! ratios are of single-thread times at 1080p and 4K, from `cargo run --release -p chiasm-media
//! --example decode` on an AMD Zen 5. Above 1, the decoder in use is faster than the alternative.
//!
//! | format | decoder | alternative | ratio |
//! |---|---|---|---|
//! | JPEG | libjpeg-turbo-rs, with run-time detection of AVX2 | `zune-jpeg`: not exact | – |
//! | PNG | this crate, with fdeflate or zlib-rs | `png`, without conversion to RGB | 0.9–1.5 |
//! | WebP, lossy | libwebp | `image-webp`: not exact for damaged files | 1.8–3.0 |
//! | WebP, lossless | libwebp | `image-webp` | 0.9–1.3 |
//! | GIF | this crate | `gif`, palette indices only | 1.5–1.6 |
//! | BMP | this crate, in the time of 3.0–3.6 copies | – | – |
//!
//! Profiles (`perf`): a baseline JPEG spends 38 % of the time in Huffman decoding, 38 % in the
//! inverse DCT, 12 % in colour conversion and 6 % in upsampling. A PNG (zlib-rs) spends 78 % in
//! inflating and 16 % in row filters.
//!
//! Reused memory is faster than fresh memory, which the system has to clear. It saves 3–8 % of the
//! time of a JPEG, up to a third of that of a PNG inflated at once, and little elsewhere.

mod bmp;
mod gif;
mod jpeg;
mod memory;
mod orient;
mod pixel;
mod png;
mod webp;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::image::container::Header;
use crate::image::probe;
use crate::{EncodedMedia, ImageHeader, MediaError, MediaHeader, RgbImage, RgbPixels};

pub use memory::DecodeMemory;
use memory::{ReusableBuffer, Scratch, rgb_bytes};

/// Decodes an image to packed RGB with its orientation applied, into reused memory.
///
/// CPU-heavy: must not run on async threads.
///
/// The pixels equal, bit for bit, those of `vllm.multimodal.media.ImageMediaIO().load_bytes(bytes)`
/// of vLLM 0.33 with Pillow 13. Memory is of the order of ten bytes per pixel, and
/// [`EncodedMedia::from_bytes`] limits the number of pixels. A lossless WebP may need 370 MB more
/// for its prefix codes, of which it can have 65,536 sets.
///
/// # Errors
/// [`MediaError::Corrupt`] and [`MediaError::UnsupportedVariant`].
///
/// Truncated or inconsistent data is an error. vLLM gets the same error from Pillow, ignores it
/// while it looks for the orientation, and may then use the part that was decoded. This crate does
/// not imitate that.
///
/// libjpeg only warns about some broken JPEG data. Of such data, a single scan that ends too early
/// is filled in as libjpeg does; anything else is an error. A JPEG file that lacks only its end
/// marker is decoded.
pub fn decode_into<'a>(
    image: &EncodedMedia,
    memory: &'a mut DecodeMemory,
) -> Result<RgbPixels<'a>, MediaError> {
    let MediaHeader::Image(expected) = image.header else {
        return Err(MediaError::UnsupportedFormat { found: None });
    };
    let header = probe::probe(&image.bytes)?;
    let format = header.format();
    if ImageHeader::from_format_header(&header, image.bytes.len()) != expected {
        return Err(MediaError::Corrupt {
            format,
            reason: "its header differs from the probed header",
        });
    }
    let length = rgb_bytes(format, header.stored_size())?;
    let is_upright = header.orientation() == 1;
    // A panic in a decoder must not kill the caller's thread.
    let decoded = catch_unwind(AssertUnwindSafe(|| {
        let stored = if is_upright { &mut memory.pixels } else { &mut memory.stored };
        stored_pixels(&image.bytes, &header, &mut memory.scratch, stored)
    }));
    decoded.unwrap_or_else(|_| {
        CAUGHT_PANICS.fetch_add(1, Ordering::Relaxed);
        tracing::error!(%format, content = %image.content, "an image decoder panicked");
        Err(MediaError::Corrupt { format, reason: "it cannot be decoded" })
    })?;
    if !is_upright {
        let (width, height) = header.stored_size();
        let pixels = memory.pixels.prepare(format, length)?;
        let stored = memory.stored.filled(length);
        orient::apply(header.orientation(), width as usize, height as usize, stored, pixels);
    }
    Ok(RgbPixels {
        width: expected.width,
        height: expected.height,
        pixels: memory.pixels.filled(length),
    })
}

/// Returns the number of files over which a decoder of this process panicked. Such files are
/// reported as corrupt; the number is 0 unless a decoder has a bug.
pub fn caught_panics() -> u64 {
    CAUGHT_PANICS.load(Ordering::Relaxed)
}

static CAUGHT_PANICS: AtomicU64 = AtomicU64::new(0);

/// Decodes an image into memory of its own; see [`decode_into`].
///
/// # Errors
/// The errors of [`decode_into`].
pub fn decode(image: &EncodedMedia) -> Result<RgbImage, MediaError> {
    let mut memory = DecodeMemory::new();
    let RgbPixels { width, height, pixels } = decode_into(image, &mut memory)?;
    let length = pixels.len();
    Ok(RgbImage { width, height, pixels: memory.pixels.into_vec(length) })
}

/// Decodes an image into this thread's memory, and passes the pixels to `use_pixels`; see
/// [`decode_into`].
///
/// The thread keeps at most 56 MiB for its next image; see [`DecodeMemory::trim`].
///
/// # Errors
/// The errors of [`decode_into`].
pub fn with_pixels<T>(
    image: &EncodedMedia,
    use_pixels: impl FnOnce(RgbPixels<'_>) -> T,
) -> Result<T, MediaError> {
    thread_local!(static MEMORY: Cell<DecodeMemory> = Cell::default());
    // Taken out of the cell, because `use_pixels` may call this function again.
    let mut memory = MEMORY.take();
    let outcome = decode_into(image, &mut memory).map(use_pixels);
    memory.trim();
    MEMORY.set(memory);
    outcome
}

/// Writes all RGB rows as stored, before orientation, to the start of `rgb`.
fn stored_pixels(
    bytes: &[u8],
    header: &Header<'_>,
    scratch: &mut Scratch,
    rgb: &mut ReusableBuffer,
) -> Result<(), MediaError> {
    match header {
        Header::Png(header) => png::decode(header, scratch, rgb),
        Header::Jpeg(header) => jpeg::decode(bytes, header, scratch, rgb),
        Header::WebP(header) => webp::decode(header, scratch, rgb),
        Header::Gif(header) => gif::decode(header, scratch, rgb),
        Header::Bmp(header) => bmp::decode(bytes, header, scratch, rgb),
    }
}
