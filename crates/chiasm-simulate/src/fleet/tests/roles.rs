//! Tests of fleets whose engines compute prompts or answers.

use super::*;
use crate::sequence::{Image, Piece};

fn text(seed: u64, length: u32) -> Piece {
    Piece::Text { seed, length }
}

/// Returns a fleet of an engine that prefills and one that decodes.
fn pair() -> Scenario {
    let scenario = scenario(Workload::Mixed, 2, 100);
    Scenario { workers: vec![Role::Prefill, Role::Decode], warm_up: 0, ..scenario }
}

/// Runs requests that arrive at these times in milliseconds. With round-robin, all are split.
fn run_at(scenario: &Scenario, requests: Vec<(u64, Sequence)>) -> PolicyReport {
    let requests =
        requests.into_iter().map(|(at, sequence)| Ok(Request { at: at * 1_000_000, sequence }));
    Fleet::new(scenario, Policy::RoundRobin, Arrivals::Traced(1.0)).run(requests).unwrap()
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-3
}

/// Returns the milliseconds to transfer this number of 16-token blocks between engines.
fn transfer_ms(blocks: f64) -> f64 {
    blocks * 16.0 * 57_344.0 / 25e6 + 1.0
}

#[test]
fn single_split_request_passes_its_stages_in_sequence() {
    let report = run_at(&pair(), vec![(0, Sequence::new(&[text(1, 2800)], text(2, 11)))]);
    let prefill = 2.0 + 100.0 + 1e-6 * 2800.0 * 2800.0 / 2.0;
    // The other engine computes the last token again, which attends to all before it.
    let last_token = 2.0 + 6.0 + 1e-6 * 2799.5;
    let first = prefill + transfer_ms(175.0) + last_token;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    let decode: Vec<f64> = (0..10).map(|step| 8.0 + 23e-6 * (2800.0 + f64::from(step))).collect();
    assert!(close(report.itl_ms.mean, decode.iter().sum::<f64>() / 10.0), "{report:?}");
    // The events of the last step arrive a millisecond after it.
    assert!(
        close(1e3 * report.virtual_seconds, first + decode.iter().sum::<f64>() + 1.0),
        "{report:?}"
    );
    assert_eq!((report.split, report.hit_rate, report.completed), (Some(1.0), 0.0, 1));
}

#[test]
fn both_engines_get_the_tensors_but_one_encodes() {
    let image = Image { id: 1, embeds: 1600 };
    let ask = |question| Sequence::new(&[Piece::Image(image), text(question, 32)], text(9, 1));
    let tensors = 5e-6 * image.pixels() as f64;
    let prefill = 2.0 + 1632e3 / 28_000.0 + 1600e3 / 70_000.0 + 1e-6 * 1632.0 * 1632.0 / 2.0;
    let last_token = 8.0 + 1e-6 * 1631.5;
    let report = run_at(&pair(), vec![(0, ask(1))]);
    let first = tensors + prefill + tensors + transfer_ms(102.0) + last_token;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    assert_eq!((report.encoder_saved, report.tensors_reused), (Some(0.0), Some(0.0)));
    // The second time both engines have the whole image: two blocks are computed and transferred.
    let both = run_at(&pair(), vec![(0, ask(1)), (1000, ask(2))]);
    let second =
        8.0 + 1e-6 * (1632.0 * 1632.0 - 1600.0 * 1600.0) / 2.0 + transfer_ms(2.0) + last_token;
    assert!(close(2.0 * both.ttft_ms.mean - first, second), "{both:?} and {second}");
    assert_eq!((both.encoder_saved, both.tensors_reused), (Some(0.5), Some(0.5)));
    assert!(close(both.hit_rate, 1600.0 / 3264.0), "{both:?}");
}

