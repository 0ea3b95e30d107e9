//! The identity of an image's file, by Chiasm and by vLLM: what a repeated image costs before
//! anything is handed over.

use std::hint::black_box;

use chiasm_media::{ContentHash, mm_hash};
use chiasm_types::Modality;

use crate::images::splitmix64;
use crate::{milliseconds, now};

/// A file's size.
pub(crate) struct FileSize {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
}

pub(crate) const FILE_SIZES: [FileSize; 4] = [
    FileSize { name: "10 kB", bytes: 10_000 },
    FileSize { name: "100 kB", bytes: 100_000 },
    FileSize { name: "1 MB", bytes: 1_000_000 },
    FileSize { name: "10 MB", bytes: 10_000_000 },
];

/// A fingerprint of a model and its settings, of a typical length.
const FINGERPRINT: [u8; 200] = [1; 200];

/// Returns a file of pseudorandom bytes.
pub(crate) fn file(size: &FileSize) -> Vec<u8> {
    (1..).flat_map(|n| splitmix64(n).to_le_bytes()).take(size.bytes).collect()
}

/// Hashes a file as `chiasm serve` does, to the key under which engines know the image. Returns the
/// milliseconds that it takes.
pub(crate) fn hash(file: &[u8]) -> f64 {
    let start = now();
    let content = ContentHash::digest(black_box(file));
    black_box(mm_hash(&content, &Modality::Image, &FINGERPRINT));
    milliseconds(start, now())
}
