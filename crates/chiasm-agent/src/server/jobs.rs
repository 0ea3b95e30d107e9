//! Jobs that frontends have given to this machine's engines.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use chiasm_backend::{Input, Job, JobError, RunningJob, Stage};
use chiasm_server::adapters::ServedAdapter;
use chiasm_server::fleet::Worker;
use chiasm_server::{CheckedJob, MachineMedia, NotFetched};
use futures_util::Stream;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::task::AtomicWaker;
use tokio::sync::{mpsc, watch};
use tonic::Status;

use super::announcements::Announcements;
use crate::answer::{delivered_to_message, embeddings_to_message, failure_to_message, output_to_message};
use crate::job::JobParts;
use crate::proto::generate_event::Event;
use crate::proto::{EmbeddingsLeft, GenerateEvent, Lacking, Outputs, Started};

/// Outputs in one message.
const MOST_OUTPUTS: usize = 64;

/// The jobs that run, by their numbers, and where each is told of continuations that are to end.
#[derive(Default)]
pub(super) struct Jobs {
    stops: Mutex<HashMap<u64, mpsc::UnboundedSender<usize>>>,
    /// How many there are, those included that have not begun.
    running: watch::Sender<usize>,
}

impl Jobs {
    /// Ends a continuation of a job, if it still runs.
    pub(super) fn stop(&self, job: u64, choice: usize) {
        if let Some(stops) = self.stops().get(&job) {
            let _ = stops.send(choice);
        }
    }

    /// How many run, those included that have not begun.
    pub(super) fn running(&self) -> usize {
        *self.running.borrow()
    }

