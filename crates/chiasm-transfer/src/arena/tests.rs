use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::error::BadHandle;
use crate::layout::{self, Handle};
use crate::reader::{ArenaReader, SlotView};
use crate::shared::GROWTH;
use crate::slot::{Lease, Slot};

fn arena(bytes: u64) -> Arena {
    Arena::create(bytes).unwrap()
}

fn reader(arena: &Arena) -> ArenaReader {
    let reader = ArenaReader::open(arena.name()).unwrap();
    arena.unlink();
    reader
}

fn filled(arena: &Arena, bytes: usize, value: u8) -> Result<Slot, NoSlot> {
    let mut writer = arena.slot(bytes)?;
    writer.fill(value);
    Ok(writer.publish())
}

fn lent(arena: &Arena, bytes: usize, value: u8) -> Lease {
    filled(arena, bytes, value).unwrap().lend().unwrap()
}

#[test]
fn what_was_written_is_read_in_place() {
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
fn a_name_is_there_until_it_is_removed() {
    let (kept, dropped) = (arena(4096), arena(4096));
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
fn a_slot_is_free_when_the_engine_has_returned_it_and_not_before() {
    let arena = arena(128 << 10);
    let reader = reader(&arena);
    let lease = lent(&arena, 128 << 10, 1);
    assert!(matches!(arena.slot(1), Err(NoSlot::Full)), "sent, not yet received");
    let view = reader.resolve(&lease.handle).unwrap();
    arena.expect_return([lease.id]);
    assert!(matches!(arena.slot(1), Err(NoSlot::Full)), "in use");
    drop(view);
    assert_eq!(
        arena.usage(),
        ArenaUsage { capacity: 128 << 10, reserved: 128 << 10, used: 0, slots: 0, leases: 0 }
    );
    assert_eq!(reader.resolve(&lease.handle).unwrap_err(), BadHandle::Ended);
    assert!(arena.slot(128 << 10).is_ok());
}

#[test]
fn a_slot_that_was_lent_twice_is_returned_twice() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let slot = filled(&arena, 4096, 1).unwrap();
    let (first, second) = (slot.lend().unwrap(), slot.lend().unwrap());
    drop(slot);
    drop(reader.resolve(&first.handle).unwrap());
    assert!(matches!(arena.slot(1), Err(NoSlot::Full)));
    drop(reader.resolve(&second.handle).unwrap());
    assert!(arena.slot(1).is_ok());
}

#[test]
fn the_frontends_own_hold_counts() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let slot = filled(&arena, 4096, 1).unwrap();
    drop(reader.resolve(&slot.lend().unwrap().handle).unwrap());
    assert!(matches!(arena.slot(1), Err(NoSlot::Full)));
    assert_eq!(slot[0], 1);
    drop(slot);
    // A writer that is given up gives its room back too.
    drop(arena.slot(4096).unwrap());
    assert_eq!(arena.usage().slots, 0);
}

#[test]
fn a_way_back_leads_to_the_same_slot_or_nowhere() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let slot = filled(&arena, 4096, 1).unwrap();
    let back = slot.downgrade();
    let lease = slot.lend().unwrap();
    drop(slot);
    // The engine has it.
    let again = back.upgrade().unwrap();
    assert_eq!(again[..], [1; 4096]);
    drop(reader.resolve(&lease.handle).unwrap());
    arena.expect_return([lease.id]);
    // Now only we do.
    assert!(matches!(arena.slot(4096), Err(NoSlot::Full)));
    assert!(back.upgrade().is_some());
    drop(again);
    assert_eq!(arena.usage().slots, 0);
    assert!(back.upgrade().is_none());
    // Another slot in the same place is another one.
    let _other = filled(&arena, 4096, 2).unwrap();
    assert!(back.upgrade().is_none());
}

#[test]
fn a_late_return_of_an_older_lease_frees_nothing() {
    let arena = arena(4096);
    let reader = reader(&arena);
    let first = lent(&arena, 4096, 1);
    drop(reader.resolve(&first.handle).unwrap());
    let second = lent(&arena, 4096, 2);
    assert_eq!(
        (second.handle.lease, second.handle.generation),
        (first.handle.lease, first.handle.generation + 1)
    );
    // As an engine would do that has forgotten that it returned it.
    let entry = arena.shared.header.lease_at(first.handle.lease).unwrap();
    let returned = arena.shared.mapping.u32_at(entry + layout::lease::RETURNED);
    returned.store(first.handle.generation, Ordering::Release);
    assert!(matches!(arena.slot(1), Err(NoSlot::Full)));
    assert_eq!(reader.resolve(&second.handle).unwrap()[0], 2);
}

