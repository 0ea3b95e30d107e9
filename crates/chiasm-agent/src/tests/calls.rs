//! Many jobs over one call.

use tokio_stream::StreamExt;
use tonic::{Code, Status, Streaming};

use super::*;
use crate::proto::agent_client::AgentClient;
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event as JobEvent;
use crate::proto::{GenerateReply, GenerateRequest, MediaChunk, Open, Stop};

type Client = AgentClient<tonic::transport::Channel>;

/// Opens a call with these requests, which stays open until `end` resolves.
async fn call_until(
    end: impl Future<Output = ()> + Send + 'static,
    jobs: &mut Client,
    requests: Vec<Request>,
) -> Result<Streaming<GenerateReply>, Status> {
    let requests = requests.into_iter().map(|request| GenerateRequest { request: Some(request) });
    let end = end.into_stream().filter_map(|()| None);
    jobs.generate(tokio_stream::iter(requests.collect::<Vec<_>>()).chain(end))
        .await
        .map(tonic::Response::into_inner)
}

/// Opens a call with these requests, without an end.
pub(super) async fn call(
    jobs: &mut Client,
    requests: Vec<Request>,
) -> Result<Streaming<GenerateReply>, Status> {
    call_until(std::future::pending(), jobs, requests).await
}

/// Waits until the engine has aborted `jobs` jobs.
async fn wait_for_aborts(harness: &TestHarness, jobs: usize) {
    let aborted = async {
        while harness.engine.aborted() < jobs {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), aborted).await.unwrap();
}

fn begin_with(number: u64, job: &Job) -> Request {
    Request::Begin(proto::Job { number, ..over_the_wire(job) }.encode_to_vec().into())
}