#[test]
fn transfers_start_between_steps_one_at_a_time() {
    let scenario = pair();
    let mut fleet = Fleet::new(&scenario, Policy::RoundRobin, Arrivals::Poisson(1.0));
    let live = |number| {
        let sequence = Sequence::new(&[text(number, 1600)], text(2, 100));
        let keys = sequence.keys(scenario.engine.block_size);
        LiveRequest::new(number, sequence, keys, 0, true)
    };
    // The engine computes a prompt until `end`.
    fleet.deliver(1, live(1), 0);
    let end = fleet.engines[1].next_wake().unwrap();
    fleet.start_transfer(0, 1, Box::new(live(2)), 1000);
    fleet.start_transfer(0, 1, Box::new(live(3)), 2000);
    let mut arrivals: Vec<Nanos> = fleet
        .planned
        .into_iter()
        .filter_map(|planned| match planned.event {
            Event::EndTransfer { from: 0, .. } => Some(planned.at),
            _ => None,
        })
        .collect();
    arrivals.sort_unstable();
    let duration = nanos((transfer_ms(100.0) - 1.0) / 1e3);
    assert_eq!(arrivals, [end + duration + 1_000_000, end + 2 * duration + 1_000_000]);
}

#[test]
fn prompt_blocks_are_held_until_the_transfer_ends() {
    let scenario = pair();
    let mut fleet = Fleet::new(&scenario, Policy::RoundRobin, Arrivals::Traced(1.0));
    let in_use = |fleet: &Fleet<'_>| {
        fleet.engines.iter().map(|engine| engine.stats().kv_usage > 0.0).collect::<Vec<_>>()
    };
    fleet
        .arrive(Request { at: 0, sequence: Sequence::new(&[text(1, 2800)], text(2, 50)) }, 0)
        .unwrap();
    let mut seen = Vec::new();
    while let Some(at) = fleet.planned.peek().map(|planned| planned.at) {
        fleet.clock.set(at);
        fleet.handle_planned(at);
        if seen.last() != Some(&in_use(&fleet)) {
            seen.push(in_use(&fleet));
        }
    }
    // Computed and retained; transferred to the other engine; ended.
    assert_eq!(seen, [[true, false], [false, true], [false, false]]);
}

#[test]
fn requests_of_all_workloads_end_with_idle_engines() {
    // Small caches: prompts wait until the blocks of others are released; answers are preempted.
    let engine = EngineModel { num_blocks: 400, ..EngineModel::default() };
    for workload in Workload::ALL {
        for policy in Policy::ALL {
            let workers = vec![Role::Prefill, Role::Decode, Role::Decode, Role::Aggregated];
            let scenario = Scenario { workers, engine, ..scenario(workload, 4, 200) };
            let mut fleet = Fleet::new(&scenario, policy, Arrivals::Poisson(60.0));
            fleet.simulate(requests(&scenario)).unwrap();
            assert_eq!(fleet.tally.completed + fleet.tally.refused, 200, "{workload}, {policy}");
            assert!(fleet.tally.completed > 80, "{workload}, {policy}");
            let workers = fleet.frontends.routers()[0].workers();
            for (worker, engine) in workers.iter().zip(&fleet.engines) {
                assert_eq!(engine.stats(), EngineStats::default(), "{workload}, {policy}");
                assert_eq!(worker.index.blocks, engine.distinct_blocks());
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
fn report_with_roles_is_determined_by_the_seed() {
    let workers = vec![Role::Prefill, Role::Decode, Role::Decode];
    let scenario = Scenario { workers, ..scenario(Workload::Mixed, 3, 600) };
    let run = || {
        let report = scenario.run(Policy::KvMedia, Arrivals::Poisson(30.0)).unwrap();
        PolicyReport { wall_seconds: 0.0, ..report }
    };
    let report = run();
    assert_eq!(report, run());
    assert!(report.split.is_some_and(|split| split > 0.0 && split < 1.0), "{report:?}");
}

#[test]
fn announcements_of_split_requests_are_refused() {
    let good = pair();
    let run = |announce_delay| {
        let frontend = FrontendModel { frontends: 2, announce_delay, ..good.frontend };
        Scenario { frontend, ..good.clone() }.run(Policy::KvMedia, Arrivals::Poisson(10.0))
    };
    assert!(matches!(run(Some(1e-3)), Err(SimulateError::Config(_))));
    assert_eq!(run(None).unwrap().completed, 100);
}