#[test]
fn handles_that_do_not_fit_are_refused() {
    let arena = arena(1 << 20);
    let reader = reader(&arena);
    let handle = lent(&arena, 5000, 1).handle;
    let refused = |handle: Handle| reader.resolve(&handle).unwrap_err();
    assert_eq!(refused(Handle { arena: handle.arena ^ 1, ..handle }), BadHandle::Arena);
    assert_eq!(refused(Handle { lease: u32::MAX, ..handle }), BadHandle::Lease);
    assert_eq!(refused(Handle { lease: 1, ..handle }), BadHandle::Ended);
    assert_eq!(refused(Handle { generation: 2, ..handle }), BadHandle::Ended);
    assert_eq!(arena.usage().leases, 1, "handles of no lease return none");
    for (offset, length) in [(64, 0), (0, 1), (u64::MAX - (1 << 40), 0)] {
        let handle = lent(&arena, 5000, 1).handle;
        let wrong =
            Handle { offset: handle.offset + offset, length: handle.length + length, ..handle };
        assert_eq!(refused(wrong), BadHandle::Range);
        assert_eq!(refused(handle), BadHandle::Used, "no view will ever return it");
    }
    assert!(reader.resolve(&handle).is_ok());
    assert_eq!(arena.usage().leases, 0);
}

#[test]
fn too_much_is_told_from_full() {
    let arena = arena(1 << 20);
    assert!(matches!(arena.slot((1 << 20) + 1), Err(NoSlot::TooLarge { capacity: 1_048_576, .. })));
    let _first = arena.slot(600 << 10).unwrap();
    assert!(matches!(arena.slot(600 << 10), Err(NoSlot::Full)));
    assert!(
        matches!(Arena::create(u64::MAX), Err(error) if error.kind() == io::ErrorKind::InvalidInput)
    );
}

#[test]
fn a_full_table_of_leases_is_told() {
    let arena = Arena::create_in(Path::new(SHM_DIR), 4096, 2).unwrap();
    let reader = reader(&arena);
    let slot = filled(&arena, 10, 1).unwrap();
    let first = slot.lend().unwrap();
    slot.lend().unwrap();
    assert!(matches!(slot.lend(), Err(NoSlot::NoLease)));
    drop(reader.resolve(&first.handle).unwrap());
    assert!(slot.lend().is_ok());
}

#[test]
fn memory_is_reserved_as_it_is_needed() {
    let arena = arena(1 << 40);
    assert_eq!(arena.usage().reserved, 0);
    let slot = arena.slot(10).unwrap();
    assert_eq!(arena.usage().reserved, GROWTH);
    let _large = arena.slot(40 << 20).unwrap();
    // The rest of the first step is part of it.
    assert_eq!(arena.usage().reserved, 2 * GROWTH);
    drop(slot);
    let _reused = arena.slot(4 << 20).unwrap();
    assert_eq!(arena.usage().reserved, 2 * GROWTH);
    // Now less than half of a step is left: the next one is reserved before anybody needs it.
    let _more = arena.slot(8 << 20).unwrap();
    let soon = Instant::now() + Duration::from_secs(20);
    while arena.usage().reserved < 3 * GROWTH {
        assert!(Instant::now() < soon, "nothing was reserved ahead");
        thread::yield_now();
    }
    assert_eq!(arena.usage().reserved, 3 * GROWTH);
}

#[test]
fn slots_that_are_asked_for_at_once_share_what_is_reserved() {
    for _ in 0..20 {
        let arena = arena(4 << 20);
        let found = thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| arena.slot(1 << 20))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(found.iter().all(Result::is_ok), "{found:?}");
    }
}

/// More than there is: the file system says no, and nobody dies.
#[test]
fn a_full_file_system_is_told() {
    let stat = rustix::fs::statvfs(SHM_DIR).unwrap();
    // More than the file system's whole size is refused before a page is taken.
    let bytes = stat.f_blocks * stat.f_frsize + (1 << 30);
    let arena = arena(bytes);
    assert!(matches!(arena.slot(bytes as usize), Err(NoSlot::NoMemory(_))));
    assert!(arena.slot(100).is_ok());
    assert_eq!(arena.usage().slots, 0);
}

/// A frontend with several writing threads and an engine that keeps views for a while and checks
/// every byte of them when they come and when they go: a slot that was given out again too early
/// would show.
#[test]
fn no_slot_is_given_out_again_while_it_is_read() {
    const WRITERS: u64 = 3;
    const ROUNDS: usize = 3000;
    let arena = arena(4 << 20);
    let reader = reader(&arena);
    let (handles, received) = std::sync::mpsc::sync_channel::<(Lease, u64)>(8);
    let full = AtomicUsize::new(0);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (handles, arena, full) = (handles.clone(), &arena, &full);
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
                    // Every other one is announced, as the mirror's evictions are.
                    if seed & 64 == 0 {
                        arena.expect_return([lease.id]);
                    }
                    handles.send((lease, seed)).unwrap();
                }
            });
        }
        drop(handles);
        scope.spawn(move || {
            let mut held: Vec<(SlotView, u64)> = Vec::new();
            let mut random = Random(99);
            for (lease, seed) in received {
                let view = reader.resolve(&lease.handle).unwrap();
                check(&view, seed);
                held.push((view, seed));
                while held.len() > 20 || (!held.is_empty() && random.next().is_multiple_of(2)) {
                    let (view, seed) = held.swap_remove(random.next() as usize % held.len());
                    check(&view, seed);
                }
            }
        });
    });
    assert!(full.into_inner() < ROUNDS * WRITERS as usize / 2, "most found room");
    let usage = arena.usage();
    assert_eq!((usage.used, usage.slots, usage.leases), (0, 0, 0), "no slot is lost");
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

/// SplitMix64.
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
