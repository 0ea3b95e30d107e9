use chiasm_router::RouterConfig;
use chiasm_types::Role;

use crate::model::{EngineModel, FrontendModel};
use crate::report::PolicyReport;
use crate::scenario::{Arrivals, Scenario, Source};
use crate::workload::{Workload, WorkloadSize};

use super::*;

fn scenario(workload: Workload, workers: usize, requests: u64) -> Scenario {
    Scenario {
        workers: vec![Role::Aggregated; workers],
        sized_for: workers,
        requests,
        warm_up: requests / 4,
        source: Source::Generated(workload, WorkloadSize::default()),
        seed: 5,
        engine: EngineModel::default(),
        frontend: FrontendModel::default(),
        router: RouterConfig::default(),
    }
}

fn run(
    scenario: &Scenario,
    frontends: usize,
    announce_delay: Option<f64>,
    rate: f64,
) -> PolicyReport {
    let frontend = FrontendModel { frontends, announce_delay, ..scenario.frontend };
    let scenario = Scenario { frontend, ..scenario.clone() };
    let report = scenario.run(Policy::KvMedia, Arrivals::Poisson(rate)).unwrap();
    PolicyReport { wall_seconds: 0.0, ..report }
}

/// Runs 8 workers at 70 % of round-robin's saturation: with one frontend, with two that announce
/// requests to each other after `announce_delay`, and with two that don't.
fn compare(workload: Workload, requests: u64, announce_delay: f64) -> [PolicyReport; 3] {
    let scenario = scenario(workload, 8, requests);
    let rate = 0.7 * scenario.saturation(Policy::RoundRobin).unwrap();
    [(1, None), (2, Some(announce_delay)), (2, None)]
        .map(|(frontends, announce_delay)| run(&scenario, frontends, announce_delay, rate))
}

#[test]
fn single_frontend_gives_the_recorded_report() {
    let scenario = scenario(Workload::Mixed, 4, 1200);
    let report = run(&scenario, 1, None, 40.0);
    // Recorded at the commit before several frontends were supported.
    assert_eq!(report.hit_rate, 0.5624539716656393);
    assert_eq!(
        (report.ttft_ms.mean, report.ttft_ms.p50, report.ttft_ms.p90),
        (49.35538204, 45.8751995, 98.0418555)
    );
    assert_eq!(report.virtual_seconds, 34.163081963);
    // With one frontend, announcements make no difference.
    assert_eq!(report, run(&scenario, 1, Some(1e-3), 40.0));
    assert_ne!(report, run(&scenario, 2, Some(1e-3), 40.0));
}

#[test]
fn several_frontends_give_one_reproducible_report() {
    let scenario = scenario(Workload::Mixed, 4, 600);
    let report = run(&scenario, 3, Some(1e-3), 30.0);
    assert_eq!((report.frontends, report.completed), (3, 600));
    assert_eq!(report, run(&scenario, 3, Some(1e-3), 30.0));
}

#[test]
fn instant_announcements_make_two_frontends_equal_one() {
    let [one, announced, unannounced] = compare(Workload::UniqueImages, 4000, 0.0);
    assert!(
        (announced.ttft_ms.mean / one.ttft_ms.mean - 1.0).abs() < 0.005,
        "{announced:?} and {one:?}"
    );
    assert!(
        (announced.ttft_ms.p99 / one.ttft_ms.p99 - 1.0).abs() < 0.02,
        "{announced:?} and {one:?}"
    );
    assert!(unannounced.ttft_ms.p90 > 1.1 * one.ttft_ms.p90, "{unannounced:?} and {one:?}");
}

#[test]
fn announced_requests_make_two_frontends_serve_as_one() {
    for workload in [
        Workload::SharedImageQa,
        Workload::MultiTurnImages,
        Workload::ImageAfterText,
        Workload::Mixed,
    ] {
        let [one, announced, unannounced] = compare(workload, 4000, 1e-3);
        assert!(
            (announced.hit_rate / one.hit_rate - 1.0).abs() < 0.05,
            "{workload}: {announced:?} and {one:?}"
        );
        assert!(
            announced.ttft_ms.p90 < 1.05 * one.ttft_ms.p90,
            "{workload}: {announced:?} and {one:?}"
        );
        // Announcements matter only for these workloads: elsewhere requests do not wait, or
        // conversations have their workers.
        if matches!(workload, Workload::ImageAfterText | Workload::Mixed) {
            assert!(
                unannounced.ttft_ms.p90 > 1.05 * announced.ttft_ms.p90,
                "{workload}: {unannounced:?} and {announced:?}"
            );
        }
    }
}

/// The limit of 5 % in the test above does not hold here: see "Several frontends" in
/// `docs/routing.md`. Once it does, this workload belongs there.
#[test]
fn unique_images_collide_before_their_announcement() {
    let [one, announced, unannounced] = compare(Workload::UniqueImages, 8000, 1e-3);
    let slower = |report: &PolicyReport| report.ttft_ms.p90 / one.ttft_ms.p90;
    assert!((1.05..1.08).contains(&slower(&announced)), "{announced:?} and {one:?}");
    assert!(slower(&unannounced) > 1.15, "{unannounced:?} and {one:?}");
}

#[test]
fn invalid_frontends_are_refused() {
    let good = FrontendModel::default();
    let refused = |frontend: FrontendModel| frontend.check().is_err();
    assert!(!refused(FrontendModel { frontends: 64, announce_delay: None, ..good }));
    assert!(refused(FrontendModel { frontends: 0, ..good }));
    assert!(refused(FrontendModel { frontends: 65, ..good }));
    assert!(refused(FrontendModel { announce_delay: Some(-1e-3), ..good }));
    assert!(refused(FrontendModel { announce_delay: Some(f64::NAN), ..good }));
}
