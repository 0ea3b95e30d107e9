//! Memory that is used for one image after another.

use std::hint::black_box;
use std::sync::Once;

use crate::image::decode::pixel::RGB;
use crate::{ImageFormat, MediaError};

/// Most bytes of pixels that are kept for the next image: a 4K image has 25 MB.
const KEPT_PIXELS: usize = 32 << 20;
/// Most bytes that are kept of each of the buffers for steps on the way to the pixels.
const KEPT_SCRATCH: usize = 8 << 20;

/// Bytes whose memory outlives the image. What was in them before is still there: whoever takes
/// them overwrites all.
#[derive(Default)]
pub(super) struct Reused(Vec<u8>);

impl Reused {
    /// The first `length` bytes; an error where the machine refuses the memory. Where it is fresh
    /// it is not touched: what a header promises costs nothing before the data comes.
    pub(super) fn take(
        &mut self,
        format: ImageFormat,
        length: usize,
    ) -> Result<&mut [u8], MediaError> {
        if self.0.capacity() < length {
            // Dropped first: growing would copy what nobody reads any more.
            self.0 = Vec::new();
            self.0 = zeroed(length).ok_or(MediaError::UnsupportedVariant {
                format,
                reason: "it needs more memory than there is",
            })?;
        } else if self.0.len() < length {
            self.0.resize(length, 0);
        }
        Ok(&mut self.0[..length])
    }

    /// The first `length` bytes, which have been taken before.
    pub(super) fn taken(&mut self, length: usize) -> &mut [u8] {
        &mut self.0[..length]
    }

    /// The first `length` bytes, which have been written before.
    pub(super) fn written(&self, length: usize) -> &[u8] {
        &self.0[..length]
    }

    /// The memory as an empty vector to append to.
    pub(super) fn cleared(&mut self) -> &mut Vec<u8> {
        self.0.clear();
        &mut self.0
    }

    /// The vector itself, cut to `length` bytes.
    pub(super) fn into_vec(mut self, length: usize) -> Vec<u8> {
        self.0.truncate(length);
        self.0
    }

    fn trim(&mut self, most: usize) {
        if self.0.capacity() > most {
            self.0 = Vec::new();
        }
    }
}

/// Memory to decode images in, one after another: pixels and what is needed on the way to them. A
/// thread that decodes image after image in one of these gets no fresh memory from the system,
/// which would have to fill it with zeros first.
///
/// Grows to the largest image; [`Self::trim`] bounds what it keeps. The pixels of an earlier image
/// never show in those of a later one.
#[derive(Default)]
pub struct DecodeMemory {
    /// The upright pixels.
    pub(super) pixels: Reused,
    /// The pixels as stored, of images that have to be turned.
    pub(super) stored: Reused,
    pub(super) scratch: Scratch,
}

/// Memory for the steps that lead to stored pixels.
#[derive(Default)]
pub(super) struct Scratch {
    /// The compressed data of a PNG, where it comes in several chunks; the WebP file made of a
    /// frame.
    pub(super) file: Reused,
    /// Samples or palette indices.
    pub(super) samples: Reused,
}

impl DecodeMemory {
    /// Takes no memory before the first image.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives back what an unusually large image took: more than 32 MiB of pixels, and more than 8
    /// MiB in each of three other buffers. So at most 56 MiB are kept.
    pub fn trim(&mut self) {
        self.pixels.trim(KEPT_PIXELS);
        self.stored.trim(KEPT_SCRATCH);
        self.scratch.file.trim(KEPT_SCRATCH);
        self.scratch.samples.trim(KEPT_SCRATCH);
    }
}

impl std::fmt::Debug for DecodeMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DecodeMemory")
            .field("bytes", &self.pixels.0.capacity())
            .finish_non_exhaustive()
    }
}

/// Zeros that the system provides when they are first touched; `None` where it refuses.
fn zeroed(length: usize) -> Option<Vec<u8>> {
    // Asked for and given back before: a request for zeros cannot be refused, only end the process.
    let mut refusable = Vec::<u8>::new();
    refusable.try_reserve_exact(length).ok()?;
    drop(black_box(refusable));
    Some(vec![0; length])
}

/// Keeps glibc from returning to the system what a decoder frees, only to get it back page by page
/// for the next image.
///
/// It returns free memory above twice the largest block that it saw freed, 32 MiB at most, and so
/// learns from one that is never touched and costs nothing. A 4K progressive JPEG takes a third
/// less time. Elsewhere this does nothing.
pub(super) fn accustom_allocator() {
    const LARGEST: usize = 31 << 20;
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(black_box(Vec::<u8>::with_capacity(LARGEST))));
}

/// Bytes of this many pixels; an error where that is more than can be addressed.
pub(super) fn bytes_of(
    format: ImageFormat,
    size: (u32, u32),
    bytes_per_pixel: usize,
) -> Result<usize, MediaError> {
    (size.0 as usize)
        .checked_mul(size.1 as usize)
        .and_then(|pixels| pixels.checked_mul(bytes_per_pixel))
        .ok_or(MediaError::UnsupportedVariant {
            format,
            reason: "it needs more memory than there is",
        })
}

/// Bytes of a packed RGB image.
pub(super) fn rgb_bytes(format: ImageFormat, size: (u32, u32)) -> Result<usize, MediaError> {
    bytes_of(format, size, RGB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_kept_up_to_the_limit() {
        let mut memory = DecodeMemory::new();
        for (length, kept) in [(1 << 20, true), (KEPT_PIXELS, true), (KEPT_PIXELS + 1, false)] {
            memory.pixels.take(ImageFormat::Png, length).unwrap().fill(7);
            memory.trim();
            assert_eq!(memory.pixels.0.capacity() >= length, kept, "{length}");
        }
    }

    #[test]
    fn smaller_images_use_the_memory_of_larger_ones() {
        let mut bytes = Reused::default();
        let first = bytes.take(ImageFormat::Png, 1000).unwrap().as_ptr();
        assert_eq!(bytes.take(ImageFormat::Png, 10).unwrap().as_ptr(), first);
        assert_eq!(bytes.take(ImageFormat::Png, 1000).unwrap().as_ptr(), first);
    }
}
