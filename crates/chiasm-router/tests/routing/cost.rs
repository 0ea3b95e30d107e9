//! Tests of the terms of a worker's cost, and of the other rules of a selection.

use crate::workload::{BLOCK, INFO, Prompt, batch, per_worker, router};
use chiasm_kv::event::KvEvent;
use chiasm_router::{
    EngineStats, Policy, Reservation, RouteError, RouteItem, RouteRequest, Router, Weights,
};
use chiasm_types::{MmHash, WorkerId};

/// Returns an item of 160 placeholder tokens from `start` on, like that of
/// `Prompt::image_question`.
fn item(image: u8, start: usize) -> RouteItem {
    RouteItem { hash: MmHash::new([image; 32]), end: start + 160, embeds: 160, elements: 10_000 }
}

const NO_WEIGHTS: Weights = Weights {
    prefill: 0.0,
    fetch: 0.0,
    encode: 0.0,
    process: 0.0,
    queue: 0.0,
    load: 0.0,
    balance: 0.0,
};

fn weighted(workers: u32, weights: Weights) -> Router {
    router(workers, |config| config.weights = weights)
}

fn select(router: &Router, prompt: &Prompt, media: &[RouteItem]) -> Reservation {
    router.select(&RouteRequest { media, ..prompt.request() }).unwrap()
}

/// Routes a text that no cache holds, followed by an image.
fn text_then_image(router: &Router, text: u32, image: u8) -> Reservation {
    select(router, &Prompt::text(text, 320), &[item(image, 160)])
}

#[test]
fn repeated_image_goes_to_the_worker_with_its_tensors() {
    let router = router(8, |_| ());
    let first = text_then_image(&router, 1, 9).worker;
    for text in 2..12 {
        // One request at a time, so that only the image attracts it.
        assert_eq!(text_then_image(&router, text, 9).worker, first);
    }
    let others: Vec<_> =
        (0..40).map(|image| text_then_image(&router, 100 + u32::from(image), 50 + image)).collect();
    assert!(per_worker(8, &others).iter().all(|count| *count == 5), "other images spread");
}

#[test]
fn kv_policy_ignores_reusable_images() {
    let router = router(8, |config| config.policy = Policy::Kv);
    let workers: Vec<_> = (0..40).map(|text| text_then_image(&router, text, 9).worker).collect();
    assert!(workers.iter().any(|worker| *worker != workers[0]));
}

#[test]
fn image_within_held_blocks_needs_no_encoder() {
    let encode_only = Weights { encode: 1.0, ..NO_WEIGHTS };
    let router = weighted(3, encode_only);
    let prompt = Prompt::image_question(1, 1);
    router.apply(WorkerId(2), &prompt.stored());
    for _ in 0..10 {
        assert_eq!(select(&router, &prompt, &[item(1, 0)]).worker, WorkerId(2));
    }
    // No worker has encoded these images, which end after the held blocks: all cost the same.
    let later: Vec<_> =
        (0..30).map(|n| select(&router, &prompt, &[item(100 + n, 40)]).worker).collect();
    assert!((0..3).all(|id| later.contains(&WorkerId(id))));
}

#[test]
fn media_is_assumed_cached_until_the_caches_are_full() {
    // 2,000 tokens hold 12 images of 160; a megabyte holds 104 of 10,000 bytes.
    let caches = [
        (Weights { encode: 1.0, ..NO_WEIGHTS }, 12),
        (Weights { process: 1.0, ..NO_WEIGHTS }, 104),
    ];
    for (weights, capacity) in caches {
        let returns_after = |others: u8, seed| {
            let router = router(2, |config| {
                config.weights = weights;
                config.seed = Some(seed);
            });
            let first = text_then_image(&router, 1, 0).worker;
            let exclude = [WorkerId(1 - first.0)];
            let prompt = Prompt::text(2, 320);
            for image in 1..=others {
                let media = [item(image, 160)];
                let request = RouteRequest { media: &media, exclude: &exclude, ..prompt.request() };
                drop(router.select(&request).unwrap());
            }
            text_then_image(&router, 3, 0).worker == first
        };
        assert!((0..16).all(|seed| returns_after(capacity - 1, seed)), "{capacity}");
        assert!(!(0..16).all(|seed| returns_after(capacity, seed)), "{capacity}");
    }
}

