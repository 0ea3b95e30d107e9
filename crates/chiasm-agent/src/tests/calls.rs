//! Many jobs over one call.

use tokio_stream::StreamExt;
use tonic::{Code, Status, Streaming};

use super::*;
use crate::proto::agent_client::AgentClient;
use crate::proto::generate_request::Request;
use crate::proto::job_event::Event as JobEvent;
use crate::proto::{GenerateReply, GenerateRequest, MediaChunk, Open, Stop};

type Client = AgentClient<tonic::transport::Channel>;

/// A call with these requests, which is open until `end` comes.
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

/// A call with these requests, and no end.
pub(super) async fn call(
    jobs: &mut Client,
    requests: Vec<Request>,
) -> Result<Streaming<GenerateReply>, Status> {
    call_until(std::future::pending(), jobs, requests).await
}

/// Waits until the engine was told to end as many jobs.
async fn aborted(stand: &Stand, jobs: usize) {
    let aborted = async {
        while stand.engine.aborted() < jobs {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), aborted).await.unwrap();
}

fn begin_with(number: u64, told: &Job) -> Request {
    Request::Begin(proto::Job { number, ..sent(told) }.encode_to_vec().into())
}

pub(super) fn begin(number: u64) -> Request {
    begin_with(number, &job(&[TokenId(1)]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_is_for_one_start_of_one_engine_and_numbers_name_one_job() {
    let stand = Stand::new().await;
    let (mut jobs, _) = stand.link.clients();
    let open = |engine, life| Request::Open(Open { engine, life, frontend: 9 });
    for (first, code) in [
        (begin(1), Code::InvalidArgument),
        (open(1, stand.life()), Code::InvalidArgument),
        (open(0, stand.life().wrapping_add(1)), Code::Unavailable),
    ] {
        assert_eq!(call(&mut jobs, vec![first]).await.unwrap_err().code(), code);
    }
    for (wrong, begun) in [(open(0, stand.life()), 1), (begin(1), 2)] {
        stand.engine.next_job(Script { hangs: true, ..Script::default() });
        let mut replies =
            call(&mut jobs, vec![open(0, stand.life()), begin(1), wrong]).await.unwrap();
        let status = loop {
            match replies.message().await {
                Ok(reply) => assert!(reply.is_some(), "the call ended well"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(stand.engine.jobs().len() <= begun);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_asked_about_one_job_leaves_the_others_as_they_are() {
    let stand = Stand::new().await;
    let (mut jobs, _) = stand.link.clients();
    let pause = Duration::from_millis(200);
    for _ in 0..3 {
        stand.engine.next_job(Script {
            pause,
            ..Script::tokens(&[7]).then(1, &[8]).finish(Finish::Length)
        });
    }
    let open = Request::Open(Open { engine: 0, life: stand.life(), frontend: 9 });
    let requests = vec![
        open,
        begin(1),
        begin(2),
        begin(3),
        Request::Abort(2),
        Request::Stop(Stop { job: 3, choice: 0 }),
        // Of jobs that nobody knows.
        Request::Abort(4),
        Request::Stop(Stop { job: 5, choice: 9 }),
    ];
    let mut replies = call(&mut jobs, requests).await.unwrap();
    let (mut told, mut ended) = (Vec::new(), 0);
    while ended < 2 {
        for event in replies.message().await.unwrap().unwrap().events {
            match event.event.unwrap() {
                JobEvent::Output(output) => told.push((event.job, output.choice)),
                JobEvent::Ended(_) => ended += 1,
                _ => {}
            }
        }
    }
    told.sort_unstable();
    // A fake engine tells of what was stopped, too, as the frontend knows it.
    assert!(told.contains(&(1, 0)) && told.contains(&(1, 1)) && told.contains(&(3, 1)), "{told:?}");
    assert!(told.iter().all(|(job, _)| *job != 2), "{told:?}");
    assert!(!told.contains(&(3, 0)), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn that_a_job_has_begun_is_told_with_its_first_output_or_soon() {
    let stand = Stand::new().await;
    let (mut jobs, mut files) = stand.link.clients();
    let picture = Bytes::from_static(PICTURE);
    let file = MediaChunk {
        content: Bytes::copy_from_slice(ContentHash::of(PICTURE).as_bytes()),
        length: PICTURE.len() as u64,
        modality: "image".to_owned(),
        bytes: picture.clone(),
    };
    files.put_media(tokio_stream::iter([file])).await.unwrap();
    let with_picture = begin_with(3, &stand.with_picture(&picture));
    let open = Request::Open(Open { engine: 0, life: stand.life(), frontend: 9 });
    stand.engine.next_job(Script::tokens(&[7]));
    stand.engine.next_job(Script { hangs: true, ..Script::default() });
    stand.engine.next_job(Script::tokens(&[8]));
    let mut replies = call(&mut jobs, vec![open, begin(1), begin(2), with_picture]).await.unwrap();
    let mut heard = Vec::new();
    while heard.len() < 3 {
        let events = replies.message().await.unwrap().unwrap().events;
        let is_output = |event: Option<&proto::JobEvent>| {
            event.is_some_and(|event| matches!(event.event, Some(JobEvent::Output(_))))
        };
        for (at, event) in events.iter().enumerate() {
            if let Some(JobEvent::Started(delivered)) = &event.event {
                heard.push((event.job, delivered.inline, is_output(events.get(at + 1))));
            }
        }
    }
    heard.sort_unstable();
    assert_eq!(heard, [(1, 0, true), (2, 0, false), (3, 1, true)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_call_ends_its_jobs() {
    let stand = Stand::new().await;
    let (mut jobs, _) = stand.link.clients();
    let open = Request::Open(Open { engine: 0, life: stand.life(), frontend: 9 });
    (0..2).for_each(|_| stand.engine.next_job(Script::tokens(&[1])));
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let requests = vec![open, begin(1), begin(2)];
    let mut replies = call_until(ended.map(drop), &mut jobs, requests).await.unwrap();
    while stand.engine.jobs().len() < 2 {
        replies.message().await.unwrap().unwrap();
    }
    assert_eq!(stand.engine.aborted(), 0);
    drop(end);
    aborted(&stand, 2).await;
    while replies.message().await.unwrap().is_some() {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_nobody_reads_ends_alone() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let more = chiasm_backend::inbox::MOST_UNREAD + 100;
    let endless = (0..more).fold(Script::tokens(&[1]), |script, _| script.then(0, &[2]));
    stand.engine.next_job(endless);
    let mut unread = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    aborted(&stand, 1).await;
    stand.engine.next_job(Script::tokens(&[3]));
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
    // The word that it has begun was read as well.
    assert_eq!(read + 1, chiasm_backend::inbox::MOST_UNREAD);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_fits_into_no_message_ends_its_job_alone() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    stand.engine.next_job(Script::tokens(&[3]));
    let mut other = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    let mut told = job(&[TokenId(1)]);
    let regex = "a".repeat(crate::MOST_MESSAGE_BYTES);
    told.sampling.structured =
        Some(Structured { constraint: Constraint::Regex(regex.into()), field: "regex" });
    let refused = engine.start(Arc::new(told)).await.map(drop);
    assert!(
        matches!(&refused, Err(JobError::Refused { message, .. }) if message == "is too long"),
        "{refused:?}"
    );
    let mut long = Script::tokens(&[1]);
    let tokens = crate::MOST_MESSAGE_BYTES / size_of::<f32>();
    long.outputs[0].prompt_logprobs = Some(chiasm_backend::PromptLogprobs {
        width: 1,
        tokens: Vec::new(),
        logprobs: vec![0.5; tokens],
        ranks: Vec::new(),
    });
    stand.engine.next_job(long);
    let mut running = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    assert!(matches!(running.next().await, Some(Err(JobError::Failed))));
    aborted(&stand, 1).await;
    other.next().await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_with_too_many_fields_is_refused_alone() {
    let stand = Stand::new().await;
    let is_about_items =
        |field: &str, message: &str| field == "messages" && message.contains("media items");
    // A frontend does not send it.
    let engine = stand.connect().await;
    let many =
        Job { embedded: vec![MmHash::new([3; 32]); job::MOST_ENTRIES], ..job(&[TokenId(1)]) };
    let refused = engine.start(Arc::new(many.clone())).await.map(drop);
    assert!(
        matches!(&refused, Err(JobError::Refused { field, message }) if is_about_items(field, message)),
        "{refused:?}"
    );
    // One that does has the call's other jobs go on, and new ones begin.
    stand.engine.next_job(Script { hangs: true, ..Script::default() });
    stand.engine.next_job(Script::tokens(&[7]));
    let open = Request::Open(Open { engine: 0, life: stand.life(), frontend: 9 });
    let (mut jobs, _) = stand.link.clients();
    let mut replies =
        call(&mut jobs, vec![open, begin(1), begin_with(2, &many), begin(3)]).await.unwrap();
    let (mut refused, mut answered) = (false, false);
    while !refused || !answered {
        for told in replies.message().await.unwrap().unwrap().events {
            match told.event.unwrap() {
                JobEvent::Failure(failure) => {
                    assert_eq!((told.job, failure.kind()), (2, proto::job_failure::Kind::Refused));
                    assert!(is_about_items(&failure.field, &failure.message), "{failure:?}");
                    refused = true;
                }
                JobEvent::Output(_) => answered |= told.job == 3,
                _ => {}
            }
        }
    }
    assert_eq!((stand.engine.jobs().len(), stand.engine.aborted()), (2, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_memory_has_no_room_for_is_for_another_agent() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let room = 200_000;
    let _files = stand.budget.charge(stand.budget.limit() - room).unwrap();
    let free = || stand.budget.limit() - stand.budget.held();
    // It is as short as any on the wire, and the engine would not take it.
    let long = job(&[TokenId(1); 60_000]);
    let Err(JobError::NotTaken(why)) = delivered(&*engine, &long).await else {
        panic!("not taken")
    };
    assert!(why.to_string().contains("--max-bytes-in-flight"), "{why}");
    stand.engine.next_job(Script::tokens(&[7]));
    let (running, _) = begun(&*engine, &job(&[TokenId(1)])).await.unwrap();
    assert!(free() < room);
    drop(running);
    aborted(&stand, 1).await;
    assert_eq!((free(), stand.engine.jobs().len()), (room, 1));
    // Two bytes for each media item: it is malformed, but that is not looked at.
    let message = [&[8, 1][..], &[0x2a, 0].repeat(1000)].concat();
    let open = Request::Open(Open { engine: 0, life: stand.life(), frontend: 9 });
    let (mut jobs, _) = stand.link.clients();
    let mut replies = call(&mut jobs, vec![open, Request::Begin(message.into())]).await.unwrap();
    let told = replies.message().await.unwrap().unwrap().events.remove(0);
    let Some(JobEvent::Failure(failure)) = told.event else { panic!("not taken") };
    assert_eq!((told.job, failure.kind()), (1, proto::job_failure::Kind::NotTaken));
}

/// A job whose message has so many bytes and some more, and takes sixteen times as many.
fn long_job(bytes: usize) -> Job {
    let mut long = job(&[TokenId(1)]);
    long.sampling.structured = Some(Structured {
        constraint: Constraint::Regex("a".repeat(bytes).into()),
        field: "regex",
    });
    long
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_there_is_no_room_for_hurts_its_own_job_alone() {
    const OTHERS: usize = 8;
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let mut others = Vec::new();
    for _ in 0..OTHERS {
        stand.engine.next_job(Script { hangs: true, ..Script::tokens(&[7]) });
        others.push(begun(&*engine, &job(&[TokenId(1)])).await.unwrap().0);
    }
    // Another frontend at this address has begun as many messages as there may be from there, and
    // they don't end.
    let (_, arriving) = &stand.shares;
    let here = arriving.of(Peer::at([127, 0, 0, 1].into()));
    let mut all_of_it = here.nothing();
    while all_of_it.grow(1 << 20).is_ok() {}
    let long = long_job(2 << 20);
    let mut not_taken = 0;
    for _ in 0..3 {
        not_taken +=
            usize::from(matches!(begun(&*engine, &long).await, Err(JobError::NotTaken(_))));
    }
    stand.engine.next_job(Script::tokens(&[8]));
    let is_short_one_taken = begun(&*engine, &job(&[TokenId(1)])).await.is_ok();
    let lost = others.iter_mut().filter_map(|running| running.next().now_or_never()).count();
    assert_eq!((not_taken, is_short_one_taken, lost), (3, true, 0));
    assert!(engine.ended().now_or_never().is_none());
    drop(all_of_it);
    stand.engine.next_job(Script::tokens(&[9]));
    begun(&*engine, &long).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_from_one_address_leave_memory_to_others() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    let room = 1_000_000;
    let _others = stand.budget.charge(stand.budget.limit() - room).unwrap();
    let mut running = Vec::new();
    let full = loop {
        stand.engine.next_job(Script { hangs: true, ..Script::tokens(&[7]) });
        match begun(&*engine, &long_job(1000)).await {
            Ok((job, _)) => running.push(job),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(&full, JobError::NotTaken(why) if why.to_string().contains("--max-bytes-in-flight")),
        "{full}"
    );
    let free = stand.budget.limit() - stand.budget.held();
    assert!((room / 8..room / 5).contains(&free), "{free} after {} jobs", running.len());
    // A file from there has no room either, and one from elsewhere has.
    let file = |number| {
        let (memory, _) = &stand.shares;
        memory.of(Peer::at([127, 0, 0, number].into())).nothing_beside().grow(room / 10).is_ok()
    };
    assert_eq!((file(1), file(2)), (false, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_jobs_are_aborted_and_those_of_an_engine_that_ended_are_not_taken() {
    let stand = Stand::new().await;
    let engine = stand.connect().await;
    stand.engine.next_job(Script::tokens(&[1]));
    let mut running = engine.start(Arc::new(job(&[TokenId(1)]))).await.unwrap();
    running.next().await.unwrap().unwrap();
    drop(running);
    aborted(&stand, 1).await;
    stand.engine.die(chiasm_backend::Death::new("it was told to"));
    let death = tokio::time::timeout(Duration::from_secs(10), engine.ended()).await.unwrap();
    assert_eq!(death.to_string(), "it was told to");
    assert!(matches!(engine.start(Arc::new(job(&[TokenId(1)]))).await, Err(JobError::NotTaken(_))));
}
