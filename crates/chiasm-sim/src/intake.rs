//! From frames to work: what vLLM's input thread does (`process_input_sockets`).

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, Utility, request,
};
use tokio::sync::mpsc;

use crate::clock::Clock;
use crate::image::{Outline, cached_bytes};
use crate::outbox::Outbox;
use crate::receiver_cache::{Incoming, ReceiverCache};
use crate::sampling_rules;
use crate::sequence::Sequence;

/// Work for the engine's loop.
pub(crate) enum Work {
    Add(Box<Sequence>),
    Abort(Vec<String>),
    Call(Utility),
    /// SIGTERM.
    Stop,
}

/// The cache is filled here and emptied by the engine's loop.
pub(crate) type SharedReceiverCache = Arc<Mutex<ReceiverCache<Outline>>>;

/// Decodes messages. One per input socket; they share everything.
#[derive(Clone)]
pub(crate) struct Intake {
    pub(crate) receiver_cache: Option<SharedReceiverCache>,
    pub(crate) block_size: usize,
    pub(crate) clock: Clock,
    pub(crate) outbox: Outbox,
    pub(crate) work: mpsc::UnboundedSender<Work>,
}

impl Intake {
    /// Takes one message.
    ///
    /// # Errors
    /// What could not be decoded. vLLM's input thread ends then, which closes its sockets; the rest of the engine
    /// lives on and hears nothing more.
    pub(crate) fn take(&self, frames: &[Bytes]) -> Result<(), String> {
        let work = match request::decode(frames).map_err(|error| error.to_string())? {
            ClientMessage::Add(request) => match self.admit(*request)? {
                Some(sequence) => Work::Add(Box::new(sequence)),
                None => return Ok(()),
            },
            ClientMessage::Abort(ids) => Work::Abort(ids),
            ClientMessage::Utility(call) => Work::Call(call),
        };
        // The loop is gone only while everything is being torn down.
        let _ = self.work.send(work);
        Ok(())
    }

    fn admit(&self, request: EngineCoreRequest) -> Result<Option<Sequence>, String> {
        if let Some(field) = sampling_rules::broken(&request.sampling_params) {
            return Err(format!("sampling parameter {field} is out of range"));
        }
        match self.items(&request) {
            Ok(items) => Ok(Some(Sequence::new(request, items, self.block_size))),
            Err(missing) => {
                tracing::debug!(request = request.request_id, ?missing, "receiver cache miss");
                self.refuse(request, missing);
                Ok(None)
            }
        }
    }

    /// The items of a request, completed by the receiver cache, if there is one.
    fn items(&self, request: &EngineCoreRequest) -> Result<Vec<Option<Outline>>, Vec<String>> {
        let features = request.mm_features.iter();
        let Some(cache) = &self.receiver_cache else {
            return Ok(features.map(|feature| feature.data.as_ref().map(Outline::of)).collect());
        };
        let incoming = features.map(|feature| Incoming {
            key: feature.cache_key().to_owned(),
            data: feature.data.as_ref().map(|item| (Outline::of(item), cached_bytes(item))),
        });
        let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(cache.update(incoming.collect())?.into_iter().map(Some).collect())
    }

    /// Tells the frontend to send a request again with the data of these items.
    fn refuse(&self, request: EngineCoreRequest, missing: Vec<String>) {
        let output = EngineCoreOutput {
            request_id: request.request_id.clone(),
            finish_reason: Some(FinishReason::Error),
            mm_cache_miss_hashes: missing,
            ..EngineCoreOutput::default()
        };
        let outputs = EngineCoreOutputs {
            outputs: vec![output],
            finished_requests: vec![request.request_id],
            timestamp: self.clock.now(),
            ..EngineCoreOutputs::default()
        };
        self.outbox.send(request.client_index, outputs);
    }
}
