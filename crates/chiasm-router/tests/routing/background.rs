//! Tests that work proportional to a worker's blocks is done in the background.

use std::sync::mpsc::{Receiver, channel};
use std::thread;

use crate::workload::{INFO, Prompt, batch};
use chiasm_kv::event::KvEvent;
use chiasm_router::{Chore, Router, RouterConfig, WorkerInfo};
use chiasm_types::WorkerId;

const LARGE: WorkerId = WorkerId(0);
const OTHER: WorkerId = WorkerId(1);

/// Creates a router with two workers that hold the first prompt; the large one holds 1,999 more.
fn filled() -> (Router, Receiver<Chore>) {
    let (send, chores) = channel();
    let config = RouterConfig { seed: Some(1), ..Default::default() };
    let router = Router::with_background(config, move |chore| send.send(chore).unwrap());
    [LARGE, OTHER].into_iter().for_each(|id| router.add_worker(id, INFO));
    (0..2000).for_each(|number| router.apply(LARGE, &Prompt::text(number, 64).stored()));
    router.apply(OTHER, &Prompt::text(0, 64).stored());
    assert!(chores.try_recv().is_err());
    (router, chores)
}

#[test]
fn selections_complete_while_a_large_worker_is_freed() {
    let changes: [fn(&Router); 4] = [
        |router| router.remove_worker(LARGE),
        |router| router.add_worker(LARGE, INFO),
        |router| router.reset_worker_blocks(LARGE),
        |router| router.apply(LARGE, &batch(KvEvent::AllBlocksCleared)),
    ];
    for change in changes {
        let (router, chores) = filled();
        change(&router);
        let chore = chores.try_recv().unwrap();
        let full = router.index_totals();
        // Overlaps are right from the call on, and nothing is locked.
        let select = || {
            let first = Prompt::text(0, 64).select(&router);
            let other = Prompt::text(1, 64).select(&router);
            assert_eq!((first.worker, first.overlap_blocks, other.overlap_blocks), (OTHER, 4, 0));
        };
        select();
        let freeing = thread::spawn(chore);
        while !freeing.is_finished() {
            select();
        }
        freeing.join().unwrap();
        select();
        let left = router.index_totals();
        assert!(full.blocks > 2000 && left.blocks == 4, "{full:?}, then {left:?}");
        assert!(chores.try_recv().is_err());
    }
}

#[test]
fn approximate_cache_is_dropped_in_the_background() {
    for change in [
        |router: &Router| router.remove_worker(OTHER),
        |router: &Router| router.reset_worker_blocks(OTHER),
    ] {
        let (router, chores) = filled();
        router.add_worker(OTHER, WorkerInfo { publishes_events: false, ..INFO });
        chores.try_iter().for_each(|chore| chore());
        let prompt = Prompt::text(5000, 64);
        prompt.select_excluding(&router, &[LARGE]).unwrap().first_token();
        assert_eq!(router.workers()[1].index.blocks, 4);
        change(&router);
        assert_eq!(chores.try_iter().map(|chore| chore()).count(), 2);
        assert_eq!(prompt.select(&router).overlap_blocks, 0);
    }
}