pub(super) fn begin(number: u64) -> Request {
    begin_with(number, &job(&[TokenId(1)]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_requests_end_the_call() {
    let harness = TestHarness::new().await;
    let (mut jobs, _) = harness.link.clients();
    let open = |engine, life| Request::Open(Open { engine, life, frontend: 9 });
    for (first, code) in [
        (begin(1), Code::InvalidArgument),
        (open(1, harness.life()), Code::InvalidArgument),
        (open(0, harness.life().wrapping_add(1)), Code::Unavailable),
    ] {
        assert_eq!(call(&mut jobs, vec![first]).await.unwrap_err().code(), code);
    }
    for (wrong, max_jobs) in [(open(0, harness.life()), 1), (begin(1), 2)] {
        harness.engine.next_job(Script { hangs: true, ..Script::default() });
        let mut replies =
            call(&mut jobs, vec![open(0, harness.life()), begin(1), wrong]).await.unwrap();
        let status = loop {
            match replies.message().await {
                Ok(reply) => assert!(reply.is_some(), "the call ended well"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(harness.engine.jobs().len() <= max_jobs);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abort_or_stop_affects_only_its_job() {
    let harness = TestHarness::new().await;
    let (mut jobs, _) = harness.link.clients();
    let pause = Duration::from_millis(200);
    for _ in 0..3 {
        harness.engine.next_job(Script {
            pause,
            ..Script::tokens(&[7]).then(1, &[8]).finish(Finish::Length)
        });
    }
    let open = Request::Open(Open { engine: 0, life: harness.life(), frontend: 9 });
    let requests = vec![
        open,
        begin(1),
        begin(2),
        begin(3),
        Request::Abort(2),
        Request::Stop(Stop { job: 3, choice: 0 }),
        // The call has no jobs of these numbers.
        Request::Abort(4),
        Request::Stop(Stop { job: 5, choice: 9 }),
    ];
    let mut replies = call(&mut jobs, requests).await.unwrap();
    let mut outputs = Vec::new();
    let mut ended = 0;
    while ended < 2 {
        for event in replies.message().await.unwrap().unwrap().events {
            match event.event.unwrap() {
                JobEvent::Output(output) => outputs.push((event.job, output.choice)),
                JobEvent::Ended(_) => ended += 1,
                _ => {}
            }
        }
    }
    outputs.sort_unstable();
    // The fake engine drops outputs of stopped continuations.
    for expected in [(1, 0), (1, 1), (3, 1)] {
        assert!(outputs.contains(&expected), "{outputs:?}");
    }
    assert!(outputs.iter().all(|(job, _)| *job != 2), "{outputs:?}");
    assert!(!outputs.contains(&(3, 0)), "{outputs:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn started_event_comes_with_the_first_output_or_soon() {
    let harness = TestHarness::new().await;
    let (mut jobs, mut files) = harness.link.clients();
    let picture = Bytes::from_static(PICTURE);
    let file = MediaChunk {
        content: Bytes::copy_from_slice(ContentHash::digest(PICTURE).as_bytes()),
        length: PICTURE.len() as u64,
        modality: "image".to_owned(),
        bytes: picture.clone(),
    };
    files.put_media(tokio_stream::iter([file])).await.unwrap();
    let with_picture = begin_with(3, &harness.with_picture(&picture));
    let open = Request::Open(Open { engine: 0, life: harness.life(), frontend: 9 });
    harness.engine.next_job(Script::tokens(&[7]));
    harness.engine.next_job(Script { hangs: true, ..Script::default() });
    harness.engine.next_job(Script::tokens(&[8]));
    let mut replies = call(&mut jobs, vec![open, begin(1), begin(2), with_picture]).await.unwrap();
    let mut started = Vec::new();
    while started.len() < 3 {
        let events = replies.message().await.unwrap().unwrap().events;
        let is_output = |event: Option<&proto::JobEvent>| {
            event.is_some_and(|event| matches!(event.event, Some(JobEvent::Output(_))))
        };
        for (index, event) in events.iter().enumerate() {
            if let Some(JobEvent::Started(delivered)) = &event.event {
                started.push((event.job, delivered.inline, is_output(events.get(index + 1))));
            }
        }
    }
    started.sort_unstable();
    assert_eq!(started, [(1, 0, true), (2, 0, false), (3, 1, true)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_of_call_aborts_its_jobs() {
    let harness = TestHarness::new().await;
    let (mut jobs, _) = harness.link.clients();
    let open = Request::Open(Open { engine: 0, life: harness.life(), frontend: 9 });
    (0..2).for_each(|_| harness.engine.next_job(Script::tokens(&[1])));
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let requests = vec![open, begin(1), begin(2)];
    let mut replies = call_until(ended.map(drop), &mut jobs, requests).await.unwrap();
    while harness.engine.jobs().len() < 2 {
        replies.message().await.unwrap().unwrap();
    }
    assert_eq!(harness.engine.aborted(), 0);
    drop(end);
    wait_for_aborts(&harness, 2).await;
    while replies.message().await.unwrap().is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_job_ends_without_affecting_others() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let more = chiasm_backend::inbox::MAX_UNREAD_ITEMS + 100;
    let endless = (0..more).fold(Script::tokens(&[1]), |script, _| script.then(0, &[2]));
    harness.engine.next_job(endless);
    let mut unread = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    wait_for_aborts(&harness, 1).await;
    harness.engine.next_job(Script::tokens(&[3]));
    let mut other = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    other.next().await.unwrap().unwrap();
    let mut read = 0;
    let error = loop {
        match unread.next().await.unwrap() {
            Ok(_) => read += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(error, JobError::Unread), "{error}");
    // The started event was read as well.
    assert_eq!(read + 1, chiasm_backend::inbox::MAX_UNREAD_ITEMS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversized_message_ends_only_its_job() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    harness.engine.next_job(Script::tokens(&[3]));
    let mut other = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    let mut too_long = job(&[TokenId(1)]);
    let regex = "a".repeat(crate::MAX_MESSAGE_BYTES);
    too_long.sampling.structured =
        Some(Structured { constraint: Constraint::Regex(regex.into()), field: "regex" });
    let refused = engine.start(Arc::new(too_long)).await.map(drop);
    assert!(
        matches!(&refused, Err(JobError::Refused { message, .. }) if message == "is too long"),
        "{refused:?}"
    );
    let mut long = Script::tokens(&[1]);
    let tokens = crate::MAX_MESSAGE_BYTES / size_of::<f32>();
    long.outputs[0].prompt_logprobs = Some(chiasm_backend::PromptLogprobs {
        width: 1,
        tokens: Vec::new(),
        logprobs: vec![0.5; tokens],
        ranks: Vec::new(),
    });
    harness.engine.next_job(long);
    let mut running = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    assert!(matches!(running.next().await, Some(Err(JobError::Failed))));
    wait_for_aborts(&harness, 1).await;
    other.next().await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_with_too_many_fields_is_refused_alone() {
    let harness = TestHarness::new().await;
    let is_about_items =
        |field: &str, message: &str| field == "messages" && message.contains("media items");
    // A frontend does not send the job.
    let engine = harness.connect().await;
    let many = Job { embedded: vec![MmHash::new([3; 32]); job::MAX_ENTRIES], ..job(&[TokenId(1)]) };
    let refused = engine.start(Arc::new(many.clone())).await.map(drop);
    assert!(
        matches!(
            &refused,
            Err(JobError::Refused { field, message }) if is_about_items(field, message)
        ),
        "{refused:?}"
    );
    // If it is sent, the call's other jobs go on, and new ones begin.
    harness.engine.next_job(Script { hangs: true, ..Script::default() });
    harness.engine.next_job(Script::tokens(&[7]));
    let open = Request::Open(Open { engine: 0, life: harness.life(), frontend: 9 });
    let (mut jobs, _) = harness.link.clients();
    let mut replies =
        call(&mut jobs, vec![open, begin(1), begin_with(2, &many), begin(3)]).await.unwrap();
    let mut is_refused = false;
    let mut is_answered = false;
    while !is_refused || !is_answered {
        for proto::JobEvent { job, event } in replies.message().await.unwrap().unwrap().events {
            match event.unwrap() {
                JobEvent::Failure(failure) => {
                    assert_eq!((job, failure.kind()), (2, proto::job_failure::Kind::Refused));
                    assert!(is_about_items(&failure.field, &failure.message), "{failure:?}");
                    is_refused = true;
                }
                JobEvent::Output(_) => is_answered |= job == 3,
                _ => {}
            }
        }
    }
    assert_eq!((harness.engine.jobs().len(), harness.engine.aborted()), (2, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn job_over_memory_budget_is_not_taken() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let room = 200_000;
    let _files = harness.budget.charge(harness.budget.limit() - room).unwrap();
    let free = || harness.budget.limit() - harness.budget.held();
    // Its repeats make it short on the wire. The engine would refuse it.
    let long = job(&[TokenId(1); 60_000]);
    let Err(JobError::NotTaken(why)) = delivered(&*engine, &long).await else {
        panic!("not taken")
    };
    assert!(why.to_string().contains("--max-bytes-in-flight"), "{why}");
    harness.engine.next_job(Script::tokens(&[7]));
    let (running, _) = first_output(&*engine, &job(&[TokenId(1)])).await.unwrap();
    assert!(free() < room);
    drop(running);
    wait_for_aborts(&harness, 1).await;
    assert_eq!((free(), harness.engine.jobs().len()), (room, 1));
    // A media item of two bytes is malformed, but the job is refused before that is checked.
    let message = [&[8, 1][..], &[0x2a, 0].repeat(1000)].concat();
    let open = Request::Open(Open { engine: 0, life: harness.life(), frontend: 9 });
    let (mut jobs, _) = harness.link.clients();
    let mut replies = call(&mut jobs, vec![open, Request::Begin(message.into())]).await.unwrap();
    let event = replies.message().await.unwrap().unwrap().events.remove(0);
    let Some(JobEvent::Failure(failure)) = event.event else { panic!("not taken") };
    assert_eq!((event.job, failure.kind()), (1, proto::job_failure::Kind::NotTaken));
}

/// Returns a job whose message has some more than `bytes` bytes, and counts sixteen times as many.
fn long_job(bytes: usize) -> Job {
    let mut long = job(&[TokenId(1)]);
    long.sampling.structured = Some(Structured {
        constraint: Constraint::Regex("a".repeat(bytes).into()),
        field: "regex",
    });
    long
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_without_room_fails_only_its_job() {
    const OTHERS: usize = 8;
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let mut others = Vec::new();
    for _ in 0..OTHERS {
        harness.engine.next_job(Script { hangs: true, ..Script::tokens(&[7]) });
        others.push(first_output(&*engine, &job(&[TokenId(1)])).await.unwrap().0);
    }
    // Another frontend at this address has as many incomplete messages as allowed.
    let (_, arriving) = &harness.shares;
    let share = arriving.for_peer(Peer::from_address([127, 0, 0, 1].into()));
    let mut whole_share = share.empty();
    while whole_share.grow(1 << 20).is_ok() {}
    let long = long_job(2 << 20);
    let mut not_taken = 0;
    for _ in 0..3 {
        not_taken +=
            usize::from(matches!(first_output(&*engine, &long).await, Err(JobError::NotTaken(_))));
    }
    harness.engine.next_job(Script::tokens(&[8]));
    let is_short_one_taken = first_output(&*engine, &job(&[TokenId(1)])).await.is_ok();
    let lost = others.iter_mut().filter_map(|running| running.next().now_or_never()).count();
    assert_eq!((not_taken, is_short_one_taken, lost), (3, true, 0));
    assert!(engine.ended().now_or_never().is_none());
    drop(whole_share);
    harness.engine.next_job(Script::tokens(&[9]));
    first_output(&*engine, &long).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_from_one_address_leave_memory_to_others() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    let room = 1_000_000;
    let _others = harness.budget.charge(harness.budget.limit() - room).unwrap();
    let mut running = Vec::new();
    let full = loop {
        harness.engine.next_job(Script { hangs: true, ..Script::tokens(&[7]) });
        match first_output(&*engine, &long_job(1000)).await {
            Ok((job, _)) => running.push(job),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(
            &full,
            JobError::NotTaken(why) if why.to_string().contains("--max-bytes-in-flight")
        ),
        "{full}"
    );
    let free = harness.budget.limit() - harness.budget.held();
    assert!((room / 8..room / 5).contains(&free), "{free} after {} jobs", running.len());
    // A file from this address has no room either, but one from another address has.
    let has_room_for_file = |number| {
        let (memory, _) = &harness.shares;
        memory
            .for_peer(Peer::from_address([127, 0, 0, number].into()))
            .empty_uncharged()
            .grow(room / 10)
            .is_ok()
    };
    assert_eq!((has_room_for_file(1), has_room_for_file(2)), (false, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_job_is_aborted() {
    let harness = TestHarness::new().await;
    let engine = harness.connect().await;
    harness.engine.next_job(Script::tokens(&[1]));
    let mut running = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    running.next().await.unwrap().unwrap();
    drop(running);
    wait_for_aborts(&harness, 1).await;
    harness.engine.die(chiasm_backend::DeathReason::new("on purpose"));
    let death = tokio::time::timeout(Duration::from_secs(10), engine.ended()).await.unwrap();
    assert_eq!(death.to_string(), "on purpose");
    assert!(matches!(engine.start(Arc::new(job(&[TokenId(1)]))).await, Err(JobError::NotTaken(_))));
}
