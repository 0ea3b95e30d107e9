//! Tests of workers whose engines publish no events: the router goes by its own decisions.

use std::time::Duration;

use crate::workload::{INFO, Prompt};
use chiasm_router::{Clock, Knowledge, Router, RouterConfig, VirtualClock, WorkerInfo};
use chiasm_types::WorkerId;

const WITHOUT_EVENTS: WorkerInfo = WorkerInfo { publishes_events: false, total_blocks: 30, ..INFO };

fn set_seconds(clock: &VirtualClock, seconds: u64) {
    clock.set(Duration::from_secs(seconds).as_nanos() as u64);
}

/// Creates a router with workers without events, whose blocks expire after a minute.
fn router_without_events(workers: u32) -> (Router, VirtualClock) {
    let clock = VirtualClock::default();
    let config = RouterConfig {
        seed: Some(1),
        approximate_ttl: Duration::from_secs(60),
        ..Default::default()
    };
    let router = Router::with_clock(config, Clock::Virtual(clock.clone()));
    (0..workers).for_each(|id| router.add_worker(WorkerId(id), WITHOUT_EVENTS));
    (router, clock)
}

/// Sends a prompt to a worker that computes it. Returns the worker and its overlap.
fn compute(router: &Router, prompt: &Prompt) -> (WorkerId, usize) {
    let mut reservation = prompt.select(router);
    assert_eq!(reservation.knowledge, Knowledge::Approximate);
    reservation.first_token();
    (reservation.worker, reservation.overlap_blocks)
}

#[test]
fn computed_prompt_is_assumed_to_be_held() {
    let (router, _) = router_without_events(4);
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
fn prompt_without_first_token_is_not_held() {
    let (router, _) = router_without_events(1);
    drop(Prompt::text(1, 160).select(&router));
    assert_eq!(compute(&router, &Prompt::text(1, 160)), (WorkerId(0), 0));
}

#[test]
fn approximate_blocks_expire_after_the_ttl() {
    let (router, clock) = router_without_events(1);
    compute(&router, &Prompt::text(1, 160));
    set_seconds(&clock, 30);
    compute(&router, &Prompt::text(2, 160));
    set_seconds(&clock, 61);
    assert_eq!(compute(&router, &Prompt::text(2, 160)).1, 10);
    assert_eq!(router.workers()[0].index.blocks, 10, "the first prompt was not used for a minute");
    set_seconds(&clock, 123);
    assert_eq!(compute(&router, &Prompt::text(2, 160)).1, 0);
}

#[test]
fn many_blocks_expire_in_steps_with_the_next_requests() {
    let (router, clock) = router_without_events(0);
    router.add_worker(WorkerId(0), WorkerInfo { total_blocks: 20_000, ..WITHOUT_EVENTS });
    compute(&router, &Prompt::text(1, 160_000));
    set_seconds(&clock, 61);
    let known = || {
        drop(Prompt::text(2, 16).select(&router));
        router.workers()[0].index.blocks
    };
    assert_eq!([known(), known(), known()], [5904, 1808, 0]);
}

#[test]
fn approximate_blocks_are_bounded_by_the_cache_size() {
    let (router, clock) = router_without_events(1);
    for text in 0..20 {
        set_seconds(&clock, u64::from(text));
        compute(&router, &Prompt::text(text, 160));
        assert!(router.workers()[0].index.blocks <= 30);
    }
    // The last three prompts fill it.
    assert_eq!(compute(&router, &Prompt::text(17, 160)).1, 10);
    assert_eq!(compute(&router, &Prompt::text(16, 160)).1, 0);
}

#[test]
fn replaced_worker_holds_nothing() {
    let (router, _) = router_without_events(1);
    compute(&router, &Prompt::text(1, 160));
    router.remove_worker(WorkerId(0));
    router.add_worker(WorkerId(0), WITHOUT_EVENTS);
    assert_eq!(router.workers()[0].index.blocks, 0);
    assert_eq!(compute(&router, &Prompt::text(1, 160)).1, 0);
}

#[test]
fn worker_with_unknown_history_is_approximate_until_cleared() {
    let (router, _) = router_without_events(0);
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
    // Blocks from events count as well, and remain when the approximate blocks are dropped.
    router.apply(id, &Prompt::text(2, 160).stored());
    router.set_history_known(id, true);
    assert_eq!((known(), router.workers()[0].index.blocks), (Knowledge::Exact, 10));
    assert_eq!(Prompt::text(2, 160).select(&router).overlap_blocks, 10);
}

#[test]
fn worker_with_events_is_exact_once_caught_up() {
    let (router, _) = router_without_events(1);
    router.add_worker(WorkerId(1), INFO);
    let knowledge = |id: usize| router.workers()[id].knowledge;
    assert_eq!(knowledge(0), Knowledge::Approximate);
    assert_eq!(knowledge(1), Knowledge::CatchingUp);
    (0..2).for_each(|id| router.set_caught_up(WorkerId(id), true));
    assert_eq!(knowledge(0), Knowledge::Approximate, "no effect without events");
    assert_eq!(knowledge(1), Knowledge::Exact);
}
