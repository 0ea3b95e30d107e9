//! The images that are handed over. `bench/handoff/images.py` has the same images.

use bytes::Bytes;

/// The size of a patch of Qwen2-VL: 3 channels, 2 frames, 14 × 14 pixels.
pub(crate) const PATCH_BYTES: usize = 3 * 2 * 14 * 14;

/// The size of an image.
pub(crate) struct Size {
    /// The length of the tensor in 10⁶ bytes, within 1 %.
    pub(crate) name: &'static str,
    /// The number of rows of patches.
    pub(crate) height: usize,
    /// The number of patches per row.
    pub(crate) width: usize,
}

pub(crate) const SIZES: [Size; 3] = [
    Size { name: "3 MB", height: 44, width: 58 },
    Size { name: "13 MB", height: 104, width: 106 },
    Size { name: "50 MB", height: 206, width: 206 },
];

/// The smallest possible image, which warms up the caches.
pub(crate) const PRIMER: Size = Size { name: "primer", height: 2, width: 2 };

/// An image of pseudorandom patches.
pub(crate) struct Image {
    pub(crate) height: usize,
    pub(crate) width: usize,
    pub(crate) seed: u64,
    pub(crate) pixels: Bytes,
    /// The CRC-32 of the pixels.
    pub(crate) checksum: u32,
}

impl Image {
    pub(crate) fn new(size: &Size, seed: u64) -> Self {
        let Size { height, width, .. } = *size;
        let words = (height * width * PATCH_BYTES / 8) as u64;
        let pixels: Vec<u8> =
            (1..=words).flat_map(|n| splitmix64(n.wrapping_add(seed)).to_le_bytes()).collect();
        let checksum = crc32fast::hash(&pixels);
        Self { height, width, seed, pixels: pixels.into(), checksum }
    }

    pub(crate) fn patches(&self) -> usize {
        self.height * self.width
    }
}

/// Returns the `n`th number of the generator with seed 0 (Steele, Lea and Flood 2014).
pub(crate) fn splitmix64(n: u64) -> u64 {
    let z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
