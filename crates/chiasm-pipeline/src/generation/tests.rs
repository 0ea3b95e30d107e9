mod breaker;

use std::time::Duration;

use chiasm_backend::fake::{FakeBackend, Script, fake_capabilities};
use chiasm_backend::{
    Capabilities, Content, Finish, Input, InputForm, JobError, Load, PlaceholderForm, Supports,
    ToolCallDelta,
};
use chiasm_fleet::{Condition, Patience};
use chiasm_parse::CallEnd;
use chiasm_request::WholeCall;
use chiasm_request::{ClientSampling, Prompt};
use chiasm_types::{BlockSize, Placeholder, TokenId};
use futures_util::StreamExt;

use super::*;
use crate::Cause;
use crate::PipelineLimits;
use crate::Retry;
use crate::retries::MAX_MOVES;
use crate::test_support::{TestPipeline, broken_picture, picture};

fn died() -> JobError {
    JobError::Dead(DeathReason::new("it was unplugged"))
}

fn not_taken() -> JobError {
    JobError::NotTaken(DeathReason::new("it was unplugged"))
}

/// Returns the number of requests that moved away from a lost worker.
fn lost_retries(test: &TestPipeline) -> u64 {
    test.pipeline.metrics.retries(Retry::Lost)
}

async fn deltas(generation: Generation) -> Vec<Result<ChoiceDelta, RequestError>> {
    generation.into_deltas().collect().await
}

