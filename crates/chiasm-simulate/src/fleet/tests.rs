mod encoders;
mod roles;

use chiasm_router::RouterConfig;
use chiasm_types::Role;

use super::*;
use crate::model::{EngineModel, FrontendModel};
use crate::scenario::Source;
use crate::workload::{Workload, WorkloadSize};

fn scenario(workload: Workload, workers: usize, requests: u64) -> Scenario {
    Scenario {
        workers: vec![Role::Aggregated; workers],
        sized_for: workers,
        requests,
        warm_up: requests / 4,
        source: Source::Generated(workload, WorkloadSize::default()),
        seed: 5,
        engine: EngineModel::default(),
        frontend: FrontendModel::default(),
        router: RouterConfig::default(),
    }
}

fn requests(scenario: &Scenario) -> impl Iterator<Item = Result<Request, SimulateError>> {
    let Source::Generated(workload, size) = &scenario.source else { panic!("generated requests") };
    let generator =
        crate::workload::Generator::new(*workload, size, scenario.workers.len(), scenario.seed);
    generator.map(Ok).take(scenario.requests as usize)
}

#[test]
fn requests_of_all_workloads_end_under_all_policies() {
    for workload in Workload::ALL {
        for policy in Policy::ALL {
            let report = scenario(workload, 3, 150).run(policy, Arrivals::Poisson(20.0)).unwrap();
            assert_eq!((report.completed, report.refused), (150, 0), "{workload}, {policy}");
            assert!(
                report.balance >= 1.0 && report.balance <= 3.0 && report.work <= 1.0,
                "{report:?}"
            );
            assert!(
                report.ttft_ms.p50 <= report.ttft_ms.p90 && report.itl_ms.p50 >= 8.0 * 0.99,
                "{report:?}"
            );
        }
    }
}

#[test]
fn report_is_determined_by_the_seed() {
    let scenario = scenario(Workload::Mixed, 4, 600);
    let run = |scenario: &Scenario| {
        let report = scenario.run(Policy::KvMedia, Arrivals::Poisson(30.0)).unwrap();
        PolicyReport { wall_seconds: 0.0, ..report }
    };
    assert_eq!(run(&scenario), run(&scenario));
    assert_ne!(run(&scenario), run(&Scenario { seed: 6, ..scenario.clone() }));
}

/// A server that does not report the size of its encoder cache is assumed to have a large one: see
/// "A cache of unknown size" in `docs/routing.md`.
#[test]
fn underestimated_encoder_cache_costs_more_than_overestimated() {
    let engine = EngineModel { encoder_cache_tokens: 16_384, ..EngineModel::default() };
    let p90 = |believed_encoder_cache_tokens| {
        let frontend = FrontendModel { believed_encoder_cache_tokens, ..FrontendModel::default() };
        let scenario = Scenario { engine, frontend, ..scenario(Workload::SharedImageQa, 8, 6000) };
        scenario.run(Policy::KvMedia, Arrivals::Poisson(380.0)).unwrap().ttft_ms.p90
    };
    let [known, many, none] = [None, Some(131_072), Some(0)].map(p90);
    assert!(1.5 * known < none && 1.5 * many < none, "{known}, {many} and {none}");
}

#[test]
fn router_views_match_the_engines() {
    // Small caches, so that many blocks are evicted.
    let engine = EngineModel { num_blocks: 1500, ..EngineModel::default() };
    for frontends in [1, 3] {
        let frontend = FrontendModel { frontends, ..FrontendModel::default() };
        let scenario = Scenario { engine, frontend, ..scenario(Workload::Mixed, 4, 800) };
        let mut fleet = Fleet::new(&scenario, Policy::KvMedia, Arrivals::Poisson(30.0));
        fleet.simulate(requests(&scenario)).unwrap();
        assert_eq!(fleet.frontends.routers().len(), frontends);
        for router in fleet.frontends.routers() {
            for (worker, engine) in router.workers().iter().zip(&fleet.engines) {
                assert_eq!(worker.index.blocks, engine.distinct_blocks());
                assert!(worker.index.blocks > 1000, "{} blocks", worker.index.blocks);
                assert_eq!((worker.index.unkeyed_blocks, worker.index.unknown_removals), (0, 0));
                assert_eq!(
                    (worker.requests, worker.blocks_in_use, worker.pending_tokens),
                    (0, 0, 0)
                );
            }
        }
    }
}

