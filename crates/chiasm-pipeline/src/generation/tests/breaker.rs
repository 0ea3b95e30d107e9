//! Workers that fail repeatedly, and workers that are merely silent.

use chiasm_backend::fake::Script;
use chiasm_backend::{Finish, JobError};
use chiasm_fleet::BreakerState;

use super::*;

fn failed(status: u16) -> JobError {
    JobError::ServerFailed { status, message: "boom".to_owned() }
}

fn overloaded(status: u16, seconds: u64) -> JobError {
    let retry_after = Duration::from_secs(seconds);
    JobError::Overloaded { status, retry_after, message: "later".to_owned() }
}

fn key_refused() -> JobError {
    JobError::KeyRefused { status: 401, message: "no".to_owned() }
}

fn unknown_model() -> JobError {
    JobError::UnknownModel { message: "what model?".to_owned() }
}

/// Has a worker fail with each of its next jobs.
fn fails(test: &TestPipeline, worker: usize, times: usize, error: impl Fn() -> JobError) {
    (0..times).for_each(|_| test.backends[worker].next_job(Script::refuse(error())));
}

fn answers(test: &TestPipeline, worker: usize, times: usize) {
    (0..times)
        .for_each(|_| test.backends[worker].next_job(Script::tokens(&[40]).finish(Finish::Eos)));
}

async fn ask(test: &TestPipeline) -> Result<WorkerId, Cause> {
    let asked = collect(&test.pipeline, &test.text(Sampling::default()).await).await;
    asked.map(|(_, attempted)| attempted.worker).map_err(|error| error.cause)
}

fn breaker(test: &TestPipeline, worker: u32) -> BreakerState {
    test.pipeline.fleet.worker(WorkerId(worker)).unwrap().breaker()
}

