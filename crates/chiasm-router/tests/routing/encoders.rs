//! Tests of workers that encode media items for workers that compute prompts.

use chiasm_router::{
    EncodeStage, Policy, Route, RouteError, RouteItem, RouteRequest, Router, RouterConfig,
    Splitting, WorkerInfo,
};
use chiasm_types::{MmHash, Role, WorkerId};

use crate::workload::{INFO, Prompt, router};

const ENCODE: WorkerId = WorkerId(0);
const OTHER_ENCODE: WorkerId = WorkerId(1);
const COMPUTE: WorkerId = WorkerId(2);
const OTHER_COMPUTE: WorkerId = WorkerId(3);

const STORE_BYTES: u64 = 1 << 30;

/// Creates two workers that encode and two that do the rest.
fn fleet(change: impl FnOnce(&mut RouterConfig)) -> Router {
    let router = router(0, change);
    for id in [ENCODE, OTHER_ENCODE, COMPUTE, OTHER_COMPUTE] {
        let role = if id < COMPUTE { Role::Encode } else { Role::Aggregated };
        router.add_worker(id, WorkerInfo { role, embedding_store_bytes: STORE_BYTES, ..INFO });
        router.set_caught_up(id, true);
    }
    router
}

/// Creates a fleet where encoding elsewhere has no fixed cost.
fn fleet_with_free_hops() -> Router {
    fleet(|config| config.stages.hop = 0.0)
}

fn item(image: u8, end: usize) -> RouteItem {
    RouteItem { hash: MmHash::new([image; 32]), end, embeds: 1024, elements: 1000 }
}

/// Routes a question about an image that fills 64 blocks.
fn ask(router: &Router, image: u8) -> Route {
    ask_excluding(router, image, &[]).unwrap()
}

fn ask_excluding(router: &Router, image: u8, exclude: &[WorkerId]) -> Result<Route, RouteError> {
    let prompt = Prompt::photo_question(image, 1);
    let media = [item(image, 1024)];
    let request = RouteRequest { media: &media, exclude, ..prompt.request() };
    router.select_stages(&[request], Splitting::Allowed)
}

/// Returns the workers that encode media items for a route.
fn encode_workers(route: &Route) -> Vec<WorkerId> {
    route.encode_stages.iter().map(|stage| stage.reservation.worker).collect()
}

/// Records that the workers have stored the embeddings they were to encode.
fn store_embeddings(route: &Route) {
    for EncodeStage { reservation, items } in &route.encode_stages {
        items.iter().for_each(|item| reservation.encoded(*item, 1 << 20));
    }
}

#[test]
fn image_is_encoded_elsewhere_if_other_requests_would_wait() {
    let router = fleet(|_| {});
    // No other request waits, so another worker would only add delay.
    let idle = ask(&router, 1);
    assert!(idle.encode_stages.is_empty() && idle.embedded.is_empty());
    // These requests decode until the end of the test.
    let mut others: Vec<Route> = (2..130).map(|image| ask(&router, image)).collect();
    others.iter_mut().for_each(|route| {
        route.encode_stages.clear();
        route.answer.first_token();
    });
    let busy = ask(&router, 200);
    assert_eq!(busy.encode_stages.len(), 1);
    assert!(busy.encode_stages[0].reservation.worker < COMPUTE && busy.answer.worker >= COMPUTE);
    assert_eq!(busy.encode_stages[0].items, [MmHash::new([200; 32])]);
}

#[test]
fn avoided_disturbance_is_no_advantage_for_a_busy_worker() {
    // Load, queue and recent work cost nothing: workers only differ in the disturbance.
    let router = fleet(|config| {
        config.weights.load = 0.0;
        config.weights.queue = 0.0;
        config.weights.balance = 0.0;
        config.stages.disturb = 10.0;
    });
    let busy: Vec<Route> =
        (2..30).map(|image| ask_excluding(&router, image, &[OTHER_COMPUTE]).unwrap()).collect();
    assert!(busy.iter().all(|route| route.answer.worker == COMPUTE));
    // The idle worker has most of the prompt.
    let prompt = Prompt::photo_question(1, 1);
    router.apply(OTHER_COMPUTE, &prompt.stored());
    assert_eq!(ask(&router, 1).answer.worker, OTHER_COMPUTE);
}

