//! Files that are broken in every way: an error, never a panic, and no pixels but of the promised size.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use chiasm_media::{EncodedImage, decode};
use proptest::prelude::*;

/// Small enough to decode many of them, large enough for every kind of header.
const MAX_PIXELS: u64 = 1 << 16;

fn fixtures() -> Vec<Vec<u8>> {
    let directory: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens"].iter().collect();
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .expect("the fixtures are missing")
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension != "json"))
        .collect();
    names.sort();
    assert!(names.len() > 500, "the fixtures are incomplete");
    names.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// Panics of this crate's own code, which `decode` would turn into an error like those of the decoders it uses.
static OWN_PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_own_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let file = panic.location().map_or("", |at| at.file());
            if file.contains("chiasm-media/src/") {
                OWN_PANICS.fetch_add(1, Ordering::SeqCst);
            }
            if !file.contains("libjpeg-turbo-rs") && !file.contains("image-webp") {
                default(panic);
            }
        }));
    });
}

fn check(bytes: Vec<u8>) {
    count_own_panics();
    check_outcome(bytes);
    assert_eq!(OWN_PANICS.load(Ordering::SeqCst), 0, "a panic in this crate");
}

fn check_outcome(bytes: Vec<u8>) {
    let Ok(image) = EncodedImage::from_bytes(bytes.into(), MAX_PIXELS) else {
        return;
    };
    assert!(image.width >= 1 && image.height >= 1 && (1..=8).contains(&image.orientation));
    assert!(u64::from(image.width) * u64::from(image.height) <= MAX_PIXELS);
    if let Ok(pixels) = decode(&image) {
        assert_eq!((pixels.width, pixels.height), (image.width, image.height));
        assert_eq!(pixels.pixels.len(), 3 * image.width as usize * image.height as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_behind_a_magic_number(
        magic in prop::sample::select(vec![
            &b""[..], b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR", b"\xff\xd8\xff", b"GIF89a", b"BM",
            b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0", b"RIFF\x40\0\0\0WEBPVP8L", b"RIFF\x40\0\0\0WEBPVP8 ",
        ]),
        rest in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        check([magic, &rest].concat());
    }
}

#[test]
fn damaged_fixtures() {
    let fixtures = fixtures();
    let damage = (
        0..fixtures.len(),
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        prop::option::of(any::<prop::sample::Index>()),
    );
    let mut runner =
        proptest::test_runner::TestRunner::new(ProptestConfig { cases: 6000, ..ProptestConfig::default() });
    runner
        .run(&damage, |(number, changes, cut)| {
            let mut bytes = fixtures[number].clone();
            for (at, value) in changes.iter().filter(|_| !fixtures[number].is_empty()) {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            if let (Some(cut), false) = (cut, bytes.is_empty()) {
                bytes.truncate(cut.index(bytes.len()));
            }
            check(bytes);
            Ok(())
        })
        .unwrap();
}
