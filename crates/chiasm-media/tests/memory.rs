//! Test that a header's announced size costs no memory before the data arrives.
//!
//! Runs alone in its process, because it reads the process's peak memory.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::path::PathBuf;

use chiasm_media::{EncodedMedia, Fault, ImageLimits, MediaLimits, decode};

/// Returns the peak memory of this process in MiB.
fn peak_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
}

fn fixture(name: &str) -> Vec<u8> {
    let directory: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens"].iter().collect();
    std::fs::read(directory.join(name)).unwrap_or_else(|error| panic!("fixture {name}: {error}"))
}

/// Replaces both sides in a file's header; `at` is the offset of the first side.
fn resized(mut file: Vec<u8>, at: usize, side: [u8; 2]) -> Vec<u8> {
    file[at..at + 4].copy_from_slice(&[side, side].concat());
    file
}

#[test]
fn announced_size_allocates_no_memory() {
    // Pixels of this size take half a gigabyte as RGB.
    let big = 13_000u16.to_be_bytes();
    let little = 13_000u16.to_le_bytes();
    let jpeg = fixture("jpeg-420-37x23.jpg");
    let frame = jpeg.windows(2).position(|pair| pair == [0xff, 0xc0]).expect("a baseline frame");
    let gif = fixture("gif-8-bits.gif");
    let descriptor = gif.iter().rposition(|&byte| byte == b',').expect("a frame");
    let mut bombs = vec![
        // Without the end marker. With it, the missing data is filled with grey, in Pillow as well.
        ("JPEG", resized(jpeg[..jpeg.len() - 2].to_vec(), frame + 5, big)),
        ("GIF", resized(gif, descriptor + 5, little)),
    ];
    for name in ["png-bomb.png", "bmp-bomb.bmp", "webp-bomb.webp"] {
        bombs.push((name, fixture(name)));
    }
    let image = ImageLimits {
        max_bytes: u64::MAX,
        max_pixels: 1 << 33,
        max_side: u32::MAX,
        max_aspect_ratio: u32::MAX,
        max_scans: 500,
    };
    let limits = MediaLimits { image, ..MediaLimits::default() };
    let before = peak_mib();
    for (name, bytes) in bombs {
        let outcome =
            EncodedMedia::from_bytes(bytes.into(), &limits).and_then(|image| decode(&image));
        assert_eq!(outcome.expect_err(name).fault(), Fault::Corrupt, "{name}");
        assert!(peak_mib() < before + 64, "{name}: {} MiB, {before} before", peak_mib());
    }
}
