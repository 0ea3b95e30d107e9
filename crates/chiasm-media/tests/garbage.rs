//! Files that are broken in every way: an error, never a panic, and no pixels but of the promised
//! size and of this image.
//!
//! For longer runs there are fuzz targets in `fuzz/`.

use std::cell::RefCell;
use std::path::PathBuf;

use chiasm_media::{
    DecodeMemory, EncodedMedia, ImageLimits, MediaHeader, MediaLimits, caught_panics, decode,
    decode_into,
};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

/// Small enough to decode many of them, large enough for every kind of header.
const LIMITS: ImageLimits = ImageLimits {
    max_bytes: u64::MAX,
    max_pixels: 1 << 16,
    max_side: 1 << 12,
    max_aspect_ratio: 1 << 12,
    max_scans: 500,
};

/// All fixtures, and for each format where its own are: damage is shared out evenly among the
/// formats.
fn fixtures() -> [Vec<Vec<u8>>; 5] {
    let directory: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", "goldens"].iter().collect();
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .expect("the fixtures are missing")
        .map(|entry| entry.unwrap().path())
        .collect();
    names.sort();
    let formats = ["png", "jpg", "webp", "gif", "bmp"].map(|format| {
        let of_format = names
            .iter()
            .filter(|path| path.extension().is_some_and(|extension| extension == format));
        of_format
            .map(|path| std::fs::read(path).unwrap())
            .filter(|bytes| !bytes.is_empty())
            .collect::<Vec<_>>()
    });
    assert!(formats.iter().all(|files| files.len() > 30), "the fixtures are incomplete");
    formats
}

fn check(bytes: Vec<u8>) {
    thread_local!(static USED: RefCell<DecodeMemory> = RefCell::default());
    if let Ok(image) = EncodedMedia::from_bytes(
        bytes.into(),
        &MediaLimits { image: LIMITS, ..MediaLimits::default() },
    ) {
        let MediaHeader::Image(header) = image.header else { panic!("{image:?} is no image") };
        assert!(header.width >= 1 && header.height >= 1 && (1..=8).contains(&header.orientation));
        assert_eq!(LIMITS.check(header.width, header.height), Ok(()));
        let fresh = decode(&image);
        USED.with_borrow_mut(|memory| match (&fresh, decode_into(&image, memory)) {
            (Ok(fresh), Ok(used)) => {
                assert_eq!((fresh.width, fresh.height), (header.width, header.height));
                assert_eq!((used.width, used.height), (header.width, header.height));
                assert_eq!(fresh.pixels.len(), 3 * header.width as usize * header.height as usize);
                assert!(fresh.pixels == used.pixels, "an earlier image shows in this one");
            }
            (Err(fresh), Err(used)) => assert_eq!(*fresh, used),
            (fresh, used) => panic!("{fresh:?} in fresh memory, {used:?} in used memory"),
        });
    }
    assert_eq!(caught_panics(), 0, "a decoder panicked");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_behind_a_magic_number(
        magic in prop::sample::select(vec![
            &b""[..], b"\x89PNG\r\n\x1a\n", b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR", b"\xff\xd8\xff", b"GIF89a", b"BM",
            b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0", b"RIFF\x40\0\0\0WEBPVP8L", b"RIFF\x40\0\0\0WEBPVP8 ",
            b"\0\0\0\x1cftyp",
        ]),
        rest in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        check([magic, &rest].concat());
    }
}

#[derive(Clone, Debug)]
enum Damage {
    Byte(Index, u8),
    Bit(Index, u8),
    /// Cut off behind a place.
    Cut(Index),
    /// Bytes that are left out: from where, how many.
    Hole(Index, usize),
    /// Bytes of another file of any format are put in, or written over what is there: where, which
    /// file, from where, how many.
    Splice {
        at: Index,
        format: usize,
        file: Index,
        from: Index,
        length: usize,
        over: bool,
    },
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, value)| Damage::Byte(at, value)),
        4 => (any::<Index>(), 0..8u8).prop_map(|(at, bit)| Damage::Bit(at, bit)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), 1..40usize).prop_map(|(at, length)| Damage::Hole(at, length)),
        2 => (any::<Index>(), 0..5usize, any::<Index>(), any::<Index>(), 1..60usize, any::<bool>()).prop_map(
            |(at, format, file, from, length, over)| Damage::Splice { at, format, file, from, length, over }
        ),
    ]
}

impl Damage {
    fn inflict(&self, bytes: &mut Vec<u8>, fixtures: &[Vec<Vec<u8>>; 5]) {
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
            Self::Splice { at, format, file, from, length, over } => {
                let source = file.get(&fixtures[*format]);
                let spliced =
                    source[range(from.index(source.len()), *length, source.len())].to_vec();
                let at = at.index(bytes.len());
                let replaced = range(at, if *over { spliced.len() } else { 0 }, bytes.len());
                bytes.splice(replaced, spliced);
            }
        }
    }
}

#[test]
fn damaged_fixtures() {
    let fixtures = fixtures();
    let cases = (0..fixtures.len(), any::<Index>(), prop::collection::vec(damage(), 0..4));
    let mut runner = TestRunner::new(ProptestConfig { cases: 10_000, ..ProptestConfig::default() });
    runner
        .run(&cases, |(format, file, damages)| {
            let mut bytes = file.get(&fixtures[format]).clone();
            for damage in damages {
                damage.inflict(&mut bytes, &fixtures);
            }
            check(bytes);
            Ok(())
        })
        .unwrap();
}
