//! Tests of the situations that routing is for.

use std::time::Duration;

use crate::workload::{BLOCK, INFO, Prompt, per_worker, router};
use chiasm_kv::event::{KvEvent, KvEventBatch};
use chiasm_router::{
    EngineStats, Policy, Reservation, RouteError, Router, RouterConfig, Weights, WorkerInfo,
};
use chiasm_types::{BlockSize, WorkerId};

fn with_policy(policy: Policy) -> impl FnOnce(&mut RouterConfig) {
    move |config| config.policy = policy
}

fn promised(router: &Router) -> usize {
    router.workers().iter().map(|worker| worker.promised_blocks).sum()
}

#[test]
fn repeat_goes_to_its_holder_even_under_modest_load() {
    let router = router(4, |_| ());
    let prompt = Prompt::image_question(1, 1);
    router.apply(WorkerId(2), &prompt.stored());
    let mut running = Vec::new();
    for _ in 0..10 {
        let repeat = prompt.select(&router);
        assert_eq!(
            (repeat.worker, repeat.overlap_blocks, repeat.total_blocks),
            (WorkerId(2), 12, 13)
        );
        running.push(repeat);
    }
}

#[test]
fn burst_about_a_new_image_goes_to_one_worker() {
    let router = router(4, |_| ());
    let mut ask = |question| Prompt::photo_question(1, question).select(&router);
    let burst: Vec<Reservation> = (0..5).map(&mut ask).collect();
    assert!(burst.iter().all(|reservation| reservation.worker == burst[0].worker));
    assert!(
        burst.iter().all(|reservation| reservation.overlap_blocks == 0),
        "no block is confirmed yet"
    );
    // Eventually computing the image on another worker is faster than waiting, and the next
    // questions follow there.
    let more: Vec<Reservation> = (5..20).map(&mut ask).collect();
    let counts = per_worker(4, burst.iter().chain(&more));
    assert!(counts.iter().all(|count| *count == 0 || *count >= 4), "{counts:?}");
}

#[test]
fn different_images_of_one_layout_share_no_blocks() {
    let router = router(2, |_| ());
    router.apply(WorkerId(0), &Prompt::image_question(1, 1).stored());
    // Another request runs there, so that only an overlap could attract this one.
    let _running = Prompt::image_question(1, 1).select(&router);
    let other = Prompt::image_question(2, 1).select(&router);
    assert_eq!((other.worker, other.overlap_blocks), (WorkerId(1), 0));
}

#[test]
fn new_prompts_spread() {
    let router = router(4, |_| ());
    let running: Vec<_> =
        (0..40).map(|image| Prompt::image_question(image, 1).select(&router)).collect();
    assert_eq!(per_worker(4, &running), [10; 4]);
}

#[test]
fn long_prompt_weighs_more_than_a_short_one() {
    let router = router(2, |_| ());
    let long = Prompt::text(1, 1600).select(&router);
    let short: Vec<_> = (2..12).map(|text| Prompt::text(text, 160).select(&router)).collect();
    assert!(short[..9].iter().all(|reservation| reservation.worker != long.worker));
}

#[test]
fn hot_worker_sheds_load_at_the_ratio_of_the_weights() {
    for ratio in [1, 4, 16] {
        let weights =
            Weights { prefill: ratio as f64, load: 1.0, queue: 0.0, ..Weights::default() };
        let router = router(2, |config| config.weights = weights);
        let prompt = Prompt::text(1, 160);
        router.apply(WorkerId(0), &prompt.stored());
        let mut running = Vec::new();
        // With `ratio` additional requests the two workers cost the same.
        for _ in 0..ratio {
            running.push(prompt.select(&router));
        }
        assert_eq!(per_worker(2, &running), [ratio, 0]);
        running.extend((0..2).map(|_| prompt.select(&router)));
        assert!(
            running.iter().any(|reservation| reservation.worker == WorkerId(1)),
            "ratio {ratio}"
        );
        // Now both have the prompt, one by promise: they share the rest evenly.
        running.extend((0..100).map(|_| prompt.select(&router)));
        let counts = per_worker(2, &running);
        assert!(counts[0].abs_diff(counts[1]) <= ratio + 1, "{counts:?}");
    }
}

#[test]
fn load_is_released_when_the_request_ends() {
    let router = router(1, |_| ());
    let reservation = Prompt::text(1, 170).select(&router);
    let busy = router.workers()[0];
    assert_eq!((busy.requests, busy.blocks_in_use, busy.promised_blocks), (1, 11, 10));
    drop(reservation);
    let idle = router.workers()[0];
    assert_eq!((idle.requests, idle.blocks_in_use, idle.promised_blocks), (0, 0, 0));
}

