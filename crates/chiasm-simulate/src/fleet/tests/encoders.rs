//! Fleets with engines that encode alone.

use super::*;
use crate::sequence::Piece;

/// Milliseconds in which it is encoded, read, made a tensor of, and computed with the question
/// behind it.
const IMAGE: Image = Image { id: 1, embeds: 1600 };
const ENCODED: f64 = 1600e3 / 70_000.0;
const READ: f64 = 1600.0 * 7168.0 / 25e6;
const TENSOR: f64 = 5e-6 * 1600.0 * 784.0;
const COMPUTED: f64 = 2.0 + 1632e3 / 28_000.0 + 1e-6 * 1632.0 * 1632.0 / 2.0;

fn text(seed: u64, length: u32) -> Piece {
    Piece::Text { seed, length }
}

/// A question about an image, which one token answers.
fn ask(image: Image, question: u64) -> Sequence {
    Sequence::new(&[Piece::Image(image), text(question, 32)], text(9, 1))
}

fn fleet_of(workers: Vec<Role>) -> Scenario {
    Scenario { warm_up: 0, workers, ..scenario(Workload::Mixed, 1, 100) }
}

/// Plays requests that come at these times in milliseconds. Round-robin has all images encoded
/// elsewhere.
fn play(scenario: &Scenario, requests: Vec<(u64, Sequence)>) -> PolicyReport {
    let requests =
        requests.into_iter().map(|(at, sequence)| Ok(Request { at: at * 1_000_000, sequence }));
    Fleet::new(scenario, Policy::RoundRobin, Arrivals::Traced(1.0)).run(requests).unwrap()
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-3
}

#[test]
fn a_request_alone_is_encoded_computed_and_answered_one_after_the_other() {
    let scenario = fleet_of(vec![Role::Encode, Role::Prefill, Role::Decode]);
    let report = play(&scenario, vec![(0, ask(IMAGE, 1))]);
    // All three engines get the tensor, each when it is its turn.
    let encode = TENSOR + 2.0 + ENCODED;
    let prefill = TENSOR + COMPUTED + READ;
    let transfer = TENSOR + 102.0 * 16.0 * 57_344.0 / 25e6 + 1.0;
    let last_token = 8.0 + 1e-6 * 1631.5;
    let first = encode + prefill + transfer + last_token;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    assert_eq!((report.split, report.encoded_elsewhere), (Some(1.0), Some(1.0)));
    assert_eq!((report.encoder_saved, report.tensors_reused), (Some(0.0), Some(0.0)));
}

#[test]
fn two_ask_about_an_image_that_is_encoded_once_and_a_third_finds_it_elsewhere() {
    let scenario =
        fleet_of(vec![Role::Encode, Role::Aggregated, Role::Aggregated, Role::Aggregated]);
    let both = play(&scenario, vec![(0, ask(IMAGE, 1)), (0, ask(IMAGE, 2))]);
    // The second one has a step of its own, in which nothing is made.
    let first = TENSOR + 2.0 + ENCODED + TENSOR + COMPUTED + READ;
    let second = first + 2.0;
    assert!(close(2.0 * both.ttft_ms.mean, first + second), "{both:?} and {first}");
    assert_eq!((both.encoder_saved, both.encoded_elsewhere), (Some(0.5), Some(1.0)));

    let all = play(&scenario, vec![(0, ask(IMAGE, 1)), (0, ask(IMAGE, 2)), (1000, ask(IMAGE, 3))]);
    let third = TENSOR + COMPUTED + READ;
    assert!(close(3.0 * all.ttft_ms.mean, first + second + third), "{all:?} and {third}");
    // Nobody had its blocks: it was another engine.
    assert_eq!((all.hit_rate, all.encoded_elsewhere), (0.0, Some(2.0 / 3.0)));
    assert!(all.encoder_saved.is_some_and(|saved| close(saved, 2.0 / 3.0)), "{all:?}");
}

#[test]
fn images_of_a_request_are_encoded_at_the_same_time_and_all_waited_for() {
    let scenario = fleet_of(vec![Role::Encode, Role::Encode, Role::Aggregated]);
    let small = Image { id: 2, embeds: 160 };
    let sequence =
        Sequence::new(&[Piece::Image(small), Piece::Image(IMAGE), text(1, 32)], text(9, 1));
    let report = play(&scenario, vec![(0, sequence)]);
    // Two threads of six make the tensors side by side; the larger image takes longest.
    let computed = 2.0 + 1792e3 / 28_000.0 + 1e-6 * 1792.0 * 1792.0 / 2.0 + 1.1 * READ;
    let first = TENSOR + 2.0 + ENCODED + TENSOR + computed;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    assert_eq!(report.encoded_elsewhere, Some(1.0));
}

