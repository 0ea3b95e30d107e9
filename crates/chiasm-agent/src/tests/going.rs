//! An agent that goes down.

use chiasm_backend::PromptLogprobs;

use super::calls::{begin, call};
use super::*;
use crate::client::STREAM_WINDOW;
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event as JobEvent;
use crate::proto::{Open, WatchRequest};

/// Less than what frontends that do not hang up are given.
const SOON: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_agent_says_last_is_read_before_it_is_gone() {
    let stand = Stand::new().await;
    let (mut jobs, _) = stand.link.clients();
    let more = 1000;
    let script = (0..more).fold(Script::tokens(&[7]), |script, _| script.then(0, &[7]));
    let mut script = script.then(1, &[8]).finish(Finish::Length);
    // More than is under way before a frontend reads.
    let logprobs = vec![0.5; STREAM_WINDOW as usize];
    script.outputs[0].prompt_logprobs =
        Some(PromptLogprobs { width: 1, tokens: Vec::new(), logprobs, ranks: Vec::new() });
    stand.engine.next_job(script);
    let open = Request::Open(Open { engine: 0, life: stand.life(), frontend: 9 });
    let mut replies = call(&mut jobs, vec![open, begin(1)]).await.unwrap();
    stand.engine_has_jobs(1).await;
    assert!(stand.drain.finished_within(SOON).await);
    stand.stop.send(()).unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!stand.serving.is_finished(), "nothing was read");
    let mut events = Vec::new();
    while let Some(reply) = replies.message().await.unwrap() {
        events.extend(reply.events.into_iter().filter_map(|event| event.event));
    }
    assert!(matches!(events.last(), Some(JobEvent::Ended(_))));
    assert_eq!(
        events.iter().filter(|event| matches!(event, JobEvent::Output(_))).count(),
        more + 2
    );
    tokio::time::timeout(SOON, stand.serving).await.unwrap().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frontend_hangs_up_when_an_agent_has_told_the_end_of_its_jobs() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    // Admitted.
    engine.follow_load(Box::new(|_| {}));
    let mut running = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    stand.engine_has_jobs(1).await;
    assert!(!stand.drain.finished_within(Duration::ZERO).await);
    stand.stop.send(()).unwrap();
    let Some(Err(JobError::Dead(why))) = running.next().await else { panic!("its engine is gone") };
    assert_eq!(why.to_string(), "its agent went down");
    tokio::time::timeout(SOON, stand.serving).await.unwrap().unwrap().unwrap();
    let death = engine.ended().await;
    assert!(death.to_string().contains("says no more of its jobs"), "{death}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_an_engine_does_not_keep_an_agent() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    stand.engine.die(chiasm_backend::Death::new("it was told to"));
    engine.ended().await;
    let (mut jobs, _) = stand.link.clients();
    let mut events =
        jobs.watch(WatchRequest { engine: 0, frontend: 9 }).await.unwrap().into_inner();
    stand.stop.send(()).unwrap();
    assert!(events.message().await.unwrap().is_none());
    tokio::time::timeout(SOON, stand.serving).await.unwrap().unwrap().unwrap();
}
