//! Tests of fleets with encoding engines.

use super::*;
use crate::sequence::Piece;

const IMAGE: Image = Image { id: 1, embeds: 1600 };
/// The time to encode the image.
const ENCODE_MS: f64 = 1600e3 / 70_000.0;
/// The time to read the embeddings of the image from the store.
const READ_MS: f64 = 1600.0 * 7168.0 / 25e6;
/// The time to make the tensor of the image.
const TENSOR_MS: f64 = 5e-6 * 1600.0 * 784.0;
/// The time to compute the image and a question.
const COMPUTE_MS: f64 = 2.0 + 1632e3 / 28_000.0 + 1e-6 * 1632.0 * 1632.0 / 2.0;

fn text(seed: u64, length: u32) -> Piece {
    Piece::Text { seed, length }
}

/// Returns a question about an image, with an answer of one token.
fn ask(image: Image, question: u64) -> Sequence {
    Sequence::new(&[Piece::Image(image), text(question, 32)], text(9, 1))
}

fn fleet_of(workers: Vec<Role>) -> Scenario {
    Scenario { warm_up: 0, workers, ..scenario(Workload::Mixed, 1, 100) }
}

/// Runs requests that arrive at these times in milliseconds. With round-robin, all images are
/// encoded elsewhere.
fn run_at(scenario: &Scenario, requests: Vec<(u64, Sequence)>) -> PolicyReport {
    let requests =
        requests.into_iter().map(|(at, sequence)| Ok(Request { at: at * 1_000_000, sequence }));
    Fleet::new(scenario, Policy::RoundRobin, Arrivals::Traced(1.0)).run(requests).unwrap()
}

fn close(found: f64, expected: f64) -> bool {
    (found - expected).abs() < 1e-3
}

#[test]
fn single_request_passes_its_stages_in_sequence() {
    let scenario = fleet_of(vec![Role::Encode, Role::Prefill, Role::Decode]);
    let report = run_at(&scenario, vec![(0, ask(IMAGE, 1))]);
    // All three engines get the tensor, each at its stage.
    let encode = TENSOR_MS + 2.0 + ENCODE_MS;
    let prefill = TENSOR_MS + COMPUTE_MS + READ_MS;
    let transfer = TENSOR_MS + 102.0 * 16.0 * 57_344.0 / 25e6 + 1.0;
    let last_token = 8.0 + 1e-6 * 1631.5;
    let first = encode + prefill + transfer + last_token;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    assert_eq!((report.split, report.encoded_elsewhere), (Some(1.0), Some(1.0)));
    assert_eq!((report.encoder_saved, report.tensors_reused), (Some(0.0), Some(0.0)));
}

#[test]
fn shared_image_is_encoded_once_for_three_requests() {
    let scenario =
        fleet_of(vec![Role::Encode, Role::Aggregated, Role::Aggregated, Role::Aggregated]);
    let both = run_at(&scenario, vec![(0, ask(IMAGE, 1)), (0, ask(IMAGE, 2))]);
    // The second request has its own encode step, in which nothing is computed.
    let first = TENSOR_MS + 2.0 + ENCODE_MS + TENSOR_MS + COMPUTE_MS + READ_MS;
    let second = first + 2.0;
    assert!(close(2.0 * both.ttft_ms.mean, first + second), "{both:?} and {first}");
    assert_eq!((both.encoder_saved, both.encoded_elsewhere), (Some(0.5), Some(1.0)));

    let all =
        run_at(&scenario, vec![(0, ask(IMAGE, 1)), (0, ask(IMAGE, 2)), (1000, ask(IMAGE, 3))]);
    let third = TENSOR_MS + COMPUTE_MS + READ_MS;
    assert!(close(3.0 * all.ttft_ms.mean, first + second + third), "{all:?} and {third}");
    // The third request went to another engine, without its blocks.
    assert_eq!((all.hit_rate, all.encoded_elsewhere), (0.0, Some(2.0 / 3.0)));
    assert!(all.encoder_saved.is_some_and(|saved| close(saved, 2.0 / 3.0)), "{all:?}");
}

#[test]
fn images_of_a_request_are_encoded_in_parallel() {
    let scenario = fleet_of(vec![Role::Encode, Role::Encode, Role::Aggregated]);
    let small = Image { id: 2, embeds: 160 };
    let sequence =
        Sequence::new(&[Piece::Image(small), Piece::Image(IMAGE), text(1, 32)], text(9, 1));
    let report = run_at(&scenario, vec![(0, sequence)]);
    // Two threads of six make the tensors in parallel; the larger image takes longest.
    let computed = 2.0 + 1792e3 / 28_000.0 + 1e-6 * 1792.0 * 1792.0 / 2.0 + 1.1 * READ_MS;
    let first = TENSOR_MS + 2.0 + ENCODE_MS + TENSOR_MS + computed;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    assert_eq!(report.encoded_elsewhere, Some(1.0));
}

