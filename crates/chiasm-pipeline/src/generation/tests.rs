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
use chiasm_request::{Prompt, Sampling};
use chiasm_types::{BlockSize, Placeholder, TokenId};
use futures_util::StreamExt;

use super::*;
use crate::Cause;
use crate::PipelineLimits;
use crate::Retry;
use crate::retries::MAX_MOVES;
use crate::test_support::{TestPipeline, broken_picture, picture};

fn died() -> JobError {
    JobError::Dead(Death::new("it was unplugged"))
}

fn not_taken() -> JobError {
    JobError::NotTaken(Death::new("it was unplugged"))
}

/// Requests that moved from a worker that had them.
fn retries(test: &TestPipeline) -> u64 {
    test.pipeline.metrics.retries(Retry::Lost)
}

async fn deltas(generation: Generation) -> Vec<Result<ChoiceDelta, RequestError>> {
    generation.into_deltas().collect().await
}

#[tokio::test(start_paused = true)]
async fn a_request_moves_on_when_its_worker_dies_before_a_token() {
    for at_once in [true, false] {
        let test = TestPipeline::new(2).await;
        let dying = if at_once { Script::refuse(died()) } else { Script::default().fail(died()) };
        test.backends[0].next_job(dying);
        test.backends[1].next_job(Script::tokens(&[40, 41]).finish(Finish::Length));
        let generation =
            Generation::start(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
        assert_eq!(generation.attempted().worker, WorkerId(1));
        let deltas = deltas(generation).await;
        assert_eq!(deltas.last().unwrap().as_ref().unwrap().finish, Some(Finish::Length));
        assert_eq!(retries(&test), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_has_told_a_token_ends_with_its_worker() {
    let test = TestPipeline::new(2).await;
    test.backends[0].next_job(Script::tokens(&[40]).fail(died()));
    let generation =
        Generation::start(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    let deltas = deltas(generation).await;
    assert_eq!(deltas.len(), 2);
    assert!(matches!(deltas[1].as_ref().unwrap_err().cause, Cause::EngineGone(_)));
    assert_eq!((retries(&test), test.backends[1].jobs().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn an_answer_in_one_piece_moves_on_whatever_its_worker_has_told() {
    let test = TestPipeline::new(2).await;
    test.backends[0].next_job(Script::tokens(&[40, 41, 42]).fail(died()));
    test.backends[1].next_job(Script::tokens(&[50]).then(0, &[51]).finish(Finish::Eos));
    let (choices, attempted) =
        collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    assert_eq!(
        (choices[0].tokens.as_slice(), attempted.worker),
        (&[50, 51].map(TokenId)[..], WorkerId(1))
    );
    assert_eq!(retries(&test), 1);
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_three_workers_died_with_visits_no_other_for_a_while() {
    let test = TestPipeline::new(4).await;
    test.backends[..3].iter().for_each(|backend| backend.next_job(Script::refuse(died())));
    let prompt = test.text(Sampling::default()).await;
    let error = collect(&test.pipeline, &prompt).await.unwrap_err();
    assert!(matches!(error.cause, Cause::EngineGone(_)), "{error}");
    assert_eq!((retries(&test), test.pipeline.metrics.retries(Retry::Quarantined)), (2, 1));

    let again = Generation::start(&test.pipeline, &prompt).await.map(drop).unwrap_err();
    assert!(matches!(again.cause, Cause::Quarantined), "{again}");
    assert_eq!(test.backends.iter().map(|backend| backend.jobs().len()).sum::<usize>(), 3);
    // Others are served, and so is this one later.
    test.backends[3].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    let other =
        test.prepare(Prompt::Tokens(vec![TokenId(7); 20]), Sampling::default()).await.unwrap();
    collect(&test.pipeline, &other).await.unwrap();
    tokio::time::sleep(test.pipeline.limits.quarantine).await;
    test.backends
        .iter()
        .for_each(|backend| backend.next_job(Script::tokens(&[40]).finish(Finish::Eos)));
    collect(&test.pipeline, &prompt).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn workers_that_never_had_a_request_are_tried_for_as_long_as_there_is_time() {
    let test = TestPipeline::new(2).await;
    for backend in &test.backends {
        (0..10).for_each(|_| backend.next_job(Script::refuse(not_taken())));
    }
    test.backends
        .iter()
        .for_each(|backend| backend.next_job(Script::tokens(&[40]).finish(Finish::Eos)));
    collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    assert_eq!((retries(&test), test.pipeline.metrics.retries(Retry::NotTaken)), (0, 20));

    let impatient = PipelineLimits {
        first_token_timeout: Some(Duration::from_secs(1)),
        ..PipelineLimits::default()
    };
    let test = TestPipeline::limited(impatient, 1).await;
    (0..1000).for_each(|_| test.backends[0].next_job(Script::refuse(not_taken())));
    let error = collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap_err();
    assert!(matches!(error.cause, Cause::TimedOut { .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn no_more_requests_move_than_the_budget_has_room_for() {
    let test =
        TestPipeline::limited(PipelineLimits { requests: Some(2), ..PipelineLimits::default() }, 2)
            .await;
    // The first takes both.
    for number in 0..3_u32 {
        test.backends.iter().for_each(|backend| backend.next_job(Script::refuse(died())));
        let prompt = test
            .prepare(Prompt::Tokens(vec![TokenId(number); 20]), Sampling::default())
            .await
            .unwrap();
        collect(&test.pipeline, &prompt).await.unwrap_err();
    }
    assert_eq!((retries(&test), test.pipeline.metrics.retries(Retry::OverBudget)), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn what_no_engine_takes_is_left_to_a_server_that_it_has_not_been_to() {
    let server =
        FakeBackend::with(Capabilities { input: InputForm::Messages, ..fake_capabilities() });
    let test = TestPipeline::with(vec![FakeBackend::new(), server]).await;
    let class = test.pipeline.fleet.worker(WorkerId(0)).unwrap().class;
    let mut prompt = test.text(Sampling::default()).await;
    prompt.plans.retain(|plan| plan.class == class);
    prompt.tried.may_be_passed_on = true;
    for (refused, lost) in [(not_taken(), 0), (died(), 1)] {
        test.backends[0].next_job(Script::refuse(refused));
        let error = collect(&test.pipeline, &prompt).await.unwrap_err();
        let Cause::LeftToServers { tried, .. } = error.cause else { panic!("{error}") };
        assert_eq!((tried.exclude, tried.lost), (vec![WorkerId(0)], lost));
    }
    // That server has failed with it, or can't be passed on: the engine is all that there is.
    let gone_to_both = Attempts {
        exclude: vec![WorkerId(1)],
        lost: 1,
        may_be_passed_on: true,
        ..Attempts::default()
    };
    for tried in [gone_to_both, Attempts::default()] {
        prompt.tried = tried;
        test.backends[0].next_job(Script::refuse(died()));
        let error = collect(&test.pipeline, &prompt).await.unwrap_err();
        assert!(!matches!(error.cause, Cause::LeftToServers { .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn moves_between_servers_count_but_quarantine_no_prompt() {
    let test = TestPipeline::new(2).await;
    let mut prompt = test.text(Sampling::default()).await;
    let servers = vec![WorkerId(7), WorkerId(8)];
    prompt.tried = Attempts { exclude: servers, lost: MAX_MOVES, ..Attempts::default() };
    test.backends[0].next_job(Script::refuse(died()));
    let error = collect(&test.pipeline, &prompt).await.unwrap_err();
    assert!(matches!(error.cause, Cause::EngineGone(_)), "{error}");
    assert_eq!(
        (test.backends[1].jobs().len(), test.pipeline.metrics.retries(Retry::Quarantined)),
        (0, 0)
    );
}

/// Waits until a worker's silence is taken for this.
async fn becomes(test: &TestPipeline, worker: u32, condition: Condition) {
    let worker = WorkerId(worker);
    while test.pipeline.fleet.worker(worker).unwrap().condition() != condition {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_worker_gets_nothing_new_and_what_waits_for_a_hung_one_moves() {
    let test = TestPipeline::new(2).await;
    let silent = &test.backends[0];
    silent.next_job(Script::tokens(&[40]));
    let told =
        Generation::start(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    let mut told = Box::pin(told.into_deltas());
    told.next().await.unwrap().unwrap();
    // Round robin: to the first.
    test.backends[1].next_job(Script::tokens(&[60]).finish(Finish::Eos));
    collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    silent.next_job(Script::tokens(&[50, 51]));
    test.backends[1].next_job(Script::tokens(&[61]).finish(Finish::Eos));
    let prompt = test.text(Sampling::default()).await;
    let whole = collect(&test.pipeline, &prompt);
    let watching = async {
        while silent.jobs().len() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        silent.fall_silent(true);
        becomes(&test, 0, Condition::Suspect).await;
        assert_eq!((test.pipeline.fleet.ready_workers(), silent.aborted()), (1, 0));
    };
    let (whole, ()) = tokio::join!(whole, watching);
    assert_eq!((whole.unwrap().1.worker, silent.aborted(), retries(&test)), (WorkerId(1), 1, 1));
    assert_eq!(test.pipeline.fleet.worker(WorkerId(0)).unwrap().condition(), Condition::Hung);
    // Who has a token stays, and goes on when the worker does.
    assert!(futures_util::poll!(told.next()).is_pending());

    for _ in 0..3 {
        test.backends[1].next_job(Script::tokens(&[62]).finish(Finish::Eos));
        collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    }
    assert_eq!(silent.jobs().len(), 2);
    silent.fall_silent(false);
    becomes(&test, 0, Condition::Answers).await;
    assert_eq!(test.pipeline.fleet.ready_workers(), 2);
    silent.next_job(Script::tokens(&[42]).finish(Finish::Eos));
    let (_, attempted) =
        collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    assert_eq!(attempted.worker, WorkerId(0));
}

#[tokio::test(start_paused = true)]
async fn request_without_token_leaves_a_suspect_worker() {
    for whole in [true, false] {
        let test = TestPipeline::new(2).await;
        test.backends[0].fall_silent(true);
        test.backends[1].next_job(Script::tokens(&[60]).finish(Finish::Eos));
        let prompt = test.text(Sampling::default()).await;
        let begun = Instant::now();
        let attempted = if whole {
            collect(&test.pipeline, &prompt).await.unwrap().1
        } else {
            Generation::start(&test.pipeline, &prompt).await.unwrap().attempted()
        };
        let patience = Patience::default();
        assert!(
            begun.elapsed() < patience.suspect_after + Duration::from_secs(3),
            "{:?}",
            begun.elapsed()
        );
        assert_eq!(
            (attempted.worker, attempted.moves, test.backends[0].aborted()),
            (WorkerId(1), 1, 1)
        );
        assert_eq!((test.pipeline.metrics.retries(Retry::Suspect), retries(&test)), (1, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn moved_request_counts_both_workers_that_die() {
    let test = TestPipeline::new(4).await;
    test.backends[0].fall_silent(true);
    test.backends[0]
        .next_job(Script { pause: Duration::from_secs(20), ..Script::default().fail(died()) });
    test.backends[1]
        .next_job(Script { pause: Duration::from_secs(30), ..Script::default().fail(died()) });
    for backend in &test.backends[2..] {
        backend.next_job(Script::refuse(died()));
    }
    let prompt = test.text(Sampling::default()).await;
    let error = collect(&test.pipeline, &prompt).await.unwrap_err();
    assert!(matches!(error.cause, Cause::EngineGone(_)), "{error}");
    let jobs = test.backends.iter().map(|backend| backend.jobs().len());
    assert_eq!(jobs.sum::<usize>(), 3, "as many as without a move");
    assert_eq!(test.pipeline.metrics.retries(Retry::Quarantined), 1);
}

#[tokio::test(start_paused = true)]
async fn suspect_worker_that_answers_first_keeps_its_request() {
    let test = TestPipeline::new(2).await;
    test.backends[0].fall_silent(true);
    for (worker, seconds) in [(0, 20), (1, 90)] {
        let answer = Script::tokens(&[50]).finish(Finish::Eos);
        test.backends[worker].next_job(Script { pause: Duration::from_secs(seconds), ..answer });
    }
    let prompt = test.text(Sampling::default()).await;
    let attempted = collect(&test.pipeline, &prompt).await.unwrap().1;
    assert_eq!(
        (attempted.worker, test.backends[1].jobs().len(), test.backends[1].aborted()),
        (WorkerId(0), 1, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn request_stays_at_a_suspect_worker_while_others_are_busy() {
    let test = TestPipeline::new(2).await;
    test.backends[0].fall_silent(true);
    let seats = fake_capabilities().max_running as u64;
    test.backends[1].say(Load { running: seats, ..Load::default() });
    test.backends[1].next_job(Script::tokens(&[60]).finish(Finish::Eos));
    let prompt = test.text(Sampling::default()).await;
    let begun = Instant::now();
    let asked = collect(&test.pipeline, &prompt);
    let freed = async {
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(test.backends[1].jobs().is_empty());
        test.backends[1].say(Load { running: seats - 1, ..Load::default() });
    };
    let (whole, ()) = tokio::join!(asked, freed);
    assert_eq!((whole.unwrap().1.worker, begun.elapsed().as_secs()), (WorkerId(1), 30));
}

#[tokio::test(start_paused = true)]
async fn error_after_the_last_token_is_ignored() {
    let test = TestPipeline::new(1).await;
    let answer = Script::tokens(&[40, 41]).finish(Finish::Length);
    test.backends[0].next_job(answer.fail(died()));
    let generation =
        Generation::start(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    let deltas = deltas(generation).await;
    assert_eq!(deltas.last().unwrap().as_ref().unwrap().finish, Some(Finish::Length));
}

#[tokio::test(start_paused = true)]
async fn a_request_has_so_long_for_its_first_token_and_so_long_in_all() {
    let (first_token_timeout, request_timeout) =
        (Some(Duration::from_secs(5)), Some(Duration::from_secs(20)));
    let test = TestPipeline::limited(
        PipelineLimits { first_token_timeout, request_timeout, ..PipelineLimits::default() },
        1,
    )
    .await;
    let flag = |error: RequestError| match error.cause {
        Cause::TimedOut { flag, .. } => flag,
        other => panic!("{other}"),
    };
    let begun = Instant::now();
    let error = Generation::start(&test.pipeline, &test.text(Sampling::default()).await)
        .await
        .map(drop)
        .unwrap_err();
    assert_eq!((flag(error), begun.elapsed().as_secs()), ("--first-token-timeout", 5));

    // A token every three seconds.
    for whole in [true, false] {
        let script =
            (0..9).fold(Script::tokens(&[40]), |script, token| script.then(0, &[50 + token]));
        test.backends[0].next_job(Script { pause: Duration::from_secs(3), ..script });
        let begun = Instant::now();
        let prompt = test.text(Sampling::default()).await;
        let error = if whole {
            collect(&test.pipeline, &prompt).await.unwrap_err()
        } else {
            let mut told = deltas(Generation::start(&test.pipeline, &prompt).await.unwrap()).await;
            assert_eq!(told.len(), 7);
            told.pop().unwrap().unwrap_err()
        };
        assert_eq!((flag(error), begun.elapsed().as_secs()), ("--request-timeout", 20));
    }
    assert_eq!(test.backends[0].aborted(), 3);
}

#[tokio::test(start_paused = true)]
async fn requests_that_are_cut_off_end_with_an_error() {
    let test = TestPipeline::new(1).await;
    test.backends[0].next_job(Script::tokens(&[40]));
    let told =
        Generation::start(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    let prompt = test.text(Sampling::default()).await;
    let waiting = collect(&test.pipeline, &prompt);
    test.pipeline.fleet.cut("the frontend is going down");
    let deltas = deltas(told).await;
    assert_eq!(
        deltas.last().unwrap().as_ref().unwrap_err().to_string(),
        "the engine is gone: the frontend is going down"
    );
    assert!(matches!(waiting.await.unwrap_err().cause, Cause::NoOtherWorker | Cause::NoWorker(_)));
    assert_eq!(test.pipeline.fleet.metrics().engine_deaths(WorkerId(0)), 0);
}

#[tokio::test(start_paused = true)]
async fn when_nobody_else_is_left_the_client_is_told_to_come_again() {
    let test = TestPipeline::new(1).await;
    test.backends[0].next_job(Script::refuse(died()));
    let error = collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap_err();
    assert!(matches!(error.cause, Cause::NoOtherWorker), "{error}");
}

#[tokio::test(start_paused = true)]
async fn what_is_the_requests_own_fault_visits_one_worker() {
    let test = TestPipeline::new(2).await;
    let message = "must be at least 1".to_owned();
    let refusal = JobError::Refused { field: "sampling_params.max_tokens".to_owned(), message };
    test.backends[0].next_job(Script::refuse(refusal));
    let error = collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap_err();
    assert_eq!(error.field.as_deref(), Some("sampling_params.max_tokens"));
    assert_eq!((retries(&test), test.backends[1].jobs().len()), (0, 0));
    test.backends[1].next_job(Script::default().fail(JobError::Failed));
    let error = collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap_err();
    assert!(matches!(error.cause, Cause::Internal(_)), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_stop_string_ends_its_continuation_and_no_other() {
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
    let (stop, more) = (tokens("over the lazy dog"), tokens("the quick brown fox"));
    let script = Script::default()
        .then(0, &stop)
        .then(1, &more)
        .then(0, &more)
        .then(1, &more)
        .finish(Finish::Length);
    test.backends[0].next_job(script);
    let stop = vec!["lazy".to_owned()];
    let sampling = Sampling { n: 2, temperature: Some(1.0), stop, ..Sampling::default() };
    let (choices, _) = collect(&test.pipeline, &test.text(sampling).await).await.unwrap();
    assert_eq!(choices[0].finish, Finish::StopString("lazy".to_owned()));
    assert_eq!(choices[0].events.text_alone(), Some("over the "));
    assert_eq!((&choices[1].finish, choices[1].tokens.len()), (&Finish::Length, 2 * more.len()));
    assert_eq!(test.backends[0].jobs()[0].sampling.n, 2);
}

#[tokio::test(start_paused = true)]
async fn outputs_behind_a_stop_string_are_left_out() {
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
    let sampling =
        || Sampling { stop: vec!["lazy".to_owned()], logprobs: Some(0), ..Sampling::default() };
    let ended = Finish::StopString("lazy".to_owned());

    test.backends[0].next_job(script());
    let (choices, attempted) = collect(&test.pipeline, &test.text(sampling()).await).await.unwrap();
    assert_eq!((choices[0].events.text_alone(), &choices[0].finish), (Some("over the "), &ended));
    assert_eq!(attempted.prefill.cached_tokens, 1);
    assert!(choices[0].logprobs.is_some(), "a late output takes none away");
    let counted = choices[0].tokens.len();

    test.backends[0].next_job(script());
    let generation = Generation::start(&test.pipeline, &test.text(sampling()).await).await.unwrap();
    let deltas: Vec<_> = deltas(generation).await.into_iter().map(Result::unwrap).collect();
    let [first, late] = &deltas[..] else { panic!("{deltas:?}") };
    assert_eq!((first.finish.as_ref(), first.tokens.len()), (Some(&ended), counted));
    assert!(late.is_for_counts() && late.prefill.is_some(), "{late:?}");
    assert_eq!(test.pipeline.metrics.finishes(&ended), 2);
}

#[tokio::test(start_paused = true)]
async fn text_of_a_backend_that_makes_it_itself_is_passed_on() {
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
        collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    let events = &choices[0].events;
    assert_eq!((events.text().as_ref(), &choices[0].finish), ("I look", &Finish::ToolCalls));
    let call = WholeCall { call: &piece(Some("call_1"), "{\"at\": 1}"), end: CallEnd::Closed };
    assert_eq!(events.calls(), [call]);
}

#[tokio::test(start_paused = true)]
async fn whoever_stops_reading_aborts_what_still_runs() {
    let test = TestPipeline::new(1).await;
    test.backends[0].next_job(Script::tokens(&[40]));
    let generation =
        Generation::start(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    assert_eq!(test.backends[0].aborted(), 0);
    drop(generation);
    assert_eq!(test.backends[0].aborted(), 1);
    // A client that leaves while the first token is awaited.
    let prepared = test.text(Sampling::default()).await;
    let waiting =
        tokio::time::timeout(Duration::from_secs(5), Generation::start(&test.pipeline, &prepared))
            .await;
    assert!(waiting.is_err());
    assert_eq!(test.backends[0].aborted(), 2);
    assert_eq!(test.pipeline.fleet.router().workers()[0].requests, 0);
}

#[tokio::test(start_paused = true)]
async fn the_time_to_the_first_token_is_the_backends() {
    let test = TestPipeline::new(1).await;
    let script =
        Script { pause: Duration::from_millis(1500), ..Script::tokens(&[40]).finish(Finish::Eos) };
    test.backends[0].next_job(script);
    let (_, attempted) =
        collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    assert_eq!(attempted.first_token, Some(Duration::from_millis(1500)));
}

// Real time: images are decoded on threads of their own.
#[tokio::test]
async fn media_is_asked_for_by_the_backend_that_lacks_it_and_by_no_other() {
    let test = TestPipeline::new(1).await;
    let backend = &test.backends[0];
    let late = Duration::from_secs(100);
    for told_late in [None, Some(late)] {
        backend.next_job(Script { told_late, ..Script::tokens(&[40]).finish(Finish::Eos) });
        let prepared = test.prepare(picture(), Sampling::default()).await.unwrap();
        let (_, attempted) = collect(&test.pipeline, &prepared).await.unwrap();
        assert_eq!(backend.pulled().len(), 1);
        let delivered = attempted.delivered;
        assert_eq!(delivered.cached + delivered.inline, 1);
        assert_eq!(attempted.hand_off >= late, told_late.is_some());
    }
    assert_eq!(test.pipeline.metrics.media_decoded.get(), 1);
}

#[tokio::test]
async fn an_image_that_can_not_be_decoded_is_the_clients_fault_at_its_field() {
    let test = TestPipeline::new(2).await;
    let prepared = test.prepare(broken_picture(), Sampling::default()).await.unwrap();
    let error = collect(&test.pipeline, &prepared).await.unwrap_err();
    assert!(matches!(error.cause, Cause::Media(_)), "{error}");
    assert_eq!(error.field.as_deref(), Some("messages[0].content[0].image_url"));
    assert_eq!((retries(&test), test.backends[1].pulled().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_request_is_planned_once_for_each_class_of_workers() {
    let mut other = fake_capabilities();
    other.class.block_size = BlockSize::new(4).unwrap();
    let test =
        TestPipeline::with(vec![FakeBackend::new(), FakeBackend::new(), FakeBackend::with(other)])
            .await;
    let prepared =
        test.prepare(Prompt::Tokens((1..=40).map(TokenId).collect()), Sampling::default()).await;
    let prepared = prepared.unwrap();
    let keys: Vec<usize> = prepared.plans.iter().map(|plan| plan.keys.len()).collect();
    assert_eq!(keys, [2, 10]);
    let mut classes = Vec::new();
    for backend in &test.backends {
        backend.next_job(Script::tokens(&[40]).finish(Finish::Eos));
    }
    for _ in 0..3 {
        let (_, attempted) = collect(&test.pipeline, &prepared).await.unwrap();
        classes.push((attempted.worker, attempted.total_blocks));
    }
    assert_eq!(classes, [(WorkerId(0), 2), (WorkerId(1), 2), (WorkerId(2), 10)]);
}

#[tokio::test(start_paused = true)]
async fn a_prompt_goes_only_where_it_fits() {
    let small = Capabilities { max_model_len: 8, ..fake_capabilities() };
    let test = TestPipeline::with(vec![FakeBackend::with(small), FakeBackend::new()]).await;
    let tokens = |count: u32| Prompt::Tokens((1..=count).map(TokenId).collect());
    for count in [7, 8, 9, 40] {
        let backend = &test.backends[usize::from(count > 7)];
        backend.next_job(Script::tokens(&[40]).finish(Finish::Eos));
        let before = backend.jobs().len();
        let prepared = test.prepare(tokens(count), Sampling::default()).await.unwrap();
        collect(&test.pipeline, &prepared).await.unwrap();
        if count > 7 {
            assert_eq!(backend.jobs().len(), before + 1, "{count}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_worker_lacks_is_asked_of_others_if_there_are_any() {
    let supports = Supports { bad_words: false, ..Supports::EVERYTHING };
    let lacking = || FakeBackend::with(Capabilities { supports, ..fake_capabilities() });
    let words = Sampling { bad_words: vec!["fox".to_owned()], ..Sampling::default() };
    let test = TestPipeline::with(vec![lacking(), FakeBackend::new(), lacking()]).await;
    for (sampling, worker) in [(words.clone(), 1), (words.clone(), 1), (Sampling::default(), 2)] {
        test.backends[worker].next_job(Script::tokens(&[40]).finish(Finish::Eos));
        let (_, attempted) = collect(&test.pipeline, &test.text(sampling).await).await.unwrap();
        assert_eq!(attempted.worker, WorkerId(worker as u32));
    }
    // It says itself what it lacks.
    let alone = TestPipeline::with(vec![lacking()]).await;
    alone.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    assert!(collect(&alone.pipeline, &alone.text(words).await).await.is_ok());
}

#[tokio::test]
async fn a_worker_that_expands_prompts_itself_is_given_one_marker_for_each_item() {
    let mut marked = fake_capabilities();
    marked.class.placeholders = PlaceholderForm::Marker;
    let test = TestPipeline::with(vec![FakeBackend::with(marked), FakeBackend::new()]).await;
    for backend in &test.backends {
        backend.next_job(Script::tokens(&[40]).finish(Finish::Eos));
    }
    let prepared = test.prepare(picture(), Sampling::default()).await.unwrap();
    for _ in 0..2 {
        collect(&test.pipeline, &prepared).await.unwrap();
    }
    let [one, other] = [0, 1].map(|worker| test.backends[worker].jobs().remove(0));
    let Input::Tokens(expanded) = &other.input else { panic!("{other:?}") };
    let Input::Marked { tokens, expanded: expected } = &one.input else { panic!("{one:?}") };
    assert_eq!(expected, expanded);
    let Placeholder { offset, length, .. } = &other.media[0].placeholder;
    let (before, behind) = (&expanded[..*offset], &expanded[offset + length..]);
    assert_eq!(**tokens, [before, &expanded[*offset..=*offset], behind].concat());
    // Without an item there is nothing to expand.
    test.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    assert!(matches!(test.backends[0].jobs().remove(1).input, Input::Tokens(_)));
}

#[tokio::test(start_paused = true)]
async fn what_was_cached_may_be_told_behind_the_answer_and_counts_once() {
    let test = TestPipeline::new(1).await;
    let prefill = |cached_tokens| Some(Prefill { cached_tokens, ..Prefill::default() });
    for (first, last, known) in
        [(None, prefill(3), 3), (prefill(0), prefill(5), 0), (prefill(4), None, 4)]
    {
        let mut script = Script::tokens(&[40]).then(0, &[41]).finish(Finish::Eos);
        (script.outputs[0].prefill, script.outputs[1].prefill) = (first, last);
        test.backends[0].next_job(script);
        let prepared = test.text(Sampling::default()).await;
        let before = test.pipeline.metrics.found_in_all().cached;
        let generation = Generation::start(&test.pipeline, &prepared).await.unwrap();
        let told: Vec<_> =
            deltas(generation).await.into_iter().map(|delta| delta.unwrap().prefill).collect();
        assert_eq!(told, [None, if first.is_none() { prefill(3) } else { None }]);
        assert_eq!(test.pipeline.metrics.found_in_all().cached - before, known);
    }
}

#[tokio::test(start_paused = true)]
async fn a_draining_worker_gets_nothing_new() {
    let test = TestPipeline::new(2).await;
    test.backends[0].say(Load { draining: true, ..Load::default() });
    for _ in 0..3 {
        test.backends[1].next_job(Script::tokens(&[40]).finish(Finish::Eos));
        let (_, attempted) =
            collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
        assert_eq!(attempted.worker, WorkerId(1));
    }
    let taking = || test.pipeline.fleet.taking_workers();
    assert_eq!(taking(), Some(1));
    test.backends[1].say(Load { draining: true, ..Load::default() });
    assert_eq!((taking(), test.pipeline.fleet.can_answer()), (None, true));
    test.backends[0].say(Load::default());
    assert_eq!(taking(), Some(1));
    test.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Eos));
    let (_, attempted) =
        collect(&test.pipeline, &test.text(Sampling::default()).await).await.unwrap();
    assert_eq!(attempted.worker, WorkerId(0));
}
