use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::error::HandleError;
use crate::layout::{self, Handle};
use crate::reader::{ArenaReader, SlotView};
use crate::shared::GROWTH_BYTES;
use crate::slot::{Lease, Slot};

fn arena(bytes: u64) -> Arena {
    Arena::create(bytes).unwrap()
}

fn reader(arena: &Arena) -> ArenaReader {
    let reader = ArenaReader::open(arena.name()).unwrap();
    arena.unlink();
    reader
}

fn filled(arena: &Arena, bytes: usize, value: u8) -> Result<Slot, SlotError> {
    let mut writer = arena.slot(bytes)?;
    writer.fill(value);
    Ok(writer.publish())
}

fn lent(arena: &Arena, bytes: usize, value: u8) -> Lease {
    filled(arena, bytes, value).unwrap().lend().unwrap()
}

#[test]
fn written_bytes_are_read_in_place() {
    let arena = arena(1 << 20);
    let reader = reader(&arena);
    for bytes in [1, 64, 1000, 70_000, 0] {
        let slot = filled(&arena, bytes, 7).unwrap();
        let view = reader.resolve(&slot.lend().unwrap().handle).unwrap();
        assert_eq!(view[..], vec![7; bytes]);
        assert_eq!(view[..], slot[..]);
    }
    let large = arena.slot(64 << 10).unwrap().publish().lend().unwrap().handle;
    assert!(large.offset.is_multiple_of(4096));
}

#[test]
fn name_exists_until_unlink_or_drop() {
    let kept = arena(4096);
    let dropped = arena(4096);
    let path = |arena: &Arena| Path::new(SHM_DIR).join(arena.name());
    let paths = [path(&kept), path(&dropped)];
    assert!(paths.iter().all(|path| path.exists()));
    kept.unlink();
    drop(dropped);
    assert!(!paths.iter().any(|path| path.exists()));
    assert!(matches!(ArenaReader::open(kept.name()), Err(crate::OpenError::Io { .. })));
    assert!(matches!(ArenaReader::open("../x"), Err(crate::OpenError::Name(_))));
}

#[test]
fn slot_is_free_once_the_engine_returns_it() {
    let arena = arena(128 << 10);
    let reader = reader(&arena);
    let lease = lent(&arena, 128 << 10, 1);
    assert!(matches!(arena.slot(1), Err(SlotError::Full)), "sent, but not yet received");
    let view = reader.resolve(&lease.handle).unwrap();
    arena.expect_return([lease.id]);
    assert!(matches!(arena.slot(1), Err(SlotError::Full)), "in use");
    drop(view);
    assert_eq!(
        arena.usage(),
        ArenaUsage { capacity: 128 << 10, reserved: 128 << 10, used: 0, slots: 0, leases: 0 }
    );
    assert_eq!(reader.resolve(&lease.handle).unwrap_err(), HandleError::Ended);
    assert!(arena.slot(128 << 10).is_ok());
}

#[test]
fn slot_that_was_lent_twice_needs_two_returns() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let slot = filled(&arena, 4096, 1).unwrap();
    let first = slot.lend().unwrap();
    let second = slot.lend().unwrap();
    drop(slot);
    drop(reader.resolve(&first.handle).unwrap());
    assert!(matches!(arena.slot(1), Err(SlotError::Full)));
    drop(reader.resolve(&second.handle).unwrap());
    assert!(arena.slot(1).is_ok());
}

#[test]
fn frontends_own_hold_keeps_the_slot() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let slot = filled(&arena, 4096, 1).unwrap();
    drop(reader.resolve(&slot.lend().unwrap().handle).unwrap());
    assert!(matches!(arena.slot(1), Err(SlotError::Full)));
    assert_eq!(slot[0], 1);
    drop(slot);
    // A dropped writer frees its memory, too.
    drop(arena.slot(4096).unwrap());
    assert_eq!(arena.usage().slots, 0);
}

