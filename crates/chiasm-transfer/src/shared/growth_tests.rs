//! Tests of slots that need free memory together with unreserved memory.

use proptest::prelude::*;

use super::*;
use crate::arena::Arena;

const MIB: u64 = 1 << 20;

#[derive(Clone, Debug)]
enum Step {
    Take { bytes: u64 },
    Release { slot: usize },
    BeginGrowth,
    EndGrowth { growth: usize, reserved: bool },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1..80 * MIB).prop_map(|bytes| Step::Take { bytes }),
        1 => (1..100_000_u64).prop_map(|bytes| Step::Take { bytes }),
        3 => any::<usize>().prop_map(|slot| Step::Release { slot }),
        1 => Just(Step::BeginGrowth),
        1 => (any::<usize>(), any::<bool>())
            .prop_map(|(growth, reserved)| Step::EndGrowth { growth, reserved }),
    ]
}

fn state(header: Header) -> State {
    State {
        free: Ranges::default(),
        unreserved: Ranges::new(header.slots..header.length),
        growing: 0,
        exhausted: false,
        reserved: 0,
        used: 0,
        slots: HashMap::new(),
        serial: 0,
        leases: Leases::new(header),
    }
}

/// Allocates a slot like [`Shared::take`] if every reservation succeeds.
fn take(state: &mut State, bytes: u64) -> Option<Range<u64>> {
    let length = bytes.next_multiple_of(LINE_BYTES);
    let alignment = layout::alignment(bytes);
    loop {
        if let Some(slot) = state.take(length, alignment) {
            return Some(slot);
        }
        let growth = state.growth(length, alignment)?;
        assert!(growth.range.start < growth.needed_end && growth.needed_end <= growth.range.end);
        state.free.insert(growth.range);
    }
}

/// Returns `true` if a gap between the ranges in use has room for `bytes`.
fn fits(header: Header, in_use: &[Range<u64>], bytes: u64) -> bool {
    let mut in_use = in_use.to_vec();
    in_use.push(header.length..header.length);
    in_use.sort_by_key(|range| range.start);
    let mut gap_start = header.slots;
    in_use.iter().any(|range| {
        let slot = gap_start.next_multiple_of(layout::alignment(bytes));
        gap_start = range.end;
        slot + bytes.next_multiple_of(LINE_BYTES) <= range.start
    })
}

proptest! {
    #[test]
    fn slot_is_refused_only_if_no_gap_fits(steps in proptest::collection::vec(step(), 1..80)) {
        let header = Header::new(1, 160 * MIB, 1, 1, 1);
        let mut state = state(header);
        let mut slots: Vec<Range<u64>> = Vec::new();
        let mut growths: Vec<Range<u64>> = Vec::new();
        for step in steps {
            match step {
                Step::Take { bytes } => {
                    let in_use = [slots.as_slice(), growths.as_slice()].concat();
                    let taken = take(&mut state, bytes);
                    prop_assert_eq!(taken.is_some(), fits(header, &in_use, bytes));
                    if let Some(slot) = taken {
                        let overlaps =
                            |other: &Range<u64>| slot.start < other.end && other.start < slot.end;
                        prop_assert!(!in_use.iter().any(overlaps));
                        slots.push(slot);
                    }
                }
                Step::Release { slot } if !slots.is_empty() => {
                    let slot = slots.swap_remove(slot % slots.len());
                    state.release(slot.start);
                }
                Step::BeginGrowth => growths.extend(state.step()),
                Step::EndGrowth { growth, reserved } if !growths.is_empty() => {
                    let range = growths.swap_remove(growth % growths.len());
                    let ranges = if reserved { &mut state.free } else { &mut state.unreserved };
                    ranges.insert(range);
                }
                Step::Release { .. } | Step::EndGrowth { .. } => {}
            }
        }
    }
}

#[test]
fn free_tail_joins_the_last_growth() {
    let arena = Arena::create(GROWTH_BYTES + 16 * MIB).unwrap();
    drop(arena.slot(10).unwrap());
    // More than the 16 MiB that are left to reserve.
    let large = arena.slot(40 << 20).unwrap();
    assert_eq!(large.len(), 40 << 20);
    assert!(matches!(arena.slot(9 << 20), Err(SlotError::Full)));
    assert!(arena.slot(8 << 20).is_ok());
}
