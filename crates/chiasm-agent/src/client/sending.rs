//! Sending a media item to an agent: as its file, as the cut of a video, or as tensors that this
//! process makes.

use std::sync::Arc;
use std::time::Instant;

use chiasm_backend::{
    CuttableVideo, ItemField, JobError, JobItem, SentForm, TensorBytes, TensorFormat, TensorMemory,
    TensorRequest, VideoPart,
};
use chiasm_transfer::SlotWriter;
use chiasm_types::MmHash;
use tonic::{Code, Status};

use super::images::{AgentMedia, ImageForms};
use super::lending::NotLent;
use super::shared::Shared;
use super::{connection_lost, describe};
use crate::tensors;

/// The form in which an agent requests an item.
#[derive(Clone, Copy, Debug)]
pub(super) enum RequestedForm {
    /// The form that was announced.
    Preferred,
    /// The tensors of a whole video, whose cut the agent does not decode. `is_rejected` is `true`
    /// if the cut decodes to other frames than were planned.
    WholeVideo { is_rejected: bool },
}

/// Sends an item's file or cut. Sends its tensors instead if the item has neither, or if tensors
/// are the chosen or requested form. Tensors that are not cached are made now.
pub(super) async fn send(
    shared: &Shared,
    item: &JobItem,
    form: RequestedForm,
) -> Result<(), JobError> {
    match (shared.cuts.cuttable(&*item.source), form) {
        (Some(video), RequestedForm::Preferred) => return send_cut(shared, item, video).await,
        (Some(video), RequestedForm::WholeVideo { is_rejected: true }) => video.reject_cut(),
        (Some(_), RequestedForm::WholeVideo { is_rejected: false }) | (None, _) => {}
    }
    let sent = match item.source.encoded() {
        Some(encoded) => {
            if try_send_tensors(shared, item, encoded.bytes.len() as u64).await {
                return Ok(());
            }
            shared.observer.sent_as(SentForm::Encoded);
            shared.observer.sent(encoded.bytes.len() as u64);
            shared.link.put_file(encoded.content, item.modality.name(), encoded.bytes).await
        }
        None => {
            let request = TensorRequest {
                // The source knows which format engines need.
                format: TensorFormat::Raw,
                model_dtype: None,
                memory: Arc::new(OwnMemory),
                is_still_needed: Arc::new(|| true),
            };
            let fields = item.source.tensors(request).await.map_err(JobError::Source)?;
            let fields = fields.unwrap_or_default();
            send_tensors(shared, &item.hash, &fields).await
        }
    };
    sent.map_err(|status| to_job_error(&status))
}

/// Sends a video's cut.
async fn send_cut(
    shared: &Shared,
    item: &JobItem,
    video: &dyn CuttableVideo,
) -> Result<(), JobError> {
    let parts = video.cut(shared.cuts.slots).await.map_err(JobError::Source)?;
    shared.observer.sent_as(SentForm::Cut);
    shared.observer.sent(parts.iter().map(VideoPart::bytes).sum());
    let sent = shared.link.put_cut(&item.hash, parts).await;
    sent.map_err(|status| to_job_error(&status))
}

/// Sends an image's tensors in place of its file of `file_bytes` bytes, if that is the chosen form.
///
/// Returns `true` if the tensors were sent. Otherwise the caller has to send the file, which is
/// counted as a step down unless the file was the chosen form, or the only one.
async fn try_send_tensors(shared: &Shared, item: &JobItem, file_bytes: u64) -> bool {
    let ImageForms { choice, format, max_bytes } = shared.images;
    let is_forced = choice == AgentMedia::Tensors;
    let step_down = |cause: &'static str, reason: &dyn std::fmt::Display| {
        shared.observer.stepped_down(cause, reason);
        false
    };
    let format = match (choice, format) {
        (AgentMedia::Encoded, _) | (AgentMedia::Auto, None) => return false,
        (AgentMedia::Tensors, None) => {
            return step_down(
                "tensors_not_taken",
                &"the agent does not accept image tensors (--take-tensors)",
            );
        }
        (_, Some(format)) => format,
    };
    let work = &shared.link.work;
    // This process can't make the tensors of an item without a cost.
    let Some(cost) = item.source.processing_cost(format) else { return false };
    if cost.tensor_bytes > max_bytes {
        work.add_file(&cost);
        let reason = format!(
            "the tensors have {} bytes, the agent accepts {max_bytes} (--processor-item-bytes)",
            cost.tensor_bytes
        );
        return is_forced && step_down("tensors_too_large", &reason);
    }
    if !is_forced && !work.should_send_tensors(&cost, file_bytes) {
        return false;
    }
    let request = TensorRequest {
        format,
        // Images have no small floats.
        model_dtype: None,
        memory: Arc::new(OwnMemory),
        is_still_needed: Arc::new(|| true),
    };
    let fields = match item.source.tensors(request).await {
        Ok(fields) => fields.unwrap_or_default(),
        // If the image is at fault, the agent reports it, as for every file.
        Err(error) => {
            work.add_file(&cost);
            return step_down("tensors_not_made", &error);
        }
    };
    let bytes = tensors::total_bytes(&fields);
    let start = Instant::now();
    match send_tensors(shared, &item.hash, &fields).await {
        Ok(()) => {
            work.record_transfer(bytes, start.elapsed());
            true
        }
        Err(status) => {
            work.add_file(&cost);
            step_down(failure_cause(&status), &describe(&status))
        }
    }
}

/// Returns the cause, for metrics, of a failure to send tensors to an agent.
fn failure_cause(status: &Status) -> &'static str {
    match status.code() {
        Code::InvalidArgument | Code::FailedPrecondition | Code::ResourceExhausted => {
            "tensors_refused"
        }
        _ => "tensors_not_sent",
    }
}

/// Transfers an item's tensors to the agent. The agent reads the tensors from this process's memory
/// if both sides are configured for that. Otherwise, or if that fails, the tensors are sent.
async fn send_tensors(shared: &Shared, hash: &MmHash, fields: &[ItemField]) -> Result<(), Status> {
    let bytes = tensors::total_bytes(fields);
    shared.observer.sent_as(SentForm::Tensors);
    match shared.link.lend_tensors(hash, fields).await {
        Ok(true) => {
            shared.observer.lent(bytes);
            return Ok(());
        }
        Ok(false) => {}
        Err(NotLent { cause, reason }) => shared.observer.stepped_down(cause, &reason),
    }
    shared.observer.sent(bytes);
    shared.link.put_tensors(hash, fields).await
}

/// This process's own memory, for tensors that are sent.
pub(crate) struct OwnMemory;

impl TensorMemory for OwnMemory {
    fn reserve(&self, _: usize) -> Option<SlotWriter> {
        None
    }

    fn takes(&self, _: &TensorBytes) -> bool {
        true
    }
}

/// Converts the status of a failed transfer. An item that the agent refuses fails the job. After
/// another failure, another agent may take the job.
fn to_job_error(status: &Status) -> JobError {
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => {
            JobError::Refused { field: "body".to_owned(), message: status.message().to_owned() }
        }
        _ => JobError::NotTaken(connection_lost(status)),
    }
}