#[test]
fn ties_spread_reproducibly_at_random() {
    let picks = |seed| -> Vec<WorkerId> {
        let router = router(4, |config| config.seed = Some(seed));
        (0..400).map(|text| Prompt::text(text, 64).select(&router).worker).collect()
    };
    assert_eq!(picks(1), picks(1));
    assert_ne!(picks(1), picks(2));
    for worker in (0..4).map(WorkerId) {
        let times = picks(1).into_iter().filter(|pick| *pick == worker).count();
        assert!((60..=140).contains(&times), "{worker} was picked {times} times of 400");
    }
}

#[test]
fn excluded_workers_are_never_picked() {
    for policy in Policy::ALL {
        let router = router(3, with_policy(policy));
        let prompt = Prompt::text(1, 64);
        router.apply(WorkerId(0), &prompt.stored());
        let exclude = [WorkerId(0), WorkerId(2)];
        for _ in 0..20 {
            assert_eq!(
                prompt.select_excluding(&router, &exclude).unwrap().worker,
                WorkerId(1),
                "{policy}"
            );
        }
        let all = [WorkerId(0), WorkerId(1), WorkerId(2)];
        assert_eq!(
            prompt.select_excluding(&router, &all).unwrap_err(),
            RouteError::NoWorker,
            "{policy}"
        );
        assert_eq!(router.workers().iter().map(|worker| worker.requests).sum::<usize>(), 0);
    }
}

#[test]
fn router_without_workers_refuses_requests() {
    assert_eq!(
        Prompt::text(1, 64).select_excluding(&router(0, |_| ()), &[]).unwrap_err(),
        RouteError::NoWorker
    );
}

#[test]
fn failed_attempt_leaves_no_promises() {
    let router = router(2, |_| ());
    let prompt = Prompt::image_question(1, 1);
    let failed = prompt.select(&router);
    let first = failed.worker;
    drop(failed);
    assert_eq!(promised(&router), 0);
    let retry = prompt.select_excluding(&router, &[first]).unwrap();
    assert_ne!(retry.worker, first);
    // Later requests follow the retry.
    assert_eq!(prompt.select(&router).worker, retry.worker);
}

#[test]
fn ended_request_stays_promised_until_its_events_arrive() {
    let router = router(4, |config| config.promise_grace = Duration::from_secs(3600));
    let prompt = Prompt::image_question(1, 1);
    let mut first = prompt.select(&router);
    let worker = first.worker;
    first.first_token();
    drop(first);
    assert_eq!(promised(&router), 12);
    for _ in 0..20 {
        let next = prompt.select(&router);
        assert_eq!((next.worker, next.overlap_blocks), (worker, 0), "promised, but not confirmed");
    }
    router.apply(worker, &prompt.stored());
    assert_eq!(promised(&router), 0);
    assert_eq!(prompt.select(&router).overlap_blocks, 12);
    router.apply(worker, &prompt.removed());
    assert_eq!(prompt.select(&router).overlap_blocks, 0);
    assert_eq!(promised(&router), 0, "confirmed and evicted blocks are not promised any more");
}

#[test]
fn promises_end_with_the_grace_time() {
    let router = router(1, |config| config.promise_grace = Duration::ZERO);
    let mut first = Prompt::text(1, 64).select(&router);
    first.first_token();
    drop(first);
    assert_eq!(promised(&router), 0);
}

#[test]
fn events_replace_promises_of_a_running_request() {
    let router = router(2, |_| ());
    let prompt = Prompt::text(1, 160);
    let running = prompt.select(&router);
    assert_eq!(promised(&router), 10);
    router.apply(running.worker, &Prompt::text(1, 64).stored());
    assert_eq!(promised(&router), 6);
    let next = prompt.select(&router);
    assert_eq!((next.worker, next.overlap_blocks), (running.worker, 4));
    drop(running);
    assert_eq!(promised(&router), 6, "the second request makes the same promise");
    drop(next);
    assert_eq!(promised(&router), 0);
}

#[test]
fn removed_worker_loses_its_blocks_with_its_promises() {
    let router = router(2, |_| ());
    let prompt = Prompt::image_question(1, 1);
    router.apply(WorkerId(0), &prompt.stored());
    let before = prompt.select(&router);
    assert_eq!(before.worker, WorkerId(0));

    router.remove_worker(WorkerId(0));
    assert_eq!(prompt.select(&router).worker, WorkerId(1));
    router.apply(WorkerId(0), &prompt.stored());

    router.add_worker(WorkerId(0), INFO);
    let replaced = router.workers()[0];
    assert_eq!((replaced.requests, replaced.blocks_in_use, replaced.index.blocks), (0, 0, 0));
    let after = prompt.select_excluding(&router, &[WorkerId(1)]).unwrap();
    assert_eq!(after.overlap_blocks, 0);
    drop(before);
    assert_eq!(router.workers()[0].requests, 1, "unchanged by a request of the old worker");
    drop(after);
    assert_eq!(router.workers()[0].requests, 0);
}

