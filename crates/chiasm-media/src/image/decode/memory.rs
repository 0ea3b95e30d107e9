//! Memory that is reused from image to image.

use std::hint::black_box;
use std::sync::Once;

use crate::image::decode::pixel::RGB;
use crate::{ImageFormat, MediaError};

/// The maximum bytes of pixels that are kept for the next image; a 4K image has 25 MB.
const MAX_KEPT_PIXEL_BYTES: usize = 32 << 20;
/// The maximum bytes of each intermediate buffer that are kept for the next image.
const MAX_KEPT_SCRATCH_BYTES: usize = 8 << 20;

/// A buffer that is reused from image to image. It still holds the bytes of earlier images, so that
/// users must overwrite all bytes that they prepare.
#[derive(Default)]
pub(super) struct ReusableBuffer(Vec<u8>);

impl ReusableBuffer {
    /// Returns `length` bytes for writing. Fails if the machine refuses the memory.
    ///
    /// Fresh memory is not touched, so that a size announced by a header costs nothing before the
    /// data arrives.
    pub(super) fn prepare(
        &mut self,
        format: ImageFormat,
        length: usize,
    ) -> Result<&mut [u8], MediaError> {
        if self.0.capacity() < length {
            // Dropped first, because growing would copy bytes that are no longer needed.
            self.0 = Vec::new();
            self.0 = zeroed(length).ok_or(MediaError::UnsupportedVariant {
                format,
                reason: "it needs more memory than is available",
            })?;
        } else if self.0.len() < length {
            self.0.resize(length, 0);
        }
        Ok(&mut self.0[..length])
    }

    /// Returns the first `length` bytes, which must have been prepared.
    pub(super) fn prepared(&mut self, length: usize) -> &mut [u8] {
        &mut self.0[..length]
    }

    /// Returns the first `length` bytes, which must have been written.
    pub(super) fn filled(&self, length: usize) -> &[u8] {
        &self.0[..length]
    }

    /// Returns the memory as an empty vector to append to.
    pub(super) fn cleared(&mut self) -> &mut Vec<u8> {
        self.0.clear();
        &mut self.0
    }

    /// Returns the vector itself, truncated to `length` bytes.
    pub(super) fn into_vec(mut self, length: usize) -> Vec<u8> {
        self.0.truncate(length);
        self.0
    }

    /// Releases the memory if it is larger than `max_bytes`.
    fn trim(&mut self, max_bytes: usize) {
        if self.0.capacity() > max_bytes {
            self.0 = Vec::new();
        }
    }
}

/// Memory for decoding one image after another: pixels and intermediate data.
///
/// Reuse saves fresh memory from the system, which has to fill it with zeros first. The memory
/// grows to that of the largest image; [`Self::trim`] bounds it. Pixels of an earlier image never
/// appear in a later one.
#[derive(Default)]
pub struct DecodeMemory {
    /// The upright pixels.
    pub(super) pixels: ReusableBuffer,
    /// The stored pixels of images with an orientation to apply.
    pub(super) stored: ReusableBuffer,
    pub(super) scratch: Scratch,
}

/// Intermediate buffers of the decoders.
#[derive(Default)]
pub(super) struct Scratch {
    /// The compressed data of a PNG that is split into several chunks.
    pub(super) file: ReusableBuffer,
    /// Samples or palette indices.
    pub(super) samples: ReusableBuffer,
}

impl DecodeMemory {
    /// Creates empty memory. Allocates nothing before the first image.
    pub fn new() -> Self {
        Self::default()
    }

    /// Releases the buffers that an unusually large image has grown.
    ///
    /// The limits are 32 MiB for the pixels and 8 MiB for each of three other buffers, so that at
    /// most 56 MiB are kept.
    pub fn trim(&mut self) {
        self.pixels.trim(MAX_KEPT_PIXEL_BYTES);
        self.stored.trim(MAX_KEPT_SCRATCH_BYTES);
        self.scratch.file.trim(MAX_KEPT_SCRATCH_BYTES);
        self.scratch.samples.trim(MAX_KEPT_SCRATCH_BYTES);
    }
}

impl std::fmt::Debug for DecodeMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DecodeMemory")
            .field("bytes", &self.pixels.0.capacity())
            .finish_non_exhaustive()
    }
}

/// Returns zeros, whose pages the system provides when they are first touched. Returns `None` if
/// the allocation fails.
fn zeroed(length: usize) -> Option<Vec<u8>> {
    // A failed allocation of zeros would abort the process. A fallible allocation of the same size
    // tests first whether there is memory.
    let mut probe = Vec::<u8>::new();
    probe.try_reserve_exact(length).ok()?;
    drop(black_box(probe));
    Some(vec![0; length])
}

/// Raises glibc's trim threshold. Otherwise glibc returns a decoder's memory to the system, only to
/// get it back page by page for the next image.
///
/// glibc returns free memory above twice the largest block that it has seen freed, where blocks
/// count up to 32 MiB. This frees one large block, which is never touched and costs nothing. A 4K
/// progressive JPEG then takes a third less time. With other allocators this has no effect.
pub(super) fn raise_trim_threshold() {
    const BLOCK_BYTES: usize = 31 << 20;
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(black_box(Vec::<u8>::with_capacity(BLOCK_BYTES))));
}

/// Returns the bytes of an image of `size`. Fails if they exceed the address space.
pub(super) fn image_bytes(
    format: ImageFormat,
    size: (u32, u32),
    bytes_per_pixel: usize,
) -> Result<usize, MediaError> {
    (size.0 as usize)
        .checked_mul(size.1 as usize)
        .and_then(|pixels| pixels.checked_mul(bytes_per_pixel))
        .ok_or(MediaError::UnsupportedVariant {
            format,
            reason: "it needs more memory than is available",
        })
}

/// Returns the bytes of a packed RGB image.
pub(super) fn rgb_bytes(format: ImageFormat, size: (u32, u32)) -> Result<usize, MediaError> {
    image_bytes(format, size, RGB)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trim_keeps_memory_up_to_the_limit() {
        let mut memory = DecodeMemory::new();
        for (length, kept) in
            [(1 << 20, true), (MAX_KEPT_PIXEL_BYTES, true), (MAX_KEPT_PIXEL_BYTES + 1, false)]
        {
            memory.pixels.prepare(ImageFormat::Png, length).unwrap().fill(7);
            memory.trim();
            assert_eq!(memory.pixels.0.capacity() >= length, kept, "{length}");
        }
    }

    #[test]
    fn smaller_image_reuses_the_memory_of_a_larger_one() {
        let mut bytes = ReusableBuffer::default();
        let first = bytes.prepare(ImageFormat::Png, 1000).unwrap().as_ptr();
        assert_eq!(bytes.prepare(ImageFormat::Png, 10).unwrap().as_ptr(), first);
        assert_eq!(bytes.prepare(ImageFormat::Png, 1000).unwrap().as_ptr(), first);
    }
}
