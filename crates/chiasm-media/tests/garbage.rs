//! Tests of randomly damaged files. Each yields an error, or pixels of the announced size and of
//! this image only; never a panic.
//!
//! The fuzz targets in `fuzz/` are for longer runs.

use std::cell::RefCell;
use std::path::PathBuf;

use chiasm_media::{
    DecodeMemory, EncodedMedia, ImageLimits, MediaHeader, MediaLimits, caught_panics, decode,
    decode_into,
};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

/// Limits small enough to decode many images, and large enough for every kind of header.
const LIMITS: ImageLimits = ImageLimits {
    max_bytes: u64::MAX,
    max_pixels: 1 << 16,
    max_side: 1 << 12,
    max_aspect_ratio: 1 << 12,
    max_scans: 500,
};

/// Returns the fixtures of each format. Tests pick a format first, so that all formats get the same
/// share of the damage.
fn fixtures() -> [Vec<Vec<u8>>; 5] {
    let directory: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens"].iter().collect();
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .expect("the fixtures are missing")
        .map(|entry| entry.unwrap().path())
        .collect();
    names.sort();
    let formats = ["png", "jpg", "webp", "gif", "bmp"].map(|format| {
        names
            .iter()
            .filter(|path| path.extension().is_some_and(|extension| extension == format))
            .map(|path| std::fs::read(path).unwrap())
            .filter(|bytes| !bytes.is_empty())
            .collect::<Vec<_>>()
    });
    assert!(formats.iter().all(|files| files.len() > 30), "the fixtures are incomplete");
    formats
}

/// Decodes a file in fresh and in reused memory. Asserts that the outcomes agree.
fn check(bytes: Vec<u8>) {
    thread_local!(static REUSED: RefCell<DecodeMemory> = RefCell::default());
    if let Ok(image) = EncodedMedia::from_bytes(
        bytes.into(),
        &MediaLimits { image: LIMITS, ..MediaLimits::default() },
    ) {
        let MediaHeader::Image(header) = image.header else { panic!("{image:?} is not an image") };
        assert!(header.width >= 1 && header.height >= 1 && (1..=8).contains(&header.orientation));
        assert_eq!(LIMITS.check(header.width, header.height), Ok(()));
        let fresh = decode(&image);
        REUSED.with_borrow_mut(|memory| match (&fresh, decode_into(&image, memory)) {
            (Ok(fresh), Ok(reused)) => {
                assert_eq!((fresh.width, fresh.height), (header.width, header.height));
                assert_eq!((reused.width, reused.height), (header.width, header.height));
                assert_eq!(fresh.pixels.len(), 3 * header.width as usize * header.height as usize);
                assert!(fresh.pixels == reused.pixels, "pixels of an earlier image remain");
            }
            (Err(fresh), Err(reused)) => assert_eq!(*fresh, reused),
            (fresh, reused) => panic!("{fresh:?} in fresh memory, {reused:?} in reused memory"),
        });
    }
    assert_eq!(caught_panics(), 0, "a decoder panicked");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_after_a_magic_number_cause_no_panic(
        magic in prop::sample::select(vec![
            &b""[..],
            b"\x89PNG\r\n\x1a\n",
            b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR",
            b"\xff\xd8\xff",
            b"GIF89a",
            b"BM",
            b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0",
            b"RIFF\x40\0\0\0WEBPVP8L",
            b"RIFF\x40\0\0\0WEBPVP8 ",
            b"\0\0\0\x1cftyp",
        ]),
        rest in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        check([magic, &rest].concat());
    }
}

/// A kind of damage to a file.
#[derive(Clone, Debug)]
enum Damage {
    /// Sets a byte.
    Byte(Index, u8),
    /// Flips a bit.
    Bit(Index, u8),
    /// Truncates the file.
    Cut(Index),
    /// Removes bytes: position and count.
    Hole(Index, usize),
    /// Copies `length` bytes at `from` of another file to `at`.
    Splice {
        at: Index,
        format: usize,
        file: Index,
        from: Index,
        length: usize,
        /// Overwrites bytes instead of inserting.
        overwrite: bool,
    },
}

fn splice() -> impl Strategy<Value = Damage> {
    let source = (0..5usize, any::<Index>(), any::<Index>(), 1..60usize);
    (any::<Index>(), source, any::<bool>()).prop_map(
        |(at, (format, file, from, length), overwrite)| Damage::Splice {
            at,
            format,
            file,
            from,
            length,
            overwrite,
        },
    )
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, value)| Damage::Byte(at, value)),
        4 => (any::<Index>(), 0..8u8).prop_map(|(at, bit)| Damage::Bit(at, bit)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), 1..40usize).prop_map(|(at, length)| Damage::Hole(at, length)),
        2 => splice(),
    ]
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>, fixtures: &[Vec<Vec<u8>>; 5]) {
        if bytes.is_empty() {
            return;
        }
        let range = |from: usize, length: usize, end: usize| from..(from + length).min(end);
        match self {
            Self::Byte(at, value) => *at.get_mut(bytes) = *value,
            Self::Bit(at, bit) => *at.get_mut(bytes) ^= 1 << bit,
            Self::Cut(at) => bytes.truncate(at.index(bytes.len())),
            Self::Hole(at, length) => {
                drop(bytes.drain(range(at.index(bytes.len()), *length, bytes.len())))
            }
            Self::Splice { at, format, file, from, length, overwrite } => {
                let source = file.get(&fixtures[*format]);
                let spliced =
                    source[range(from.index(source.len()), *length, source.len())].to_vec();
                let at = at.index(bytes.len());
                let replaced = range(at, if *overwrite { spliced.len() } else { 0 }, bytes.len());
                bytes.splice(replaced, spliced);
            }
        }
    }
}

#[test]
fn damaged_fixtures_cause_no_panic() {
    let fixtures = fixtures();
    let cases = (0..fixtures.len(), any::<Index>(), prop::collection::vec(damage(), 0..4));
    let mut runner = TestRunner::new(ProptestConfig { cases: 10_000, ..ProptestConfig::default() });
    runner
        .run(&cases, |(format, file, damages)| {
            let mut bytes = file.get(&fixtures[format]).clone();
            for damage in damages {
                damage.apply(&mut bytes, &fixtures);
            }
            check(bytes);
            Ok(())
        })
        .unwrap();
}