#[test]
fn lost_events_drop_the_blocks_but_keep_the_worker() {
    let router = router(1, |_| ());
    let prompt = Prompt::text(1, 64);
    router.apply(WorkerId(0), &prompt.stored());
    router.reset_worker_blocks(WorkerId(0));
    let next = prompt.select(&router);
    assert_eq!((next.worker, next.overlap_blocks), (WorkerId(0), 0));
}

#[test]
fn cleared_cache_has_no_overlap() {
    let router = router(1, |_| ());
    let prompt = Prompt::text(1, 64);
    router.apply(WorkerId(0), &prompt.stored());
    let events = vec![KvEvent::AllBlocksCleared];
    router.apply(WorkerId(0), &KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None });
    assert_eq!(prompt.select(&router).overlap_blocks, 0);
}

#[test]
fn round_robin_skips_removed_or_excluded_workers() {
    let router = router(4, with_policy(Policy::RoundRobin));
    let prompt = Prompt::text(1, 64);
    let next = |exclude: &[u32]| {
        let exclude: Vec<_> = exclude.iter().copied().map(WorkerId).collect();
        prompt.select_excluding(&router, &exclude).unwrap().worker.0
    };
    assert_eq!([next(&[]), next(&[]), next(&[]), next(&[]), next(&[])], [0, 1, 2, 3, 0]);
    assert_eq!([next(&[1, 2]), next(&[0]), next(&[])], [3, 1, 2]);
    router.remove_worker(WorkerId(3));
    let next = || prompt.select(&router).worker.0;
    assert_eq!([next(), next(), next(), next()], [0, 1, 2, 0]);
}

#[test]
fn every_policy_reports_the_overlap_of_the_picked_worker() {
    for policy in [Policy::RoundRobin, Policy::Random, Policy::LeastLoaded] {
        let router = router(2, with_policy(policy));
        let prompt = Prompt::text(1, 64);
        router.apply(WorkerId(1), &prompt.stored());
        for _ in 0..10 {
            let reservation = prompt.select(&router);
            assert_eq!(
                reservation.overlap_blocks,
                if reservation.worker == WorkerId(1) { 4 } else { 0 },
                "{policy}"
            );
        }
    }
}

#[test]
fn least_loaded_counts_only_blocks_in_use() {
    let router = router(2, with_policy(Policy::LeastLoaded));
    let prompt = Prompt::text(1, 160);
    router.apply(WorkerId(0), &prompt.stored());
    let running: Vec<_> = (0..20).map(|_| prompt.select(&router)).collect();
    assert_eq!(per_worker(2, &running), [10, 10]);
}

#[test]
fn random_policy_picks_all_workers() {
    let router = router(3, with_policy(Policy::Random));
    let prompt = Prompt::text(1, 160);
    router.apply(WorkerId(0), &prompt.stored());
    let running: Vec<_> = (0..300).map(|_| prompt.select(&router)).collect();
    assert!(per_worker(3, &running).into_iter().all(|times| (70..=130).contains(&times)));
}

#[test]
fn worker_with_another_block_size_can_be_picked() {
    let router = router(1, |_| ());
    router.add_worker(WorkerId(1), WorkerInfo { block_size: BlockSize::new(64).unwrap(), ..INFO });
    let prompt = Prompt::text(1, 170);
    router.apply(WorkerId(1), &prompt.stored());
    let other = prompt.select_excluding(&router, &[WorkerId(0)]).unwrap();
    assert_eq!((other.overlap_blocks, other.total_blocks), (0, 3));
    assert_eq!(BLOCK.get(), 16);
}

#[test]
fn work_is_counted_in_tokens_for_all_block_sizes() {
    let router = router(1, |_| ());
    router.add_worker(WorkerId(1), WorkerInfo { block_size: BlockSize::new(64).unwrap(), ..INFO });
    let running: Vec<_> = (0..20).map(|text| Prompt::text(text, 640).select(&router)).collect();
    assert_eq!(per_worker(2, &running), [10, 10]);
}

#[test]
fn prompt_shorter_than_a_block_is_routed_by_load() {
    let router = router(2, |_| ());
    let running: Vec<_> = (0..10).map(|text| Prompt::text(text, 5).select(&router)).collect();
    assert_eq!(per_worker(2, &running), [5, 5]);
    assert_eq!((running[0].overlap_blocks, running[0].total_blocks), (0, 1));
}

#[test]
fn engine_stats_appear_in_the_snapshot() {
    let router = router(1, |_| ());
    assert_eq!(router.workers()[0].engine, None);
    let stats = EngineStats { running: 3, waiting: 2, kv_usage: 0.25, ..EngineStats::default() };
    router.set_stats(WorkerId(0), stats);
    router.set_stats(
        WorkerId(9),
        EngineStats { running: 1, waiting: 1, kv_usage: 1.0, ..EngineStats::default() },
    );
    assert_eq!(router.workers()[0].engine, Some(stats));
}
