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

/// Lets a worker fail with its next `times` jobs.
fn script_failures(test: &TestPipeline, worker: usize, times: usize, error: impl Fn() -> JobError) {
    (0..times).for_each(|_| test.backends[worker].next_job(Script::refuse(error())));
}

/// Lets a worker answer its next `times` jobs.
fn script_answers(test: &TestPipeline, worker: usize, times: usize) {
    (0..times)
        .for_each(|_| test.backends[worker].next_job(Script::tokens(&[40]).finish(Finish::Eos)));
}

/// Runs a request. Returns the worker that answered it.
async fn run_request(test: &TestPipeline) -> Result<WorkerId, Cause> {
    let answer = collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await;
    answer.map(|(_, route)| route.worker).map_err(|error| error.cause)
}

fn breaker(test: &TestPipeline, worker: u32) -> BreakerState {
    test.pipeline.fleet.worker(WorkerId(worker)).unwrap().breaker()
}

/// Waits until a breaker is half-open. That takes the breaker's pause, whose timer the keeper has.
async fn wait_half_open(test: &TestPipeline, worker: u32, pause: f64) {
    let started = Instant::now();
    while breaker(test, worker) != BreakerState::HalfOpen {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let waited = started.elapsed().as_secs_f64();
    assert!((pause - 0.005..pause + 0.005).contains(&waited), "{waited}");
}

#[tokio::test(start_paused = true)]
async fn failing_worker_gets_five_requests_and_a_probe() {
    let test = TestPipeline::new(2).await;
    script_failures(&test, 0, 6, || failed(500));
    script_answers(&test, 1, 100);
    for _ in 0..50 {
        assert_eq!(run_request(&test).await.unwrap(), WorkerId(1));
    }
    assert_eq!((test.backends[0].jobs().len(), breaker(&test, 0)), (5, BreakerState::Open));
    assert_eq!((lost_retries(&test), test.pipeline.fleet.accepting_workers()), (5, Some(1)));
    // One probe fails, the next one succeeds.
    for (pause, jobs, state) in [(0.5, 6, BreakerState::Open), (1.0, 7, BreakerState::Closed)] {
        wait_half_open(&test, 0, pause).await;
        assert_eq!(
            test.pipeline.fleet.accepting_workers(),
            Some(2),
            "a balancer must send the probe"
        );
        script_answers(&test, 0, usize::from(jobs == 7));
        for _ in 0..3 {
            if test.backends[0].jobs().len() == jobs {
                break;
            }
            run_request(&test).await.unwrap();
        }
        assert_eq!((test.backends[0].jobs().len(), breaker(&test, 0)), (jobs, state));
    }
}

#[tokio::test(start_paused = true)]
async fn spent_budget_leaves_the_healthy_worker() {
    let test =
        TestPipeline::limited(PipelineLimits { requests: Some(1), ..PipelineLimits::default() }, 2)
            .await;
    script_failures(&test, 0, 100, || failed(500));
    script_answers(&test, 1, 100);
    let mut lost = 0;
    for _ in 0..50 {
        lost += usize::from(run_request(&test).await.is_err());
    }
    assert!(lost <= 5, "{lost} requests were lost beside an idle worker");
    assert_eq!(test.backends[0].jobs().len(), 5);
}

#[tokio::test(start_paused = true)]
async fn failure_of_all_servers_is_reported_as_theirs() {
    for status in [500, 503, 504] {
        let test = TestPipeline::new(2).await;
        script_failures(&test, 0, 1, || failed(status));
        script_failures(&test, 1, 1, || failed(status));
        let error = run_request(&test).await.unwrap_err();
        let Cause::ServerFailed { status: reported, message } = error else { panic!("{error}") };
        assert_eq!((reported, message.as_str()), (status, "boom"));
    }
}

#[tokio::test(start_paused = true)]
async fn only_broken_connections_quarantine_a_prompt() {
    for (status, quarantined) in [(502, 1), (500, 0)] {
        let test = TestPipeline::new(3).await;
        (0..3).for_each(|worker| script_failures(&test, worker, 1, || failed(status)));
        let error = run_request(&test).await.unwrap_err();
        assert!(matches!(error, Cause::ServerFailed { .. }), "{error}");
        assert_eq!(test.pipeline.metrics.retries(Retry::Quarantined), quarantined, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn refused_key_opens_at_once() {
    let test = TestPipeline::new(2).await;
    script_failures(&test, 0, 1, key_refused);
    script_answers(&test, 1, 3);
    for _ in 0..3 {
        assert_eq!(run_request(&test).await.unwrap(), WorkerId(1));
    }
    assert_eq!(
        (test.backends[0].jobs().len(), breaker(&test, 0), lost_retries(&test)),
        (1, BreakerState::Open, 0)
    );
    script_failures(&test, 1, 1, key_refused);
    for _ in 0..2 {
        let error = run_request(&test).await.unwrap_err();
        assert!(matches!(error, Cause::KeyRefused { .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn shortest_retry_after_of_all_servers_is_returned() {
    let test = TestPipeline::new(2).await;
    script_failures(&test, 0, 1, || overloaded(429, 30));
    script_failures(&test, 1, 1, || overloaded(503, 7));
    // The second request reaches no server.
    for waited in [0, 2] {
        tokio::time::sleep(Duration::from_secs(waited)).await;
        let Err(Cause::Overloaded { status, retry_after, .. }) = run_request(&test).await else {
            panic!("the request was accepted")
        };
        assert_eq!((status, retry_after.as_secs_f64().round() as u64), (503, 7 - waited));
    }
    assert_eq!(lost_retries(&test), 0);
    wait_half_open(&test, 1, 5.0).await;
    script_answers(&test, 1, 1);
    assert_eq!(run_request(&test).await.unwrap(), WorkerId(1));
    assert_eq!((breaker(&test, 0), breaker(&test, 1)), (BreakerState::Open, BreakerState::Closed));
}

#[tokio::test(start_paused = true)]
async fn unknown_model_is_tried_elsewhere() {
    let test = TestPipeline::new(2).await;
    script_failures(&test, 0, 5, unknown_model);
    script_answers(&test, 1, 20);
    for _ in 0..12 {
        assert_eq!(run_request(&test).await.unwrap(), WorkerId(1));
    }
    assert_eq!(
        (test.backends[0].jobs().len(), breaker(&test, 0), lost_retries(&test)),
        (5, BreakerState::Open, 0)
    );

    let test = TestPipeline::new(2).await;
    script_failures(&test, 0, 1, unknown_model);
    script_failures(&test, 1, 1, unknown_model);
    let error = run_request(&test).await.unwrap_err();
    assert!(matches!(error, Cause::UnknownModel { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn rejected_request_visits_one_server() {
    let test = TestPipeline::new(2).await;
    let rejected =
        || JobError::Rejected { status: 422, field: "body".to_owned(), message: "odd".to_owned() };
    for worker in [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1] {
        script_failures(&test, worker, 1, rejected);
        let error = run_request(&test).await.unwrap_err();
        assert!(matches!(error, Cause::Rejected { status: 422, .. }), "{error}");
    }
    assert_eq!(
        (breaker(&test, 0), breaker(&test, 1)),
        (BreakerState::Closed, BreakerState::Closed)
    );
}

#[tokio::test(start_paused = true)]
async fn abandoned_probe_admits_another() {
    let test = TestPipeline::new(1).await;
    script_failures(&test, 0, 5, || failed(500));
    for _ in 0..5 {
        run_request(&test).await.unwrap_err();
    }
    wait_half_open(&test, 0, 0.5).await;
    // The client leaves before the probe has an outcome.
    test.backends[0].next_job(Script { hangs: true, ..Script::default() });
    let abandoned = tokio::time::timeout(Duration::from_millis(1), run_request(&test)).await;
    assert!(abandoned.is_err());
    assert_eq!(breaker(&test, 0), BreakerState::HalfOpen);
    script_answers(&test, 0, 1);
    assert_eq!(run_request(&test).await.unwrap(), WorkerId(0));
    assert_eq!(breaker(&test, 0), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn open_breakers_fail_requests_at_once() {
    let test = TestPipeline::new(1).await;
    script_failures(&test, 0, 5, || failed(500));
    for _ in 0..5 {
        run_request(&test).await.unwrap_err();
    }
    let started = Instant::now();
    let error = run_request(&test).await.unwrap_err();
    assert!(matches!(error, Cause::ServerFailed { .. }), "{error}");
    assert_eq!((started.elapsed(), test.backends[0].jobs().len()), (Duration::ZERO, 5));
    assert!(!test.pipeline.fleet.can_answer());
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_suspect_worker() {
    let test = TestPipeline::new(1).await;
    test.backends[0].set_silent(true);
    wait_for_condition(&test, 0, Condition::Suspect).await;
    script_answers(&test, 0, 1);
    let waiting = run_request(&test);
    let answering = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(test.backends[0].jobs().is_empty());
        test.backends[0].set_silent(false);
    };
    let (answer, ()) = tokio::join!(waiting, answering);
    assert_eq!(answer.unwrap(), WorkerId(0));
}

#[tokio::test(start_paused = true)]
async fn wait_for_suspect_worker_ends_at_deadline() {
    let limits = PipelineLimits {
        first_token_timeout: Some(Duration::from_secs(3)),
        ..PipelineLimits::default()
    };
    let test = TestPipeline::limited(limits, 1).await;
    test.backends[0].set_silent(true);
    wait_for_condition(&test, 0, Condition::Suspect).await;
    let started = Instant::now();
    let error = run_request(&test).await.unwrap_err();
    assert!(matches!(error, Cause::TimedOut { .. }), "{error}");
    assert_eq!(started.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn hung_or_dead_workers_end_the_wait() {
    for dies in [false, true] {
        let test = TestPipeline::new(1).await;
        test.backends[0].set_silent(true);
        wait_for_condition(&test, 0, Condition::Suspect).await;
        let ending = async {
            if dies {
                test.backends[0].die(DeathReason::new("it was unplugged"));
            }
        };
        let (answer, ()) = tokio::join!(run_request(&test), ending);
        let error = answer.unwrap_err();
        assert!(matches!(error, Cause::NoWorker(_) | Cause::Silent), "{error}");
        assert!(test.backends[0].jobs().is_empty());
    }
}