#[test]
fn predicted_overlap_matches_the_engine() {
    // One request at a time, so that all events have been applied when the next one comes.
    let scenario = scenario(Workload::MultiTurnImages, 2, 300);
    let mut fleet = Fleet::new(&scenario, Policy::Kv, Arrivals::Poisson(1.0));
    let mut compared = 0;
    for (number, request) in (1..).zip(requests(&scenario)) {
        let sequence = request.unwrap().sequence;
        let keys = sequence.keys(scenario.engine.block_size);
        let prompt = sequence.prompt();
        let router = &fleet.frontends.routers()[0];
        let reservation = router
            .select(&RouteRequest {
                keys: &keys[..prompt / 16],
                prompt_tokens: prompt,
                ..RouteRequest::default()
            })
            .unwrap();
        let worker = reservation.worker.0 as usize;
        let overlap = reservation.overlap_blocks;
        let now = number * 100_000_000_000;
        let mut live = LiveRequest::new(number, sequence, keys, now, true);
        live.reservation = Some(reservation);
        fleet.engines[worker].deliver(live, now);
        let before = fleet.tally.cached_tokens;
        while let Some(wake) = fleet.engines[worker].next_wake() {
            let events = fleet.engines[worker].wake(wake, &mut fleet.tally);
            let batch = KvEventBatch { timestamp: 0.0, events, data_parallel_rank: None };
            fleet.frontends.routers()[0].apply(WorkerId(worker as u32), &batch);
        }
        // The engine computes the last token again.
        let expected = overlap.min((prompt - 1) / 16) * 16;
        assert_eq!((fleet.tally.cached_tokens - before) as usize, expected);
        compared += usize::from(expected > 0);
    }
    assert!(compared > 150, "only {compared} requests had an overlap");
}

#[test]
fn tensors_are_made_once_per_engine() {
    let scenario = scenario(Workload::SharedImageQa, 1, 10);
    let mut fleet = Fleet::new(&scenario, Policy::RoundRobin, Arrivals::Poisson(1.0));
    let image = crate::sequence::Image { id: 1, embeds: 1000 };
    let text = crate::sequence::Piece::Text { seed: 1, length: 10 };
    let sequence = Sequence::new(&[crate::sequence::Piece::Image(image), text], text);
    let duration = nanos(image.pixels() as f64 * scenario.frontend.pixel);
    assert_eq!(fleet.make_tensors(0, &sequence, 100, true), 100 + duration);
    // At the first repetition the image is in transit, at the second it is cached.
    assert_eq!(fleet.make_tensors(0, &sequence, 200, true), 100 + duration);
    assert_eq!(fleet.make_tensors(0, &sequence, 1 << 40, true), 1 << 40);
    assert_eq!((fleet.tally.items, fleet.tally.reused_items), (3, 2));
}

#[test]
fn tensors_wait_for_a_free_thread() {
    let scenario = scenario(Workload::SharedImageQa, 1, 10);
    let mut fleet = Fleet::new(&scenario, Policy::RoundRobin, Arrivals::Poisson(1.0));
    let image = |id| crate::sequence::Piece::Image(crate::sequence::Image { id, embeds: 1000 });
    let text = crate::sequence::Piece::Text { seed: 1, length: 10 };
    let duration = nanos(1000.0 * 784.0 * scenario.frontend.pixel);
    // Two threads, three images.
    let sequence = Sequence::new(&[image(1), image(2), image(3)], text);
    assert_eq!(fleet.make_tensors(0, &sequence, 0, true), 2 * duration);
}

#[test]
fn requests_queue_only_above_saturation() {
    // With a higher limit all 4,000 requests would run at once before the first ends.
    let engine = EngineModel { max_running: 256, ..EngineModel::default() };
    let scenario = Scenario { engine, ..scenario(Workload::UniqueImages, 4, 4000) };
    let saturation = scenario.saturation(Policy::RoundRobin).unwrap();
    let run =
        |load: f64| scenario.run(Policy::RoundRobin, Arrivals::Poisson(load * saturation)).unwrap();
    let less = run(0.8);
    let more = run(1.5);
    assert!(less.ttft_ms.p90 < 300.0, "{less:?}");
    assert!(more.ttft_ms.p90 > 10_000.0, "{more:?}");
    // More requests in flight make steps longer, and those begun at the end are not counted.
    assert!(
        (0.8..1.05).contains(&(more.requests_per_second / saturation)),
        "{} of {saturation}",
        more.requests_per_second
    );
    assert!(
        (less.requests_per_second / saturation - 0.8).abs() < 0.04,
        "{} of {saturation}",
        less.requests_per_second
    );
}

