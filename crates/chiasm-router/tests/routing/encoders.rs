//! Workers that encode media items for those that compute prompts.

use chiasm_router::{
    Encodes, Policy, Route, RouteError, RouteItem, RouteRequest, Router, RouterConfig, Splitting,
    WorkerInfo,
};
use chiasm_types::{MmHash, Role, WorkerId};

use crate::workload::{INFO, Prompt, router};

const ENCODE: WorkerId = WorkerId(0);
const OTHER_ENCODE: WorkerId = WorkerId(1);
const COMPUTE: WorkerId = WorkerId(2);
const OTHER_COMPUTE: WorkerId = WorkerId(3);

const STORE: u64 = 1 << 30;

/// Two workers that encode and two that do the rest.
fn fleet(change: impl FnOnce(&mut RouterConfig)) -> Router {
    let router = router(0, change);
    for id in [ENCODE, OTHER_ENCODE, COMPUTE, OTHER_COMPUTE] {
        let role = if id < COMPUTE { Role::Encode } else { Role::Aggregated };
        router.add_worker(id, WorkerInfo { role, embedding_store_bytes: STORE, ..INFO });
        router.set_caught_up(id, true);
    }
    router
}

/// A fleet where encoding elsewhere costs nothing.
fn eager() -> Router {
    fleet(|config| config.stages.hop = 0.0)
}

fn item(image: u8, end: usize) -> RouteItem {
    RouteItem { hash: MmHash::new([image; 32]), end, embeds: 1024, elements: 1000 }
}

/// A question about an image that fills 64 blocks.
fn ask(router: &Router, image: u8) -> Route {
    ask_but(router, image, &[]).unwrap()
}

fn ask_but(router: &Router, image: u8, exclude: &[WorkerId]) -> Result<Route, RouteError> {
    let prompt = Prompt::photo_question(image, 1);
    let media = [item(image, 1024)];
    let request = RouteRequest { media: &media, exclude, ..prompt.request() };
    router.select_stages(&[request], Splitting::Allowed)
}

fn encoded_by(route: &Route) -> Vec<WorkerId> {
    route.encodes.iter().map(|encodes| encodes.reservation.worker).collect()
}

/// The workers leave what they were to encode.
fn leave(route: &Route) {
    for Encodes { reservation, items } in &route.encodes {
        items.iter().for_each(|item| reservation.encoded(*item, 1 << 20));
    }
}

#[test]
fn an_image_is_encoded_elsewhere_where_others_would_wait_for_it() {
    let router = fleet(|_| {});
    // Nobody waits: the way to another worker and back is longer.
    let idle = ask(&router, 1);
    assert!(idle.encodes.is_empty() && idle.embedded.is_empty());
    // Those that decode do until they are done.
    let mut others: Vec<Route> = (2..130).map(|image| ask(&router, image)).collect();
    others.iter_mut().for_each(|route| {
        route.encodes.clear();
        route.answers.first_token();
    });
    let busy = ask(&router, 200);
    assert_eq!(busy.encodes.len(), 1);
    assert!(busy.encodes[0].reservation.worker < COMPUTE && busy.answers.worker >= COMPUTE);
    assert_eq!(busy.encodes[0].items, [MmHash::new([200; 32])]);
}

#[test]
fn who_has_more_to_do_is_no_better_for_having_images_encoded_elsewhere() {
    // What waits, runs and was done counts for nothing: all that differs is what would be lost.
    let router = fleet(|config| {
        (config.weights.load, config.weights.queue, config.weights.balance) = (0.0, 0.0, 0.0);
        config.stages.disturb = 10.0;
    });
    let busy: Vec<Route> =
        (2..30).map(|image| ask_but(&router, image, &[OTHER_COMPUTE]).unwrap()).collect();
    assert!(busy.iter().all(|route| route.answers.worker == COMPUTE));
    // The idle one has most of the prompt.
    let prompt = Prompt::photo_question(1, 1);
    router.apply(OTHER_COMPUTE, &prompt.stored());
    assert_eq!(ask(&router, 1).answers.worker, OTHER_COMPUTE);
}

#[test]
fn what_was_left_is_found_by_all_and_encoded_by_nobody() {
    let router = eager();
    let first = ask(&router, 1);
    assert_eq!(first.encodes.len(), 1);
    leave(&first);
    drop(first);
    for exclude in [COMPUTE, OTHER_COMPUTE] {
        let route = ask_but(&router, 1, &[exclude]).unwrap();
        assert_eq!((encoded_by(&route), &route.embedded), (vec![], &vec![MmHash::new([1; 32])]));
    }
}

#[test]
fn what_is_not_found_is_encoded_again() {
    let router = eager();
    leave(&ask(&router, 1));
    router.forget_embeddings(COMPUTE, &[MmHash::new([1; 32])]);
    for exclude in [COMPUTE, OTHER_COMPUTE] {
        let route = ask_but(&router, 1, &[exclude]).unwrap();
        assert!(route.embedded.is_empty());
    }
}

#[test]
fn who_encodes_an_image_is_asked_by_all_who_need_it() {
    let router = eager();
    let first = ask(&router, 1);
    let others: Vec<Route> =
        (0..3).map(|_| ask_but(&router, 1, &[first.answers.worker]).unwrap()).collect();
    // One of them is taken to keep it in its own cache from the first of these on.
    assert_eq!(encoded_by(&others[0]), encoded_by(&first));
    let another = ask(&router, 2);
    assert_ne!(encoded_by(&another), encoded_by(&first), "who has nothing to do gets what is new");
    drop((first, others));
    // It was never told that something was left.
    let again = ask_but(&router, 1, &[]).unwrap();
    assert!(again.embedded.is_empty());
}

