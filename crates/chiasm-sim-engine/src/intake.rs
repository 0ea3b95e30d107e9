//! Converts frames to work, like vLLM's input thread (`process_input_sockets`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, MmItem,
    RequestError, TensorData, WireError, WireTensor, request,
};
use tokio::sync::mpsc;

use crate::handle::HandleProblem;
use crate::image::cached_bytes;
use crate::item::Item;
use crate::lent_slot::{Alarm, LentSlot};
use crate::moment_log::MomentLog;
use crate::monotonic_time::MonotonicTime;
use crate::outbox::Outbox;
use crate::plugin::Plugin;
use crate::prompt_digest::PromptDigest;
use crate::prompt_store::{self, BadParams, KvTransfer, Origin, PromptStore};
use crate::receiver_cache::{Incoming, ReceiverCache};
use crate::sampling_rules;
use crate::sequence::Sequence;
use crate::work::Work;

/// The receiver cache, which the intake fills and the engine's loop clears.
pub(crate) type SharedReceiverCache = Arc<Mutex<ReceiverCache<Item>>>;

/// Decodes messages. There is one per input socket; all share their state.
#[derive(Clone)]
pub(crate) struct Intake {
    pub(crate) receiver_cache: Option<SharedReceiverCache>,
    pub(crate) plugin: Option<Plugin>,
    /// Raised for slots that were overwritten; `None` if slots are not checked.
    pub(crate) alarm: Option<Alarm>,
    pub(crate) retained: Arc<Mutex<RetainedItems>>,
    pub(crate) block_size: usize,
    pub(crate) time: MonotonicTime,
    pub(crate) outbox: Outbox,
    pub(crate) work: mpsc::UnboundedSender<Work>,
    /// `None` without a KV connector.
    pub(crate) prompt_store: Option<PromptStore>,
    /// `true` if outputs have a field for the reason of an error, as since vLLM 0.33.
    pub(crate) explains_errors: bool,
    /// The log of the times at which requests arrive, if one is configured.
    pub(crate) request_log: Option<Arc<MomentLog>>,
}

/// The items that the input thread's variables still refer to after a message was processed.
#[derive(Debug, Default)]
pub(crate) struct RetainedItems {
    /// The items of the last ADD, vLLM's `req`, until another ADD is decoded.
    decoded: Vec<Item>,
    /// The items of the last message for the engine's loop, vLLM's `request`, until another message
    /// follows. Empty if the message was no ADD.
    passed_on: Vec<Item>,
}

/// A prompt to fetch for a waiting request.
struct PromptFetch {
    id: String,
    /// The digest that the prompt must have.
    expected: PromptDigest,
    origin: Origin,
}

/// An error that ends the input thread.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Undecodable {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("sampling parameter {0} is out of range")]
    Sampling(&'static str),
    /// An assertion of vLLM's decoder failed.
    #[error("received an out-of-band tensor without a plugin that provides it")]
    NoPlugin,
}

/// A reason that a request is not passed on.
enum Rejection {
    /// A tensor can't be read. Only this request fails.
    Tensor(HandleProblem),
    /// These items have no data and are not in the receiver cache. Only this request fails.
    Missing(Vec<String>),
    /// The input thread ends.
    Undecodable(Undecodable),
}

impl Intake {
    /// Processes one message.
    ///
    /// # Errors
    /// Returns [`Undecodable`] if the message can't be decoded. vLLM's input thread then ends and
    /// closes its sockets; the rest of the engine continues and receives no more messages.
    pub(crate) fn take(&self, frames: &[Bytes]) -> Result<(), Undecodable> {
        let arrived_at = self.request_log.as_ref().map(|_| SystemTime::now());
        let message = request::decode(frames)?;
        // vLLM has one thread for all input sockets.
        let mut retained = self.retained.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fetch = None;
        let work = match message {
            ClientMessage::Add(request) => {
                if let (Some(log), Some(arrived_at)) = (&self.request_log, arrived_at) {
                    log.write(arrived_at);
                }
                let transfer = match self.kv_transfer(&request) {
                    Ok(transfer) => transfer,
                    Err(error) => {
                        let _ = self.work.send(Work::Die(error.to_string()));
                        return Ok(());
                    }
                };
                let Some(sequence) = self.admit(*request, &mut retained)? else { return Ok(()) };
                let (work, prompt_fetch) = self.with_transfer(sequence, transfer);
                fetch = prompt_fetch;
                work
            }
            ClientMessage::Abort(ids) => Work::Abort(ids),
            ClientMessage::Utility(call) => Work::Call(call),
        };
        retained.passed_on = match work {
            Work::Add(_) | Work::WaitForPrompt(_) => retained.decoded.clone(),
            _ => Vec::new(),
        };
        // The loop is gone only during shutdown.
        let _ = self.work.send(work);
        fetch.into_iter().for_each(|fetch| self.fetch(fetch));
        Ok(())
    }

    /// Parses the transfer of the prompt that a request asks for.
    fn kv_transfer(&self, request: &EngineCoreRequest) -> Result<Option<KvTransfer>, BadParams> {
        let extra = request.sampling_params.extra_args.as_ref();
        match (extra.and_then(|extra| extra.kv_transfer_params.as_ref()), &self.prompt_store) {
            (Some(params), Some(_)) => KvTransfer::parse(params),
            // vLLM logs a warning and ignores the parameters.
            (Some(_), None) | (None, _) => Ok(None),
        }
    }

