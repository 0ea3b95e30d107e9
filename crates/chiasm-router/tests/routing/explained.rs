//! What is told of a choice is what was compared.

use chiasm_router::{Decision, Policy, RouteItem, RouteRequest, Router};
use chiasm_types::{MmHash, WorkerId};
use proptest::prelude::*;

use crate::workload::{BLOCK, Prompt, router};

fn image(number: u8) -> RouteItem {
    RouteItem { hash: MmHash::new([number; 32]), end: 160, embeds: 160, elements: 10_000 }
}

/// Gives each worker some of what the requests below ask for.
fn busy_router(choices: &[(u32, u8)]) -> Router {
    let router = router(4, |_| ());
    for &(worker, text) in choices {
        router.apply(
            WorkerId(worker % 4),
            &Prompt::text(u32::from(text), 160 + BLOCK.get() * worker as usize).stored(),
        );
    }
    router
}

proptest! {
    #[test]
    fn costs_are_the_sums_of_their_terms_and_the_lowest_wins(
        held in proptest::collection::vec((0_u32..8, 0_u8..4), 0..8),
        asked in proptest::collection::vec((0_u8..4, 0_u8..3), 1..12),
    ) {
        let router = busy_router(&held);
        let mut running = Vec::new();
        for (text, picture) in asked {
            let prompt = Prompt::text(u32::from(text), 400);
            let media = [image(picture)];
            let request = RouteRequest { media: &media, ..prompt.request() };
            let (reservation, told) = router.select_explained(&[request]).unwrap();
            prop_assert_eq!(told.decision, Decision::Cost(Policy::KvMedia));
            prop_assert_eq!(told.candidates.len(), 4);
            let lowest = told.candidates.iter().map(|candidate| candidate.cost).fold(f64::INFINITY, f64::min);
            let chosen = told.candidates.iter().find(|candidate| candidate.worker == told.chosen).unwrap();
            prop_assert_eq!(chosen.worker, reservation.worker);
            prop_assert_eq!(chosen.overlap as usize, reservation.overlap_blocks);
            prop_assert_eq!(chosen.cost, lowest);
            for candidate in &told.candidates {
                prop_assert_eq!(candidate.terms.cost(&told.weights), candidate.cost);
                let covered = candidate.expected.max(candidate.loadable);
                prop_assert!(candidate.overlap <= candidate.expected);
                prop_assert_eq!(candidate.terms.compute, (candidate.blocks - u64::from(covered)) as f64);
            }
            running.push(reservation);
        }
    }
}

#[test]
fn what_others_have_in_flight_is_told_as_expected_and_an_image_that_is_there_as_spared() {
    let router = router(2, |_| ());
    let prompt = Prompt::image_question(1, 1);
    let media = [image(1)];
    let request = RouteRequest { media: &media, ..prompt.request() };
    let (first, told) = router.select_explained(&[request]).unwrap();
    assert!(
        told.candidates
            .iter()
            .all(|candidate| candidate.expected == 0 && candidate.terms.process > 0.0)
    );
    let (_second, told) = router.select_explained(&[request]).unwrap();
    let of = |id| told.candidates.iter().find(|candidate| candidate.worker == id).unwrap();
    let (there, other) = (of(first.worker), of(WorkerId(1 - first.worker.0)));
    assert_eq!((there.overlap, there.expected as usize), (0, prompt.request().keys.len()));
    assert_eq!((there.terms.process, there.terms.encode), (0.0, 0.0));
    assert!(there.terms.waiting > 0.0 && other.terms.waiting == 0.0);
    assert!(other.expected == 0 && other.terms.process > 0.0);
}

#[test]
fn who_decided_is_told() {
    let kept = router(3, |_| ());
    let prompt = Prompt::text(1, 160);
    let request = RouteRequest { session: Some(7), ..prompt.request() };
    let (first, told) = kept.select_explained(&[request]).unwrap();
    assert_eq!(told.decision, Decision::Cost(Policy::KvMedia));
    let (second, told) = kept.select_explained(&[request]).unwrap();
    assert_eq!((told.decision, second.worker), (Decision::Session, first.worker));
    let blind = router(3, |config| config.policy = Policy::RoundRobin);
    let (_, told) = blind.select_explained(&[prompt.request()]).unwrap();
    assert_eq!(told.decision, Decision::Policy(Policy::RoundRobin));
    assert!(told.candidates.iter().all(|candidate| candidate.cost == 0.0));
}