#[test]
fn what_the_store_has_no_room_for_is_encoded_where_the_prompt_is_computed() {
    let scenario = fleet_of(vec![Role::Encode, Role::Aggregated]);
    let engine = EngineModel { embedding_store_bytes: 1600 * 7168 - 1, ..scenario.engine };
    let report = play(&Scenario { engine, ..scenario }, vec![(0, ask(IMAGE, 1))]);
    let first = TENSOR + 2.0 + ENCODED + TENSOR + COMPUTED + ENCODED;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    assert_eq!((report.encoder_saved, report.encoded_elsewhere), (Some(-1.0), Some(1.0)));
}

/// Images of one request, and a place for it.
fn encoding(fleet: &Fleet<'_>, number: u64, images: &[Image]) -> Encoding {
    let reservation = fleet.frontends.routers()[0]
        .select(&RouteRequest { prompt_tokens: 1, ..Default::default() });
    Encoding::new(number, reservation.unwrap(), images.to_vec())
}

#[test]
fn a_step_takes_what_waits_up_to_its_budget_or_one_image_that_is_larger() {
    let scenario = fleet_of(vec![Role::Aggregated]);
    let fleet = Fleet::new(&scenario, Policy::Random, Arrivals::Poisson(1.0));
    let model = EngineModel { max_batched_tokens: 2500, ..EngineModel::default() };
    let mut encoder = Encoder::new(model, EmbeddingStore::new(&model));
    let image = |id, embeds| Image { id, embeds };
    let (one, two, three, huge) = (image(1, 1200), image(2, 1200), image(3, 800), image(4, 5000));
    let encodings: [(u64, &[Image]); 5] =
        [(1, &[one]), (2, &[two]), (3, &[image(5, 1200), three]), (4, &[huge]), (5, &[one])];
    for (number, images) in encodings {
        encoder.deliver(encoding(&fleet, number, images), 0);
    }
    let mut steps = Vec::new();
    let mut now = 0;
    while let Some(end) = encoder.step_end() {
        let made = seconds(end - now) - model.overhead;
        let ended =
            encoder.wake(end).into_iter().map(|encoding| encoding.number).collect::<Vec<_>>();
        steps.push(((made / model.embed).round(), ended));
        now = end;
    }
    // The last one is in a cache.
    let expected =
        [(1200.0, vec![1]), (2400.0, vec![2]), (800.0, vec![3]), (5000.0, vec![4]), (0.0, vec![5])];
    assert_eq!(steps, expected);
    assert!(encoder.is_idle() && close(1e3 * encoder.work(), 9400.0 / 70.0), "{}", encoder.work());
}

#[test]
fn every_request_of_every_workload_ends_and_nobody_has_anything_to_do_then() {
    // Small caches: much is evicted, and let go of before it is read.
    let engine = EngineModel {
        num_blocks: 400,
        encoder_cache_tokens: 3000,
        embedding_store_bytes: 30 << 20,
        ..Default::default()
    };
    for workload in Workload::ALL {
        for policy in Policy::ALL {
            let workers =
                vec![Role::Prefill, Role::Encode, Role::Decode, Role::Encode, Role::Aggregated];
            let scenario = Scenario { workers, engine, ..scenario(workload, 4, 200) };
            let mut fleet = Fleet::new(&scenario, policy, Arrivals::Poisson(60.0));
            fleet.play(requests(&scenario)).unwrap();
            assert_eq!(fleet.tally.completed + fleet.tally.refused, 200, "{workload}, {policy}");
            assert!(
                fleet.tally.completed > 80 && fleet.awaiting.is_empty(),
                "{workload}, {policy}"
            );
            assert!(fleet.encoders.values().all(Encoder::is_idle) && fleet.encoders.len() == 2);
            for (worker, engine) in
                fleet.frontends.routers()[0].workers().iter().zip(&fleet.engines)
            {
                assert_eq!(engine.stats(), EngineStats::default(), "{workload}, {policy}");
                assert_eq!(worker.index.blocks, engine.distinct_blocks());
                assert_eq!(
                    (worker.requests, worker.blocks_in_use, worker.pending_tokens),
                    (0, 0, 0)
                );
            }
        }
    }
}

#[test]
fn the_busier_the_others_are_the_more_is_encoded_elsewhere_and_a_seed_is_a_report() {
    let workers = vec![Role::Encode, Role::Aggregated, Role::Aggregated, Role::Aggregated];
    let scenario = Scenario { workers, ..scenario(Workload::UniqueImages, 4, 600) };
    let run = |rate| {
        let report = scenario.run(Policy::KvMedia, Arrivals::Poisson(rate)).unwrap();
        PolicyReport { wall_seconds: 0.0, ..report }
    };
    let [idle, busy] = [1.0, 35.0].map(run);
    assert!(idle.encoded_elsewhere.is_some_and(|part| part < 0.01), "{idle:?}");
    assert!(busy.encoded_elsewhere.is_some_and(|part| part > 0.1), "{busy:?}");
    assert_eq!(busy, run(35.0));
}

#[test]
fn engines_that_encode_are_not_all_that_a_fleet_needs() {
    let scenario = fleet_of(vec![Role::Encode]);
    assert!(matches!(
        scenario.run(Policy::KvMedia, Arrivals::Poisson(1.0)),
        Err(SimulateError::Config(_))
    ));
}
