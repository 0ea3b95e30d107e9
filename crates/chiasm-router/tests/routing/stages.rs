//! Tests of workers that prefill for others, and of workers that decode.

use chiasm_router::{
    Policy, Route, RouteError, RouteItem, RouteRequest, Router, RouterConfig, Splitting, WorkerInfo,
};
use chiasm_types::{MmHash, Role, WorkerId};

use crate::workload::{INFO, Prompt, router};

const PREFILL: WorkerId = WorkerId(0);
const OTHER_PREFILL: WorkerId = WorkerId(1);
const DECODE: WorkerId = WorkerId(2);
const OTHER_DECODE: WorkerId = WorkerId(3);

/// Creates two workers of each role.
fn fleet(change: impl FnOnce(&mut RouterConfig)) -> Router {
    let router = router(0, change);
    for id in [PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE] {
        let role = if id < DECODE { Role::Prefill } else { Role::Decode };
        router.add_worker(id, WorkerInfo { role, ..INFO });
        router.set_caught_up(id, true);
    }
    router
}

/// Routes a prompt that may be split.
fn split(router: &Router, prompt: &Prompt) -> Route {
    router.select_stages(&[prompt.request()], Splitting::Allowed).unwrap()
}

/// Returns the worker that computes the prompt, if it is not the one that answers.
fn prefill_worker(route: &Route) -> Option<WorkerId> {
    route.prefill.as_ref().map(|prefill| prefill.worker)
}

/// Starts this number of answers on each worker that decodes.
fn start_answers(router: &Router, per_worker: u32) -> Vec<Route> {
    let mut routes: Vec<Route> = (0..2 * per_worker)
        .map(|number| {
            let prompt = Prompt::text(1000 + number, 16);
            router.select_stages(&[prompt.request()], Splitting::Forbidden).unwrap()
        })
        .collect();
    routes.iter_mut().for_each(|route| route.answer.first_token());
    routes
}

#[test]
fn only_long_prompts_are_split_from_busy_decode_workers() {
    let router = fleet(|_| {});
    let long = Prompt::text(1, 4000);
    let short = Prompt::text(2, 200);
    // No other request would wait.
    assert_eq!(prefill_worker(&split(&router, &long)), None);
    let _answers = start_answers(&router, 40);
    let route = split(&router, &long);
    assert!(prefill_worker(&route).is_some_and(|id| id < DECODE) && route.answer.worker >= DECODE);
    assert_eq!(prefill_worker(&split(&router, &short)), None);
}

#[test]
fn prompt_held_by_a_decode_worker_is_not_split() {
    let router = fleet(|_| {});
    let _answers = start_answers(&router, 40);
    let prompt = Prompt::text(1, 4000);
    router.apply(OTHER_DECODE, &prompt.stored());
    let route = split(&router, &prompt);
    assert_eq!((prefill_worker(&route), route.answer.worker), (None, OTHER_DECODE));
}

#[test]
fn split_prompt_goes_to_the_prefill_worker_that_holds_it() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let prompt = Prompt::text(1, 4000);
    for holder in [OTHER_PREFILL, PREFILL] {
        router.apply(holder, &prompt.stored());
        let route = split(&router, &prompt);
        let prefill = route.prefill.as_ref().unwrap();
        assert_eq!((prefill.worker, prefill.overlap_blocks), (holder, 250));
        assert_eq!(route.answer.overlap_blocks, 0);
        router.apply(holder, &prompt.removed());
    }
}

#[test]
fn split_requests_spread_over_both_roles() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let first = split(&router, &Prompt::text(1, 4000));
    let second = split(&router, &Prompt::text(2, 4000));
    assert_ne!(first.answer.worker, second.answer.worker);
    assert_ne!(prefill_worker(&first), prefill_worker(&second));
}

#[test]
fn burst_of_long_prompts_is_computed_by_all_workers() {
    let router = fleet(|config| config.stages.disturb = 0.0);
    let routes: Vec<Route> =
        (0..8).map(|number| split(&router, &Prompt::text(number, 4000))).collect();
    for worker in [PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE] {
        let computes =
            |route: &&Route| prefill_worker(route).unwrap_or(route.answer.worker) == worker;
        assert_eq!(routes.iter().filter(computes).count(), 2, "{worker}");
    }
}

