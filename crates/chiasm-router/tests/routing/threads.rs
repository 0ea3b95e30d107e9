//! Tests that threads can select while events are applied and workers come and go.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use crate::workload::{INFO, Prompt, router};
use chiasm_router::EngineStats;
use chiasm_types::WorkerId;

/// The minimum number of selections per thread. Threads go on until events have been applied in
/// between.
const SELECTIONS: usize = 2000;

#[test]
fn load_returns_to_zero_after_concurrent_selections() {
    let router = router(4, |config| config.promise_grace = Duration::ZERO);
    let prompts: Vec<_> = (0..8).map(|image| Prompt::image_question(image, 1)).collect();
    let selecting = AtomicBool::new(true);
    let overlapped = AtomicUsize::new(0);

    thread::scope(|scope| {
        // Workers 0 and 1 compute and evict; 2 dies and comes back; 3 loses its events.
        scope.spawn(|| {
            while selecting.load(Relaxed) {
                for (turn, prompt) in prompts.iter().enumerate() {
                    router.apply(WorkerId(turn as u32 % 2), &prompt.stored());
                }
                router.remove_worker(WorkerId(2));
                router.add_worker(WorkerId(2), INFO);
                router.apply(WorkerId(3), &prompts[0].stored());
                router.reset_worker_blocks(WorkerId(3));
                for (turn, prompt) in prompts.iter().enumerate() {
                    router.apply(WorkerId(turn as u32 % 2), &prompt.removed());
                }
            }
        });
        scope.spawn(|| {
            while selecting.load(Relaxed) {
                for worker in router.workers() {
                    assert!(worker.index.blocks <= 8 * 12, "{worker:?}");
                    router.set_stats(
                        worker.id,
                        EngineStats {
                            running: 1,
                            waiting: 0,
                            kv_usage: 0.5,
                            ..EngineStats::default()
                        },
                    );
                }
            }
        });
        let selectors: Vec<_> = (0..4usize)
            .map(|thread| {
                let router = &router;
                let prompts = &prompts;
                let overlapped = &overlapped;
                scope.spawn(move || {
                    let mut running = Vec::new();
                    let mut turn = 0;
                    while turn < SELECTIONS || overlapped.load(Relaxed) == 0 {
                        turn += 1;
                        let prompt = &prompts[(turn * 7 + thread) % prompts.len()];
                        let mut reservation = prompt.select(router);
                        assert!(reservation.overlap_blocks <= 12, "{reservation:?}");
                        overlapped.fetch_add(reservation.overlap_blocks / 12, Relaxed);
                        if turn % 3 == 0 {
                            reservation.first_token();
                        }
                        running.push(reservation);
                        if running.len() > 5 {
                            drop(running.swap_remove(turn % 5));
                        }
                    }
                })
            })
            .collect();
        // The results are checked last: a selector's panic must not leave the other threads
        // running.
        let ended: Vec<_> = selectors.into_iter().map(|selector| selector.join()).collect();
        selecting.store(false, Relaxed);
        ended.into_iter().for_each(|end| end.unwrap());
    });

    // Lets the lingering promises expire.
    drop(Prompt::text(99, 64).select(&router));
    for worker in router.workers() {
        assert_eq!(
            (worker.requests, worker.blocks_in_use, worker.promised_blocks),
            (0, 0, 0),
            "{worker:?}"
        );
    }
}