#[test]
fn weak_slot_upgrades_to_the_same_slot_or_none() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let slot = filled(&arena, 4096, 1).unwrap();
    let weak = slot.downgrade();
    let lease = slot.lend().unwrap();
    drop(slot);
    // The engine's lease keeps the slot.
    let again = weak.upgrade().unwrap();
    assert_eq!(again[..], [1; 4096]);
    drop(reader.resolve(&lease.handle).unwrap());
    arena.expect_return([lease.id]);
    // Now only `again` keeps it.
    assert!(matches!(arena.slot(4096), Err(SlotError::Full)));
    assert!(weak.upgrade().is_some());
    drop(again);
    assert_eq!(arena.usage().slots, 0);
    assert!(weak.upgrade().is_none());
    // A new slot at the same offset is a different slot.
    let _other = filled(&arena, 4096, 2).unwrap();
    assert!(weak.upgrade().is_none());
}

#[test]
fn late_return_of_an_older_lease_frees_nothing() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let first = lent(&arena, 4096, 1);
    drop(reader.resolve(&first.handle).unwrap());
    let second = lent(&arena, 4096, 2);
    assert_eq!(
        (second.handle.lease, second.handle.generation),
        (first.handle.lease, first.handle.generation + 1)
    );
    // Simulates an engine that returns the first lease again.
    let entry = arena.shared.header.entry_offset(first.handle.lease).unwrap();
    let returned = arena.shared.mapping.u32_at(entry + layout::lease::RETURNED);
    returned.store(first.handle.generation, Ordering::Release);
    assert!(matches!(arena.slot(1), Err(SlotError::Full)));
    assert_eq!(reader.resolve(&second.handle).unwrap()[0], 2);
}

#[test]
fn invalid_handles_are_refused() {
    let arena = arena(1 << 20);
    let reader = reader(&arena);
    let handle = lent(&arena, 5000, 1).handle;
    let refused = |handle: Handle| reader.resolve(&handle).unwrap_err();
    assert_eq!(refused(Handle { arena: handle.arena ^ 1, ..handle }), HandleError::Arena);
    assert_eq!(refused(Handle { lease: u32::MAX, ..handle }), HandleError::Lease);
    assert_eq!(refused(Handle { lease: 1, ..handle }), HandleError::Ended);
    assert_eq!(refused(Handle { generation: 2, ..handle }), HandleError::Ended);
    assert_eq!(arena.usage().leases, 1, "handles without a lease return none");
    for (offset, length) in [(64, 0), (0, 1), (u64::MAX - (1 << 40), 0)] {
        let handle = lent(&arena, 5000, 1).handle;
        let wrong =
            Handle { offset: handle.offset + offset, length: handle.length + length, ..handle };
        assert_eq!(refused(wrong), HandleError::Range);
        assert_eq!(refused(handle), HandleError::Used, "the lease was returned without a view");
    }
    assert!(reader.resolve(&handle).is_ok());
    assert_eq!(arena.usage().leases, 0);
}

#[test]
fn too_large_slot_differs_from_full_arena() {
    let arena = arena(1 << 20);
    assert!(matches!(
        arena.slot((1 << 20) + 1),
        Err(SlotError::TooLarge { capacity: 1_048_576, .. })
    ));
    let _first = arena.slot(600 << 10).unwrap();
    assert!(matches!(arena.slot(600 << 10), Err(SlotError::Full)));
    assert!(
        matches!(Arena::create(u64::MAX), Err(error) if error.kind() == io::ErrorKind::InvalidInput)
    );
}

#[test]
fn full_table_of_leases_refuses_a_loan() {
    let arena = Arena::create_in(Path::new(SHM_DIR), 4096, 2).unwrap();
    let reader = reader(&arena);
    let slot = filled(&arena, 10, 1).unwrap();
    let first = slot.lend().unwrap();
    slot.lend().unwrap();
    assert!(matches!(slot.lend(), Err(SlotError::NoLease)));
    drop(reader.resolve(&first.handle).unwrap());
    assert!(slot.lend().is_ok());
}

