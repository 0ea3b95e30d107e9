//! One job that runs on an engine of an agent.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};

use chiasm_backend::{
    Death, Delivered, Embeddings, Job, JobError, JobItem, Left, Output, RunningJob, TensorBytes, TensorFormat,
    TensorMemory, TensorOrder,
};
use chiasm_server::NotFetched;
use chiasm_transfer::SlotWriter;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use tonic::{Code, Status, Streaming};

use super::backend::Shared;
use super::lending::NotLent;
use super::lost;
use crate::answer::{delivered_from_message, embeddings_from_message, failure_from_message, output_from_message};
use crate::proto::generate_event::Event;
use crate::proto::{GenerateEvent, GenerateRequest, Lacking, Started, StopRequest};
use crate::tensors;

/// A job, and what has come of it that nobody has asked for yet.
pub(super) struct RunningAgentJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// `None` once all has come.
    events: Option<Streaming<GenerateEvent>>,
    /// The agent's name of the job.
    number: u64,
    came: VecDeque<Output>,
    /// The continuations that have not ended.
    open: Vec<bool>,
    delivered: Delivered,
    left: Option<Left>,
    embeddings: Vec<Embeddings>,
    /// Why an item could not be sent.
    unsent: (mpsc::UnboundedSender<JobError>, mpsc::UnboundedReceiver<JobError>),
    /// The end of the engine, which may be known before its connection fails.
    ended: BoxFuture<'static, Death>,
}

impl RunningAgentJob {
    /// Hands a job over, and the files and tensors that the agent lacks before it can begin.
    pub(super) async fn start(shared: Arc<Shared>, job: Arc<Job>, request: GenerateRequest) -> Result<Self, JobError> {
        let mut jobs = shared.link.jobs.clone();
        let events = jobs.generate(request).await.map_err(|status| not_taken(&shared, &status))?.into_inner();
        let open = vec![true; job.sampling.n];
        let (came, delivered) = (VecDeque::new(), Delivered::default());
        let ended = shared.when_ended();
        let unsent = mpsc::unbounded_channel();
        let mut running = Self {
            shared,
            job,
            events: Some(events),
            number: 0,
            came,
            open,
            delivered,
            left: None,
            embeddings: Vec::new(),
            unsent,
            ended,
        };
        loop {
            let event = running.next_event().await?;
            if let Event::Started(Started { job, delivered }) = event {
                running.number = job;
                running.take_delivered(delivered.unwrap_or_default());
                return Ok(running);
            }
            running.take(event)?;
        }
    }

