//! One job that runs on an engine of an agent.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use chiasm_backend::{Death, Delivered, Embeddings, Job, JobError, Left, Output, RunningJob};
use chiasm_pipeline::NotFetched;

use super::jobs::Call;
use super::sending::send;
use super::shared::Shared;
use crate::answer::{
    delivered_from_message, embeddings_from_message, failure_from_message, output_from_message,
};
use crate::proto::job_event::Event;
use crate::proto::{self, Lacking};

/// A job, and what it has left so far.
pub(super) struct RunningAgentJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// `None` once all has come.
    call: Option<Call>,
    /// The continuations that have not ended.
    open: Vec<bool>,
    delivered: Delivered,
    hand_off: Duration,
    left: Option<Left>,
    embeddings: Vec<Embeddings>,
}

impl RunningAgentJob {
    /// Hands a job over. Whether the agent takes it, and what it lacks before it can begin, is told
    /// with what comes of it.
    pub(super) fn start(
        shared: Arc<Shared>,
        job: Arc<Job>,
        told: proto::Job,
    ) -> Result<Self, JobError> {
        let call = Some(shared.jobs.begin(told)?);
        let open = vec![true; job.sampling.n];
        let (delivered, hand_off, left, embeddings) =
            (Delivered::default(), Duration::ZERO, None, Vec::new());
        Ok(Self { shared, job, call, open, delivered, hand_off, left, embeddings })
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Event, JobError>> {
        match &mut self.call {
            Some(call) => call.poll_event(context),
            None => Poll::Ready(Err(JobError::Unfinished)),
        }
    }

    /// Takes in what the agent says, which may be an output.
    fn take(&mut self, event: Event) -> Result<Option<Output>, JobError> {
        match event {
            Event::Started(delivered) | Event::Delivered(delivered) => {
                self.take_delivered(delivered)
            }
            Event::Ended(_) => return Err(JobError::Unfinished),
            Event::Lacking(Lacking { items, not_fetched, reason }) => {
                if !not_fetched.is_empty() {
                    // A later version may know more causes.
                    let cause = NotFetched::CAUSES.into_iter().find(|cause| *cause == not_fetched);
                    self.shared.observer.stepped_down(cause.unwrap_or("fetch_failed"), &reason);
                }
                self.send_media(&items);
            }
            Event::Left(words) => self.left = Left::new(words),
            Event::Embeddings(left) => {
                self.embeddings.extend(left.items.iter().filter_map(embeddings_from_message))
            }
            Event::Failure(failure) => {
                let constraint =
                    self.job.sampling.structured.as_ref().map(|structured| structured.field);
                return Err(failure_from_message(failure, constraint));
            }
            Event::Output(output) => {
                let output =
                    output_from_message(output).filter(|output| output.choice < self.open.len());
                let output =
                    output.ok_or_else(|| JobError::Dead(Death::new("its agent tells nonsense")))?;
                // Otherwise the agent has not heard yet that it is not wanted.
                if self.open[output.choice] {
                    self.open[output.choice] = output.finish.is_none();
                    return Ok(Some(output));
                }
            }
        }
        Ok(None)
    }

    fn take_delivered(&mut self, delivered: proto::Delivered) {
        let counted = self.delivered.unfound;
        (self.delivered, self.hand_off) = delivered_from_message(delivered);
        if self.delivered != Delivered::default() {
            self.shared.observer.delivered(self.delivered);
        }
        for _ in counted..self.delivered.unfound {
            self.shared
                .observer
                .stepped_down("no_embeddings", &"the agent's machine does not have them");
        }
    }

    /// Sends the files of items that the agent lacks, or their tensors. What can't be sent ends the
    /// job.
    fn send_media(&self, items: &[u32]) {
        let Some(job) = self.call.as_ref().map(Call::number) else { return };
        for item in items.iter().filter_map(|&item| self.job.media.get(item as usize)) {
            let (shared, item) = (self.shared.clone(), item.clone());
            tokio::spawn(async move {
                if let Err(error) = send(&shared, &item).await {
                    let (agent, modality) = (shared.link.address(), &item.modality);
                    tracing::warn!(agent, %modality, %error, "a media item did not get there");
                    shared.observer.stepped_down("not_sent", &error);
                    shared.jobs.fail(job, error);
                }
            });
        }
    }
}

impl RunningJob for RunningAgentJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Output, JobError>>> {
        loop {
            if self.open.iter().all(|open| !open) {
                if let Some(call) = self.call.take() {
                    call.finish();
                }
                return Poll::Ready(None);
            }
            match ready!(self.poll_event(context)).and_then(|event| self.take(event)) {
                Ok(Some(output)) => return Poll::Ready(Some(Ok(output))),
                Ok(None) => {}
                Err(error) => {
                    self.open.fill(false);
                    self.call = None;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(open) = self.open.get_mut(choice) else { return };
        *open = false;
        if self.open.iter().all(|open| !open) {
            // All that the agent needs to know.
            self.call = None;
        } else if let Some(call) = &self.call {
            call.stop(choice);
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

    fn hand_off(&self) -> Duration {
        self.hand_off
    }
}
