//! Damaged clips: each yields an error or a plausible index, never a panic.
//!
//! The fuzz target `video` is for longer runs.

use std::time::Instant;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::clips::clips;
use crate::properties::index_and_cut;

/// A place in a file: the part of it, and the position there.
type Place = (Index, Index);

/// A change to a file.
#[derive(Clone, Debug)]
enum Damage {
    /// Sets a byte.
    Byte(Place, u8),
    /// Sets a 32-bit integer, of which containers have many.
    Integer(Place, u32),
    /// Cuts off the end.
    Truncate(Index),
    /// Removes some bytes.
    Remove(Place, u8),
    /// Copies some bytes to another place.
    Copy(Place, Place, u8),
}

fn damage() -> impl Strategy<Value = Damage> {
    let any_place = any::<Place>;
    let extreme = prop_oneof![
        Just(0),
        Just(1),
        Just(u32::MAX),
        Just(i32::MAX as u32),
        Just(1 << 31),
        0u32..100_000,
    ];
    prop_oneof![
        4 => (any_place(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        4 => (any_place(), extreme).prop_map(|(at, value)| Damage::Integer(at, value)),
        1 => any::<Index>().prop_map(Damage::Truncate),
        1 => (any_place(), any::<u8>()).prop_map(|(at, count)| Damage::Remove(at, count)),
        1 => (any_place(), any_place(), any::<u8>())
            .prop_map(|(from, to, count)| Damage::Copy(from, to, count)),
    ]
}

/// Returns a position: in most cases in the first or last part of the file, where headers are.
fn place((part, index): &Place, length: usize) -> usize {
    let near = length.min(2048);
    match part.index(5) {
        0 => index.index(length),
        1 | 2 => index.index(near),
        _ => length - 1 - index.index(near),
    }
}

fn apply(file: &mut Vec<u8>, damage: &Damage) {
    if file.is_empty() {
        return;
    }
    let length = file.len();
    match damage {
        Damage::Byte(at, byte) => file[place(at, length)] = *byte,
        Damage::Integer(at, value) => {
            let at = place(at, length);
            let end = (at + 4).min(length);
            file[at..end].copy_from_slice(&value.to_be_bytes()[..end - at]);
        }
        Damage::Truncate(at) => file.truncate(at.index(length)),
        Damage::Remove(at, count) => {
            let at = place(at, length);
            file.drain(at..(at + usize::from(*count)).min(length));
        }
        Damage::Copy(from, to, count) => {
            let from = place(from, length);
            let bytes = file[from..(from + usize::from(*count)).min(length)].to_vec();
            let to = place(to, length);
            let end = (to + bytes.len()).min(length);
            file[to..end].copy_from_slice(&bytes[..end - to]);
        }
    }
}

#[test]
fn damaged_clips_cause_no_panic() {
    let clips = clips();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 20_000,
        ..ProptestConfig::default()
    });
    let damages = prop::collection::vec(damage(), 1..4);
    let wanted = prop::collection::vec(any::<u64>(), 1..6);
    let input = (any::<Index>(), damages, wanted, 1usize..4);
    let cuts = std::cell::Cell::new(0);
    let slowest = std::cell::Cell::new(std::time::Duration::ZERO);
    runner
        .run(&input, |(clip, damages, wanted, parts)| {
            let mut file = clips[clip.index(clips.len())].file.clone();
            for damage in &damages {
                apply(&mut file, damage);
            }
            let start = Instant::now();
            cuts.set(cuts.get() + u32::from(index_and_cut(&file, &wanted, parts)));
            slowest.set(slowest.get().max(start.elapsed()));
            Ok(())
        })
        .unwrap();
    println!("{} cuts of damaged clips, the slowest in {:?}", cuts.get(), slowest.get());
    assert!(cuts.get() > 1000, "only {} damaged clips could be cut", cuts.get());
}

#[test]
fn undamaged_clips_have_the_properties() {
    let cuts = clips().iter().filter(|clip| index_and_cut(&clip.file, &[0, 7, 20], 2)).count();
    assert!(cuts > 80, "{cuts}");
}

#[test]
fn table_of_a_million_samples_needs_their_bytes() {
    // One size for all samples, so that the table itself needs no memory.
    let mut file = clips().into_iter().find(|clip| clip.name == "h264.mp4").unwrap().file;
    let stsz = file.windows(4).position(|name| name == b"stsz").unwrap();
    file[stsz + 8..stsz + 12].copy_from_slice(&1u32.to_be_bytes());
    for count in [1 << 20, u32::MAX] {
        file[stsz + 12..stsz + 16].copy_from_slice(&count.to_be_bytes());
        assert!(!index_and_cut(&file, &[0], 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_behind_a_magic_number_cause_no_panic(
        magic in prop::sample::select(vec![
            &b""[..],
            b"\0\0\0\x08ftyp",
            b"\0\0\0\x08ftyp\0\0\0\0moov",
            b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\xff",
        ]),
        bytes in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        index_and_cut(&[magic, &bytes].concat(), &[0], 1);
    }
}