    /// Returns the work for a request with this transfer, and the fetch to start after the work was
    /// passed on.
    fn with_transfer(
        &self,
        mut sequence: Sequence,
        transfer: Option<KvTransfer>,
    ) -> (Work, Option<PromptFetch>) {
        match transfer {
            None => (Work::Add(Box::new(sequence)), None),
            Some(KvTransfer::Keep) => {
                sequence.retention_id = self.prompt_store.as_ref().map(PromptStore::next_id);
                (Work::Add(Box::new(sequence)), None)
            }
            Some(KvTransfer::Fetch(origin)) => {
                let id = sequence.id.clone();
                let expected = sequence.prompt_digest();
                let fetch = PromptFetch { id, expected, origin };
                (Work::WaitForPrompt(Box::new(sequence)), Some(fetch))
            }
        }
    }

    /// Fetches a prompt from another engine for a waiting request.
    fn fetch(&self, PromptFetch { id, expected, origin }: PromptFetch) {
        let work = self.work.clone();
        tokio::spawn(async move {
            let fetched = prompt_store::fetch(&origin).await;
            // vLLM would silently continue with the keys and values of another prompt.
            let _ = work.send(match fetched {
                Some(fetched) if fetched != expected => {
                    Work::Die(format!("request {id} fetched the prompt of another request"))
                }
                fetched => Work::PromptFetched { id, found: fetched.is_some() },
            });
        });
    }

    fn admit(
        &self,
        mut request: EngineCoreRequest,
        retained: &mut RetainedItems,
    ) -> Result<Option<Sequence>, Undecodable> {
        if let Some(field) = sampling_rules::invalid_field(&request.sampling_params) {
            return Err(Undecodable::Sampling(field));
        }
        if !sampling_rules::compiles(&request.sampling_params) {
            let error = RequestError {
                code: RequestError::VALIDATION.to_owned(),
                message: "Invalid structured outputs: the grammar has no root".to_owned(),
                retryable: false,
            };
            self.refuse(request, Vec::new(), Some(error).filter(|_| self.explains_errors));
            return Ok(None);
        }
        match self.items(&mut request, retained) {
            Ok(items) => return Ok(Some(Sequence::new(request, items, self.block_size))),
            Err(Rejection::Tensor(reason)) => {
                tracing::warn!(request = request.request_id, %reason, "refused a request");
                self.refuse(request, Vec::new(), None);
            }
            Err(Rejection::Missing(missing)) => {
                tracing::debug!(request = request.request_id, ?missing, "receiver cache miss");
                self.refuse(request, missing, None);
            }
            Err(Rejection::Undecodable(problem)) => return Err(problem),
        }
        Ok(None)
    }

    /// Returns the items of a request, completed from the receiver cache if there is one.
    fn items(
        &self,
        request: &mut EngineCoreRequest,
        retained: &mut RetainedItems,
    ) -> Result<Vec<Option<Item>>, Rejection> {
        // vLLM drops the previous request here, also if this one is refused.
        retained.decoded.clear();
        let mut received = Vec::with_capacity(request.mm_features.len());
        for feature in &mut request.mm_features {
            let sent = feature.data.take().map(|item| (cached_bytes(&item), item));
            let sent = sent.map(|(bytes, item)| Ok((self.receive(item)?, bytes))).transpose()?;
            received.push(Incoming { key: feature.cache_key().to_owned(), data: sent });
        }
        let sent: Vec<Option<Item>> = received
            .iter()
            .map(|incoming| incoming.data.as_ref().map(|(item, _)| item.clone()))
            .collect();
        retained.decoded.extend(sent.iter().flatten().cloned());
        let Some(cache) = &self.receiver_cache else {
            return Ok(sent);
        };
        let updated = cache.lock().unwrap_or_else(PoisonError::into_inner).update(received);
        let items = updated.map_err(Rejection::Missing)?;
        retained.decoded.clone_from(&items);
        Ok(items.into_iter().map(Some).collect())
    }

    /// Receives an item and resolves its out-of-band tensors to slots.
    fn receive(&self, item: MmItem) -> Result<Item, Rejection> {
        Item::receive(item, |tensor| self.resolve_slot(tensor))
    }

    fn resolve_slot(&self, tensor: &WireTensor) -> Result<Option<LentSlot>, Rejection> {
        let TensorData::OutOfBand(map) = &tensor.data else {
            return Ok(None);
        };
        let plugin = self.plugin.as_ref().ok_or(Rejection::Undecodable(Undecodable::NoPlugin))?;
        plugin.resolve(tensor, map, self.alarm.clone()).map(Some).map_err(Rejection::Tensor)
    }

    /// Ends a request with an error. With `missing` items, the frontend sends the request again
    /// with their data.
    fn refuse(
        &self,
        request: EngineCoreRequest,
        missing: Vec<String>,
        error: Option<RequestError>,
    ) {
        let output = EngineCoreOutput {
            request_id: request.request_id.clone(),
            finish_reason: Some(FinishReason::Error),
            mm_cache_miss_hashes: missing,
            error,
            ..EngineCoreOutput::default()
        };
        let outputs = EngineCoreOutputs {
            outputs: vec![output],
            finished_requests: vec![request.request_id],
            timestamp: self.time.now(),
            ..EngineCoreOutputs::default()
        };
        self.outbox.send(request.client_index, outputs);
    }
}
