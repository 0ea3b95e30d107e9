//! Workers that prefill for others and workers that decode.

use chiasm_router::{
    Policy, Route, RouteError, RouteItem, RouteRequest, Router, RouterConfig, Splitting, WorkerInfo,
};
use chiasm_types::{MmHash, Role, WorkerId};

use crate::workload::{INFO, Prompt, router};

const PREFILL: WorkerId = WorkerId(0);
const OTHER_PREFILL: WorkerId = WorkerId(1);
const DECODE: WorkerId = WorkerId(2);
const OTHER_DECODE: WorkerId = WorkerId(3);

/// Two workers of each role.
fn fleet(change: impl FnOnce(&mut RouterConfig)) -> Router {
    let router = router(0, change);
    for id in [PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE] {
        let role = if id < DECODE { Role::Prefill } else { Role::Decode };
        router.add_worker(id, WorkerInfo { role, ..INFO });
        router.set_caught_up(id, true);
    }
    router
}

fn split(router: &Router, prompt: &Prompt) -> Route {
    router.select_stages(&[prompt.request()], Splitting::Allowed).unwrap()
}

/// Who computes the prompt, if not whoever answers.
fn prefills(route: &Route) -> Option<WorkerId> {
    route.prefills.as_ref().map(|prefills| prefills.worker)
}

/// As if several answers were under way on each worker that decodes.
fn busy(router: &Router, answers: usize) -> Vec<Route> {
    let others = [Splitting::Forbidden].into_iter().cycle().take(2 * answers);
    let mut routes: Vec<Route> = others
        .enumerate()
        .map(|(number, splitting)| {
            let prompt = Prompt::text(1000 + number as u32, 16);
            router.select_stages(&[prompt.request()], splitting).unwrap()
        })
        .collect();
    routes.iter_mut().for_each(|route| route.answers.first_token());
    routes
}

#[test]
fn long_prompts_are_computed_elsewhere_where_many_answers_would_wait_and_short_ones_are_not() {
    let router = fleet(|_| {});
    let (long, short) = (Prompt::text(1, 4000), Prompt::text(2, 200));
    // Nobody would wait but the request itself.
    assert_eq!(prefills(&split(&router, &long)), None);
    let _answers = busy(&router, 40);
    let route = split(&router, &long);
    assert!(prefills(&route).is_some_and(|id| id < DECODE) && route.answers.worker >= DECODE);
    assert_eq!(prefills(&split(&router, &short)), None);
}

#[test]
fn what_a_worker_that_decodes_holds_is_not_computed_elsewhere() {
    let router = fleet(|_| {});
    let _answers = busy(&router, 40);
    let prompt = Prompt::text(1, 4000);
    router.apply(OTHER_DECODE, &prompt.stored());
    let route = split(&router, &prompt);
    assert_eq!((prefills(&route), route.answers.worker), (None, OTHER_DECODE));
}

#[test]
fn a_prompt_goes_to_the_worker_of_its_role_that_holds_most_of_it() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let prompt = Prompt::text(1, 4000);
    for holder in [OTHER_PREFILL, PREFILL] {
        router.apply(holder, &prompt.stored());
        let route = split(&router, &prompt);
        let prefills = route.prefills.as_ref().unwrap();
        assert_eq!(
            (prefills.worker, prefills.overlap_blocks, route.answers.overlap_blocks),
            (holder, 250, 0)
        );
        router.apply(holder, &prompt.removed());
    }
}

#[test]
fn of_those_that_decode_the_one_with_less_to_do_answers() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let first = split(&router, &Prompt::text(1, 4000));
    let second = split(&router, &Prompt::text(2, 4000));
    assert_ne!(first.answers.worker, second.answers.worker);
    assert_ne!(prefills(&first), prefills(&second));
}

#[test]
fn burst_of_long_prompts_is_computed_by_all_workers() {
    let router = fleet(|config| config.stages.disturb = 0.0);
    let routes: Vec<Route> =
        (0..8).map(|number| split(&router, &Prompt::text(number, 4000))).collect();
    for worker in [PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE] {
        let computes = |route: &&Route| prefills(route).unwrap_or(route.answers.worker) == worker;
        assert_eq!(routes.iter().filter(computes).count(), 2, "{worker}");
    }
}

#[test]
fn a_request_that_must_not_be_split_is_not() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let prompt = Prompt::text(1, 4000);
    let route = router.select_stages(&[prompt.request()], Splitting::Forbidden).unwrap();
    assert!(route.prefills.is_none() && route.answers.worker >= DECODE);
}

#[test]
fn who_is_left_does_what_there_is_to_do() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let prompt = Prompt::text(1, 4000);
    let but = |exclude: &[WorkerId]| {
        let request = RouteRequest { exclude, ..prompt.request() };
        let route = router.select_stages(&[request], Splitting::Allowed)?;
        Ok::<_, RouteError>((prefills(&route), route.answers.worker))
    };
    assert_eq!(but(&[PREFILL, DECODE]), Ok((Some(OTHER_PREFILL), OTHER_DECODE)));
    assert_eq!(but(&[PREFILL, OTHER_PREFILL, DECODE]), Ok((None, OTHER_DECODE)));
    assert_eq!(but(&[PREFILL, DECODE, OTHER_DECODE]), Ok((None, OTHER_PREFILL)));
    assert_eq!(but(&[PREFILL, OTHER_PREFILL, DECODE, OTHER_DECODE]), Err(RouteError::NoWorker));
}

#[test]
fn policies_without_costs_take_each_worker_for_what_it_is_there_for() {
    for policy in [Policy::RoundRobin, Policy::Random, Policy::LeastLoaded, Policy::PowerOfTwo] {
        let router = fleet(|config| config.policy = policy);
        for number in 0..8 {
            let route = split(&router, &Prompt::text(number, 32));
            assert!(
                prefills(&route).is_some_and(|id| id < DECODE) && route.answers.worker >= DECODE,
                "{policy}"
            );
        }
    }
}

