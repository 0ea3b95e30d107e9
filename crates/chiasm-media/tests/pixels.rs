//! Compares every fixture with the pixels of vLLM's own loader, bit for bit. `python/media_goldens`
//! generates the fixtures.

use std::path::PathBuf;

use chiasm_media::{
    DecodeMemory, EncodedMedia, Fault, ImageFormat, ImageHeader, ImageLimits, MediaError,
    MediaHeader, MediaLimits, caught_panics, decode, decode_into, with_pixels,
};
use serde_json::Value;

/// Reads a file's header within the default limits.
fn open(file: Vec<u8>) -> Result<EncodedMedia, MediaError> {
    EncodedMedia::from_bytes(file.into(), &MediaLimits::default())
}

/// Reads a file's header within the given limits.
fn open_within(file: Vec<u8>, image: ImageLimits) -> Result<EncodedMedia, MediaError> {
    EncodedMedia::from_bytes(file.into(), &MediaLimits { image, ..MediaLimits::default() })
}

fn pixel_limit(max_pixels: u64) -> ImageLimits {
    ImageLimits { max_pixels, ..ImageLimits::default() }
}

fn header(item: &EncodedMedia) -> ImageHeader {
    let MediaHeader::Image(header) = item.header else { panic!("{item:?} is not an image") };
    header
}

fn directory() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "goldens"].iter().collect()
}

fn index() -> Vec<Value> {
    let text = std::fs::read_to_string(directory().join("index.json"))
        .expect("the fixtures' index is missing");
    let index: Value = serde_json::from_str(&text).unwrap();
    index["images"].as_array().unwrap().clone()
}

fn bytes(entry: &Value) -> Vec<u8> {
    let name = entry["file"].as_str().unwrap();
    std::fs::read(directory().join(name)).unwrap_or_else(|error| panic!("fixture {name}: {error}"))
}

/// Decodes a file. Returns its format, size and the hash of its pixels.
fn outcome(bytes: Vec<u8>) -> Result<(ImageFormat, u32, u32, String), MediaError> {
    let image = open(bytes)?;
    let pixels = decode(&image)?;
    let header = header(&image);
    assert_eq!((header.width, header.height), (pixels.width, pixels.height));
    assert_eq!(pixels.pixels.len(), 3 * pixels.width as usize * pixels.height as usize);
    let hash = blake3::hash(&pixels.pixels).to_hex().to_string();
    Ok((header.format, pixels.width, pixels.height, hash))
}

#[test]
fn pixels_equal_those_of_vllm() {
    let entries = index();
    let mut wrong = Vec::new();
    let mut formats = std::collections::BTreeMap::<_, [usize; 2]>::new();
    for entry in &entries {
        let name = entry["file"].as_str().unwrap();
        let got = outcome(bytes(entry));
        formats.entry(entry["format"].as_str().unwrap_or("none")).or_default()
            [usize::from(got.is_err())] += 1;
        let agrees = match (&got, entry["rgb_blake3"].as_str()) {
            (Ok((_, width, height, hash)), Some(expected)) => {
                hash == expected && *width == entry["width"] && *height == entry["height"]
            }
            (Err(error), None) => {
                matches!(error.fault(), Fault::Corrupt | Fault::Unsupported | Fault::TooLarge)
            }
            _ => false,
        };
        if !agrees {
            wrong.push(format!("{name}: {got:?} instead of {entry}"));
        }
    }
    println!("[pixels, errors] by format: {formats:?}");
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), entries.len(), wrong.join("\n"));
}

#[test]
fn fixtures_cover_every_format_in_every_mode() {
    let entries = index();
    for (format, modes) in [
        ("PNG", &["1", "L", "LA", "I;16", "P", "RGB", "RGBA"][..]),
        ("JPEG", &["L", "RGB", "CMYK"]),
        ("WEBP", &["RGB", "RGBA"]),
        ("GIF", &["L", "P"]),
        ("BMP", &["1", "L", "P", "RGB", "RGBA"]),
    ] {
        for mode in modes {
            let count = entries
                .iter()
                .filter(|entry| {
                    entry["format"] == format && entry["mode"] == *mode && entry["error"].is_null()
                })
                .count();
            assert!(count >= 5, "{format} {mode}: {count}");
        }
    }
}

#[test]
fn announced_pixels_over_the_limit_are_refused() {
    for entry in index().iter().filter(|entry| {
        let name = entry["file"].as_str().unwrap();
        matches!(
            name,
            "png-bomb.png" | "jpeg-bomb.jpg" | "webp-bomb.webp" | "gif-bomb.gif" | "bmp-bomb.bmp"
        )
    }) {
        let error = open_within(bytes(entry), pixel_limit(1_000_000)).unwrap_err();
        let is_corrupt = entry["file"] == "webp-bomb.webp";
        assert_eq!(error.fault() == Fault::TooLarge, !is_corrupt, "{entry}: {error}");
    }
}