#[tokio::test(start_paused = true)]
async fn worker_death_before_token_moves_request() {
    for at_once in [true, false] {
        let test = TestPipeline::new(2).await;
        let dying = if at_once { Script::refuse(died()) } else { Script::default().fail(died()) };
        test.backends[0].next_job(dying);
        test.backends[1].next_job(Script::tokens(&[40, 41]).finish(Finish::Length));
        let generation =
            Generation::start(&test.pipeline, &mut test.text(ClientSampling::default()).await)
                .await
                .unwrap();
        assert_eq!(generation.route().worker, WorkerId(1));
        let deltas = deltas(generation).await;
        assert_eq!(deltas.last().unwrap().as_ref().unwrap().finish, Some(Finish::Length));
        assert_eq!(lost_retries(&test), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn worker_death_after_token_ends_request() {
    let test = TestPipeline::new(2).await;
    test.backends[0].next_job(Script::tokens(&[40]).fail(died()));
    let generation =
        Generation::start(&test.pipeline, &mut test.text(ClientSampling::default()).await)
            .await
            .unwrap();
    let deltas = deltas(generation).await;
    assert_eq!(deltas.len(), 2);
    assert!(matches!(deltas[1].as_ref().unwrap_err().cause, Cause::EngineGone(_)));
    assert_eq!((lost_retries(&test), test.backends[1].jobs().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn collected_answer_moves_even_after_tokens() {
    let test = TestPipeline::new(2).await;
    test.backends[0].next_job(Script::tokens(&[40, 41, 42]).fail(died()));
    test.backends[1].next_job(Script::tokens(&[50]).then(0, &[51]).finish(Finish::Eos));
    let (choices, route) =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    assert_eq!(
        (choices[0].tokens.as_slice(), route.worker),
        (&[50, 51].map(TokenId)[..], WorkerId(1))
    );
    assert_eq!(lost_retries(&test), 1);
}

#[tokio::test(start_paused = true)]
async fn prompt_of_three_dead_workers_is_quarantined() {
    let test = TestPipeline::new(4).await;
    test.backends[..3].iter().for_each(|backend| backend.next_job(Script::refuse(died())));
    let mut prompt = test.text(ClientSampling::default()).await;
    let error = collect(&test.pipeline, &mut prompt).await.unwrap_err();
    assert!(matches!(error.cause, Cause::EngineGone(_)), "{error}");
    assert_eq!((lost_retries(&test), test.pipeline.metrics.retries(Retry::Quarantined)), (2, 1));

    let again = Generation::start(&test.pipeline, &mut prompt).await.map(drop).unwrap_err();
    assert!(matches!(again.cause, Cause::Quarantined), "{again}");
    assert_eq!(test.backends.iter().map(|backend| backend.jobs().len()).sum::<usize>(), 3);
    // Other prompts are served, and so is this one after the quarantine.
    test.backends[3].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    let mut other = test
        .prepare(Prompt::Tokens(vec![TokenId(7); 20]), ClientSampling::default())
        .await
        .unwrap();
    collect(&test.pipeline, &mut other).await.unwrap();
    tokio::time::sleep(test.pipeline.limits.quarantine).await;
    test.backends
        .iter()
        .for_each(|backend| backend.next_job(Script::tokens(&[40]).finish(Finish::Eos)));
    collect(&test.pipeline, &mut prompt).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn not_taken_request_is_retried_until_deadline() {
    let test = TestPipeline::new(2).await;
    for backend in &test.backends {
        (0..10).for_each(|_| backend.next_job(Script::refuse(not_taken())));
    }
    test.backends
        .iter()
        .for_each(|backend| backend.next_job(Script::tokens(&[40]).finish(Finish::Eos)));
    collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    assert_eq!((lost_retries(&test), test.pipeline.metrics.retries(Retry::NotTaken)), (0, 20));

    let impatient = PipelineLimits {
        first_token_timeout: Some(Duration::from_secs(1)),
        ..PipelineLimits::default()
    };
    let test = TestPipeline::limited(impatient, 1).await;
    (0..1000).for_each(|_| test.backends[0].next_job(Script::refuse(not_taken())));
    let error =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap_err();
    assert!(matches!(error.cause, Cause::TimedOut { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn moves_are_limited_by_retry_budget() {
    let test =
        TestPipeline::limited(PipelineLimits { requests: Some(2), ..PipelineLimits::default() }, 2)
            .await;
    // The first request uses the whole budget of two moves.
    for number in 0..3_u32 {
        test.backends.iter().for_each(|backend| backend.next_job(Script::refuse(died())));
        let mut prompt = test
            .prepare(Prompt::Tokens(vec![TokenId(number); 20]), ClientSampling::default())
            .await
            .unwrap();
        collect(&test.pipeline, &mut prompt).await.unwrap_err();
    }
    assert_eq!((lost_retries(&test), test.pipeline.metrics.retries(Retry::OverBudget)), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn request_is_left_to_untried_server() {
    let server = FakeBackend::with_capabilities(Capabilities {
        input: InputForm::Messages,
        ..fake_capabilities()
    });
    let test = TestPipeline::with(vec![FakeBackend::new(), server]).await;
    let class = test.pipeline.fleet.worker(WorkerId(0)).unwrap().class;
    let mut prompt = test.text(ClientSampling::default()).await;
    prompt.plans.retain(|plan| plan.class == class);
    prompt.attempts.can_forward = true;
    for (refused, lost) in [(not_taken(), 0), (died(), 1)] {
        test.backends[0].next_job(Script::refuse(refused));
        let error = collect(&test.pipeline, &mut prompt).await.unwrap_err();
        let Cause::LeftToServers { attempts, .. } = error.cause else { panic!("{error}") };
        assert_eq!((attempts.exclude, attempts.lost), (vec![WorkerId(0)], lost));
    }
    // The server has failed with the request, or the request can't be forwarded.
    let server_tried =
        Attempts { exclude: vec![WorkerId(1)], lost: 1, can_forward: true, ..Attempts::default() };
    for attempts in [server_tried, Attempts::default()] {
        prompt.attempts = attempts;
        test.backends[0].next_job(Script::refuse(died()));
        let error = collect(&test.pipeline, &mut prompt).await.unwrap_err();
        assert!(!matches!(error.cause, Cause::LeftToServers { .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn moves_between_servers_do_not_quarantine() {
    let test = TestPipeline::new(2).await;
    let mut prompt = test.text(ClientSampling::default()).await;
    let servers = vec![WorkerId(7), WorkerId(8)];
    prompt.attempts = Attempts { exclude: servers, lost: MAX_MOVES, ..Attempts::default() };
    test.backends[0].next_job(Script::refuse(died()));
    let error = collect(&test.pipeline, &mut prompt).await.unwrap_err();
    assert!(matches!(error.cause, Cause::EngineGone(_)), "{error}");
    assert_eq!(
        (test.backends[1].jobs().len(), test.pipeline.metrics.retries(Retry::Quarantined)),
        (0, 0)
    );
}

/// Waits until a worker has this condition.
async fn wait_for_condition(test: &TestPipeline, worker: u32, condition: Condition) {
    let worker = WorkerId(worker);
    while test.pipeline.fleet.worker(worker).unwrap().condition() != condition {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn silent_worker_gets_no_requests_hung_one_loses_them() {
    let test = TestPipeline::new(2).await;
    let silent = &test.backends[0];
    silent.next_job(Script::tokens(&[40]));
    let generation =
        Generation::start(&test.pipeline, &mut test.text(ClientSampling::default()).await)
            .await
            .unwrap();
    let mut with_token = Box::pin(generation.into_deltas());
    with_token.next().await.unwrap().unwrap();
    // Round robin: the next request goes to the first worker again.
    test.backends[1].next_job(Script::tokens(&[60]).finish(Finish::Eos));
    collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    silent.next_job(Script::tokens(&[50, 51]));
    test.backends[1].next_job(Script::tokens(&[61]).finish(Finish::Eos));
    let mut prompt = test.text(ClientSampling::default()).await;
    let whole = collect(&test.pipeline, &mut prompt);
    let watching = async {
        while silent.jobs().len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        silent.set_silent(true);
        wait_for_condition(&test, 0, Condition::Suspect).await;
        assert_eq!((test.pipeline.fleet.ready_workers(), silent.aborted()), (1, 0));
    };
    let (whole, ()) = tokio::join!(whole, watching);
    assert_eq!(
        (whole.unwrap().1.worker, silent.aborted(), lost_retries(&test)),
        (WorkerId(1), 1, 1)
    );
    assert_eq!(test.pipeline.fleet.worker(WorkerId(0)).unwrap().condition(), Condition::Hung);
    // A request with a token stays, and continues with the worker.
    assert!(futures_util::poll!(with_token.next()).is_pending());

    for _ in 0..3 {
        test.backends[1].next_job(Script::tokens(&[62]).finish(Finish::Eos));
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    }
    assert_eq!(silent.jobs().len(), 2);
    silent.set_silent(false);
    wait_for_condition(&test, 0, Condition::Answers).await;
    assert_eq!(test.pipeline.fleet.ready_workers(), 2);
    silent.next_job(Script::tokens(&[42]).finish(Finish::Eos));
    let (_, route) =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    assert_eq!(route.worker, WorkerId(0));
}

#[tokio::test(start_paused = true)]
async fn request_without_token_leaves_suspect_worker() {
    for whole in [true, false] {
        let test = TestPipeline::new(2).await;
        test.backends[0].set_silent(true);
        test.backends[1].next_job(Script::tokens(&[60]).finish(Finish::Eos));
        let mut prompt = test.text(ClientSampling::default()).await;
        let started = Instant::now();
        let route = if whole {
            collect(&test.pipeline, &mut prompt).await.unwrap().1
        } else {
            Generation::start(&test.pipeline, &mut prompt).await.unwrap().route()
        };
        let patience = Patience::default();
        assert!(
            started.elapsed() < patience.suspect_after + Duration::from_secs(3),
            "{:?}",
            started.elapsed()
        );
        assert_eq!((route.worker, route.moves, test.backends[0].aborted()), (WorkerId(1), 1, 1));
        assert_eq!((test.pipeline.metrics.retries(Retry::Suspect), lost_retries(&test)), (1, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn moved_request_counts_both_workers_that_die() {
    let test = TestPipeline::new(4).await;
    test.backends[0].set_silent(true);
    test.backends[0]
        .next_job(Script { pause: Duration::from_secs(20), ..Script::default().fail(died()) });
    test.backends[1]
        .next_job(Script { pause: Duration::from_secs(30), ..Script::default().fail(died()) });
    for backend in &test.backends[2..] {
        backend.next_job(Script::refuse(died()));
    }
    let mut prompt = test.text(ClientSampling::default()).await;
    let error = collect(&test.pipeline, &mut prompt).await.unwrap_err();
    assert!(matches!(error.cause, Cause::EngineGone(_)), "{error}");
    let jobs = test.backends.iter().map(|backend| backend.jobs().len());
    assert_eq!(jobs.sum::<usize>(), 3, "as many as without a move");
    assert_eq!(test.pipeline.metrics.retries(Retry::Quarantined), 1);
}

#[tokio::test(start_paused = true)]
async fn suspect_worker_that_answers_first_keeps_its_request() {
    let test = TestPipeline::new(2).await;
    test.backends[0].set_silent(true);
    for (worker, seconds) in [(0, 20), (1, 90)] {
        let answer = Script::tokens(&[50]).finish(Finish::Eos);
        test.backends[worker].next_job(Script { pause: Duration::from_secs(seconds), ..answer });
    }
    let mut prompt = test.text(ClientSampling::default()).await;
    let route = collect(&test.pipeline, &mut prompt).await.unwrap().1;
    assert_eq!(
        (route.worker, test.backends[1].jobs().len(), test.backends[1].aborted()),
        (WorkerId(0), 1, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn request_stays_at_suspect_worker_while_others_are_busy() {
    let test = TestPipeline::new(2).await;
    test.backends[0].set_silent(true);
    let max_running = fake_capabilities().max_running as u64;
    test.backends[1].report_load(Load { running: max_running, ..Load::default() });
    test.backends[1].next_job(Script::tokens(&[60]).finish(Finish::Eos));
    let mut prompt = test.text(ClientSampling::default()).await;
    let started = Instant::now();
    let answer = collect(&test.pipeline, &mut prompt);
    let freed = async {
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(test.backends[1].jobs().is_empty());
        test.backends[1].report_load(Load { running: max_running - 1, ..Load::default() });
    };
    let (whole, ()) = tokio::join!(answer, freed);
    assert_eq!((whole.unwrap().1.worker, started.elapsed().as_secs()), (WorkerId(1), 30));
}

#[tokio::test(start_paused = true)]
async fn error_after_the_last_token_is_ignored() {
    let test = TestPipeline::new(1).await;
    let answer = Script::tokens(&[40, 41]).finish(Finish::Length);
    test.backends[0].next_job(answer.fail(died()));
    let generation =
        Generation::start(&test.pipeline, &mut test.text(ClientSampling::default()).await)
            .await
            .unwrap();
    let deltas = deltas(generation).await;
    assert_eq!(deltas.last().unwrap().as_ref().unwrap().finish, Some(Finish::Length));
}

#[tokio::test(start_paused = true)]
async fn first_token_or_whole_request_times_out() {
    let limits = PipelineLimits {
        first_token_timeout: Some(Duration::from_secs(5)),
        request_timeout: Some(Duration::from_secs(20)),
        ..PipelineLimits::default()
    };
    let test = TestPipeline::limited(limits, 1).await;
    let flag = |error: RequestError| match error.cause {
        Cause::TimedOut { flag, .. } => flag,
        other => panic!("{other}"),
    };
    let started = Instant::now();
    let error = Generation::start(&test.pipeline, &mut test.text(ClientSampling::default()).await)
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!((flag(error), started.elapsed().as_secs()), ("--first-token-timeout", 5));

    // A token every three seconds.
    for whole in [true, false] {
        let script =
            (0..9).fold(Script::tokens(&[40]), |script, token| script.then(0, &[50 + token]));
        test.backends[0].next_job(Script { pause: Duration::from_secs(3), ..script });
        let started = Instant::now();
        let mut prompt = test.text(ClientSampling::default()).await;
        let error = if whole {
            collect(&test.pipeline, &mut prompt).await.unwrap_err()
        } else {
            let generation = Generation::start(&test.pipeline, &mut prompt).await.unwrap();
            let mut deltas = deltas(generation).await;
            assert_eq!(deltas.len(), 7);
            deltas.pop().unwrap().unwrap_err()
        };
        assert_eq!((flag(error), started.elapsed().as_secs()), ("--request-timeout", 20));
    }
    assert_eq!(test.backends[0].aborted(), 3);
}

#[tokio::test(start_paused = true)]
async fn aborted_requests_end_with_an_error() {
    let test = TestPipeline::new(1).await;
    test.backends[0].next_job(Script::tokens(&[40]));
    let generation =
        Generation::start(&test.pipeline, &mut test.text(ClientSampling::default()).await)
            .await
            .unwrap();
    let mut prompt = test.text(ClientSampling::default()).await;
    let waiting = collect(&test.pipeline, &mut prompt);
    test.pipeline.fleet.abort_requests("the frontend is shutting down");
    let deltas = deltas(generation).await;
    assert_eq!(
        deltas.last().unwrap().as_ref().unwrap_err().to_string(),
        "the engine is gone: the frontend is shutting down"
    );
    assert!(matches!(waiting.await.unwrap_err().cause, Cause::NoOtherWorker | Cause::NoWorker(_)));
    assert_eq!(test.pipeline.fleet.metrics().engine_deaths(WorkerId(0)), 0);
}

#[tokio::test(start_paused = true)]
async fn last_worker_lost_reports_no_other_worker() {
    let test = TestPipeline::new(1).await;
    test.backends[0].next_job(Script::refuse(died()));
    let error =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap_err();
    assert!(matches!(error.cause, Cause::NoOtherWorker), "{error}");
}

#[tokio::test(start_paused = true)]
async fn request_fault_is_not_retried() {
    let test = TestPipeline::new(2).await;
    let message = "must be at least 1".to_owned();
    let refusal = JobError::Refused { field: "sampling_params.max_tokens".to_owned(), message };
    test.backends[0].next_job(Script::refuse(refusal));
    let error =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap_err();
    assert_eq!(error.field.as_deref(), Some("sampling_params.max_tokens"));
    assert_eq!((lost_retries(&test), test.backends[1].jobs().len()), (0, 0));
    test.backends[1].next_job(Script::default().fail(JobError::Failed));
    let error =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap_err();
    assert!(matches!(error.cause, Cause::Internal(_)), "{error}");
}

#[tokio::test(start_paused = true)]
async fn stop_string_ends_only_its_continuation() {
    let test = TestPipeline::new(1).await;
    let tokens = |text: &str| -> Vec<u32> {
        test.pipeline
            .model
            .tokenizer
            .encode(text, false)
            .unwrap()
            .iter()
            .map(|token| token.0)
            .collect()
    };
    let stop = tokens("over the lazy dog");
    let more = tokens("the quick brown fox");
    let script = Script::default()
        .then(0, &stop)
        .then(1, &more)
        .then(0, &more)
        .then(1, &more)
        .finish(Finish::Length);
    test.backends[0].next_job(script);
    let stop = vec!["lazy".to_owned()];
    let sampling =
        ClientSampling { n: 2, temperature: Some(1.0), stop, ..ClientSampling::default() };
    let (choices, _) = collect(&test.pipeline, &mut test.text(sampling).await).await.unwrap();
    assert_eq!(choices[0].finish, Finish::StopString("lazy".to_owned()));
    assert_eq!(choices[0].events.only_text(), Some("over the "));
    assert_eq!((&choices[1].finish, choices[1].tokens.len()), (&Finish::Length, 2 * more.len()));
    assert_eq!(test.backends[0].jobs()[0].sampling.n, 2);
}

#[tokio::test(start_paused = true)]
async fn outputs_after_stop_string_are_dropped() {
    let test = TestPipeline::new(1).await;
    let tokens = |text: &str| -> Vec<u32> {
        test.pipeline
            .model
            .tokenizer
            .encode(text, false)
            .unwrap()
            .iter()
            .map(|token| token.0)
            .collect()
    };
    let stop = tokens("over the lazy dog");
    let script = || {
        let script =
            Script::default().then(0, &stop).then(0, &tokens("the fox")).finish(Finish::Length);
        let late = Prefill { cached_tokens: 1, ..Prefill::default() };
        let mut script = Script { overtakes_stop: true, ..script };
        script.outputs[0].prefill = None;
        script.outputs[1].prefill = Some(late);
        script
    };
    let sampling = || ClientSampling {
        stop: vec!["lazy".to_owned()],
        logprobs: Some(0),
        ..ClientSampling::default()
    };
    let ended = Finish::StopString("lazy".to_owned());

    test.backends[0].next_job(script());
    let (choices, route) = collect(&test.pipeline, &mut test.text(sampling()).await).await.unwrap();
    assert_eq!((choices[0].events.only_text(), &choices[0].finish), (Some("over the "), &ended));
    assert_eq!(route.prefill.cached_tokens, 1);
    assert!(choices[0].logprobs.is_some(), "a late output removes no log probabilities");
    let counted = choices[0].tokens.len();

    test.backends[0].next_job(script());
    let generation =
        Generation::start(&test.pipeline, &mut test.text(sampling()).await).await.unwrap();
    let deltas: Vec<_> = deltas(generation).await.into_iter().map(Result::unwrap).collect();
    let [first, late] = &deltas[..] else { panic!("{deltas:?}") };
    assert_eq!((first.finish.as_ref(), first.tokens.len()), (Some(&ended), counted));
    assert!(late.has_only_counts() && late.prefill.is_some(), "{late:?}");
    assert_eq!(test.pipeline.metrics.finishes(&ended), 2);
}

#[tokio::test(start_paused = true)]
async fn backend_text_passes_unchanged() {
    let test = TestPipeline::new(1).await;
    let piece = |id: Option<&str>, arguments: &str| ToolCallDelta {
        index: 0,
        id: id.map(str::to_owned),
        name: id.map(|_| "look".to_owned()),
        arguments: arguments.to_owned(),
    };
    let text = |text: &str, call: ToolCallDelta, finish| Output {
        choice: 0,
        content: Content::Text { text: text.to_owned(), tool_calls: vec![call] },
        finish,
        prefill: None,
        prompt_logprobs: None,
    };
    let outputs = [
        text("I look", piece(Some("call_1"), "{\"at\":"), None),
        text("", piece(None, " 1}"), Some(Finish::ToolCalls)),
    ];
    test.backends[0].next_job(Script { outputs: outputs.into(), ..Script::default() });
    let (choices, _) =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    let events = &choices[0].events;
    assert_eq!((events.text().as_ref(), &choices[0].finish), ("I look", &Finish::ToolCalls));
    let call = WholeCall { call: &piece(Some("call_1"), "{\"at\": 1}"), end: CallEnd::Closed };
    assert_eq!(events.calls(), [call]);
}

#[tokio::test(start_paused = true)]
async fn dropped_answer_aborts_its_job() {
    let test = TestPipeline::new(1).await;
    test.backends[0].next_job(Script::tokens(&[40]));
    let generation =
        Generation::start(&test.pipeline, &mut test.text(ClientSampling::default()).await)
            .await
            .unwrap();
    assert_eq!(test.backends[0].aborted(), 0);
    drop(generation);
    assert_eq!(test.backends[0].aborted(), 1);
    // The client leaves before the first token.
    let mut prepared = test.text(ClientSampling::default()).await;
    let waiting = tokio::time::timeout(
        Duration::from_secs(5),
        Generation::start(&test.pipeline, &mut prepared),
    )
    .await;
    assert!(waiting.is_err());
    assert_eq!(test.backends[0].aborted(), 2);
    assert_eq!(test.pipeline.fleet.router().workers()[0].requests, 0);
}

#[tokio::test(start_paused = true)]
async fn first_token_time_includes_backend_time() {
    let test = TestPipeline::new(1).await;
    let script =
        Script { pause: Duration::from_millis(1500), ..Script::tokens(&[40]).finish(Finish::Eos) };
    test.backends[0].next_job(script);
    let (_, route) =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    assert_eq!(route.first_token, Some(Duration::from_millis(1500)));
}

// Real time, because images are decoded on other threads.
#[tokio::test]
async fn media_is_decoded_once_for_its_backend() {
    let test = TestPipeline::new(1).await;
    let backend = &test.backends[0];
    let late = Duration::from_secs(100);
    for late_delivery in [None, Some(late)] {
        backend.next_job(Script { late_delivery, ..Script::tokens(&[40]).finish(Finish::Eos) });
        let mut prepared = test.prepare(picture(), ClientSampling::default()).await.unwrap();
        let (_, route) = collect(&test.pipeline, &mut prepared).await.unwrap();
        assert_eq!(backend.requested_items().len(), 1);
        let delivered = route.delivered;
        assert_eq!(delivered.cached + delivered.inline, 1);
        assert_eq!(route.hand_off >= late, late_delivery.is_some());
    }
    assert_eq!(test.pipeline.metrics.media_decoded.get(), 1);
}

#[tokio::test]
async fn broken_image_is_client_fault_at_its_field() {
    let test = TestPipeline::new(2).await;
    let mut prepared = test.prepare(broken_picture(), ClientSampling::default()).await.unwrap();
    let error = collect(&test.pipeline, &mut prepared).await.unwrap_err();
    assert!(matches!(error.cause, Cause::Media(_)), "{error}");
    assert_eq!(error.field.as_deref(), Some("messages[0].content[0].image_url"));
    assert_eq!((lost_retries(&test), test.backends[1].requested_items().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn request_is_planned_once_per_class() {
    let mut other = fake_capabilities();
    other.class.block_size = BlockSize::new(4).unwrap();
    let test = TestPipeline::with(vec![
        FakeBackend::new(),
        FakeBackend::new(),
        FakeBackend::with_capabilities(other),
    ])
    .await;
    let prepared = test
        .prepare(Prompt::Tokens((1..=40).map(TokenId).collect()), ClientSampling::default())
        .await;
    let mut prepared = prepared.unwrap();
    let keys: Vec<usize> = prepared.plans.iter().map(|plan| plan.keys.len()).collect();
    assert_eq!(keys, [2, 10]);
    let mut classes = Vec::new();
    for backend in &test.backends {
        backend.next_job(Script::tokens(&[40]).finish(Finish::Eos));
    }
    for _ in 0..3 {
        let (_, route) = collect(&test.pipeline, &mut prepared).await.unwrap();
        classes.push((route.worker, route.total_blocks));
    }
    assert_eq!(classes, [(WorkerId(0), 2), (WorkerId(1), 2), (WorkerId(2), 10)]);
}

#[tokio::test(start_paused = true)]
async fn prompt_goes_only_to_workers_it_fits() {
    let small = Capabilities { max_model_len: 8, ..fake_capabilities() };
    let test =
        TestPipeline::with(vec![FakeBackend::with_capabilities(small), FakeBackend::new()]).await;
    let tokens = |count: u32| Prompt::Tokens((1..=count).map(TokenId).collect());
    for count in [7, 8, 9, 40] {
        let backend = &test.backends[usize::from(count > 7)];
        backend.next_job(Script::tokens(&[40]).finish(Finish::Eos));
        let before = backend.jobs().len();
        let mut prepared = test.prepare(tokens(count), ClientSampling::default()).await.unwrap();
        collect(&test.pipeline, &mut prepared).await.unwrap();
        if count > 7 {
            assert_eq!(backend.jobs().len(), before + 1, "{count}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unsupporting_worker_is_avoided_if_possible() {
    let supports = Supports { bad_words: false, ..Supports::EVERYTHING };
    let lacking =
        || FakeBackend::with_capabilities(Capabilities { supports, ..fake_capabilities() });
    let words = ClientSampling { bad_words: vec!["fox".to_owned()], ..ClientSampling::default() };
    let test = TestPipeline::with(vec![lacking(), FakeBackend::new(), lacking()]).await;
    for (sampling, worker) in
        [(words.clone(), 1), (words.clone(), 1), (ClientSampling::default(), 2)]
    {
        test.backends[worker].next_job(Script::tokens(&[40]).finish(Finish::Eos));
        let (_, route) = collect(&test.pipeline, &mut test.text(sampling).await).await.unwrap();
        assert_eq!(route.worker, WorkerId(worker as u32));
    }
    // Without another worker, the worker itself reports what it lacks.
    let alone = TestPipeline::with(vec![lacking()]).await;
    alone.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    assert!(collect(&alone.pipeline, &mut alone.text(words).await).await.is_ok());
}

#[tokio::test]
async fn expanding_worker_gets_one_marker_per_item() {
    let mut marked = fake_capabilities();
    marked.class.placeholders = PlaceholderForm::Marker;
    let test =
        TestPipeline::with(vec![FakeBackend::with_capabilities(marked), FakeBackend::new()]).await;
    for backend in &test.backends {
        backend.next_job(Script::tokens(&[40]).finish(Finish::Eos));
    }
    let mut prepared = test.prepare(picture(), ClientSampling::default()).await.unwrap();
    for _ in 0..2 {
        collect(&test.pipeline, &mut prepared).await.unwrap();
    }
    let marked_job = test.backends[0].jobs().remove(0);
    let expanded_job = test.backends[1].jobs().remove(0);
    let Input::Tokens(expanded) = &expanded_job.input else { panic!("{expanded_job:?}") };
    let Input::Marked { tokens, expanded: expected } = &marked_job.input else {
        panic!("{marked_job:?}")
    };
    assert_eq!(expected, expanded);
    let Placeholder { offset, length, .. } = &expanded_job.media[0].placeholder;
    let before = &expanded[..*offset];
    let after = &expanded[offset + length..];
    assert_eq!(**tokens, [before, &expanded[*offset..=*offset], after].concat());
    // A prompt without items is not expanded.
    test.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    assert!(matches!(test.backends[0].jobs().remove(1).input, Input::Tokens(_)));
}

#[tokio::test(start_paused = true)]
async fn late_cached_tokens_are_counted_once() {
    let test = TestPipeline::new(1).await;
    let prefill = |cached_tokens| Some(Prefill { cached_tokens, ..Prefill::default() });
    for (first, last, known) in
        [(None, prefill(3), 3), (prefill(0), prefill(5), 0), (prefill(4), None, 4)]
    {
        let mut script = Script::tokens(&[40]).then(0, &[41]).finish(Finish::Eos);
        script.outputs[0].prefill = first;
        script.outputs[1].prefill = last;
        test.backends[0].next_job(script);
        let mut prepared = test.text(ClientSampling::default()).await;
        let before = test.pipeline.metrics.total_prompt_tokens().cached;
        let generation = Generation::start(&test.pipeline, &mut prepared).await.unwrap();
        let prefills: Vec<_> =
            deltas(generation).await.into_iter().map(|delta| delta.unwrap().prefill).collect();
        assert_eq!(prefills, [None, if first.is_none() { prefill(3) } else { None }]);
        assert_eq!(test.pipeline.metrics.total_prompt_tokens().cached - before, known);
    }
}

#[tokio::test(start_paused = true)]
async fn draining_worker_gets_no_requests() {
    let test = TestPipeline::new(2).await;
    test.backends[0].report_load(Load { draining: true, ..Load::default() });
    for _ in 0..3 {
        test.backends[1].next_job(Script::tokens(&[40]).finish(Finish::Eos));
        let (_, route) =
            collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
        assert_eq!(route.worker, WorkerId(1));
    }
    let accepting = || test.pipeline.fleet.accepting_workers();
    assert_eq!(accepting(), Some(1));
    test.backends[1].report_load(Load { draining: true, ..Load::default() });
    assert_eq!((accepting(), test.pipeline.fleet.can_answer()), (None, true));
    test.backends[0].report_load(Load::default());
    assert_eq!(accepting(), Some(1));
    test.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    let (_, route) =
        collect(&test.pipeline, &mut test.text(ClientSampling::default()).await).await.unwrap();
    assert_eq!(route.worker, WorkerId(0));
}
