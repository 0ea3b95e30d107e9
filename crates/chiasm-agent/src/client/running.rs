//! A job that runs on an engine of an agent.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use chiasm_backend::{
    DeathReason, Job, JobError, KvTransferParams, MediaDelivery, Output, RunningJob,
    StoredEmbeddings,
};
use chiasm_pipeline::{CutFailure, FetchFailure};

use super::jobs::JobHandle;
use super::sending::{RequestedForm, send};
use super::shared::Shared;
use crate::answer::{
    delivered_from_message, embeddings_from_message, failure_from_message, output_from_message,
};
use crate::proto::job_event::Event;
use crate::proto::{self, Lacking};

/// A running job, and what it has left behind so far.
pub(super) struct RunningAgentJob {
    shared: Arc<Shared>,
    job: Arc<Job>,
    /// `None` once the job has ended.
    handle: Option<JobHandle>,
    /// `true` for each continuation that has not ended.
    open: Vec<bool>,
    delivered: MediaDelivery,
    hand_off: Duration,
    left: Option<KvTransferParams>,
    embeddings: Vec<StoredEmbeddings>,
}

impl RunningAgentJob {
    /// Sends a job to the agent. The job's events show whether the agent takes it, and which items
    /// it lacks.
    pub(super) fn start(
        shared: Arc<Shared>,
        job: Arc<Job>,
        message: proto::Job,
    ) -> Result<Self, JobError> {
        let handle = Some(shared.jobs.begin(message)?);
        let open = vec![true; job.sampling.n];
        Ok(Self {
            shared,
            job,
            handle,
            open,
            delivered: MediaDelivery::default(),
            hand_off: Duration::ZERO,
            left: None,
            embeddings: Vec::new(),
        })
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Event, JobError>> {
        match &mut self.handle {
            Some(handle) => handle.poll_event(context),
            None => Poll::Ready(Err(JobError::Unfinished)),
        }
    }

    /// Handles an event. Returns its output, if it has one.
    fn handle_event(&mut self, event: Event) -> Result<Option<Output>, JobError> {
        match event {
            Event::Started(delivered) | Event::Delivered(delivered) => {
                self.set_delivered(delivered)
            }
            Event::Ended(_) => return Err(JobError::Unfinished),
            Event::Lacking(Lacking { items, not_fetched, reason, not_decoded }) => {
                if !not_fetched.is_empty() {
                    // Later versions may have more causes.
                    let cause =
                        FetchFailure::CAUSES.into_iter().find(|cause| *cause == not_fetched);
                    self.shared.observer.stepped_down(cause.unwrap_or("fetch_failed"), &reason);
                }
                if not_decoded.is_empty() {
                    self.send_media(&items, RequestedForm::Preferred);
                } else {
                    self.shared.observer.stepped_down("cut_not_decoded", &reason);
                    // Later versions may have more causes.
                    let is_rejected = not_decoded == CutFailure::OTHER_FRAMES;
                    self.send_media(&items, RequestedForm::WholeVideo { is_rejected });
                }
            }
            Event::Left(words) => self.left = KvTransferParams::new(words),
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
                let output = output.ok_or_else(|| {
                    JobError::Dead(DeathReason::new("the agent sent a malformed output"))
                })?;
                // Outputs of stopped continuations arrive until the agent has received the stop.
                if self.open[output.choice] {
                    self.open[output.choice] = output.finish.is_none();
                    return Ok(Some(output));
                }
            }
        }
        Ok(None)
    }

    fn set_delivered(&mut self, delivered: proto::Delivered) {
        let counted = self.delivered.unfound;
        (self.delivered, self.hand_off) = delivered_from_message(delivered);
        if self.delivered != MediaDelivery::default() {
            self.shared.observer.delivered(self.delivered);
        }
        for _ in counted..self.delivered.unfound {
            self.shared
                .observer
                .stepped_down("no_embeddings", &"the agent's machine does not have the embeddings");
        }
    }

    /// Sends the files, tensors or cuts of items that the agent lacks. An item that can't be sent
    /// ends the job.
    fn send_media(&self, items: &[u32], form: RequestedForm) {
        let Some(job) = self.handle.as_ref().map(JobHandle::number) else { return };
        for item in items.iter().filter_map(|&item| self.job.media.get(item as usize)) {
            let shared = self.shared.clone();
            let item = item.clone();
            tokio::spawn(async move {
                if let Err(error) = send(&shared, &item, form).await {
                    let agent = shared.link.address();
                    let modality = &item.modality;
                    tracing::warn!(agent, %modality, %error, "can't send a media item to an agent");
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
                if let Some(handle) = self.handle.take() {
                    handle.finish();
                }
                return Poll::Ready(None);
            }
            match ready!(self.poll_event(context)).and_then(|event| self.handle_event(event)) {
                Ok(Some(output)) => return Poll::Ready(Some(Ok(output))),
                Ok(None) => {}
                Err(error) => {
                    self.open.fill(false);
                    self.handle = None;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }

    fn stop(&mut self, choice: usize) {
        let Some(open) = self.open.get_mut(choice) else { return };
        *open = false;
        if self.open.iter().all(|open| !open) {
            // Aborts the job.
            self.handle = None;
        } else if let Some(handle) = &self.handle {
            handle.stop(choice);
        }
    }

    fn kv_transfer_params(&mut self) -> Option<KvTransferParams> {
        self.left.take()
    }

    fn stored_embeddings(&mut self) -> Vec<StoredEmbeddings> {
        std::mem::take(&mut self.embeddings)
    }

    fn delivered(&self) -> MediaDelivery {
        self.delivered
    }

    fn hand_off(&self) -> Duration {
        self.hand_off
    }
}
