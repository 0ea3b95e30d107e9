//! Tests that explanations match the comparison behind a choice.

use chiasm_router::{Decision, Policy, RouteItem, RouteRequest, Router};
use chiasm_types::{MmHash, WorkerId};
use proptest::prelude::*;

use crate::workload::{BLOCK, Prompt, router};

fn image(number: u8) -> RouteItem {
    RouteItem { hash: MmHash::new([number; 32]), end: 160, embeds: 160, elements: 10_000 }
}

/// Creates a router whose workers hold parts of the prompts below.
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
    fn cost_is_the_sum_of_its_terms_with_the_lowest_chosen(
        held in proptest::collection::vec((0_u32..8, 0_u8..4), 0..8),
        requests in proptest::collection::vec((0_u8..4, 0_u8..3), 1..12),
    ) {
        let router = busy_router(&held);
        let mut running = Vec::new();
        for (text, picture) in requests {
            let prompt = Prompt::text(u32::from(text), 400);
            let media = [image(picture)];
            let request = RouteRequest { media: &media, ..prompt.request() };
            let (reservation, explanation) = router.select_explained(&[request]).unwrap();
            prop_assert_eq!(explanation.decision, Decision::Cost(Policy::KvMedia));
            let candidates = &explanation.candidates;
            prop_assert_eq!(candidates.len(), 4);
            let costs = candidates.iter().map(|candidate| candidate.cost);
            let lowest = costs.fold(f64::INFINITY, f64::min);
            let is_chosen = |worker: WorkerId| worker == explanation.chosen;
            let chosen =
                candidates.iter().find(|candidate| is_chosen(candidate.worker)).unwrap();
            prop_assert_eq!(chosen.worker, reservation.worker);
            prop_assert_eq!(chosen.overlap as usize, reservation.overlap_blocks);
            prop_assert_eq!(chosen.cost, lowest);
            for candidate in candidates {
                prop_assert_eq!(candidate.terms.cost(&explanation.weights), candidate.cost);
                let covered = candidate.expected.max(candidate.loadable);
                prop_assert!(candidate.overlap <= candidate.expected);
                let computed = candidate.blocks - u64::from(covered);
                prop_assert_eq!(candidate.terms.compute, computed as f64);
            }
            running.push(reservation);
        }
    }
}

#[test]
fn blocks_in_flight_are_expected_while_cached_media_is_spared() {
    let router = router(2, |_| ());
    let prompt = Prompt::image_question(1, 1);
    let media = [image(1)];
    let request = RouteRequest { media: &media, ..prompt.request() };
    let (first, explanation) = router.select_explained(&[request]).unwrap();
    assert!(
        explanation
            .candidates
            .iter()
            .all(|candidate| candidate.expected == 0 && candidate.terms.process > 0.0)
    );
    let (_second, explanation) = router.select_explained(&[request]).unwrap();
    let candidate =
        |id| explanation.candidates.iter().find(|candidate| candidate.worker == id).unwrap();
    let same = candidate(first.worker);
    let other = candidate(WorkerId(1 - first.worker.0));
    assert_eq!((same.overlap, same.expected as usize), (0, prompt.request().keys.len()));
    assert_eq!((same.terms.process, same.terms.encode), (0.0, 0.0));
    assert!(same.terms.waiting > 0.0 && other.terms.waiting == 0.0);
    assert!(other.expected == 0 && other.terms.process > 0.0);
}

#[test]
fn explanation_names_the_decision() {
    let by_cost = router(3, |_| ());
    let prompt = Prompt::text(1, 160);
    let request = RouteRequest { session: Some(7), ..prompt.request() };
    let (first, explanation) = by_cost.select_explained(&[request]).unwrap();
    assert_eq!(explanation.decision, Decision::Cost(Policy::KvMedia));
    let (second, explanation) = by_cost.select_explained(&[request]).unwrap();
    assert_eq!((explanation.decision, second.worker), (Decision::Session, first.worker));
    let round_robin = router(3, |config| config.policy = Policy::RoundRobin);
    let (_, explanation) = round_robin.select_explained(&[prompt.request()]).unwrap();
    assert_eq!(explanation.decision, Decision::Policy(Policy::RoundRobin));
    assert!(explanation.candidates.iter().all(|candidate| candidate.cost == 0.0));
}
