//! Tests the load of workers under random requests against a plain list of the requests.

use std::time::Duration;

use crate::workload::{INFO, Prompt, router};
use chiasm_router::{Policy, Reservation};
use chiasm_types::WorkerId;
use proptest::collection::vec;
use proptest::prelude::*;

const WORKERS: u32 = 3;

#[derive(Clone, Debug)]
enum Step {
    Start { image: u8, question: u32 },
    FirstToken(prop::sample::Index),
    End(prop::sample::Index),
    Stored { worker: u32, image: u8 },
    Removed { worker: u32, image: u8 },
    LoseEvents { worker: u32 },
    Restart { worker: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u8, 0..3u32).prop_map(|(image, question)| Step::Start { image, question }),
        2 => any::<prop::sample::Index>().prop_map(Step::FirstToken),
        3 => any::<prop::sample::Index>().prop_map(Step::End),
        2 => (0..WORKERS, 0..3u8).prop_map(|(worker, image)| Step::Stored { worker, image }),
        2 => (0..WORKERS, 0..3u8).prop_map(|(worker, image)| Step::Removed { worker, image }),
        1 => (0..WORKERS).prop_map(|worker| Step::LoseEvents { worker }),
        1 => (0..WORKERS).prop_map(|worker| Step::Restart { worker }),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    prop::sample::select(&Policy::ALL[..])
}

proptest! {
    #[test]
    fn load_is_the_sum_of_the_live_reservations(
        policy in policy(),
        seed in any::<u64>(),
        steps in vec(step(), 0..60),
    ) {
        let router = router(WORKERS, |config| {
            config.policy = policy;
            config.seed = Some(seed);
            config.promise_grace = Duration::ZERO;
        });
        // The reservations, each with the generation of its worker.
        let mut running: Vec<(Reservation, u32)> = Vec::new();
        let mut generations = [0; WORKERS as usize];
        // The number of copies of the blocks of each image's question 0, per worker.
        let mut copies = [[0u32; 3]; WORKERS as usize];
        for step in steps {
            match step {
                Step::Start { image, question } => {
                    let reservation = Prompt::image_question(image, question).select(&router);
                    let worker = reservation.worker.0 as usize;
                    let held = copies[worker][image as usize] > 0;
                    let expected = match question {
                        _ if !held => 0,
                        0 => 12,
                        _ => 10,
                    };
                    prop_assert_eq!(reservation.overlap_blocks, expected);
                    prop_assert_eq!(reservation.total_blocks, 13);
                    running.push((reservation, generations[worker]));
                }
                Step::FirstToken(which) if !running.is_empty() => {
                    let at = which.index(running.len());
                    running[at].0.first_token();
                }
                Step::End(which) if !running.is_empty() => {
                    drop(running.swap_remove(which.index(running.len())));
                }
                Step::FirstToken(_) | Step::End(_) => {}
                Step::Stored { worker, image } => {
                    router.apply(WorkerId(worker), &Prompt::image_question(image, 0).stored());
                    copies[worker as usize][image as usize] += 1;
                }
                Step::Removed { worker, image } => {
                    router.apply(WorkerId(worker), &Prompt::image_question(image, 0).removed());
                    let copies = &mut copies[worker as usize][image as usize];
                    *copies = copies.saturating_sub(1);
                }
                Step::LoseEvents { worker } => {
                    router.reset_worker_blocks(WorkerId(worker));
                    copies[worker as usize] = [0; 3];
                }
                Step::Restart { worker } => {
                    router.remove_worker(WorkerId(worker));
                    router.add_worker(WorkerId(worker), INFO);
                    generations[worker as usize] += 1;
                    copies[worker as usize] = [0; 3];
                }
            }
            for worker in router.workers() {
                let at = worker.id.0 as usize;
                let live = running.iter().filter(|(reservation, generation)| {
                    reservation.worker == worker.id && *generation == generations[at]
                });
                let requests = live.count();
                prop_assert_eq!(worker.requests, requests);
                prop_assert_eq!(worker.blocks_in_use, 13 * requests as u64);
                let held_images = copies[at].iter().filter(|copies| **copies > 0).count();
                prop_assert_eq!(worker.index.blocks, 12 * held_images);
            }
        }
        running.clear();
        drop(Prompt::text(99, 64).select(&router));
        for worker in router.workers() {
            prop_assert_eq!((worker.promised_blocks, worker.pending_tokens), (0, 0));
        }
    }
}
