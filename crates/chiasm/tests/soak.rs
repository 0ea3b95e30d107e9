//! The soak test: mixed load under random faults.
//!
//! Engines are killed and frozen, the log's reader stalls, shared memory fills up, file descriptors
//! run out, and misbehaving clients and peers connect.
//!
//! All the time, the test checks that no request exceeds its deadline, no answer is wrong, memory
//! and descriptors are bounded, and `/ready` is correct. After the faults end, it checks that the
//! service is back in its initial state.
//!
//! `CHIASM_SOAK_SECONDS` is the duration (default 20), `CHIASM_TEST_SEED` the seed of the faults,
//! which the test prints. `cargo xtask soak --minutes N --seed S` sets both.
#![cfg(target_os = "linux")]

mod bad_clients;
mod garbage_peer;
mod good_clients;
mod small_shm;
mod stand;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::support::wait_for;
use bad_clients::BadClient;
use good_clients::{Load, Tally};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use stand::{ENGINES, TestHarness};

/// The number of well-behaved clients that send requests all the time.
const CLIENTS: u64 = 6;
/// The deadline for recovery after the last fault.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// The limit of the frontend's resident memory. Bodies in flight and caches are limited to a part
/// of it.
const MAX_RESIDENT_BYTES: u64 = 256 << 20;
/// The deadline for `/health`, which needs no engine.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(3);
/// The interval at which expired faults are reverted.
const REVERT_INTERVAL: Duration = Duration::from_millis(20);
/// The time after the last fault of an engine until `/ready` must count it again: suspicion, a
/// restart and a handshake.
const SETTLE_TIME: Duration = Duration::from_secs(8);

/// A fault of the fleet, its frontend or its machine.
#[derive(Clone, Copy, Debug)]
enum Fault {
    KillEngine,
    FreezeEngine,
    StallLog,
    GarbagePeer,
    FullShm,
    FewDescriptors,
    Bad(BadClient),
}

impl Fault {
    /// All faults other than bad clients. Repeated entries are chosen more often.
    const FLEET: [Self; 7] = [
        Self::KillEngine,
        Self::FreezeEngine,
        Self::FreezeEngine,
        Self::StallLog,
        Self::GarbagePeer,
        Self::FullShm,
        Self::FewDescriptors,
    ];

