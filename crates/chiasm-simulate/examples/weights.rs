//! Measures how the weights of the cost change latencies, over all generated workloads: each weight
//! alone, around the defaults.
//!
//! `cargo run --release -p chiasm-simulate --example weights [workers] [requests] [load…]`;
//! `docs/decisions/0015-default-routing-weights.md` has a run.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use chiasm_router::{Policy, RouterConfig, Weights};
use chiasm_simulate::{Arrivals, PolicyReport, Scenario, Source, Workload, WorkloadSize};
use chiasm_types::Role;

fn main() {
    let numbers: Vec<f64> =
        std::env::args().skip(1).map(|number| number.parse().unwrap()).collect();
    let workers = numbers.first().map_or(16, |number| *number as usize);
    let requests = numbers.get(1).map_or(10_000, |number| *number as u64);
    let loads = numbers.get(2..).filter(|loads| !loads.is_empty()).unwrap_or(&[0.5, 0.7, 0.85]);

    let candidates = candidates();
    let scenarios: Vec<Scenario> = Workload::ALL
        .iter()
        .map(|workload| Scenario {
            workers: vec![Role::Aggregated; workers],
            sized_for: workers,
            requests,
            warm_up: requests / 4,
            source: Source::Generated(*workload, WorkloadSize::default()),
            seed: 1,
            engine: Default::default(),
            frontend: Default::default(),
            router: Default::default(),
        })
        .collect();
    let rates =
        parallel(scenarios.len(), |at| scenarios[at].saturation(Policy::RoundRobin).unwrap());
    for load in loads {
        let jobs = candidates.len() * scenarios.len();
        let reports = parallel(jobs, |job| {
            let workload = job % scenarios.len();
            let (_, policy, router) = &candidates[job / scenarios.len()];
            let scenario = Scenario { router: router.clone(), ..scenarios[workload].clone() };
            scenario.run(*policy, Arrivals::Poisson(load * rates[workload])).unwrap()
        });
        print(*load, &candidates, &reports, workers, requests);
    }
}

/// The name of a line, and its policy and configuration.
type Candidate = (String, Policy, RouterConfig);

/// Returns the default of each policy, then changes of the defaults.
fn candidates() -> Vec<Candidate> {
    let default = RouterConfig::default();
    let plain = |policy: Policy| (policy.to_string(), policy, RouterConfig::default());
    let mut candidates = vec![
        plain(Policy::KvMedia),
        plain(Policy::Kv),
        plain(Policy::LeastLoaded),
        plain(Policy::RoundRobin),
    ];
    type Set = fn(&mut Weights, f64);
    let changes: [(&str, Set, &[f64]); 5] = [
        ("queue", |weights, value| weights.queue = value, &[0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 2.0]),
        ("load", |weights, value| weights.load = value, &[0.0, 0.03, 0.1, 0.3, 1.0, 3.0]),
        ("encode", |weights, value| weights.encode = value, &[0.0, 4.0, 6.5, 8.0, 12.0]),
        ("process", |weights, value| weights.process = value, &[0.0, 1.5, 3.0, 6.0]),
        ("balance", |weights, value| weights.balance = value, &[0.0, 0.05, 0.1, 0.2, 0.4, 1.0]),
    ];
    for (name, set, values) in changes {
        for value in values {
            let mut router = default.clone();
            set(&mut router.weights, *value);
            if router.weights != default.weights {
                candidates.push((format!("{name} {value}"), Policy::KvMedia, router));
            }
        }
    }
    for temperature in [10.0, 50.0, 200.0] {
        let router = RouterConfig { temperature, ..default.clone() };
        candidates.push((format!("temperature {temperature}"), Policy::KvMedia, router));
    }
    candidates
}

/// Prints the p90 of TTFT in ms (and the balance), and the geometric means of the ratios to the
/// first line.
fn print(
    load: f64,
    candidates: &[Candidate],
    reports: &[PolicyReport],
    workers: usize,
    requests: u64,
) {
    let count = Workload::ALL.len();
    println!(
        "\n{workers} workers, {requests} requests, {load} of round-robin's saturation, {:?}\n",
        RouterConfig::default().weights
    );
    println!(
        "| | {} | p90 | p99 |",
        Workload::ALL.map(|workload| workload.to_string()).join(" | ")
    );
    println!("|---|{}---|---|", "---|".repeat(count));
    let (first, _) = reports.split_at(count);
    for ((name, ..), reports) in candidates.iter().zip(reports.chunks(count)) {
        let cells: Vec<String> = reports
            .iter()
            .map(|report| format!("{:.1} ({:.2})", report.ttft_ms.p90, report.balance))
            .collect();
        let mean = |value: fn(&PolicyReport) -> f64| {
            let ratios =
                reports.iter().zip(first).map(|(report, first)| value(report) / value(first));
            let logarithms = ratios.map(f64::ln);
            (logarithms.sum::<f64>() / count as f64).exp()
        };
        let p90 = mean(|report| report.ttft_ms.p90);
        let p99 = mean(|report| report.ttft_ms.p99);
        println!("| {name} | {} | {p90:.3} | {p99:.3} |", cells.join(" | "));
    }
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
