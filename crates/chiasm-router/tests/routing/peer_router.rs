//! Tests of requests that another router in front of the same workers has assigned.

use std::time::Duration;

use chiasm_router::{Policy, Reservation, RouteError, RouteItem, RouteRequest};
use chiasm_types::{MmHash, PlanClassId, WorkerId};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::workload::{Prompt, router};

const WORKERS: u32 = 4;

#[derive(Clone, Debug)]
enum Step {
    Start { image: u8, question: u32 },
    FirstToken(prop::sample::Index),
    End(prop::sample::Index),
    Stored { worker: u32, image: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u8, 0..3u32).prop_map(|(image, question)| Step::Start { image, question }),
        2 => any::<prop::sample::Index>().prop_map(Step::FirstToken),
        2 => any::<prop::sample::Index>().prop_map(Step::End),
        1 => (0..WORKERS, 0..3u8).prop_map(|(worker, image)| Step::Stored { worker, image }),
    ]
}

fn item(image: u8) -> RouteItem {
    RouteItem { hash: MmHash::new([image; 32]), end: 160, embeds: 160, elements: 1 << 16 }
}

proptest! {
    #[test]
    fn peer_assignments_give_the_state_of_the_choosing_router(
        seed in any::<u64>(),
        steps in vec(step(), 0..60),
    ) {
        let make = || router(WORKERS, |config| {
            config.policy = Policy::KvMedia;
            config.seed = Some(seed);
            config.promise_grace = Duration::ZERO;
        });
        let choosing = make();
        let following = make();
        let mut running: Vec<(Reservation, Reservation)> = Vec::new();
        for step in steps {
            match step {
                Step::Start { image, question } => {
                    let prompt = Prompt::image_question(image, question);
                    let media = [item(image)];
                    let request = RouteRequest { media: &media, ..prompt.request() };
                    let chosen = choosing.select(&request).unwrap();
                    let followed = following.reserve_on(chosen.worker, &request).unwrap();
                    prop_assert_eq!(
                        (followed.worker, followed.overlap_blocks, followed.total_blocks),
                        (chosen.worker, chosen.overlap_blocks, chosen.total_blocks)
                    );
                    running.push((chosen, followed));
                }
                Step::FirstToken(at) if !running.is_empty() => {
                    let (one, other) = at.get_mut(&mut running);
                    one.first_token();
                    other.first_token();
                }
                Step::End(at) if !running.is_empty() => {
                    drop(running.swap_remove(at.index(running.len())));
                }
                Step::FirstToken(_) | Step::End(_) => {}
                Step::Stored { worker, image } => {
                    let stored = Prompt::image_question(image, 0).stored();
                    choosing.apply(WorkerId(worker), &stored);
                    following.apply(WorkerId(worker), &stored);
                }
            }
            prop_assert_eq!(choosing.workers(), following.workers());
        }
    }
}

#[test]
fn peer_assignment_counts_on_known_even_busy_workers() {
    let router = router(2, |config| config.busy.pending_tokens = Some(1));
    let prompt = Prompt::text(1, 320);
    let first = router.reserve_on(WorkerId(0), &prompt.request()).unwrap();
    let second = router.reserve_on(WorkerId(0), &prompt.request()).unwrap();
    assert_eq!(router.workers()[0].requests, 2);
    assert_eq!(prompt.select(&router).worker, WorkerId(1));
    drop((first, second));
    assert_eq!(router.workers()[0].requests, 0);
    assert_eq!(
        router.reserve_on(WorkerId(7), &prompt.request()).unwrap_err(),
        RouteError::NoWorker
    );
    let other = RouteRequest { class: PlanClassId(1), ..prompt.request() };
    assert_eq!(router.reserve_on(WorkerId(0), &other).unwrap_err(), RouteError::NoWorker);
}