#[test]
fn images_of_one_request_are_encoded_at_the_same_time() {
    let router = eager();
    let prompt = Prompt::photo_question(1, 1);
    let media = [item(1, 500), item(2, 1024), item(3, 1030)];
    let request = RouteRequest { media: &media, ..prompt.request() };
    let route = router.select_stages(&[request], Splitting::Allowed).unwrap();
    let mut counts: Vec<_> = route.encodes.iter().map(|encodes| encodes.items.len()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 2]);
}

#[test]
fn only_what_has_to_be_computed_is_encoded() {
    let router = eager();
    let prompt = Prompt::photo_question(1, 1);
    router.apply(COMPUTE, &prompt.stored());
    let route = ask(&router, 1);
    assert_eq!((route.answers.worker, route.encodes.len()), (COMPUTE, 0));
}

#[test]
fn who_holds_a_prompt_is_not_passed_over_for_one_that_has_its_images_encoded_elsewhere() {
    let router = fleet(|config| {
        config.stages.hop = 0.0;
        config.stages.disturb = 1000.0;
    });
    let prompt = Prompt::photo_question(1, 1);
    router.apply(OTHER_COMPUTE, &prompt.stored());
    let route = ask(&router, 1);
    assert_eq!((route.answers.worker, route.encodes.len()), (OTHER_COMPUTE, 0));
}

#[test]
fn what_a_worker_has_itself_and_finds_counts_once() {
    let router = eager();
    let first = ask(&router, 1);
    leave(&first);
    let prompt = Prompt::photo_question(9, 1);
    let media = [item(1, 500), item(2, 1024)];
    let request = RouteRequest { media: &media, ..prompt.request() };
    let (_, explanation) = router.select_stages_explained(&[request], Splitting::Allowed).unwrap();
    // The second image is to be encoded by both, whoever has used the first one.
    let encode = explanation.candidates.iter().map(|considered| considered.terms.encode);
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
        router.add_worker(id, WorkerInfo { role, machine, embedding_store_bytes: STORE, ..INFO });
        router.set_caught_up(id, true);
    }
    let here = ask_but(&router, 1, &[OTHER_COMPUTE]).unwrap();
    assert_eq!(encoded_by(&here), [ENCODE]);
    leave(&here);
    let there = ask_but(&router, 1, &[COMPUTE]).unwrap();
    assert!(there.encodes.is_empty() && there.embedded.is_empty());
}

#[test]
fn who_encodes_answers_nothing() {
    for policy in Policy::ALL {
        let router = fleet(|config| config.policy = policy);
        for image in 0..8 {
            let route = ask(&router, image);
            assert!(route.answers.worker >= COMPUTE && route.prefills.is_none(), "{policy}");
        }
        assert!(matches!(
            ask_but(&router, 1, &[COMPUTE, OTHER_COMPUTE]),
            Err(RouteError::NoWorker)
        ));
        let text = Prompt::text(1, 64);
        assert!(text.select_but(&router, &[COMPUTE, OTHER_COMPUTE]).is_err(), "{policy}");
    }
}

#[test]
fn policies_without_costs_have_all_encoded_by_those_who_are_there_for_it() {
    for policy in [Policy::RoundRobin, Policy::Random, Policy::LeastLoaded, Policy::PowerOfTwo] {
        let router = fleet(|config| config.policy = policy);
        let route = ask(&router, 1);
        assert_eq!(route.encodes.len(), 1, "{policy}");
        leave(&route);
        assert_eq!(ask(&router, 1).embedded.len(), 1, "{policy}");
    }
}

#[test]
fn prompts_and_their_images_are_computed_by_three_workers() {
    let router = router(0, |config| {
        config.stages.hop = 0.0;
        config.stages.disturb = 1000.0;
    });
    for (id, role) in
        [(ENCODE, Role::Encode), (COMPUTE, Role::Prefill), (OTHER_COMPUTE, Role::Decode)]
    {
        router.add_worker(id, WorkerInfo { role, embedding_store_bytes: STORE, ..INFO });
        router.set_caught_up(id, true);
    }
    let route = ask(&router, 1);
    let prefills = route.prefills.as_ref().map(|prefills| prefills.worker);
    assert_eq!(
        (encoded_by(&route), prefills, route.answers.worker),
        (vec![ENCODE], Some(COMPUTE), OTHER_COMPUTE)
    );
    leave(&route);
    let waiting = |router: &Router| {
        router.workers().iter().map(|worker| worker.pending_tokens).collect::<Vec<_>>()
    };
    assert_eq!(waiting(&router), [1024, 1064, 1]);
    drop(route);
    assert_eq!(waiting(&router), [0, 0, 0]);
    assert!(router.workers().iter().all(|worker| worker.requests == 0));
}

#[test]
fn without_those_who_encode_the_others_do_it() {
    let router = eager();
    let route = ask_but(&router, 1, &[ENCODE, OTHER_ENCODE]).unwrap();
    assert!(route.encodes.is_empty());
    router.set_suspect(ENCODE, true);
    assert_eq!(encoded_by(&ask(&router, 2)), [OTHER_ENCODE]);
    router.remove_worker(OTHER_ENCODE);
    assert!(ask(&router, 3).encodes.is_empty());
}