    async fn next_event(&mut self) -> Result<Event, JobError> {
        std::future::poll_fn(|context| self.poll_event(context)).await
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Event, JobError>> {
        if let Poll::Ready(Some(error)) = self.unsent.1.poll_recv(context) {
            return Poll::Ready(Err(error));
        }
        loop {
            let Some(events) = &mut self.events else { return Poll::Ready(Err(JobError::Unfinished)) };
            let event = match std::task::ready!(events.poll_next_unpin(context)) {
                Some(Ok(GenerateEvent { event: Some(event) })) => Ok(event),
                // A kind of event that a later version tells of.
                Some(Ok(GenerateEvent { event: None })) => continue,
                Some(Err(status)) => Err(JobError::Dead(lost(&self.shared.link.address, &status))),
                None => Err(JobError::Unfinished),
            };
            return Poll::Ready(event);
        }
    }

    /// Takes in what the agent says.
    fn take(&mut self, event: Event) -> Result<(), JobError> {
        match event {
            Event::Started(_) => {}
            Event::Lacking(Lacking { items, not_fetched, reason }) => {
                if !not_fetched.is_empty() {
                    // A later version may know more causes.
                    let cause = NotFetched::CAUSES.into_iter().find(|cause| *cause == not_fetched);
                    self.shared.observer.stepped_down(cause.unwrap_or("fetch_failed"), &reason);
                }
                self.send_media(&items);
            }
            Event::Delivered(delivered) => self.take_delivered(delivered),
            Event::Left(words) => self.left = Left::new(words),
            Event::Embeddings(left) => self.embeddings.extend(left.items.iter().filter_map(embeddings_from_message)),
            Event::Failure(failure) => {
                let constraint = self.job.sampling.structured.as_ref().map(|structured| structured.field);
                return Err(failure_from_message(failure, constraint));
            }
            Event::Outputs(outputs) => {
                for output in outputs.outputs {
                    let output = output_from_message(output).filter(|output| output.choice < self.open.len());
                    let output = output.ok_or_else(|| {
                        JobError::Dead(Death::new(format!("the agent at {} tells nonsense", self.shared.link.address)))
                    })?;
                    if self.open[output.choice] {
                        self.open[output.choice] = output.finish.is_none();
                        self.came.push_back(output);
                    }
                }
            }
        }
        Ok(())
    }

    fn take_delivered(&mut self, delivered: crate::proto::Delivered) {
        let counted = self.delivered.unfound;
        self.delivered = delivered_from_message(delivered);
        if self.delivered != Delivered::default() {
            self.shared.observer.delivered(self.delivered);
        }
        for _ in counted..self.delivered.unfound {
            self.shared.observer.stepped_down("no_embeddings", &"the agent's machine does not have them");
        }
    }

    /// Sends the files of items that the agent lacks, or their tensors. What can't be sent ends the job.
    fn send_media(&self, items: &[u32]) {
        for item in items.iter().filter_map(|&item| self.job.media.get(item as usize)) {
            let (shared, item, unsent) = (self.shared.clone(), item.clone(), self.unsent.0.clone());
            tokio::spawn(async move {
                if let Err(error) = send(&shared, &item).await {
                    let (agent, modality) = (shared.link.address(), &item.modality);
                    tracing::warn!(agent, %modality, %error, "a media item did not get there");
                    shared.observer.stepped_down("not_sent", &error);
                    let _ = unsent.send(error);
                }
            });
        }
    }
}

/// Sends an item's file, or its tensors where that does not say what they are: made for that if they were not kept.
async fn send(shared: &Shared, item: &JobItem) -> Result<(), JobError> {
    let sent = match item.source.encoded() {
        Some(encoded) => {
            shared.observer.sent(encoded.bytes.len() as u64);
            shared.link.put(encoded.content, item.modality.name(), encoded.bytes).await
        }
        None => {
            let order = TensorOrder {
                // What makes them knows what engines want.
                format: TensorFormat::Raw,
                memory: Arc::new(OwnMemory),
                still_wanted: Arc::new(|| true),
            };
            let fields = item.source.tensors(order).await.map_err(JobError::Source)?;
            let fields = fields.unwrap_or_default();
            let bytes = tensors::bytes(&fields);
            match shared.link.lend_tensors(&item.hash, &fields).await {
                Ok(true) => {
                    shared.observer.lent(bytes);
                    return Ok(());
                }
                Ok(false) => {}
                Err(NotLent { cause, why }) => shared.observer.stepped_down(cause, &why),
            }
            shared.observer.sent(bytes);
            shared.link.put_tensors(&item.hash, &fields).await
        }
    };
    sent.map_err(|status| not_taken(shared, &status))
}

/// What is sent lies in this process's memory.
pub(crate) struct OwnMemory;

impl TensorMemory for OwnMemory {
    fn reserve(&self, _: usize) -> Option<SlotWriter> {
        None
    }

    fn takes(&self, _: &TensorBytes) -> bool {
        true
    }
}

/// Why an agent did not take a job: what it refuses without being gone, another may take.
fn not_taken(shared: &Shared, status: &Status) -> JobError {
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => {
            JobError::Refused { field: "body".to_owned(), message: status.message().to_owned() }
        }
        _ => JobError::NotTaken(lost(&shared.link.address, status)),
    }
}

impl RunningJob for RunningAgentJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            if let Some(output) = self.came.pop_front() {
                return Poll::Ready(Some(Ok(output)));
            }
            if self.open.iter().all(|open| !open) {
                self.events = None;
                return Poll::Ready(None);
            }
            let event = match self.poll_event(context) {
                Poll::Ready(event) => event,
                Poll::Pending => Err(JobError::Dead(std::task::ready!(self.ended.poll_unpin(context)))),
            };
            if let Err(error) = event.and_then(|event| self.take(event)) {
                self.open.fill(false);
                self.events = None;
                return Poll::Ready(Some(Err(error)));
            }
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(open) = self.open.get_mut(choice) else { return };
        *open = false;
        self.came.retain(|output| output.choice != choice);
        if self.open.iter().any(|open| *open) {
            let (mut jobs, request) =
                (self.shared.link.jobs.clone(), StopRequest { job: self.number, choice: choice as u32 });
            tokio::spawn(async move { jobs.stop(request).await });
        } else {
            // All that the agent needs to know.
            self.events = None;
        }
    }

    fn left(&mut self) -> Option<Left> {
        self.left.take()
    }

    fn embeddings(&mut self) -> Vec<Embeddings> {
        std::mem::take(&mut self.embeddings)
    }

    fn delivered(&self) -> Delivered {
        self.delivered
    }
}