    /// Chooses a fault at random.
    fn random(random: &mut SmallRng) -> Self {
        let index = random.random_range(0..Self::FLEET.len() + BadClient::ALL.len());
        match index.checked_sub(Self::FLEET.len()) {
            None => Self::FLEET[index],
            Some(index) => Self::Bad(BadClient::ALL[index]),
        }
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: `cargo xtask test` and `cargo xtask soak` run it"]
async fn random_faults_leave_the_service_up() {
    let has_small_shm = small_shm::is_own();
    if !has_small_shm && small_shm::run_in_namespace("soak::random_faults_leave_the_service_up") {
        return;
    }
    let seed = setting("CHIASM_TEST_SEED").unwrap_or_else(rand::random);
    let duration = Duration::from_secs(setting("CHIASM_SOAK_SECONDS").unwrap_or(20));
    eprintln!("CHIASM_TEST_SEED={seed} CHIASM_SOAK_SECONDS={}", duration.as_secs());
    let mut random = SmallRng::seed_from_u64(seed);
    let mut harness = TestHarness::start().await;
    let load = Load::start(&harness.frontend.url, CLIENTS, seed).await;
    let mut bad = tokio::task::JoinSet::new();
    let started = Instant::now();
    let mut slowest_health = Duration::ZERO;
    let mut max_resident = 0;
    let mut rounds = 0_u32;
    while started.elapsed() < duration {
        let fault = Fault::random(&mut random);
        match fault {
            Fault::KillEngine => harness.kill_engine(random.random_range(0..ENGINES)),
            Fault::FreezeEngine => {
                let frozen = Duration::from_millis(random.random_range(100..4000));
                harness.freeze_engine(random.random_range(0..ENGINES), frozen);
            }
            Fault::StallLog => {
                harness.stall_log(Duration::from_millis(random.random_range(100..3000)))
            }
            Fault::GarbagePeer => {
                let address = harness.engine_address(random.random_range(0..ENGINES));
                bad.spawn(garbage_peer::connect(address, random.random()));
            }
            Fault::FullShm if has_small_shm => {
                harness.fill_shm(Duration::from_millis(random.random_range(100..3000)))
            }
            Fault::FullShm => {}
            Fault::FewDescriptors => {
                let more = random.random_range(0..8);
                harness
                    .limit_descriptors(more, Duration::from_millis(random.random_range(100..1500)));
            }
            Fault::Bad(client) => {
                // Bounded, so that the frontend's limits are tested and not this machine's.
                if bad.len() < 64 {
                    bad.spawn(client.run(harness.address(), random.random()));
                }
            }
        }
        while bad.try_join_next().is_some_and(|finished| {
            finished.expect("the frontend answers a bad client as expected");
            true
        }) {}
        let pause = Instant::now() + Duration::from_millis(random.random_range(50..400));
        while Instant::now() < pause {
            harness.revert_expired_faults();
            tokio::time::sleep(REVERT_INTERVAL).await;
        }

        let health_time = {
            let mut request = std::pin::pin!(time_health_request(harness.frontend.url.clone()));
            loop {
                tokio::select! {
                    elapsed = &mut request => break elapsed,
                    () = tokio::time::sleep(REVERT_INTERVAL) => harness.revert_expired_faults(),
                }
            }
        };
        assert!(health_time < HEALTH_TIMEOUT, "/health took {health_time:?} after {fault:?}");
        slowest_health = slowest_health.max(health_time);
        let resident = harness.resident();
        assert!(resident < MAX_RESIDENT_BYTES, "{} MB resident after {fault:?}", resident >> 20);
        max_resident = max_resident.max(resident);
        load.check();
        if harness.undisturbed_for() > SETTLE_TIME {
            assert_eq!(
                harness.ready_workers().await,
                ENGINES as u64,
                "no engine has been disturbed for {SETTLE_TIME:?}"
            );
        }
        rounds += 1;
    }

    harness.revert_all_faults();
    let Tally { correct, errors, longest } = load.stop().await;
    bad.abort_all();
    harness.frontend.wait_ready(ENGINES as u64, RECOVERY_TIMEOUT).await;
    wait_for("requests to end", RECOVERY_TIMEOUT, async || {
        harness.frontend.metric("chiasm_in_flight_requests").await == 0.0
    })
    .await;
    eprintln!(
        "{rounds} rounds: {correct} correct answers, {errors} errors; longest {longest:?}; \
         /health took up to {slowest_health:?}; {} MB resident at most, {} at the end; \
         {} deaths, {} moves",
        max_resident >> 20,
        harness.resident() >> 20,
        harness.frontend.metric("chiasm_engine_deaths_total").await,
        harness.frontend.metric("chiasm_retries_total").await,
    );
    assert!(correct > u64::from(rounds), "{correct} correct answers in {rounds} rounds");
    assert_eq!(harness.frontend.metric("chiasm_panics_total").await, 0.0);
    // As at the start: every engine answers correctly, and no descriptor has leaked.
    let again = Load::start(&harness.frontend.url, 1, seed).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    again.check();
    assert!(again.stop().await.correct > 0);
    harness.assert_resources_released().await;
}

/// Returns the duration of a request that needs no engine, on a new connection.
async fn time_health_request(url: String) -> Duration {
    let started = Instant::now();
    let answer = crate::support::client().get(format!("{url}/health")).send().await;
    assert_eq!(answer.expect("the frontend lives").status(), 200);
    started.elapsed()
}

/// Counters shared by all clients.
#[derive(Debug, Default)]
struct Counts {
    correct: std::sync::atomic::AtomicU64,
    errors: std::sync::atomic::AtomicU64,
    longest_ms: std::sync::atomic::AtomicU64,
}

impl Counts {
    fn tally(self: &Arc<Self>) -> Tally {
        Tally {
            correct: self.correct.load(Relaxed),
            errors: self.errors.load(Relaxed),
            longest: Duration::from_millis(self.longest_ms.load(Relaxed)),
        }
    }
}
