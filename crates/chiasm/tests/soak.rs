//! Any weather: mixed load while engines are killed and frozen, the log's reader stalls, shared
//! memory is full, descriptors are few, and clients and peers of all bad kinds come by.
//!
//! What has to hold is looked at all the time: nobody waits beyond a deadline, nobody gets a wrong
//! answer, memory and descriptors are bounded, `/ready` tells the truth, and when the weather is
//! over everything is as it was.
//!
//! `CHIASM_SOAK_SECONDS` is how long it lasts, 20 unless it is given; `cargo xtask soak --minutes N
//! --seed S` sets it. `CHIASM_TEST_SEED`, which it prints, chooses the weather.
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
use stand::{ENGINES, Stand};

/// Clients that ask for answers all the time.
const CLIENTS: u64 = 6;
/// Longer than anything takes once the weather is over.
const PATIENCE: Duration = Duration::from_secs(30);
/// Resident memory of the frontend that nothing in here needs: bodies in flight and caches are
/// limited to a part of it.
const MOST_RESIDENT: u64 = 256 << 20;
/// How long the light client's question may take: it asks for no engine.
const LIGHT: Duration = Duration::from_secs(3);
/// How often it is looked whether some weather is over.
const TEND: Duration = Duration::from_millis(20);
/// After an engine was last touched it may take so long until `/ready` knows: suspicion, a restart,
/// a handshake.
const SETTLED: Duration = Duration::from_secs(8);

/// What is done to the fleet, its frontend and its machine.
#[derive(Clone, Copy, Debug)]
enum Weather {
    KillEngine,
    FreezeEngine,
    StallLog,
    GarbagePeer,
    FullShm,
    FewDescriptors,
    Bad(BadClient),
}

impl Weather {
    /// Beside bad clients; some are more frequent than others.
    const FLEET: [Self; 7] = [
        Self::KillEngine,
        Self::FreezeEngine,
        Self::FreezeEngine,
        Self::StallLog,
        Self::GarbagePeer,
        Self::FullShm,
        Self::FewDescriptors,
    ];

    fn any(random: &mut SmallRng) -> Self {
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
async fn no_weather_takes_the_service_down() {
    let has_small_shm = small_shm::is_own();
    if !has_small_shm && small_shm::run_in_namespace("soak::no_weather_takes_the_service_down") {
        return;
    }
    let seed = setting("CHIASM_TEST_SEED").unwrap_or_else(rand::random);
    let lasts = Duration::from_secs(setting("CHIASM_SOAK_SECONDS").unwrap_or(20));
    eprintln!("CHIASM_TEST_SEED={seed} CHIASM_SOAK_SECONDS={}", lasts.as_secs());
    let mut random = SmallRng::seed_from_u64(seed);
    let mut stand = Stand::start().await;
    let load = Load::start(&stand.frontend.url, CLIENTS, seed).await;
    let mut bad = tokio::task::JoinSet::new();
    let (started, mut worst, mut most_resident) = (Instant::now(), Duration::ZERO, 0);
    let mut looks = 0_u32;
    while started.elapsed() < lasts {
        let weather = Weather::any(&mut random);
        match weather {
            Weather::KillEngine => stand.kill_engine(random.random_range(0..ENGINES)),
            Weather::FreezeEngine => {
                let frozen = Duration::from_millis(random.random_range(100..4000));
                stand.freeze_engine(random.random_range(0..ENGINES), frozen);
            }
            Weather::StallLog => {
                stand.stall_log(Duration::from_millis(random.random_range(100..3000)))
            }
            Weather::GarbagePeer => {
                let address = stand.engine_address(random.random_range(0..ENGINES));
                bad.spawn(garbage_peer::visit(address, random.random()));
            }
            Weather::FullShm if has_small_shm => {
                stand.fill_shm(Duration::from_millis(random.random_range(100..3000)))
            }
            Weather::FullShm => {}
            Weather::FewDescriptors => {
                let more = random.random_range(0..8);
                stand
                    .limit_descriptors(more, Duration::from_millis(random.random_range(100..1500)));
            }
            Weather::Bad(client) => {
                // A bounded number: what they hold is the frontend's business, not this machine's.
                if bad.len() < 64 {
                    bad.spawn(client.visit(stand.address(), random.random()));
                }
            }
        }
        while bad.try_join_next().is_some_and(|visited| {
            visited.expect("a bad client is treated as it should be");
            true
        }) {}
        let pause = Instant::now() + Duration::from_millis(random.random_range(50..400));
        while Instant::now() < pause {
            stand.tend();
            tokio::time::sleep(TEND).await;
        }

        let light = {
            let mut asking = std::pin::pin!(light_question(stand.frontend.url.clone()));
            loop {
                tokio::select! {
                    took = &mut asking => break took,
                    () = tokio::time::sleep(TEND) => stand.tend(),
                }
            }
        };
        assert!(light < LIGHT, "/health took {light:?} after {weather:?}");
        worst = worst.max(light);
        let resident = stand.resident();
        assert!(resident < MOST_RESIDENT, "{} MB are resident after {weather:?}", resident >> 20);
        most_resident = most_resident.max(resident);
        load.check();
        if stand.untouched_for() > SETTLED {
            assert_eq!(
                stand.ready_workers().await,
                ENGINES as u64,
                "all engines have been well for {SETTLED:?}"
            );
        }
        looks += 1;
    }

    stand.calm_down();
    let Tally { right, told, longest } = load.stop().await;
    bad.abort_all();
    stand.frontend.wait_ready(ENGINES as u64, PATIENCE).await;
    wait_for("requests to end", PATIENCE, async || {
        stand.frontend.metric("chiasm_in_flight_requests").await == 0.0
    })
    .await;
    eprintln!(
        "{looks} looks: {right} answers right, {told} told of an error; longest {longest:?}; /health {worst:?} at worst; {} MB \
         resident at most, {} at the end; {} deaths, {} moves",
        most_resident >> 20,
        stand.resident() >> 20,
        stand.frontend.metric("chiasm_engine_deaths_total").await,
        stand.frontend.metric("chiasm_retries_total").await,
    );
    assert!(right > u64::from(looks), "{right} answers were right in {looks} looks");
    assert_eq!(stand.frontend.metric("chiasm_panics_total").await, 0.0);
    // As at the start: every engine answers rightly, and no descriptor is lost.
    let again = Load::start(&stand.frontend.url, 1, seed).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    again.check();
    assert!(again.stop().await.right > 0);
    stand.has_given_everything_back().await;
}

/// How long a question takes that needs no engine, on a connection of its own.
async fn light_question(url: String) -> Duration {
    let asked = Instant::now();
    let answer = crate::support::client().get(format!("{url}/health")).send().await;
    assert_eq!(answer.expect("the frontend lives").status(), 200);
    asked.elapsed()
}

/// Counts that clients share.
#[derive(Debug, Default)]
struct Counts {
    right: std::sync::atomic::AtomicU64,
    told: std::sync::atomic::AtomicU64,
    longest_ms: std::sync::atomic::AtomicU64,
}

impl Counts {
    fn tally(self: &Arc<Self>) -> Tally {
        Tally {
            right: self.right.load(Relaxed),
            told: self.told.load(Relaxed),
            longest: Duration::from_millis(self.longest_ms.load(Relaxed)),
        }
    }
}
