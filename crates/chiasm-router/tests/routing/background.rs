//! What takes time in proportion to blocks is done elsewhere, and nobody waits for it.

use std::sync::mpsc::{Receiver, channel};
use std::thread;

use crate::workload::{INFO, Prompt, batch};
use chiasm_kv::event::KvEvent;
use chiasm_router::{Chore, Router, RouterConfig, WorkerInfo};
use chiasm_types::WorkerId;

const LARGE: WorkerId = WorkerId(0);
const OTHER: WorkerId = WorkerId(1);

/// Both workers hold the first prompt; the large one holds 2,000 more.
fn filled() -> (Router, Receiver<Chore>) {
    let (send, chores) = channel();
    let config = RouterConfig { seed: Some(1), ..Default::default() };
    let router = Router::in_background(config, move |chore| send.send(chore).unwrap());
    [LARGE, OTHER].into_iter().for_each(|id| router.add_worker(id, INFO));
    (0..2000).for_each(|number| router.apply(LARGE, &Prompt::text(number, 64).stored()));
    router.apply(OTHER, &Prompt::text(0, 64).stored());
    assert!(chores.try_recv().is_err());
    (router, chores)
}

#[test]
fn selections_complete_while_the_blocks_of_a_large_worker_are_given_back() {
    let changes: [fn(&Router); 4] = [
        |router| router.remove_worker(LARGE),
        |router| router.add_worker(LARGE, INFO),
        |router| router.reset_worker_blocks(LARGE),
        |router| router.apply(LARGE, &batch(KvEvent::AllBlocksCleared)),
    ];
    for change in changes {
        let (router, chores) = filled();
        change(&router);
        let (chore, full) = (chores.try_recv().unwrap(), router.index_totals());
        // Overlaps are right from the call on, and nothing is locked.
        let select = || {
            let (first, other) =
                (Prompt::text(0, 64).select(&router), Prompt::text(1, 64).select(&router));
            assert_eq!((first.worker, first.overlap_blocks, other.overlap_blocks), (OTHER, 4, 0));
        };
        select();
        let giving_back = thread::spawn(chore);
        while !giving_back.is_finished() {
            select();
        }
        giving_back.join().unwrap();
        select();
        let left = router.index_totals();
        assert!(full.blocks > 2000 && left.blocks == 4, "{full:?}, then {left:?}");
        assert!(chores.try_recv().is_err());
    }
}

#[test]
fn what_a_worker_without_events_was_believed_to_hold_is_dropped_elsewhere_too() {
    for change in [
        |router: &Router| router.remove_worker(OTHER),
        |router: &Router| router.reset_worker_blocks(OTHER),
    ] {
        let (router, chores) = filled();
        router.add_worker(OTHER, WorkerInfo { publishes_events: false, ..INFO });
        chores.try_iter().for_each(|chore| chore());
        let prompt = Prompt::text(5000, 64);
        prompt.select_but(&router, &[LARGE]).unwrap().first_token();
        assert_eq!(router.workers()[1].index.blocks, 4);
        change(&router);
        assert_eq!(chores.try_iter().map(|chore| chore()).count(), 2);
        assert_eq!(prompt.select(&router).overlap_blocks, 0);
    }
}
