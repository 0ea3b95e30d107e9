use chiasm_api::openai::Usage;
use chiasm_backend::fake::Script;
use chiasm_backend::{DeathReason, Finish, JobError};
use chiasm_pipeline::{Prepared, collect};
use chiasm_request::{ClientSampling, Prompt, RouteOutcome};
use tracing::Span;

use super::*;
use crate::record::Record;
use crate::test_server::TestServer;

#[test]
fn explanations_are_rate_limited_with_a_burst() {
    let requests = Requests::default();
    let wanted = |from: u64, to: u64| {
        (from..to)
            .filter(|&at| requests.should_explain_at(Duration::from_millis(at), PAUSE))
            .count() as u64
    };
    assert_eq!(wanted(0, 500), MAX_BURST);
    assert_eq!(wanted(500, 10_500), 10);
    let after_a_pause = wanted(60_000, 60_500);
    assert_eq!(after_a_pause, MAX_BURST);
}

/// Creates a server with a page in front of workers that are tried in order.
async fn server(workers: usize) -> TestServer {
    TestServer::with_page(workers).await
}

fn record(server: &TestServer) -> Record {
    Record::new("completions", Span::none(), None, server.recorder())
}

async fn prepare(server: &TestServer, record: &Record) -> Prepared {
    let prompt = Prompt::Text("the quick brown fox".to_owned());
    server
        .test
        .prepare_with_entries(prompt, ClientSampling::default(), record.entries())
        .await
        .unwrap()
}

/// Returns the entries as the page shows them: worker, status, tokens of the answer.
fn shown(server: &TestServer) -> Vec<(String, String, Option<usize>)> {
    let page = server.page();
    let row = |summary: Summary| {
        let status = match &summary.outcome {
            Some(outcome) => outcome.status.to_string(),
            None if summary.moved => "moved".to_owned(),
            None => "running".to_owned(),
        };
        let found = summary.outcome.and_then(|outcome| outcome.found);
        (summary.worker, status, found.map(|found| found.completion_tokens))
    };
    page.requests.all().into_iter().map(row).collect()
}

fn row(worker: &str, status: &str, tokens: Option<usize>) -> (String, String, Option<usize>) {
    (worker.to_owned(), status.to_owned(), tokens)
}

#[tokio::test(start_paused = true)]
async fn moved_attempt_is_marked() {
    let server = server(2).await;
    server.test.backends[0]
        .next_job(Script::refuse(JobError::Dead(DeathReason::new("it was unplugged"))));
    server.test.backends[1].next_job(Script::tokens(&[40, 41]).finish(Finish::Length));
    let record = record(&server);
    let (_, route) =
        collect(&server.test.pipeline, &mut prepare(&server, &record).await).await.unwrap();
    assert_eq!(shown(&server), [row("worker_0", "moved", None), row("worker_1", "running", None)]);
    record.set_route(route);
    record.set_usage(Usage { completion_tokens: 2, ..Usage::default() });
    record.set_response(200, None);
    drop(record);
    assert_eq!(shown(&server), [row("worker_0", "moved", None), row("worker_1", "200", Some(2))]);
}

#[tokio::test(start_paused = true)]
async fn refusal_after_routing_ends_the_entry() {
    let server = server(1).await;
    let refused =
        JobError::Refused { field: "prompt".to_owned(), message: "is too long".to_owned() };
    server.test.backends[0].next_job(Script::refuse(refused));
    let record = record(&server);
    collect(&server.test.pipeline, &mut prepare(&server, &record).await)
        .await
        .map(drop)
        .unwrap_err();
    record.set_response(400, None);
    drop(record);
    assert_eq!(shown(&server), [row("worker_0", "400", None)]);
}

#[tokio::test(start_paused = true)]
async fn disconnect_ends_the_entry() {
    // A job without a script hangs.
    let server = server(1).await;
    let record = record(&server);
    let mut prepared = prepare(&server, &record).await;
    let answer = collect(&server.test.pipeline, &mut prepared);
    let late = tokio::time::timeout(Duration::from_secs(1), answer).await;
    assert!(late.is_err());
    assert_eq!(shown(&server), [row("worker_0", "running", None)]);
    drop(record);
    assert_eq!(shown(&server), [row("worker_0", "499", None)]);
}

#[tokio::test(start_paused = true)]
async fn forwarded_request_shows_its_first_token() {
    let server = server(1).await;
    server.test.backends[0].next_job(Script::tokens(&[40]).finish(Finish::Length));
    let record = record(&server);
    let (_, route) =
        collect(&server.test.pipeline, &mut prepare(&server, &record).await).await.unwrap();
    // A forwarded request is recorded when the head of its answer arrives, and its tokens may never
    // be counted.
    record.set_route(RouteOutcome { first_token: None, ..route });
    record.set_first_token(Duration::from_millis(250));
    record.set_response(200, None);
    drop(record);
    let outcome = server.page().requests.all().remove(0).outcome.unwrap();
    assert_eq!((outcome.ttft, outcome.found), (Some(0.25), None));
}

#[tokio::test(start_paused = true)]
async fn every_prompt_of_a_list_has_its_own_outcome() {
    let server = server(2).await;
    server.test.backends[0].next_job(Script::tokens(&[40, 41]).finish(Finish::Length));
    server.test.backends[1].next_job(Script::tokens(&[40, 41, 42]).finish(Finish::Length));
    let record = record(&server);
    let mut total = Usage::default();
    for tokens in [2, 3] {
        let (_, route) =
            collect(&server.test.pipeline, &mut prepare(&server, &record).await).await.unwrap();
        let usage = Usage { completion_tokens: tokens, ..Usage::default() };
        total += usage;
        record.set_route(route);
        record.set_prompt_usage(route.explanation_id, usage);
    }
    record.set_usage(total);
    record.set_response(200, None);
    drop(record);
    assert_eq!(shown(&server), [row("worker_0", "200", Some(2)), row("worker_1", "200", Some(3))]);
}