#[test]
fn memory_is_reserved_in_steps() {
    let arena = arena(1 << 40);
    assert_eq!(arena.usage().reserved, 0);
    let slot = arena.slot(10).unwrap();
    assert_eq!(arena.usage().reserved, GROWTH_BYTES);
    let _large = arena.slot(40 << 20).unwrap();
    // The large slot uses the rest of the first step.
    assert_eq!(arena.usage().reserved, 2 * GROWTH_BYTES);
    drop(slot);
    let _reused = arena.slot(4 << 20).unwrap();
    assert_eq!(arena.usage().reserved, 2 * GROWTH_BYTES);
    // Less than half of a step is left, so the next step is reserved ahead of need.
    let _more = arena.slot(8 << 20).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while arena.usage().reserved < 3 * GROWTH_BYTES {
        assert!(Instant::now() < deadline, "nothing was reserved ahead");
        thread::yield_now();
    }
    assert_eq!(arena.usage().reserved, 3 * GROWTH_BYTES);
}

#[test]
fn concurrent_slots_share_a_reserved_step() {
    for _ in 0..20 {
        let arena = arena(4 << 20);
        let slots = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| arena.slot(1 << 20))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(slots.iter().all(Result::is_ok), "{slots:?}");
    }
}

/// A slot that is larger than the file system fails, instead of killing a process.
#[test]
fn full_file_system_is_an_error() {
    let stat = rustix::fs::statvfs(SHM_DIR).unwrap();
    // A size above that of the file system is refused before any page is reserved.
    let bytes = stat.f_blocks * stat.f_frsize + (1 << 30);
    let arena = arena(bytes);
    assert!(matches!(arena.slot(bytes as usize), Err(SlotError::NoMemory(_))));
    assert!(arena.slot(100).is_ok());
    assert_eq!(arena.usage().slots, 0);
}

/// Runs a frontend with several writing threads, and an engine that keeps views for a while. The
/// engine checks every byte of a view at its start and at its end, so a slot that is reused too
/// early is noticed.
#[test]
fn slot_is_not_reused_while_it_is_read() {
    const WRITERS: u64 = 3;
    const ROUNDS: usize = 3000;
    let arena = arena(4 << 20);
    let reader = reader(&arena);
    let (handles, received) = std::sync::mpsc::sync_channel::<(Lease, u64)>(8);
    let full = AtomicUsize::new(0);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let handles = handles.clone();
            let arena = &arena;
            let full = &full;
            scope.spawn(move || {
                let mut random = Random(writer + 1);
                for _ in 0..ROUNDS {
                    let seed = random.next();
                    let bytes = 1 + (seed % 150_000) as usize;
                    let Ok(mut slot) = arena.slot(bytes) else {
                        full.fetch_add(1, Ordering::Relaxed);
                        thread::yield_now();
                        continue;
                    };
                    pattern(seed, &mut slot);
                    let lease = slot.publish().lend().unwrap();
                    // About half of the returns are announced, like the mirror's evictions.
                    if seed & 64 == 0 {
                        arena.expect_return([lease.id]);
                    }
                    handles.send((lease, seed)).unwrap();
                }
            });
        }
        drop(handles);
        scope.spawn(move || {
            let mut views: Vec<(SlotView, u64)> = Vec::new();
            let mut random = Random(99);
            for (lease, seed) in received {
                let view = reader.resolve(&lease.handle).unwrap();
                check(&view, seed);
                views.push((view, seed));
                while views.len() > 20 || (!views.is_empty() && random.next().is_multiple_of(2)) {
                    let (view, seed) = views.swap_remove(random.next() as usize % views.len());
                    check(&view, seed);
                }
            }
        });
    });
    assert!(full.into_inner() < ROUNDS * WRITERS as usize / 2, "most slots found room");
    let usage = arena.usage();
    assert_eq!((usage.used, usage.slots, usage.leases), (0, 0, 0), "no slot leaks");
}

fn pattern(seed: u64, bytes: &mut [u8]) {
    let mut random = Random(seed);
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
    }
}

fn check(view: &SlotView, seed: u64) {
    let mut expected = vec![0; view.len()];
    pattern(seed, &mut expected);
    assert!(view[..] == expected[..], "a slot was written to while it was lent");
}

/// A SplitMix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}