    /// Returns when none runs.
    pub(super) async fn all_ended(&self) {
        // The sender is here.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    fn stops(&self) -> MutexGuard<'_, HashMap<u64, mpsc::UnboundedSender<usize>>> {
        self.stops.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job that runs, until it is dropped.
struct Running {
    jobs: Arc<Jobs>,
    number: u64,
}

impl Running {
    fn new(jobs: Arc<Jobs>) -> Self {
        jobs.running.send_modify(|running| *running += 1);
        Self { jobs, number: rand::random() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.jobs.stops().remove(&self.number);
        self.jobs.running.send_modify(|running| *running -= 1);
    }
}

/// Whose a job is, and who is told of it.
pub(super) struct Owner {
    pub(super) frontend: u64,
    pub(super) announcements: Arc<Announcements>,
}

/// A job, as what its frontend is told of it. It begins when it is first asked for, goes on for as long as somebody asks, and is aborted when it is
/// dropped: the frontend is gone then, or does not want it any more.
pub(super) struct RunningEvents {
    /// `None` when it has ended.
    job: Option<BoxFuture<'static, ()>>,
    teller: Arc<Teller>,
}

/// What is to be told of a job.
#[derive(Default)]
struct Teller {
    events: Mutex<VecDeque<Event>>,
    /// Who tells it.
    told_by: AtomicWaker,
}

impl Teller {
    fn tell(&self, event: Event) {
        self.events().push_back(event);
        self.told_by.wake();
    }

    fn events(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A job to be run.
pub(super) fn run(
    jobs: Arc<Jobs>,
    media: Arc<MachineMedia>,
    worker: Arc<Worker>,
    owner: Owner,
    parts: JobParts,
    adapter: Option<Arc<ServedAdapter>>,
) -> RunningEvents {
    let (teller, running) = (Arc::<Teller>::default(), Running::new(jobs));
    let events = teller.clone();
    let job = async move {
        if let Err(error) = run_to_end(&running, &media, &worker, owner, parts, adapter, &events).await {
            events.tell(Event::Failure(failure_to_message(&error)));
        }
    };
    RunningEvents { job: Some(job.boxed()), teller }
}

impl Stream for RunningEvents {
    type Item = Result<GenerateEvent, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { job, teller } = self.get_mut();
        loop {
            if let Some(event) = teller.events().pop_front() {
                return Poll::Ready(Some(Ok(GenerateEvent { event: Some(event) })));
            }
            let Some(running) = job else { return Poll::Ready(None) };
            // Files are asked for by others, too.
            teller.told_by.register(context.waker());
            if running.poll_unpin(context).is_ready() {
                *job = None;
            } else if teller.events().is_empty() {
                return Poll::Pending;
            }
        }
    }
}

async fn run_to_end(
    this: &Running,
    media: &Arc<MachineMedia>,
    worker: &Worker,
    owner: Owner,
    parts: JobParts,
    // Let go of last: the engine has let go of the job before it may forget the adapter.
    adapter: Option<Arc<ServedAdapter>>,
    events: &Arc<Teller>,
) -> Result<(), JobError> {
    let JobParts {
        id, tokens, media: planned, sampling, cache_salt, priority, trace, reasoning, stage, embedded, ..
    } = parts;
    let adapter = adapter.as_ref().map(|adapter| adapter.engine().clone());
    // Whoever keeps the job's items longer than it runs keeps nobody waiting for its end.
    let asking = Arc::downgrade(events);
    let ask = Arc::new(move |item: usize, why: Option<NotFetched>| {
        if let Some(events) = asking.upgrade() {
            let (not_fetched, reason) = why.map(|why| (why.cause.to_owned(), why.reason)).unwrap_or_default();
            events.tell(Event::Lacking(Lacking { items: vec![item as u32], not_fetched, reason }));
        }
    });
    let lora = adapter.as_ref().map(|adapter| adapter.name.as_str());
    let checked = media.check(worker, &tokens, planned, lora, cache_salt.as_deref(), ask).await;
    let checked = checked.map_err(|message| JobError::Refused { field: "messages".to_owned(), message })?;
    let CheckedJob { items: media, mut told } = checked;
    if sampling.skip_reading_prefix_cache || stage == Stage::Encode {
        // What the engine holds is of no use to it.
        told.keys = Vec::new();
    }
    let mut announced = owner.announcements.begin(owner.frontend, this.number, told);
    let job = Job {
        id,
        input: Input::Tokens(Arc::new(tokens)),
        media,
        sampling,
        adapter,
        cache_salt,
        priority,
        trace,
        reasoning,
        stage,
        embedded,
    };
    let mut running = worker.backend.start(Arc::new(job)).await?;
    let (stop, mut stops) = mpsc::unbounded_channel();
    this.jobs.stops().insert(this.number, stop);
    let mut delivered = running.delivered();
    let started = Started { job: this.number, delivered: Some(delivered_to_message(delivered)) };
    events.tell(Event::Started(started));
    loop {
        let outputs = tokio::select! {
            Some(choice) = stops.recv() => {
                running.stop(choice);
                continue;
            }
            outputs = next_outputs(&mut *running) => outputs,
        };
        if running.delivered() != delivered {
            delivered = running.delivered();
            events.tell(Event::Delivered(delivered_to_message(delivered)));
        }
        let (outputs, ended) = outputs;
        // Before the outputs: with the last of them the frontend has heard all.
        if let Some(left) = running.left() {
            events.tell(Event::Left(left.words().clone()));
        }
        let embeddings = running.embeddings();
        if !embeddings.is_empty() {
            let items = embeddings.iter().map(embeddings_to_message).collect();
            events.tell(Event::Embeddings(EmbeddingsLeft { items }));
        }
        if !outputs.is_empty() {
            announced.computed();
            events.tell(Event::Outputs(Outputs { outputs }));
        }
        match ended {
            None => {}
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) => return Err(error),
        }
    }
}

/// What is there next, and what is there besides; and how the job has ended, if it has. Cancel safe: nothing is lost before the first.
async fn next_outputs(
    running: &mut (dyn RunningJob + 'static),
) -> (Vec<crate::proto::Output>, Option<Result<(), JobError>>) {
    let mut outputs = Vec::new();
    let mut next = running.next().await;
    loop {
        match next {
            None => return (outputs, Some(Ok(()))),
            Some(Err(error)) => return (outputs, Some(Err(error))),
            Some(Ok(output)) => outputs.push(output_to_message(output)),
        }
        if outputs.len() == MOST_OUTPUTS {
            return (outputs, None);
        }
        next = match running.next().now_or_never() {
            Some(next) => next,
            None => return (outputs, None),
        };
    }
}
