//! Measures how stage weights change the latencies of fleets with roles, over all generated
//! workloads. Each fleet is compared with a fleet without roles that has as many engines and gets
//! the same requests.
//!
//! `cargo run --release -p chiasm-simulate --example stages [requests] [load…]`; the results of a
//! run are in `docs/decisions/0014-splitting-has-a-price.md`. Loads are fractions of the saturation
//! of the fleet without roles under kv+media.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use chiasm_router::{Policy, RouterConfig, StageWeights};
use chiasm_simulate::{Arrivals, PolicyReport, Scenario, Source, Workload, WorkloadSize};
use chiasm_types::Role;

const ENGINES: usize = 6;
/// The numbers of prefill engines among the [`ENGINES`] to compare.
const PREFILL_ENGINES: [usize; 2] = [2, 3];

fn main() {
    let numbers: Vec<f64> =
        std::env::args().skip(1).map(|number| number.parse().unwrap()).collect();
    let requests = numbers.first().map_or(6_000, |number| *number as u64);
    let loads = numbers.get(1..).filter(|loads| !loads.is_empty()).unwrap_or(&[0.6, 0.75, 0.9]);

    let rates = parallel(Workload::ALL.len(), |at| {
        scenario(Workload::ALL[at], 0, requests, StageWeights::default())
            .saturation(Policy::KvMedia)
            .unwrap()
    });
    // Each workload at each load.
    let demands: Vec<(Workload, f64)> = loads
        .iter()
        .flat_map(|load| {
            Workload::ALL.iter().zip(&rates).map(move |(workload, rate)| (*workload, load * rate))
        })
        .collect();
    let run = |prefill: usize, weights: StageWeights, (workload, rate): (Workload, f64)| {
        scenario(workload, prefill, requests, weights)
            .run(Policy::KvMedia, Arrivals::Poisson(rate))
            .unwrap()
    };
    let baseline = parallel(demands.len(), |at| run(0, StageWeights::default(), demands[at]));
    println!("{requests} requests, loads {loads:?}, defaults {:?}\n", StageWeights::default());
    println!(
        "| fleet | changed | split | TTFT p50 | p90 | p99 | ITL p50 | p99 | both p99 | \
         worst TTFT p99 |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let candidates = candidates();
    for prefill in PREFILL_ENGINES {
        let reports = parallel(candidates.len() * demands.len(), |job| {
            run(prefill, candidates[job / demands.len()].1, demands[job % demands.len()])
        });
        for ((name, _), reports) in candidates.iter().zip(reports.chunks(demands.len())) {
            println!(
                "| {prefill}P{}D | {name} | {} |",
                ENGINES - prefill,
                ratios(reports, &baseline)
            );
        }
    }
}

/// Returns the stage weights to compare: the defaults, and changes of one weight or of two weights
/// that depend on each other.
fn candidates() -> Vec<(String, StageWeights)> {
    let default = StageWeights::default();
    let mut candidates = vec![("defaults".to_owned(), default)];
    candidates.push(("never split".to_owned(), StageWeights { hop: 1e12, ..default }));
    candidates.push(("always split".to_owned(), StageWeights { hop: -1e12, ..default }));
    for transfer in [0.0, 4.0, 16.0] {
        candidates.push((format!("transfer {transfer}"), StageWeights { transfer, ..default }));
    }
    for hop in [0.0, 150.0, 300.0, 500.0, 1000.0] {
        for disturb in [0.0, 0.01, 0.02, 0.025, 0.03, 0.05, 0.1] {
            let weights = StageWeights { hop, disturb, ..default };
            if weights != default {
                candidates.push((format!("hop {hop}, disturb {disturb}"), weights));
            }
        }
    }
    candidates
}

fn scenario(workload: Workload, prefill: usize, requests: u64, stages: StageWeights) -> Scenario {
    let mut workers = vec![if prefill > 0 { Role::Decode } else { Role::Aggregated }; ENGINES];
    workers[..prefill].fill(Role::Prefill);
    Scenario {
        workers,
        sized_for: ENGINES,
        requests,
        warm_up: requests / 4,
        source: Source::Generated(workload, WorkloadSize::default()),
        seed: 1,
        engine: Default::default(),
        frontend: Default::default(),
        router: RouterConfig { stages, ..RouterConfig::default() },
    }
}

/// Returns cells of a table: the mean fraction of split requests, geometric means of the latencies'
/// ratios to the fleet without roles, and the worst ratio of a TTFT p99.
fn ratios(reports: &[PolicyReport], baseline: &[PolicyReport]) -> String {
    let ratios = |value: fn(&PolicyReport) -> f64| -> Vec<f64> {
        reports
            .iter()
            .zip(baseline)
            .map(|(report, baseline)| value(report) / value(baseline))
            .collect()
    };
    let mean = |ratios: &[f64]| {
        (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp()
    };
    let ttft = ratios(|report| report.ttft_ms.p99);
    let itl = ratios(|report| report.itl_ms.p99);
    let split =
        reports.iter().filter_map(|report| report.split).sum::<f64>() / reports.len() as f64;
    let cells = [
        mean(&ratios(|report| report.ttft_ms.p50)),
        mean(&ratios(|report| report.ttft_ms.p90)),
        mean(&ttft),
        mean(&ratios(|report| report.itl_ms.p50)),
        mean(&itl),
        (mean(&ttft) * mean(&itl)).sqrt(),
        ttft.iter().copied().fold(0.0, f64::max),
    ];
    format!("{:.0} % | {}", 100.0 * split, cells.map(|cell| format!("{cell:.3}")).join(" | "))
}

/// Runs the jobs on two threads and returns their results in order.
fn parallel<T: Send>(jobs: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    if job >= jobs {
                        break;
                    }
                    let result = run(job);
                    done.lock().unwrap().push((job, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap();
    done.sort_by_key(|(job, _)| *job);
    done.into_iter().map(|(_, result)| result).collect()
}