#[test]
fn embeddings_too_large_for_the_store_are_encoded_again() {
    let scenario = fleet_of(vec![Role::Encode, Role::Aggregated]);
    let engine = EngineModel { embedding_store_bytes: 1600 * 7168 - 1, ..scenario.engine };
    let report = run_at(&Scenario { engine, ..scenario }, vec![(0, ask(IMAGE, 1))]);
    let first = TENSOR_MS + 2.0 + ENCODE_MS + TENSOR_MS + COMPUTE_MS + ENCODE_MS;
    assert!(close(report.ttft_ms.mean, first), "{report:?} and {first}");
    assert_eq!((report.encoder_saved, report.encoded_elsewhere), (Some(-1.0), Some(1.0)));
}

/// Creates a job for these images, with a reservation.
fn encode_job(fleet: &Fleet<'_>, number: u64, images: &[Image]) -> EncodeJob {
    let reservation = fleet.frontends.routers()[0]
        .select(&RouteRequest { prompt_tokens: 1, ..Default::default() });
    EncodeJob::new(number, reservation.unwrap(), images.to_vec())
}

#[test]
fn encode_step_is_bounded_by_its_budget_or_one_image() {
    let scenario = fleet_of(vec![Role::Aggregated]);
    let fleet = Fleet::new(&scenario, Policy::Random, Arrivals::Poisson(1.0));
    let model = EngineModel { max_batched_tokens: 2500, ..EngineModel::default() };
    let mut encoder = Encoder::new(model, EmbeddingStore::new(&model));
    let image = |id, embeds| Image { id, embeds };
    let jobs: [(u64, &[Image]); 5] = [
        (1, &[image(1, 1200)]),
        (2, &[image(2, 1200)]),
        (3, &[image(5, 1200), image(3, 800)]),
        (4, &[image(4, 5000)]),
        (5, &[image(1, 1200)]),
    ];
    for (number, images) in jobs {
        encoder.deliver(encode_job(&fleet, number, images), 0);
    }
    let mut steps = Vec::new();
    let mut now = 0;
    while let Some(end) = encoder.step_end() {
        let work = seconds(end - now) - model.overhead;
        let ended: Vec<u64> = encoder.end_step(end).iter().map(|job| job.number).collect();
        steps.push(((work / model.embed).round(), ended));
        now = end;
    }
    // The image of the last job is cached.
    let expected =
        [(1200.0, vec![1]), (2400.0, vec![2]), (800.0, vec![3]), (5000.0, vec![4]), (0.0, vec![5])];
    assert_eq!(steps, expected);
    assert!(encoder.is_idle() && close(1e3 * encoder.work(), 9400.0 / 70.0), "{}", encoder.work());
}

#[test]
fn requests_of_all_workloads_end_with_idle_encoders() {
    // Small caches: much is evicted, also from the store before it is read.
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
            fleet.simulate(requests(&scenario)).unwrap();
            assert_eq!(fleet.tally.completed + fleet.tally.refused, 200, "{workload}, {policy}");
            assert!(
                fleet.tally.completed > 80 && fleet.awaiting_images.is_empty(),
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
fn busier_engines_have_more_images_encoded_elsewhere() {
    let workers = vec![Role::Encode, Role::Aggregated, Role::Aggregated, Role::Aggregated];
    let scenario = Scenario { workers, ..scenario(Workload::UniqueImages, 4, 600) };
    let run = |rate| {
        let report = scenario.run(Policy::KvMedia, Arrivals::Poisson(rate)).unwrap();
        PolicyReport { wall_seconds: 0.0, ..report }
    };
    let [idle, busy] = [1.0, 35.0].map(run);
    assert!(idle.encoded_elsewhere.is_some_and(|fraction| fraction < 0.01), "{idle:?}");
    assert!(busy.encoded_elsewhere.is_some_and(|fraction| fraction > 0.1), "{busy:?}");
    assert_eq!(busy, run(35.0));
}

#[test]
fn fleet_of_encoding_engines_only_is_refused() {
    let scenario = fleet_of(vec![Role::Encode]);
    assert!(matches!(
        scenario.run(Policy::KvMedia, Arrivals::Poisson(1.0)),
        Err(SimulateError::Config(_))
    ));
}
