//! Pixels of an encoded image, as vLLM hands them to a model's processor.
//!
//! The decoders are the fastest, or within a tenth of it, of those that make Pillow's pixels. The
//! ratios are of one-thread times at 1080p and 4K, from `cargo run --release -p chiasm-media
//! --example decode` on an AMD Zen 5; above 1 the decoder in use is the faster one.
//!
//! | format | by | beside it | ratio |
//! |---|---|---|---|
//! | JPEG | libjpeg-turbo-rs, whose AVX2 is found at run time | `zune-jpeg`: not exact | – |
//! | PNG | this crate, inflated by fdeflate or zlib-rs | `png`, which flattens and converts nothing | 0.9–1.5 |
//! | WebP, lossy | libwebp | `image-webp`: not exact for damaged files | 1.8–3.0 |
//! | WebP, lossless | libwebp | `image-webp` | 0.9–1.3 |
//! | GIF | this crate | `gif`, palette indices only | 1.5–1.6 |
//! | BMP | this crate, 3.0–3.6 copies | – | – |
//!
//! Where the time goes (`perf`): of a baseline JPEG 38 % Huffman codes, 38 % inverse DCT, 12 %
//! colour, 6 % upsampling; of a PNG (zlib-rs) 78 % inflating, 16 % row filters. Memory that is used
//! again saves 3–8 % of a JPEG over fresh memory, which the system has to clear, up to a third of a
//! PNG that is inflated at once, and little elsewhere.

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
use memory::{Reused, Scratch, rgb_bytes};

/// Decodes an image to packed RGB with its orientation applied, into memory that is used again.
/// CPU-heavy: not for async threads.
///
/// Equal, bit for bit, to `vllm.multimodal.media.ImageMediaIO().load_bytes(bytes)` of vLLM 0.33
/// with Pillow 13. Memory stays in the order of ten bytes per pixel, and
/// [`EncodedMedia::from_bytes`] has limited their number; a lossless WebP may need 370 MB more for
/// its codes, of which it can have 65,536 sets.
///
/// # Errors
/// [`MediaError::Corrupt`] and [`MediaError::UnsupportedVariant`]. A file whose data breaks off or
/// is inconsistent is an error here. vLLM meets the same error in Pillow, ignores it while it looks
/// for the orientation, and may then go on with the part that was decoded; that is not imitated. Of
/// broken JPEG data that libjpeg only warns about, one scan that ends too early is filled up as
/// libjpeg does; the rest is an error. A JPEG file that only lacks its end marker is read.
pub fn decode_into<'a>(
    image: &EncodedMedia,
    memory: &'a mut DecodeMemory,
) -> Result<RgbPixels<'a>, MediaError> {
    let MediaHeader::Image(expected) = image.header else {
        return Err(MediaError::UnsupportedFormat { found: None });
    };
    let header = probe::probe(&image.bytes)?;
    let format = header.format();
    if ImageHeader::of(&header, image.bytes.len()) != expected {
        return Err(MediaError::Corrupt { format, reason: "it differs from what was probed" });
    }
    let length = rgb_bytes(format, header.stored_size())?;
    let upright = header.orientation() == 1;
    // A decoder that panics over a file must not take the caller's thread with it.
    let decoded = catch_unwind(AssertUnwindSafe(|| {
        let stored = if upright { &mut memory.pixels } else { &mut memory.stored };
        stored_pixels(&image.bytes, &header, &mut memory.scratch, stored)
    }));
    decoded.unwrap_or_else(|_| {
        CAUGHT_PANICS.fetch_add(1, Ordering::Relaxed);
        tracing::error!(%format, content = %image.content, "an image decoder panicked");
        Err(MediaError::Corrupt { format, reason: "it cannot be decoded" })
    })?;
    if !upright {
        let (width, height) = header.stored_size();
        let pixels = memory.pixels.take(format, length)?;
        let stored = memory.stored.written(length);
        orient::apply(header.orientation(), width as usize, height as usize, stored, pixels);
    }
    Ok(RgbPixels {
        width: expected.width,
        height: expected.height,
        pixels: memory.pixels.written(length),
    })
}

/// How often a decoder of this process panicked over a file, which then counted as corrupt. 0
/// unless one has a bug.
pub fn caught_panics() -> u64 {
    CAUGHT_PANICS.load(Ordering::Relaxed)
}

static CAUGHT_PANICS: AtomicU64 = AtomicU64::new(0);

/// [`decode_into`] memory of its own.
///
/// # Errors
/// Those of [`decode_into`].
pub fn decode(image: &EncodedMedia) -> Result<RgbImage, MediaError> {
    let mut memory = DecodeMemory::new();
    let RgbPixels { width, height, pixels } = decode_into(image, &mut memory)?;
    let length = pixels.len();
    Ok(RgbImage { width, height, pixels: memory.pixels.into_vec(length) })
}

/// [`decode_into`] memory that this thread keeps for its next image: at most 56 MiB, see
/// [`DecodeMemory::trim`].
///
/// # Errors
/// Those of [`decode_into`].
pub fn with_pixels<T>(
    image: &EncodedMedia,
    use_them: impl FnOnce(RgbPixels<'_>) -> T,
) -> Result<T, MediaError> {
    thread_local!(static MEMORY: Cell<DecodeMemory> = Cell::default());
    // Taken, not borrowed: `use_them` may come back here.
    let mut memory = MEMORY.take();
    let used = decode_into(image, &mut memory).map(use_them);
    memory.trim();
    MEMORY.set(memory);
    used
}

/// Writes the RGB rows as stored, before orientation, to the start of `rgb`: all of them.
fn stored_pixels(
    bytes: &[u8],
    header: &Header<'_>,
    scratch: &mut Scratch,
    rgb: &mut Reused,
) -> Result<(), MediaError> {
    match header {
        Header::Png(header) => png::decode(header, scratch, rgb),
        Header::Jpeg(header) => jpeg::decode(bytes, header, scratch, rgb),
        Header::WebP(header) => webp::decode(header, scratch, rgb),
        Header::Gif(header) => gif::decode(header, scratch, rgb),
        Header::Bmp(header) => bmp::decode(bytes, header, scratch, rgb),
    }
}
