//! Damaged recordings: each yields an error or a plausible length, never a panic.
//!
//! The fuzz target `recording` is for longer runs.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;

use crate::properties::length_and_size;
use crate::recordings::recordings;

/// The largest file that is damaged.
const MAX_BYTES: usize = 20_000;
/// The bytes at the beginning of a file in which most damages are.
const HEADER_BYTES: usize = 256;

/// A change to a file.
#[derive(Clone, Debug)]
enum Damage {
    /// Sets a byte, in the header or anywhere.
    Byte(bool, Index, u8),
    /// Sets a 32-bit integer of one or the other byte order.
    Integer(bool, Index, u32),
    /// Cuts off the end.
    Truncate(Index),
    /// Removes some bytes.
    Remove(Index, u8),
    /// Repeats some bytes.
    Repeat(Index, u8),
}

fn damage() -> impl Strategy<Value = Damage> {
    let extreme = prop_oneof![
        Just(0),
        Just(1),
        Just(u32::MAX),
        Just(i32::MAX as u32),
        Just(1 << 31),
        0u32..100_000,
    ];
    prop_oneof![
        4 => (any::<bool>(), any::<Index>(), any::<u8>())
            .prop_map(|(is_near, at, byte)| Damage::Byte(is_near, at, byte)),
        4 => (any::<bool>(), any::<Index>(), extreme)
            .prop_map(|(is_near, at, value)| Damage::Integer(is_near, at, value)),
        1 => any::<Index>().prop_map(Damage::Truncate),
        1 => (any::<Index>(), any::<u8>()).prop_map(|(at, count)| Damage::Remove(at, count)),
        1 => (any::<Index>(), any::<u8>()).prop_map(|(at, count)| Damage::Repeat(at, count)),
    ]
}

fn apply(file: &mut Vec<u8>, damage: &Damage) {
    if file.is_empty() {
        return;
    }
    let length = file.len();
    let near = |is_near: bool| if is_near { length.min(HEADER_BYTES) } else { length };
    match damage {
        Damage::Byte(is_near, at, byte) => file[at.index(near(*is_near))] = *byte,
        Damage::Integer(is_near, at, value) => {
            let at = at.index(near(*is_near));
            let end = (at + 4).min(length);
            let bytes = if at % 2 == 0 { value.to_be_bytes() } else { value.to_le_bytes() };
            file[at..end].copy_from_slice(&bytes[..end - at]);
        }
        Damage::Truncate(at) => file.truncate(at.index(length)),
        Damage::Remove(at, count) => {
            let at = at.index(length);
            file.drain(at..(at + usize::from(*count)).min(length));
        }
        Damage::Repeat(at, count) => {
            let at = at.index(length);
            let bytes = file[at..(at + usize::from(*count)).min(length)].to_vec();
            file.splice(at..at, bytes);
        }
    }
}

#[test]
fn damaged_recordings_cause_no_panic() {
    let files: Vec<Vec<u8>> = recordings()
        .into_iter()
        .map(|recording| recording.file)
        .filter(|file| file.len() <= MAX_BYTES)
        .collect();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 20_000,
        ..ProptestConfig::default()
    });
    let input = (any::<Index>(), prop::collection::vec(damage(), 1..4));
    let lengths = std::cell::Cell::new(0);
    let slowest = std::cell::Cell::new(Duration::ZERO);
    runner
        .run(&input, |(file, damages)| {
            let mut file = files[file.index(files.len())].clone();
            for damage in &damages {
                apply(&mut file, damage);
            }
            let start = Instant::now();
            lengths.set(lengths.get() + u32::from(length_and_size(&file)));
            slowest.set(slowest.get().max(start.elapsed()));
            Ok(())
        })
        .unwrap();
    assert!(lengths.get() > 2_000, "{} damaged recordings have a length", lengths.get());
    assert!(slowest.get() < Duration::from_secs(1), "{:?}", slowest.get());
}

proptest! {
    #[test]
    fn random_bytes_behind_a_signature_cause_no_panic(
        signature in prop::sample::select(vec![
            b"RIFF\x20\0\0\0WAVEfmt ".as_slice(),
            b"fLaC\0\0\0\x22",
            b"ID3\x04\0\0",
            b"\xFF\xFB\x90\x00",
            b"\0\0\0\x08ftyp",
        ]),
        bytes in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        length_and_size(&[signature, &bytes].concat());
    }
}