#[test]
fn a_session_is_answered_where_it_was() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let ask = |number| {
        let prompt = Prompt::text(number, 4000);
        let request = RouteRequest { session: Some(7), ..prompt.request() };
        router.select_stages(&[request], Splitting::Allowed).unwrap()
    };
    let first = ask(1);
    for number in 2..6 {
        let next = ask(number);
        assert_eq!(next.answers.worker, first.answers.worker);
        assert!(prefills(&next).is_some());
    }
}

#[test]
fn both_workers_are_let_go_of() {
    let router = fleet(|config| config.stages.disturb = 1000.0);
    let mut route = split(&router, &Prompt::text(1, 4000));
    let requests = || router.workers().iter().map(|worker| worker.requests).sum::<usize>();
    assert_eq!(requests(), 2);
    let promised = || router.workers().iter().map(|worker| worker.promised_blocks).sum::<usize>();
    assert_eq!(promised(), 500);
    if let Some(mut prefills) = route.prefills.take() {
        prefills.first_token();
    }
    assert_eq!(requests(), 1);
    route.answers.first_token();
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
        router.add_worker(id, WorkerInfo { role, machine, hands_over_in: machine, ..INFO });
        router.set_caught_up(id, true);
    }
    let prompt = Prompt::text(1, 4000);
    // What another machine holds is of no use.
    router.apply(PREFILL, &prompt.stored());
    let route = split(&router, &prompt);
    assert_eq!((prefills(&route), route.answers.worker), (Some(OTHER_PREFILL), DECODE));
    let but = RouteRequest { exclude: &[DECODE], ..prompt.request() };
    let route = router.select_stages(&[but], Splitting::Allowed).unwrap();
    assert_eq!((prefills(&route), route.answers.worker), (None, OTHER_DECODE));
}

/// Where prompts are handed over on a network of these machines.
const NETWORK: u64 = 1 << 63;
const OTHER_NETWORK: u64 = 1 << 62;

/// Engines with their roles, the networks or machines that they hand over prompts in, and their
/// machines.
fn on_machines(engines: [(WorkerId, Role, u64, u64); 4], network_transfer: f64) -> Router {
    let router = router(0, |config| {
        config.stages.disturb = 1000.0;
        config.stages.network_transfer = network_transfer;
    });
    for (id, role, hands_over_in, machine) in engines {
        router.add_worker(id, WorkerInfo { role, machine, hands_over_in, ..INFO });
        router.set_caught_up(id, true);
    }
    router
}

#[test]
fn prompts_are_handed_over_between_machines_of_one_private_network_and_of_no_two() {
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
    // What is on another network is of no use.
    router.apply(OTHER_PREFILL, &prompt.stored());
    let route = split(&router, &prompt);
    assert_eq!((prefills(&route), route.answers.worker), (Some(PREFILL), DECODE));
    let without = |exclude: WorkerId| {
        let request = RouteRequest { exclude: &[exclude], ..prompt.request() };
        router.select_stages(&[request], Splitting::Allowed).unwrap()
    };
    assert_eq!(prefills(&without(PREFILL)), None);
    let route = without(DECODE);
    assert_eq!((prefills(&route), route.answers.worker), (None, OTHER_DECODE));
}

#[test]
fn a_machine_with_and_one_without_a_network_are_no_pair_although_they_are_one_machine() {
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
        assert_eq!(prefills(&split(&router, &Prompt::text(number, 4000))), None);
    }
}

#[test]
fn a_prompt_goes_to_another_machine_if_that_has_less_to_do_for_what_the_network_takes() {
    let engines = |decode_machine| {
        [
            (PREFILL, Role::Prefill, NETWORK, 1),
            (OTHER_PREFILL, Role::Prefill, NETWORK, 2),
            (DECODE, Role::Decode, NETWORK, decode_machine),
            (OTHER_DECODE, Role::Decode, NETWORK, 2),
        ]
    };
    let prompt = Prompt::text(1, 4000);
    let pair = |router: &Router| {
        // 128 of 250 blocks need not be computed by the one, which is worth 16 each.
        router.apply(PREFILL, &Prompt::text(1, 2048).stored());
        let route = split(router, &prompt);
        (prefills(&route), route.answers.worker)
    };
    assert_eq!(pair(&on_machines(engines(1), 1000.0)), (Some(PREFILL), DECODE));
    // Both decode on the other machine: what is held elsewhere is worth a cheap way, and not a dear
    // one.
    let (by, _) = pair(&on_machines(engines(2), 2.0));
    assert_eq!(by, Some(PREFILL));
    let (by, _) = pair(&on_machines(engines(2), 1000.0));
    assert_eq!(by, Some(OTHER_PREFILL));
}

#[test]
fn one_after_the_other_means_those_of_a_role() {
    let router = fleet(|config| config.policy = Policy::RoundRobin);
    let routes: Vec<Route> =
        (0..4).map(|number| split(&router, &Prompt::text(number, 160))).collect();
    let prefill: Vec<_> = routes.iter().filter_map(prefills).collect();
    assert_eq!(prefill, [PREFILL, OTHER_PREFILL, PREFILL, OTHER_PREFILL]);
}

#[test]
fn the_tensors_of_a_split_request_are_at_both_workers() {
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
    let of = |id: WorkerId| {
        explanation.candidates.iter().find(|considered| considered.worker == id).unwrap().terms
    };
    let (here, elsewhere) = (of(first.answers.worker), of(WorkerId(5 - first.answers.worker.0)));
    assert!(here.process < elsewhere.process, "{here:?} {elsewhere:?}");
}
