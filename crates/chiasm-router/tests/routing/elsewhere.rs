//! Choices of another router before the same workers.

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
    fn a_router_that_is_told_of_all_choices_knows_what_the_one_that_made_them_does(
        seed in any::<u64>(),
        steps in vec(step(), 0..60),
    ) {
        let make = || router(WORKERS, |config| {
            config.policy = Policy::KvMedia;
            config.seed = Some(seed);
            config.promise_grace = Duration::ZERO;
        });
        let (chooses, is_told) = (make(), make());
        let mut running: Vec<(Reservation, Reservation)> = Vec::new();
        for step in steps {
            match step {
                Step::Start { image, question } => {
                    let (prompt, media) = (Prompt::image_question(image, question), [item(image)]);
                    let request = RouteRequest { media: &media, ..prompt.request() };
                    let chosen = chooses.select(&request).unwrap();
                    let told = is_told.chosen_elsewhere(chosen.worker, &request).unwrap();
                    prop_assert_eq!(
                        (told.worker, told.overlap_blocks, told.total_blocks),
                        (chosen.worker, chosen.overlap_blocks, chosen.total_blocks)
                    );
                    running.push((chosen, told));
                }
                Step::FirstToken(at) if !running.is_empty() => {
                    let (one, other) = at.get_mut(&mut running);
                    one.first_token();
                    other.first_token();
                }
                Step::End(at) if !running.is_empty() => drop(running.swap_remove(at.index(running.len()))),
                Step::FirstToken(_) | Step::End(_) => {}
                Step::Stored { worker, image } => {
                    let stored = Prompt::image_question(image, 0).stored();
                    [&chooses, &is_told].into_iter().for_each(|router| router.apply(WorkerId(worker), &stored));
                }
            }
            prop_assert_eq!(chooses.workers(), is_told.workers());
        }
    }
}

#[test]
fn a_choice_of_others_counts_for_workers_that_are_there_and_busy_ones() {
    let router = router(2, |config| config.busy.pending_tokens = Some(1));
    let prompt = Prompt::text(1, 320);
    let first = router.chosen_elsewhere(WorkerId(0), &prompt.request()).unwrap();
    let second = router.chosen_elsewhere(WorkerId(0), &prompt.request()).unwrap();
    assert_eq!(router.workers()[0].requests, 2);
    assert_eq!(prompt.select(&router).worker, WorkerId(1));
    drop((first, second));
    assert_eq!(router.workers()[0].requests, 0);
    assert_eq!(
        router.chosen_elsewhere(WorkerId(7), &prompt.request()).unwrap_err(),
        RouteError::NoWorker
    );
    let other = RouteRequest { class: PlanClassId(1), ..prompt.request() };
    assert_eq!(router.chosen_elsewhere(WorkerId(0), &other).unwrap_err(), RouteError::NoWorker);
}