#[test]
fn forbidden_splitting_keeps_one_worker() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let prompt = Prompt::text(1, 4000);
    let route = router.select_stages(&[prompt.request()], Splitting::Forbidden).unwrap();
    assert!(route.prefill.is_none() && route.answer.worker >= DECODE);
}

#[test]
fn remaining_workers_take_over_missing_stages() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let prompt = Prompt::text(1, 4000);
    let workers_without = |exclude: &[WorkerId]| {
        let request = RouteRequest { exclude, ..prompt.request() };
        let route = router.select_stages(&[request], Splitting::Allowed)?;
        Ok::<_, RouteError>((prefill_worker(&route), route.answer.worker))
    };
    assert_eq!(workers_without(&[PREFILL, DECODE]), Ok((Some(OTHER_PREFILL), OTHER_DECODE)));
    assert_eq!(workers_without(&[PREFILL, OTHER_PREFILL, DECODE]), Ok((None, OTHER_DECODE)));
    assert_eq!(workers_without(&[PREFILL, DECODE, OTHER_DECODE]), Ok((None, OTHER_PREFILL)));
    assert_eq!(
        workers_without(&[PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE]),
        Err(RouteError::NoWorker)
    );
}

#[test]
fn policies_without_costs_always_split() {
    for policy in [Policy::RoundRobin, Policy::Random, Policy::LeastLoaded, Policy::PowerOfTwo] {
        let router = fleet(|config| config.policy = policy);
        for number in 0..8 {
            let route = split(&router, &Prompt::text(number, 32));
            assert!(
                prefill_worker(&route).is_some_and(|id| id < DECODE)
                    && route.answer.worker >= DECODE,
                "{policy}"
            );
        }
    }
}

#[test]
fn session_is_answered_by_its_worker() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let ask = |number| {
        let prompt = Prompt::text(number, 4000);
        let request = RouteRequest { session: Some(7), ..prompt.request() };
        router.select_stages(&[request], Splitting::Allowed).unwrap()
    };
    let first = ask(1);
    for number in 2..6 {
        let next = ask(number);
        assert_eq!(next.answer.worker, first.answer.worker);
        assert!(prefill_worker(&next).is_some());
    }
}

#[test]
fn both_workers_are_released() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let mut route = split(&router, &Prompt::text(1, 4000));
    let requests = || router.workers().iter().map(|worker| worker.requests).sum::<usize>();
    assert_eq!(requests(), 2);
    let promised = || router.workers().iter().map(|worker| worker.promised_blocks).sum::<usize>();
    assert_eq!(promised(), 500);
    if let Some(mut prefill) = route.prefill.take() {
        prefill.first_token();
    }
    assert_eq!(requests(), 1);
    route.answer.first_token();
    drop(route);
    assert_eq!(requests(), 0);
    assert!(
        router
            .workers()
            .iter()
            .all(|worker| worker.blocks_in_use == 0 && worker.pending_tokens == 0)
    );
}

#[test]
fn prompts_are_handed_over_within_a_machine() {
    let router = router(0, |config| config.stages.disturb = 1000.0);
    for (id, role, machine) in [
        (PREFILL, Role::Prefill, 1),
        (OTHER_PREFILL, Role::Prefill, 2),
        (DECODE, Role::Decode, 2),
        (OTHER_DECODE, Role::Decode, 3),
    ] {
        router.add_worker(id, WorkerInfo { role, machine, handover_domain: machine, ..INFO });
        router.set_caught_up(id, true);
    }
    let prompt = Prompt::text(1, 4000);
    // The other machine holds the prompt, but can't hand it over.
    router.apply(PREFILL, &prompt.stored());
    let route = split(&router, &prompt);
    assert_eq!((prefill_worker(&route), route.answer.worker), (Some(OTHER_PREFILL), DECODE));
    let request = RouteRequest { exclude: &[DECODE], ..prompt.request() };
    let route = router.select_stages(&[request], Splitting::Allowed).unwrap();
    assert_eq!((prefill_worker(&route), route.answer.worker), (None, OTHER_DECODE));
}

/// Handover domains of two networks.
const NETWORK: u64 = 1 << 63;
const OTHER_NETWORK: u64 = 1 << 62;

/// Creates workers with these ids, roles, handover domains and machines.
fn on_machines(workers: [(WorkerId, Role, u64, u64); 4], network_transfer: f64) -> Router {
    let router = router(0, |config| {
        config.stages.disturb = 1000.0;
        config.stages.network_transfer = network_transfer;
    });
    for (id, role, handover_domain, machine) in workers {
        router.add_worker(id, WorkerInfo { role, machine, handover_domain, ..INFO });
        router.set_caught_up(id, true);
    }
    router
}

