//! Tests of workers that get no requests for now: suspect ones, and ones that are closed.

use chiasm_router::{Admission, Policy, RouteError, Router};
use chiasm_types::WorkerId;

use crate::workload::{Prompt, router};

fn picks(router: &Router) -> Result<u32, RouteError> {
    Prompt::text(1, 64).select_excluding(router, &[]).map(|reservation| reservation.worker.0)
}

const POLICIES: [Policy; 3] = [Policy::KvMedia, Policy::LeastLoaded, Policy::RoundRobin];

#[test]
fn closed_worker_is_not_picked() {
    for policy in POLICIES {
        let router = router(2, |config| config.policy = policy);
        router.set_admission(WorkerId(0), Admission::None);
        assert_eq!((0..3).map(|_| picks(&router)).collect::<Vec<_>>(), [Ok(1); 3], "{policy}");
        router.set_admission(WorkerId(1), Admission::None);
        assert_eq!(picks(&router), Err(RouteError::NoWorker));
    }
}

#[test]
fn half_open_worker_gets_one_request() {
    for policy in POLICIES {
        let router = router(1, |config| config.policy = policy);
        router.set_admission(WorkerId(0), Admission::One);
        assert_eq!(picks(&router), Ok(0), "{policy}");
        assert_eq!(picks(&router), Err(RouteError::NoWorker), "{policy}");
        router.set_admission(WorkerId(0), Admission::All);
        assert_eq!((picks(&router), picks(&router)), (Ok(0), Ok(0)), "{policy}");
    }
}

#[test]
fn suspect_workers_alone_give_suspect_error() {
    let router = router(3, |_| ());
    router.set_suspect(WorkerId(0), true);
    router.set_admission(WorkerId(1), Admission::None);
    assert_eq!(picks(&router), Ok(2));
    router.set_suspect(WorkerId(2), true);
    assert_eq!(picks(&router), Err(RouteError::Suspect(2)));
    let only = Prompt::text(1, 64).select_excluding(&router, &[WorkerId(0), WorkerId(2)]);
    assert_eq!(
        only.map(|_| ()),
        Err(RouteError::NoWorker),
        "a closed worker does not count as suspect"
    );
}