#[test]
fn stored_embeddings_are_found_by_the_whole_machine() {
    let router = fleet_with_free_hops();
    let first = ask(&router, 1);
    assert_eq!(first.encode_stages.len(), 1);
    store_embeddings(&first);
    drop(first);
    for exclude in [COMPUTE, OTHER_COMPUTE] {
        let route = ask_excluding(&router, 1, &[exclude]).unwrap();
        assert!(encode_workers(&route).is_empty());
        assert_eq!(route.embedded, [MmHash::new([1; 32])]);
    }
}

#[test]
fn missing_embeddings_are_encoded_again() {
    let router = fleet_with_free_hops();
    store_embeddings(&ask(&router, 1));
    router.forget_embeddings(COMPUTE, &[MmHash::new([1; 32])]);
    for exclude in [COMPUTE, OTHER_COMPUTE] {
        let route = ask_excluding(&router, 1, &[exclude]).unwrap();
        assert!(route.embedded.is_empty());
    }
}

#[test]
fn pending_encode_is_shared_by_all_requests() {
    let router = fleet_with_free_hops();
    let first = ask(&router, 1);
    let others: Vec<Route> =
        (0..3).map(|_| ask_excluding(&router, 1, &[first.answer.worker]).unwrap()).collect();
    // From the first of these on, their worker is expected to have the image in its own cache.
    assert_eq!(encode_workers(&others[0]), encode_workers(&first));
    let another = ask(&router, 2);
    assert_ne!(encode_workers(&another), encode_workers(&first), "the idle encoder gets it");
    drop((first, others));
    // The router was never notified of stored embeddings.
    let again = ask_excluding(&router, 1, &[]).unwrap();
    assert!(again.embedded.is_empty());
}

#[test]
fn images_of_a_request_are_spread_over_the_encoders() {
    let router = fleet_with_free_hops();
    let prompt = Prompt::photo_question(1, 1);
    let media = [item(1, 500), item(2, 1024), item(3, 1030)];
    let request = RouteRequest { media: &media, ..prompt.request() };
    let route = router.select_stages(&[request], Splitting::Allowed).unwrap();
    let mut counts: Vec<_> = route.encode_stages.iter().map(|stage| stage.items.len()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 2]);
}

#[test]
fn images_within_held_blocks_are_not_encoded() {
    let router = fleet_with_free_hops();
    let prompt = Prompt::photo_question(1, 1);
    router.apply(COMPUTE, &prompt.stored());
    let route = ask(&router, 1);
    assert_eq!((route.answer.worker, route.encode_stages.len()), (COMPUTE, 0));
}

#[test]
fn prompt_holder_is_preferred_over_encoding_elsewhere() {
    let router = fleet(|config| {
        config.stages.hop = 0.0;
        config.stages.disturb = 1000.0;
    });
    let prompt = Prompt::photo_question(1, 1);
    router.apply(OTHER_COMPUTE, &prompt.stored());
    let route = ask(&router, 1);
    assert_eq!((route.answer.worker, route.encode_stages.len()), (OTHER_COMPUTE, 0));
}

#[test]
fn cached_item_in_the_store_is_subtracted_once() {
    let router = fleet_with_free_hops();
    let first = ask(&router, 1);
    store_embeddings(&first);
    let prompt = Prompt::photo_question(9, 1);
    let media = [item(1, 500), item(2, 1024)];
    let request = RouteRequest { media: &media, ..prompt.request() };
    let (_, explanation) = router.select_stages_explained(&[request], Splitting::Allowed).unwrap();
    // Both workers would have to encode the second image, whichever has used the first one.
    let encode = explanation.candidates.iter().map(|candidate| candidate.terms.encode);
    assert_eq!(encode.collect::<Vec<_>>(), [64.0, 64.0]);
}