#[test]
fn cpu_blocks_are_loaded_if_cheaper_than_computing() {
    let prompt = Prompt::text(1, 160);
    let pick = |fetch| {
        let router = weighted(2, Weights { prefill: 16.0, fetch, ..NO_WEIGHTS });
        router.apply(WorkerId(0), &prompt.stored());
        // Worker 1 holds the first four on its device and the rest on the CPU.
        router.apply(WorkerId(1), &Prompt::text(1, 64).stored());
        let KvEvent::BlockStored(mut offloaded) = prompt.stored().events.remove(0) else {
            panic!("stored")
        };
        offloaded.medium = Some("CPU".to_owned());
        // vLLM's events of its lower tiers have only hashes, which are known from the device.
        offloaded.token_ids = Vec::new();
        offloaded.extra_keys = None;
        router.apply(WorkerId(1), &prompt.stored());
        router.apply(WorkerId(1), &batch(KvEvent::BlockStored(offloaded)));
        router.apply(WorkerId(1), &prompt.removed());
        router.apply(WorkerId(1), &Prompt::text(1, 64).stored());
        let other = prompt.select_excluding(&router, &[WorkerId(0)]).unwrap();
        assert_eq!(other.overlap_blocks, 4, "the overlap is that of the device");
        let pending = router.workers()[1].pending_tokens;
        drop(other);
        // Now worker 0 has to compute two blocks that worker 1 can load.
        router.apply(WorkerId(0), &prompt.removed());
        router.apply(WorkerId(0), &Prompt::text(1, 128).stored());
        (prompt.select(&router).worker, pending)
    };
    assert_eq!(pick(1.0), (WorkerId(1), 1), "6 blocks to load against 2 to compute");
    assert_eq!(pick(16.0).0, WorkerId(0));
}

#[test]
fn pending_work_counts_until_the_first_token() {
    let router = weighted(2, Weights { prefill: 1.0, queue: 1.0, ..NO_WEIGHTS });
    let mut long = Prompt::text(1, 16 * 100).select(&router);
    assert_eq!(router.workers()[long.worker.0 as usize].pending_tokens, 1600);
    let short: Vec<_> = (2..12).map(|text| Prompt::text(text, 160).select(&router)).collect();
    assert!(
        short.iter().all(|reservation| reservation.worker != long.worker),
        "100 blocks against 10 times 10"
    );
    long.first_token();
    assert_eq!(router.workers()[long.worker.0 as usize].pending_tokens, 0);
    let next: Vec<_> = (20..30).map(|text| Prompt::text(text, 160).select(&router)).collect();
    assert!(next.iter().all(|reservation| reservation.worker == long.worker));
    drop((long, short, next));
    assert!(
        router.workers().iter().all(|worker| worker.pending_tokens == 0 && worker.requests == 0)
    );
}

#[test]
fn held_blocks_are_not_pending() {
    let router = weighted(1, Weights::default());
    let prompt = Prompt::text(1, 170);
    router.apply(WorkerId(0), &Prompt::text(1, 160).stored());
    let _running = prompt.select(&router);
    assert_eq!(router.workers()[0].pending_tokens, 10);
    let _promised = Prompt::text(2, 1000).select(&router);
    let again = Prompt::text(2, 1000).select(&router);
    assert_eq!(again.overlap_blocks, 0);
    assert_eq!(BLOCK.get(), 16);
    assert_eq!(router.workers()[0].pending_tokens, 10 + 1000 + 1000 - 62 * 16);
}

#[test]
fn cached_embeddings_are_not_pending() {
    let router = weighted(2, Weights { encode: 1.0, queue: 1.0, ..NO_WEIGHTS });
    let holder = text_then_image(&router, 1, 0).worker;
    let running = text_then_image(&router, 2, 0);
    assert_eq!(running.worker, holder);
    // For other images both workers cost the same.
    assert!((1..30).any(|image| text_then_image(&router, 3, image).worker == holder));
}

#[test]
fn waiting_requests_of_others_count_as_typical_ones() {
    let router = weighted(2, Weights { prefill: 1.0, queue: 1.0, ..NO_WEIGHTS });
    // Sets the work of a typical request.
    (0..500).for_each(|text| drop(Prompt::text(text, 160).select(&router)));
    router.set_stats(
        WorkerId(0),
        EngineStats { running: 3, waiting: 2, kv_usage: 0.1, ..EngineStats::default() },
    );
    assert!((1000..1020).all(|text| Prompt::text(text, 160).select(&router).worker == WorkerId(1)));
    // Running requests don't wait, and this router's own are counted exactly.
    router.set_stats(
        WorkerId(0),
        EngineStats { running: 30, waiting: 0, kv_usage: 0.1, ..EngineStats::default() },
    );
    assert!((2000..2050).any(|text| Prompt::text(text, 160).select(&router).worker == WorkerId(0)));
}

#[test]
fn own_ended_requests_do_not_count_as_those_of_others() {
    let router = weighted(2, Weights { prefill: 1.0, queue: 1.0, ..NO_WEIGHTS });
    (0..500).for_each(|text| drop(Prompt::text(text, 160).select(&router)));
    let own: Vec<_> = (1000..1010)
        .map(|text| Prompt::text(text, 160).select_excluding(&router, &[WorkerId(1)]).unwrap())
        .collect();
    // Servers report once a second, and answer many requests in that time.
    router.set_stats(
        WorkerId(0),
        EngineStats { running: 1, waiting: 9, kv_usage: 0.1, ..EngineStats::default() },
    );
    drop(own);
    assert!((2000..2050).any(|text| Prompt::text(text, 160).select(&router).worker == WorkerId(0)));
    // New own requests don't reduce the number of others either.
    router.set_stats(
        WorkerId(0),
        EngineStats { running: 1, waiting: 2, kv_usage: 0.1, ..EngineStats::default() },
    );
    let _own = Prompt::text(3000, 0).select_excluding(&router, &[WorkerId(1)]).unwrap();
    let _more = Prompt::text(3001, 0).select_excluding(&router, &[WorkerId(1)]).unwrap();
    let _most = Prompt::text(3002, 0).select_excluding(&router, &[WorkerId(1)]).unwrap();
    assert!((4000..4020).all(|text| Prompt::text(text, 160).select(&router).worker == WorkerId(1)));
}