#[test]
fn unsupported_subsampling_is_not_reported_as_corrupt() {
    let file = std::fs::read(directory().join("jpeg-first-component-subsampled.jpg")).unwrap();
    assert_eq!(decode(&open(file).unwrap()).unwrap_err().fault(), Fault::Unsupported);
}

#[test]
fn pixel_limit_is_exact() {
    let file = std::fs::read(directory().join("jpeg-420-37x23.jpg")).unwrap();
    assert!(open_within(file.clone(), pixel_limit(37 * 23)).is_ok());
    let error = open_within(file, pixel_limit(37 * 23 - 1)).unwrap_err();
    assert_eq!(error, MediaError::TooManyPixels { width: 37, height: 23, limit: 37 * 23 - 1 });
}

#[test]
fn byte_limit_is_exact() {
    let file = std::fs::read(directory().join("jpeg-420-37x23.jpg")).unwrap();
    let limits = |max_bytes| ImageLimits { max_bytes, ..ImageLimits::default() };
    let bytes = file.len() as u64;
    assert!(open_within(file.clone(), limits(bytes)).is_ok());
    assert_eq!(
        open_within(file, limits(bytes - 1)).unwrap_err(),
        MediaError::TooManyBytes { limit: bytes - 1 }
    );
}

#[test]
fn side_limit_is_exact() {
    let file = std::fs::read(directory().join("jpeg-420-37x23.jpg")).unwrap();
    let limits = |max_side| ImageLimits { max_side, ..ImageLimits::default() };
    assert!(open_within(file.clone(), limits(37)).is_ok());
    let error = open_within(file, limits(36)).unwrap_err();
    assert_eq!(error, MediaError::TooLongSide { width: 37, height: 23, limit: 36 });
}

/// Decodes all fixtures one after another in the same memory. No pixel of an earlier image may
/// remain.
#[test]
fn reused_memory_gives_the_pixels_of_fresh_memory() {
    let mut memory = DecodeMemory::new();
    let mut compared = 0;
    for entry in &index() {
        let Ok(image) = open_within(bytes(entry), pixel_limit(1 << 20)) else {
            continue;
        };
        let fresh = decode(&image).map(|image| image.pixels);
        let reused = decode_into(&image, &mut memory).map(|image| image.pixels.to_vec());
        assert!(fresh == reused, "{entry}");
        let thread_local = with_pixels(&image, |pixels| {
            // The thread's memory is in use, so that a nested call gets memory of its own.
            let inner = with_pixels(&image, |inner| inner.pixels == pixels.pixels);
            assert_eq!(inner, Ok(true));
            pixels.pixels.to_vec()
        });
        assert!(fresh == thread_local, "{entry}");
        compared += usize::from(fresh.is_ok());
    }
    assert!(compared > 300, "{compared}");
}

#[test]
fn header_has_the_upright_size() {
    for (name, orientation, size) in
        [("exif-1.jpg", 1, (21, 13)), ("exif-6.jpg", 6, (13, 21)), ("exif-3.webp", 3, (21, 13))]
    {
        let file = std::fs::read(directory().join(name)).unwrap();
        let image = open(file).unwrap();
        let header = header(&image);
        assert_eq!(
            (header.orientation, (header.width, header.height)),
            (orientation, size),
            "{name}"
        );
    }
}

#[test]
fn header_that_differs_from_the_file_is_refused() {
    let file = std::fs::read(directory().join("jpeg-420-37x23.jpg")).unwrap();
    let mut image = open(file).unwrap();
    let mut wrong = header(&image);
    wrong.width = 1000;
    image.header = MediaHeader::Image(wrong);
    assert_eq!(decode(&image).unwrap_err().fault(), Fault::Corrupt);
}

#[test]
fn jpeg_over_the_scan_limit_is_refused() {
    let file = std::fs::read(directory().join("jpeg-420-37x23-progressive.jpg")).unwrap();
    let last_scan = file.windows(2).rposition(|pair| pair == [0xff, 0xda]).unwrap();
    let (head, scan) = file[..file.len() - 2].split_at(last_scan);
    let bomb = [head, &scan.repeat(10_000), &[0xff, 0xd9]].concat();
    let scans = file.windows(2).filter(|pair| *pair == [0xff, 0xda]).count() as u32;
    assert_eq!(
        open(bomb).unwrap_err(),
        MediaError::TooManyScans { scans: scans + 9_999, limit: 100 }
    );
}

#[test]
fn cmyk_with_coarse_first_component_is_unsupported() {
    let mut file = std::fs::read(directory().join("jpeg-cmyk-16x16.jpg")).unwrap();
    let frame =
        file.windows(2).position(|pair| matches!(pair, [0xff, 0xc0..=0xc2])).expect("a frame");
    // The marker, length, depth, height, width and count come first, then the number and sampling
    // of each component.
    file[frame + 14] = 0x31;
    let image = open(file).unwrap();
    let caught = caught_panics();
    assert_eq!(decode(&image).unwrap_err().fault(), Fault::Unsupported);
    assert_eq!(caught_panics(), caught);
}
