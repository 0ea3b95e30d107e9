//! Workers whose engines publish no events: the router goes by its own decisions.

use std::time::Duration;

use crate::workload::{INFO, Prompt};
use chiasm_router::{Clock, Knowledge, Router, RouterConfig, VirtualClock, WorkerInfo};
use chiasm_types::WorkerId;

const SILENT: WorkerInfo = WorkerInfo { publishes_events: false, total_blocks: 30, ..INFO };

fn at(clock: &VirtualClock, time: Duration) {
    clock.set(time.as_nanos() as u64);
}

fn silent(workers: u32) -> (Router, VirtualClock) {
    let clock = VirtualClock::default();
    let config =
        RouterConfig { seed: Some(1), believed_for: Duration::from_secs(60), ..Default::default() };
    let router = Router::with_clock(config, Clock::Virtual(clock.clone()));
    (0..workers).for_each(|id| router.add_worker(WorkerId(id), SILENT));
    (router, clock)
}

fn compute(router: &Router, prompt: &Prompt) -> (WorkerId, usize) {
    let mut reservation = prompt.select(router);
    assert_eq!(reservation.knowledge, Knowledge::Approximate);
    reservation.first_token();
    (reservation.worker, reservation.overlap_blocks)
}

#[test]
fn what_was_computed_is_believed_to_be_held() {
    let (router, _) = silent(4);
    let (worker, overlap) = compute(&router, &Prompt::text(1, 160));
    assert_eq!(overlap, 0);
    for _ in 0..5 {
        assert_eq!(compute(&router, &Prompt::text(1, 160)), (worker, 10));
    }
    let known = router.workers()[worker.0 as usize];
    assert_eq!(
        (known.knowledge, known.index.blocks, known.promised_blocks),
        (Knowledge::Approximate, 10, 0)
    );
}

#[test]
fn what_was_not_computed_is_not() {
    let (router, _) = silent(1);
    drop(Prompt::text(1, 160).select(&router));
    assert_eq!(compute(&router, &Prompt::text(1, 160)), (WorkerId(0), 0));
}

#[test]
fn beliefs_end_after_their_time() {
    let (router, clock) = silent(1);
    compute(&router, &Prompt::text(1, 160));
    at(&clock, Duration::from_secs(30));
    compute(&router, &Prompt::text(2, 160));
    at(&clock, Duration::from_secs(61));
    assert_eq!(compute(&router, &Prompt::text(2, 160)).1, 10);
    assert_eq!(router.workers()[0].index.blocks, 10, "the first prompt was not used for a minute");
    at(&clock, Duration::from_secs(123));
    assert_eq!(compute(&router, &Prompt::text(2, 160)).1, 0);
}

#[test]
fn many_beliefs_end_bit_by_bit_and_all_of_them_with_the_next_requests() {
    let (router, clock) = silent(0);
    router.add_worker(WorkerId(0), WorkerInfo { total_blocks: 20_000, ..SILENT });
    compute(&router, &Prompt::text(1, 160_000));
    at(&clock, Duration::from_secs(61));
    let known = || {
        drop(Prompt::text(2, 16).select(&router));
        router.workers()[0].index.blocks
    };
    assert_eq!([known(), known(), known()], [5904, 1808, 0]);
}

#[test]
fn no_more_is_believed_than_the_cache_has_room_for() {
    let (router, clock) = silent(1);
    for text in 0..20 {
        at(&clock, Duration::from_secs(u64::from(text)));
        compute(&router, &Prompt::text(text, 160));
        assert!(router.workers()[0].index.blocks <= 30);
    }
    // The last three prompts fill it.
    assert_eq!(compute(&router, &Prompt::text(17, 160)).1, 10);
    assert_eq!(compute(&router, &Prompt::text(16, 160)).1, 0);
}

#[test]
fn another_engine_in_its_place_holds_nothing() {
    let (router, _) = silent(1);
    compute(&router, &Prompt::text(1, 160));
    router.remove_worker(WorkerId(0));
    router.add_worker(WorkerId(0), SILENT);
    assert_eq!(router.workers()[0].index.blocks, 0);
    assert_eq!(compute(&router, &Prompt::text(1, 160)).1, 0);
}

#[test]
fn a_worker_whose_history_is_lost_is_known_by_what_it_computes_until_its_cache_is_cleared() {
    let (router, _) = silent(0);
    let id = WorkerId(0);
    router.add_worker(id, INFO);
    router.set_caught_up(id, true);
    let known = || router.workers()[0].knowledge;
    assert_eq!(known(), Knowledge::Exact);
    router.reset_worker_blocks(id);
    router.set_history_known(id, false);
    assert_eq!(known(), Knowledge::Approximate);
    assert_eq!(compute(&router, &Prompt::text(1, 160)).1, 0);
    assert_eq!(compute(&router, &Prompt::text(1, 160)).1, 10);
    router.set_caught_up(id, false);
    assert_eq!(known(), Knowledge::CatchingUp);
    router.set_caught_up(id, true);
    // What events tell counts beside it, and stays when the beliefs go.
    router.apply(id, &Prompt::text(2, 160).stored());
    router.set_history_known(id, true);
    assert_eq!((known(), router.workers()[0].index.blocks), (Knowledge::Exact, 10));
    assert_eq!(Prompt::text(2, 160).select(&router).overlap_blocks, 10);
}

#[test]
fn a_worker_with_events_is_exact_once_it_has_caught_up() {
    let (router, _) = silent(1);
    router.add_worker(WorkerId(1), INFO);
    let of = |id: usize| router.workers()[id].knowledge;
    assert_eq!((of(0), of(1)), (Knowledge::Approximate, Knowledge::CatchingUp));
    (0..2).for_each(|id| router.set_caught_up(WorkerId(id), true));
    assert_eq!(
        (of(0), of(1)),
        (Knowledge::Approximate, Knowledge::Exact),
        "nobody can say so of the silent one"
    );
}
