//! Tests of several plan classes, and of requests that do not fit a worker.

use chiasm_router::{EngineStats, RouteError, RouteRequest, Router, RouterConfig, WorkerInfo};
use chiasm_types::{PlanClassId, WorkerId};

use crate::workload::{INFO, Prompt};

const ZERO: WorkerId = WorkerId(0);
const ONE: WorkerId = WorkerId(1);
const TWO: WorkerId = WorkerId(2);
const OTHER: PlanClassId = PlanClassId(1);

/// Creates a router with workers 0 and 2 of one class and worker 1 of another.
fn router() -> Router {
    let router = Router::new(RouterConfig { seed: Some(1), ..RouterConfig::default() });
    for (id, class) in [(ZERO, PlanClassId(0)), (ONE, OTHER), (TWO, PlanClassId(0))] {
        router.add_worker(id, WorkerInfo { class, ..INFO });
        router.set_caught_up(id, true);
    }
    router
}

#[test]
fn worker_is_judged_by_the_plan_of_its_class() {
    // The same request has one plan for two workers, and another one for the third.
    let here = Prompt::text(1, 320);
    let there = Prompt::text(2, 320);
    for (holder, prompt) in [(TWO, &here), (ONE, &there)] {
        let router = router();
        router.apply(holder, &prompt.stored());
        // Blocks of another class's plan do not count for a worker.
        router.apply(if holder == ONE { ZERO } else { ONE }, &prompt.stored());
        let plans = [here.request(), RouteRequest { class: OTHER, ..there.request() }];
        let reservation = router.select_planned(&plans).unwrap();
        assert_eq!((reservation.worker, reservation.overlap_blocks), (holder, 20));
    }
}

#[test]
fn class_without_a_plan_gets_no_request() {
    let router = router();
    let prompt = Prompt::text(1, 320);
    router.apply(ONE, &prompt.stored());
    assert_ne!(prompt.select(&router).worker, ONE);
    let excluded = router.select(&RouteRequest { exclude: &[ZERO, TWO], ..prompt.request() });
    assert_eq!(excluded.unwrap_err(), RouteError::NoWorker);
    assert_eq!(router.select_planned(&[]).unwrap_err(), RouteError::NoWorker);
}

#[test]
fn promises_count_within_their_class() {
    let router = router();
    let here = Prompt::text(1, 320);
    let there = Prompt::text(2, 320);
    let plans = [here.request(), RouteRequest { class: OTHER, ..there.request() }];
    let first = router.select_planned(&plans).unwrap();
    // The worker of the first request will hold its blocks, so the second goes there too.
    assert_eq!(router.select_planned(&plans).unwrap().worker, first.worker);
}

#[test]
fn prompt_goes_only_to_workers_with_room_for_it() {
    let router = Router::new(RouterConfig::default());
    router.add_worker(ZERO, WorkerInfo { max_prompt_tokens: 100, ..INFO });
    router.add_worker(ONE, WorkerInfo { max_encoder_tokens: 50, ..INFO });
    let short = Prompt::text(1, 100);
    let long = Prompt::text(1, 101);
    assert_eq!(short.select_excluding(&router, &[ONE]).unwrap().worker, ZERO);
    assert_eq!(long.select(&router).worker, ONE);
    assert_eq!(long.select_excluding(&router, &[ONE]).unwrap_err(), RouteError::NoWorker);
    let large = RouteRequest { encoder_tokens: 51, ..short.request() };
    assert_eq!(router.select(&large).unwrap().worker, ZERO);
}

#[test]
fn draining_makes_busy_work_of_others_adds_cost() {
    let router = Router::new(RouterConfig { seed: Some(1), ..RouterConfig::default() });
    [ZERO, ONE].into_iter().for_each(|id| router.add_worker(id, INFO));
    let prompt = Prompt::text(1, 320);
    router.set_stats(ZERO, EngineStats { draining: true, ..EngineStats::default() });
    assert_eq!(prompt.select(&router).worker, ONE);
    router.set_stats(ONE, EngineStats { draining: true, ..EngineStats::default() });
    let error = prompt.select_excluding(&router, &[]).unwrap_err();
    assert_eq!(error, RouteError::Drained);
    assert_eq!(error.to_string(), "no engine accepts new requests: all agents are drained");
    router
        .set_stats(ZERO, EngineStats { pending_tokens_of_others: 5000, ..EngineStats::default() });
    router.set_stats(ONE, EngineStats::default());
    let running: Vec<_> = (0..4).map(|_| Prompt::text(2, 16).select(&router)).collect();
    assert!(running.iter().all(|reservation| reservation.worker == ONE));
}
