//! An agent that goes down.

use chiasm_backend::PromptLogprobs;

use super::calls::{begin, call};
use super::*;
use crate::client::STREAM_WINDOW_BYTES;
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event as JobEvent;
use crate::proto::{Open, WatchRequest};

/// A time shorter than the close timeout of frontends that stay connected.
const SOON: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_events_are_read_before_the_agent_ends() {
    let harness = TestHarness::new().await;
    let (mut jobs, _) = harness.link.clients();
    let more = 1000;
    let script = (0..more).fold(Script::tokens(&[7]), |script, _| script.then(0, &[7]));
    let mut script = script.then(1, &[8]).finish(Finish::Length);
    // More than fits into the stream's window.
    let logprobs = vec![0.5; STREAM_WINDOW_BYTES as usize];
    script.outputs[0].prompt_logprobs =
        Some(PromptLogprobs { width: 1, tokens: Vec::new(), logprobs, ranks: Vec::new() });
    harness.engine.next_job(script);
    let open = Request::Open(Open { engine: 0, life: harness.life(), frontend: 9 });
    let mut replies = call(&mut jobs, vec![open, begin(1)]).await.unwrap();
    harness.wait_for_jobs(1).await;
    assert!(harness.drain.finish_jobs(SOON).await);
    harness.stop.send(()).unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!harness.serving.is_finished(), "nothing was read");
    let mut events = Vec::new();
    while let Some(reply) = replies.message().await.unwrap() {
        events.extend(reply.events.into_iter().filter_map(|event| event.event));
    }
    assert!(matches!(events.last(), Some(JobEvent::Ended(_))));
    assert_eq!(
        events.iter().filter(|event| matches!(event, JobEvent::Output(_))).count(),
        more + 2
    );
    tokio::time::timeout(SOON, harness.serving).await.unwrap().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frontend_disconnects_after_the_end_of_its_jobs() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    // Admits the engine.
    engine.follow_load(Box::new(|_| {}));
    let mut running = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    harness.wait_for_jobs(1).await;
    assert!(!harness.drain.finish_jobs(Duration::ZERO).await);
    harness.stop.send(()).unwrap();
    let Some(Err(JobError::Dead(why))) = running.next().await else {
        panic!("the engine should be gone")
    };
    assert_eq!(why.to_string(), "the agent shut down");
    tokio::time::timeout(SOON, harness.serving).await.unwrap().unwrap().unwrap();
    let death = engine.ended().await;
    assert!(death.to_string().contains("ended the call of its jobs"), "{death}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_of_a_missing_engine_does_not_delay_shutdown() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    harness.engine.die(chiasm_backend::DeathReason::new("on purpose"));
    engine.ended().await;
    let (mut jobs, _) = harness.link.clients();
    let mut events =
        jobs.watch(WatchRequest { engine: 0, frontend: 9 }).await.unwrap().into_inner();
    harness.stop.send(()).unwrap();
    assert!(events.message().await.unwrap().is_none());
    tokio::time::timeout(SOON, harness.serving).await.unwrap().unwrap().unwrap();
}
