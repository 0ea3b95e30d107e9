//! Sending a media item to an agent: as its file, or as tensors that are made of it here.

use std::sync::Arc;
use std::time::Instant;

use chiasm_backend::{
    ItemField, JobError, JobItem, SentForm, TensorBytes, TensorFormat, TensorMemory, TensorOrder,
};
use chiasm_transfer::SlotWriter;
use chiasm_types::MmHash;
use tonic::{Code, Status};

use super::images::{AgentMedia, ImageForms};
use super::lending::NotLent;
use super::shared::Shared;
use super::{lost, words};
use crate::tensors;

/// Sends an item's file, or its tensors where that does not say what they are or is not how it is
/// to go: made for that if they were not kept.
pub(super) async fn send(shared: &Shared, item: &JobItem) -> Result<(), JobError> {
    let sent = match item.source.encoded() {
        Some(encoded) => {
            if tensors_sent(shared, item, encoded.bytes.len() as u64).await {
                return Ok(());
            }
            shared.observer.sent_as(SentForm::Encoded);
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
            send_tensors(shared, &item.hash, &fields).await
        }
    };
    sent.map_err(|status| not_taken(&status))
}

/// Sends an image's tensors in place of its file of so many bytes, if that is how it is to go.
/// Whether they got there: otherwise the file has to be sent, which is counted as a step down
/// unless it was to be.
async fn tensors_sent(shared: &Shared, item: &JobItem, file_bytes: u64) -> bool {
    let ImageForms { choice, format, most_bytes } = shared.images;
    let is_forced = choice == AgentMedia::Tensors;
    let step_down = |cause: &'static str, why: &dyn std::fmt::Display| {
        shared.observer.stepped_down(cause, why);
        false
    };
    let format = match (choice, format) {
        (AgentMedia::Encoded, _) | (AgentMedia::Auto, None) => return false,
        (AgentMedia::Tensors, None) => {
            return step_down(
                "tensors_not_taken",
                &"the agent takes none of images (--take-tensors)",
            );
        }
        (_, Some(format)) => format,
    };
    let work = &shared.link.work;
    // What is made of it is known here alone, or there alone.
    let Some(making) = item.source.making(format) else { return false };
    if making.bytes > most_bytes {
        work.given(&making);
        let why = format!(
            "they have {} bytes, and the agent takes {most_bytes} (--processor-item-bytes)",
            making.bytes
        );
        return is_forced && step_down("tensors_too_large", &why);
    }
    if !is_forced && !work.takes_longer_than_sending(&making, file_bytes) {
        return false;
    }
    let order =
        TensorOrder { format, memory: Arc::new(OwnMemory), still_wanted: Arc::new(|| true) };
    let fields = match item.source.tensors(order).await {
        Ok(fields) => fields.unwrap_or_default(),
        // If the fault is the image's the agent finds it too, and says so as with all files.
        Err(error) => {
            work.given(&making);
            return step_down("tensors_not_made", &error);
        }
    };
    let (bytes, begun) = (tensors::bytes(&fields), Instant::now());
    match send_tensors(shared, &item.hash, &fields).await {
        Ok(()) => {
            work.sent(bytes, begun.elapsed());
            true
        }
        Err(status) => {
            work.given(&making);
            step_down(cause(&status), &words(&status))
        }
    }
}

/// Why tensors did not get to an agent, in a word.
fn cause(status: &Status) -> &'static str {
    match status.code() {
        Code::InvalidArgument | Code::FailedPrecondition | Code::ResourceExhausted => {
            "tensors_refused"
        }
        _ => "tensors_not_sent",
    }
}

/// Has the agent get an item's tensors: it reads them here if both sides are told so, otherwise or
/// if that fails they are sent.
async fn send_tensors(shared: &Shared, hash: &MmHash, fields: &[ItemField]) -> Result<(), Status> {
    let bytes = tensors::bytes(fields);
    shared.observer.sent_as(SentForm::Tensors);
    match shared.link.lend_tensors(hash, fields).await {
        Ok(true) => {
            shared.observer.lent(bytes);
            return Ok(());
        }
        Ok(false) => {}
        Err(NotLent { cause, why }) => shared.observer.stepped_down(cause, &why),
    }
    shared.observer.sent(bytes);
    shared.link.put_tensors(hash, fields).await
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
fn not_taken(status: &Status) -> JobError {
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => {
            JobError::Refused { field: "body".to_owned(), message: status.message().to_owned() }
        }
        _ => JobError::NotTaken(lost(status)),
    }
}