/// Waits for the pause, and for the keeper, whose timer ends at the same time.
async fn becomes_half_open(test: &TestPipeline, worker: u32, pause: f64) {
    let begun = Instant::now();
    while breaker(test, worker) != BreakerState::HalfOpen {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let waited = begun.elapsed().as_secs_f64();
    assert!((pause - 0.005..pause + 0.005).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn failing_worker_gets_five_requests_and_a_probe() {
    let test = TestPipeline::new(2).await;
    fails(&test, 0, 6, || failed(500));
    answers(&test, 1, 100);
    for _ in 0..50 {
        assert_eq!(ask(&test).await.unwrap(), WorkerId(1));
    }
    assert_eq!((test.backends[0].jobs().len(), breaker(&test, 0)), (5, BreakerState::Open));
    assert_eq!((retries(&test), test.pipeline.fleet.taking_workers()), (5, Some(1)));
    // One probe fails, the next one succeeds.
    for (pause, jobs, state) in [(0.5, 6, BreakerState::Open), (1.0, 7, BreakerState::Closed)] {
        becomes_half_open(&test, 0, pause).await;
        assert_eq!(test.pipeline.fleet.taking_workers(), Some(2), "a balancer must send the probe");
        answers(&test, 0, usize::from(jobs == 7));
        for _ in 0..3 {
            if test.backends[0].jobs().len() == jobs {
                break;
            }
            ask(&test).await.unwrap();
        }
        assert_eq!((test.backends[0].jobs().len(), breaker(&test, 0)), (jobs, state));
    }
}

#[tokio::test(start_paused = true)]
async fn spent_budget_leaves_the_healthy_worker() {
    let test =
        TestPipeline::limited(PipelineLimits { requests: Some(1), ..PipelineLimits::default() }, 2)
            .await;
    fails(&test, 0, 100, || failed(500));
    answers(&test, 1, 100);
    let mut lost = 0;
    for _ in 0..50 {
        lost += usize::from(ask(&test).await.is_err());
    }
    assert!(lost <= 5, "{lost} requests were lost beside an idle worker");
    assert_eq!(test.backends[0].jobs().len(), 5);
}

#[tokio::test(start_paused = true)]
async fn failures_of_all_servers_are_told_as_the_first() {
    for status in [500, 503, 504] {
        let test = TestPipeline::new(2).await;
        fails(&test, 0, 1, || failed(status));
        fails(&test, 1, 1, || failed(status));
        let error = ask(&test).await.unwrap_err();
        let Cause::ServerFailed { status: told, message } = error else { panic!("{error}") };
        assert_eq!((told, message.as_str()), (status, "boom"));
    }
}

#[tokio::test(start_paused = true)]
async fn only_broken_connections_quarantine_a_prompt() {
    for (status, quarantined) in [(502, 1), (500, 0)] {
        let test = TestPipeline::new(3).await;
        (0..3).for_each(|worker| fails(&test, worker, 1, || failed(status)));
        let error = ask(&test).await.unwrap_err();
        assert!(matches!(error, Cause::ServerFailed { .. }), "{error}");
        assert_eq!(test.pipeline.metrics.retries(Retry::Quarantined), quarantined, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn refused_key_opens_at_once() {
    let test = TestPipeline::new(2).await;
    fails(&test, 0, 1, key_refused);
    answers(&test, 1, 3);
    for _ in 0..3 {
        assert_eq!(ask(&test).await.unwrap(), WorkerId(1));
    }
    assert_eq!(
        (test.backends[0].jobs().len(), breaker(&test, 0), retries(&test)),
        (1, BreakerState::Open, 0)
    );
    fails(&test, 1, 1, key_refused);
    for _ in 0..2 {
        let error = ask(&test).await.unwrap_err();
        assert!(matches!(error, Cause::KeyRefused { .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn shortest_retry_after_of_all_servers_is_returned() {
    let test = TestPipeline::new(2).await;
    fails(&test, 0, 1, || overloaded(429, 30));
    fails(&test, 1, 1, || overloaded(503, 7));
    // The second request reaches no server.
    for waited in [0, 2] {
        tokio::time::sleep(Duration::from_secs(waited)).await;
        let Err(Cause::Overloaded { status, retry_after, .. }) = ask(&test).await else {
            panic!("it is taken")
        };
        assert_eq!((status, retry_after.as_secs_f64().round() as u64), (503, 7 - waited));
    }
    assert_eq!(retries(&test), 0);
    becomes_half_open(&test, 1, 5.0).await;
    answers(&test, 1, 1);
    assert_eq!(ask(&test).await.unwrap(), WorkerId(1));
    assert_eq!((breaker(&test, 0), breaker(&test, 1)), (BreakerState::Open, BreakerState::Closed));
}

#[tokio::test(start_paused = true)]
async fn unknown_model_is_looked_for_elsewhere() {
    let test = TestPipeline::new(2).await;
    fails(&test, 0, 5, unknown_model);
    answers(&test, 1, 20);
    for _ in 0..12 {
        assert_eq!(ask(&test).await.unwrap(), WorkerId(1));
    }
    assert_eq!(
        (test.backends[0].jobs().len(), breaker(&test, 0), retries(&test)),
        (5, BreakerState::Open, 0)
    );

    let test = TestPipeline::new(2).await;
    fails(&test, 0, 1, unknown_model);
    fails(&test, 1, 1, unknown_model);
    let error = ask(&test).await.unwrap_err();
    assert!(matches!(error, Cause::UnknownModel { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn rejected_request_visits_one_server() {
    let test = TestPipeline::new(2).await;
    let rejected =
        || JobError::Rejected { status: 422, field: "body".to_owned(), message: "odd".to_owned() };
    for worker in [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1] {
        fails(&test, worker, 1, rejected);
        let error = ask(&test).await.unwrap_err();
        assert!(matches!(error, Cause::Rejected { status: 422, .. }), "{error}");
    }
    assert_eq!(
        (breaker(&test, 0), breaker(&test, 1)),
        (BreakerState::Closed, BreakerState::Closed)
    );
}

#[tokio::test(start_paused = true)]
async fn abandoned_probe_makes_room_for_another() {
    let test = TestPipeline::new(1).await;
    fails(&test, 0, 5, || failed(500));
    for _ in 0..5 {
        ask(&test).await.unwrap_err();
    }
    becomes_half_open(&test, 0, 0.5).await;
    // The client leaves before the probe has an outcome.
    test.backends[0].next_job(Script { hangs: true, ..Script::default() });
    let abandoned = tokio::time::timeout(Duration::from_millis(1), ask(&test)).await;
    assert!(abandoned.is_err());
    assert_eq!(breaker(&test, 0), BreakerState::HalfOpen);
    answers(&test, 0, 1);
    assert_eq!(ask(&test).await.unwrap(), WorkerId(0));
    assert_eq!(breaker(&test, 0), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn open_breakers_fail_requests_at_once() {
    let test = TestPipeline::new(1).await;
    fails(&test, 0, 5, || failed(500));
    for _ in 0..5 {
        ask(&test).await.unwrap_err();
    }
    let begun = Instant::now();
    let error = ask(&test).await.unwrap_err();
    assert!(matches!(error, Cause::ServerFailed { .. }), "{error}");
    assert_eq!((begun.elapsed(), test.backends[0].jobs().len()), (Duration::ZERO, 5));
    assert!(!test.pipeline.fleet.can_answer());
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_a_suspect_worker() {
    let test = TestPipeline::new(1).await;
    test.backends[0].fall_silent(true);
    becomes(&test, 0, Condition::Suspect).await;
    answers(&test, 0, 1);
    let waiting = ask(&test);
    let answering = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(test.backends[0].jobs().is_empty());
        test.backends[0].fall_silent(false);
    };
    let (asked, ()) = tokio::join!(waiting, answering);
    assert_eq!(asked.unwrap(), WorkerId(0));
}

#[tokio::test(start_paused = true)]
async fn wait_for_a_suspect_worker_ends_with_the_deadline() {
    let limits = PipelineLimits {
        first_token_timeout: Some(Duration::from_secs(3)),
        ..PipelineLimits::default()
    };
    let test = TestPipeline::limited(limits, 1).await;
    test.backends[0].fall_silent(true);
    becomes(&test, 0, Condition::Suspect).await;
    let begun = Instant::now();
    let error = ask(&test).await.unwrap_err();
    assert!(matches!(error, Cause::TimedOut { .. }), "{error}");
    assert_eq!(begun.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn hung_or_dead_workers_end_the_wait() {
    for dies in [false, true] {
        let test = TestPipeline::new(1).await;
        test.backends[0].fall_silent(true);
        becomes(&test, 0, Condition::Suspect).await;
        let ending = async {
            if dies {
                test.backends[0].die(Death::new("it was unplugged"));
            }
        };
        let (asked, ()) = tokio::join!(ask(&test), ending);
        let error = asked.unwrap_err();
        assert!(matches!(error, Cause::NoWorker(_) | Cause::Silent), "{error}");
        assert!(test.backends[0].jobs().is_empty());
    }
}