#[test]
fn busy_worker_is_skipped_until_all_busy_is_an_error() {
    let stats = EngineStats { running: 10, waiting: 5, kv_usage: 0.9, ..EngineStats::default() };
    for threshold in 0..3 {
        let router = router(2, |config| match threshold {
            0 => config.busy.kv_usage = Some(0.9),
            1 => config.busy.waiting = Some(5),
            _ => config.busy.pending_tokens = Some(1600),
        });
        let make_busy = |id: u32| {
            if threshold == 2 {
                let prompt = Prompt::text(10 + id, 1600);
                return Some(prompt.select_excluding(&router, &[WorkerId(1 - id)]).unwrap());
            }
            router.set_stats(WorkerId(id), stats);
            None
        };
        let first = make_busy(0);
        assert!(
            (100..120).all(|text| Prompt::text(text, 160).select(&router).worker == WorkerId(1))
        );
        let second = make_busy(1);
        let error = Prompt::text(200, 160).select_excluding(&router, &[]).unwrap_err();
        assert_eq!(error, RouteError::Busy(2), "threshold {threshold}");
        let excluded = Prompt::text(200, 160)
            .select_excluding(&router, &[WorkerId(0), WorkerId(1)])
            .unwrap_err();
        assert_eq!(excluded, RouteError::NoWorker);
        router.set_stats(WorkerId(0), EngineStats::default());
        drop((first, second));
        assert_eq!(
            Prompt::text(300, 160).select_excluding(&router, &[WorkerId(1)]).unwrap().worker,
            WorkerId(0)
        );
    }
}

#[test]
fn temperature_spreads_by_the_difference_in_cost() {
    let picks = |temperature: f64| {
        let router = router(2, |config| {
            config.weights = Weights { prefill: 1.0, ..NO_WEIGHTS };
            config.temperature = temperature;
        });
        let prompt = Prompt::text(1, 160);
        router.apply(WorkerId(0), &prompt.stored());
        (0..1000).filter(|_| prompt.select(&router).worker == WorkerId(0)).count()
    };
    assert_eq!(picks(0.0), 1000);
    // Worker 1 costs 10 more: its probability is e^(-10/t) of the other's.
    for (temperature, expected) in [(10.0, 731), (3.0, 965), (1e9, 500)] {
        assert!(
            picks(temperature).abs_diff(expected) < 60,
            "at {temperature}: {}",
            picks(temperature)
        );
    }
}

#[test]
fn two_choices_balance_better_than_one() {
    let max_requests = |policy| {
        let router = router(50, |config| config.policy = policy);
        let running: Vec<_> =
            (0..1000).map(|text| Prompt::text(text, 160).select(&router)).collect();
        per_worker(50, &running).into_iter().max().unwrap()
    };
    let power_of_two = max_requests(Policy::PowerOfTwo);
    assert!(power_of_two <= 24, "{power_of_two}");
    let random = max_requests(Policy::Random);
    assert!(random >= 26, "{random}");
}

#[test]
fn session_stays_on_its_worker_while_that_is_available() {
    for policy in Policy::ALL {
        let router = router(4, |config| config.policy = policy);
        let route = |session, text, exclude: &[WorkerId]| {
            let prompt = Prompt::text(text, 160);
            router.select(&RouteRequest { session, exclude, ..prompt.request() }).unwrap().worker
        };
        let first = route(Some(7), 1, &[]);
        assert!((2..20).all(|text| route(Some(7), text, &[]) == first), "{policy}");
        let moved = route(Some(7), 30, &[first]);
        assert_ne!(moved, first);
        assert_eq!(route(Some(7), 31, &[]), moved, "the session has moved");
        router.remove_worker(moved);
        router.add_worker(moved, INFO);
        let spread: Vec<_> = (100..140).map(|session| route(Some(session), 40, &[])).collect();
        assert!(spread.iter().any(|worker| *worker != spread[0]), "{policy}");
    }
}

#[test]
fn sessions_are_bounded() {
    let router = router(40, |config| {
        config.policy = Policy::Random;
        config.max_sessions = 2;
    });
    let route = |session| {
        let prompt = Prompt::text(1, 160);
        router.select(&RouteRequest { session: Some(session), ..prompt.request() }).unwrap().worker
    };
    let first = route(1);
    assert_eq!([route(1), route(1)], [first, first]);
    let again: Vec<_> = (10..20)
        .map(|other| {
            route(other);
            route(other + 100);
            route(1)
        })
        .collect();
    assert!(again.iter().any(|worker| *worker != first));
}