#[test]
fn kv_media_policy_beats_round_robin_on_shared_images() {
    let scenario = scenario(Workload::SharedImageQa, 16, 8000);
    let rate = 0.7 * scenario.saturation(Policy::RoundRobin).unwrap();
    let run = |policy| scenario.run(policy, Arrivals::Poisson(rate)).unwrap();
    let media = run(Policy::KvMedia);
    let robin = run(Policy::RoundRobin);
    assert!(media.hit_rate > robin.hit_rate + 0.2, "{} and {}", media.hit_rate, robin.hit_rate);
    assert!(
        media.encoder_saved > robin.encoder_saved.map(|saved| saved + 0.3),
        "{media:?} and {robin:?}"
    );
    assert!(
        robin.ttft_ms.p90 > 2.0 * media.ttft_ms.p90,
        "{:?} and {:?}",
        robin.ttft_ms,
        media.ttft_ms
    );
}

#[test]
fn holders_of_popular_images_get_no_more_work() {
    let scenario = scenario(Workload::SharedImageQa, 32, 16_000);
    let rate = 0.7 * scenario.saturation(Policy::RoundRobin).unwrap();
    let run = |balance: f64| {
        let mut scenario = scenario.clone();
        scenario.router.weights.balance = balance;
        scenario.run(Policy::KvMedia, Arrivals::Poisson(rate)).unwrap()
    };
    let with = run(RouterConfig::default().weights.balance);
    let without = run(0.0);
    assert!(
        with.balance < 1.3 && without.balance > with.balance + 0.2,
        "{} and {}",
        with.balance,
        without.balance
    );
    assert!(
        with.ttft_ms.p90 < 1.05 * without.ttft_ms.p90,
        "{:?} and {:?}",
        with.ttft_ms,
        without.ttft_ms
    );
}

#[test]
fn trace_requests_arrive_at_their_times() {
    use std::io::Write as _;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for number in 0..200 {
        // Ten requests a second, with three shared blocks and one block of its own.
        let line = serde_json::json!({
            "timestamp": 100 * number,
            "input_length": 2000,
            "output_length": 20,
            "hash_ids": [0, 1, 2, 10 + number],
        });
        writeln!(file, "{line}").unwrap();
    }
    let source = Source::Trace(file.path().to_owned());
    let summary = source.trace_summary().unwrap().unwrap();
    assert_eq!((summary.requests, summary.seconds), (200, 19.9));
    let scenario = Scenario { source, ..scenario(Workload::Mixed, 2, 200) };
    let report = scenario.run(Policy::Kv, Arrivals::Traced(2.0)).unwrap();
    assert_eq!(report.completed, 200);
    assert!((9.95..10.5).contains(&report.virtual_seconds), "{report:?}");
    assert!((report.hit_rate - 1536.0 / 2000.0).abs() < 0.01, "{report:?}");
    assert_eq!((report.encoder_saved, report.tensors_reused), (None, None));
}

#[test]
fn invalid_scenario_is_refused() {
    let good = scenario(Workload::Mixed, 2, 10);
    let refused = |scenario: &Scenario, arrivals| scenario.run(Policy::Kv, arrivals).is_err();
    assert!(refused(&Scenario { workers: Vec::new(), ..good.clone() }, Arrivals::Poisson(1.0)));
    assert!(refused(&Scenario { warm_up: 10, ..good.clone() }, Arrivals::Poisson(1.0)));
    assert!(refused(&good, Arrivals::Poisson(f64::NAN)));
    assert!(refused(&good, Arrivals::Traced(1.0)));
    assert!(refused(&good, Arrivals::Closed(0)));
    let engine = EngineModel { num_blocks: 2, ..EngineModel::default() };
    let tiny = Scenario { engine, ..good };
    assert!(matches!(
        tiny.run(Policy::Kv, Arrivals::Poisson(1.0)),
        Err(SimulateError::NothingFits)
    ));
}

/// Returns the reports of several policies and numbers of frontends, as lines of JSON.
fn aggregated_reports() -> String {
    let mut lines = String::new();
    for (workload, policy, frontends) in [
        (Workload::Mixed, Policy::KvMedia, 1),
        (Workload::Mixed, Policy::KvMedia, 3),
        (Workload::MultiTurnImages, Policy::Kv, 1),
        (Workload::SharedSystemPrompt, Policy::RoundRobin, 1),
        (Workload::UniqueImages, Policy::PowerOfTwo, 1),
    ] {
        let frontend = FrontendModel { frontends, ..FrontendModel::default() };
        let scenario = Scenario { frontend, ..scenario(workload, 4, 600) };
        let report = scenario.run(policy, Arrivals::Poisson(40.0)).unwrap();
        let report = PolicyReport { wall_seconds: 0.0, ..report };
        lines += &format!("{}\n", serde_json::to_string(&report).unwrap());
    }
    lines
}

#[test]
fn fleet_without_roles_gives_the_recorded_reports() {
    // Recorded at the commit before roles were supported.
    assert_eq!(aggregated_reports(), include_str!("tests/aggregated.jsonl"));
}