#[test]
fn prompts_are_handed_over_within_a_network_only() {
    let router = on_machines(
        [
            (PREFILL, Role::Prefill, NETWORK, 1),
            (OTHER_PREFILL, Role::Prefill, OTHER_NETWORK, 2),
            (DECODE, Role::Decode, NETWORK, 3),
            (OTHER_DECODE, Role::Decode, 4, 4),
        ],
        2.0,
    );
    let prompt = Prompt::text(1, 4000);
    // The worker on the other network holds the prompt, but can't hand it over.
    router.apply(OTHER_PREFILL, &prompt.stored());
    let route = split(&router, &prompt);
    assert_eq!((prefill_worker(&route), route.answer.worker), (Some(PREFILL), DECODE));
    let without = |exclude: WorkerId| {
        let request = RouteRequest { exclude: &[exclude], ..prompt.request() };
        router.select_stages(&[request], Splitting::Allowed).unwrap()
    };
    assert_eq!(prefill_worker(&without(PREFILL)), None);
    let route = without(DECODE);
    assert_eq!((prefill_worker(&route), route.answer.worker), (None, OTHER_DECODE));
}

#[test]
fn different_handover_domains_on_one_machine_are_no_pair() {
    let router = on_machines(
        [
            (PREFILL, Role::Prefill, NETWORK, 1),
            (DECODE, Role::Decode, 1, 1),
            (OTHER_PREFILL, Role::Prefill, 2, 2),
            (OTHER_DECODE, Role::Decode, OTHER_NETWORK, 2),
        ],
        2.0,
    );
    for number in 0..4 {
        assert_eq!(prefill_worker(&split(&router, &Prompt::text(number, 4000))), None);
    }
}

#[test]
fn network_transfer_is_weighed_against_held_blocks() {
    let workers = |decode_machine| {
        [
            (PREFILL, Role::Prefill, NETWORK, 1),
            (OTHER_PREFILL, Role::Prefill, NETWORK, 2),
            (DECODE, Role::Decode, NETWORK, decode_machine),
            (OTHER_DECODE, Role::Decode, NETWORK, 2),
        ]
    };
    let prompt = Prompt::text(1, 4000);
    let pair = |router: &Router| {
        // This worker holds 128 of the 250 blocks, which would cost 16 each.
        router.apply(PREFILL, &Prompt::text(1, 2048).stored());
        let route = split(router, &prompt);
        (prefill_worker(&route), route.answer.worker)
    };
    assert_eq!(pair(&on_machines(workers(1), 1000.0)), (Some(PREFILL), DECODE));
    // Both decode workers are on the other machine: the held blocks are worth a cheap transfer, but
    // not an expensive one.
    let (prefill, _) = pair(&on_machines(workers(2), 2.0));
    assert_eq!(prefill, Some(PREFILL));
    let (prefill, _) = pair(&on_machines(workers(2), 1000.0));
    assert_eq!(prefill, Some(OTHER_PREFILL));
}

#[test]
fn round_robin_alternates_within_a_role() {
    let router = fleet(|config| config.policy = Policy::RoundRobin);
    let routes: Vec<Route> =
        (0..4).map(|number| split(&router, &Prompt::text(number, 160))).collect();
    let prefill_workers: Vec<_> = routes.iter().filter_map(prefill_worker).collect();
    assert_eq!(prefill_workers, [PREFILL, OTHER_PREFILL, PREFILL, OTHER_PREFILL]);
}

#[test]
fn tensors_of_a_split_request_are_on_both_workers() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let ask = |question: u32| {
        let prompt = Prompt::photo_question(7, question);
        let media =
            [RouteItem { hash: MmHash::new([7; 32]), end: 1024, embeds: 1024, elements: 1000 }];
        let request = RouteRequest { media: &media, ..prompt.request() };
        router.select_stages_explained(&[request], Splitting::Allowed).unwrap()
    };
    let (first, _) = ask(1);
    let (_, explanation) = ask(2);
    let terms = |id: WorkerId| {
        explanation.candidates.iter().find(|candidate| candidate.worker == id).unwrap().terms
    };
    let same = terms(first.answer.worker);
    let other = terms(WorkerId(5 - first.answer.worker.0));
    assert!(same.process < other.process, "{same:?} {other:?}");
}