#[test]
fn embeddings_stay_on_their_machine() {
    let router = router(0, |config| config.stages.hop = 0.0);
    for (id, role, machine) in [
        (ENCODE, Role::Encode, 1),
        (COMPUTE, Role::Aggregated, 1),
        (OTHER_COMPUTE, Role::Aggregated, 2),
    ] {
        router.add_worker(
            id,
            WorkerInfo { role, machine, embedding_store_bytes: STORE_BYTES, ..INFO },
        );
        router.set_caught_up(id, true);
    }
    let here = ask_excluding(&router, 1, &[OTHER_COMPUTE]).unwrap();
    assert_eq!(encode_workers(&here), [ENCODE]);
    store_embeddings(&here);
    let there = ask_excluding(&router, 1, &[COMPUTE]).unwrap();
    assert!(there.encode_stages.is_empty() && there.embedded.is_empty());
}

#[test]
fn encode_worker_never_answers() {
    for policy in Policy::ALL {
        let router = fleet(|config| config.policy = policy);
        for image in 0..8 {
            let route = ask(&router, image);
            assert!(route.answer.worker >= COMPUTE && route.prefill.is_none(), "{policy}");
        }
        assert!(matches!(
            ask_excluding(&router, 1, &[COMPUTE, OTHER_COMPUTE]),
            Err(RouteError::NoWorker)
        ));
        let text = Prompt::text(1, 64);
        assert!(text.select_excluding(&router, &[COMPUTE, OTHER_COMPUTE]).is_err(), "{policy}");
    }
}

#[test]
fn policies_without_costs_always_use_encode_workers() {
    for policy in [Policy::RoundRobin, Policy::Random, Policy::LeastLoaded, Policy::PowerOfTwo] {
        let router = fleet(|config| config.policy = policy);
        let route = ask(&router, 1);
        assert_eq!(route.encode_stages.len(), 1, "{policy}");
        store_embeddings(&route);
        assert_eq!(ask(&router, 1).embedded.len(), 1, "{policy}");
    }
}

#[test]
fn encode_prefill_decode_use_three_workers() {
    let router = router(0, |config| {
        config.stages.hop = 0.0;
        config.stages.disturb = 1000.0;
    });
    for (id, role) in
        [(ENCODE, Role::Encode), (COMPUTE, Role::Prefill), (OTHER_COMPUTE, Role::Decode)]
    {
        router.add_worker(id, WorkerInfo { role, embedding_store_bytes: STORE_BYTES, ..INFO });
        router.set_caught_up(id, true);
    }
    let route = ask(&router, 1);
    assert_eq!(encode_workers(&route), [ENCODE]);
    assert_eq!(route.prefill.as_ref().map(|prefill| prefill.worker), Some(COMPUTE));
    assert_eq!(route.answer.worker, OTHER_COMPUTE);
    store_embeddings(&route);
    let pending = |router: &Router| {
        router.workers().iter().map(|worker| worker.pending_tokens).collect::<Vec<_>>()
    };
    assert_eq!(pending(&router), [1024, 1064, 1]);
    drop(route);
    assert_eq!(pending(&router), [0, 0, 0]);
    assert!(router.workers().iter().all(|worker| worker.requests == 0));
}

#[test]
fn items_are_encoded_in_place_without_encode_workers() {
    let router = fleet_with_free_hops();
    let route = ask_excluding(&router, 1, &[ENCODE, OTHER_ENCODE]).unwrap();
    assert!(route.encode_stages.is_empty());
    router.set_suspect(ENCODE, true);
    assert_eq!(encode_workers(&ask(&router, 2)), [OTHER_ENCODE]);
    router.remove_worker(OTHER_ENCODE);
    assert!(ask(&router, 3).encode_stages.is_empty());
}
