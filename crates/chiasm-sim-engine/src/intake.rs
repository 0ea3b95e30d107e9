//! From frames to work: what vLLM's input thread does (`process_input_sockets`).

use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use chiasm_engine::wire::{
    ClientMessage, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, MmItem,
    RequestError, TensorData, WireError, WireTensor, request,
};
use tokio::sync::mpsc;

use crate::computed::Computed;
use crate::handle::Refused;
use crate::image::cached_bytes;
use crate::item::Item;
use crate::left_prompts::{self, BadParams, Handed, LeftPrompts, Origin};
use crate::lent_slot::{Alarm, LentSlot};
use crate::moment_log::MomentLog;
use crate::monotonic_time::MonotonicTime;
use crate::outbox::Outbox;
use crate::plugin::Plugin;
use crate::receiver_cache::{Incoming, ReceiverCache};
use crate::sampling_rules;
use crate::sequence::Sequence;
use crate::work::Work;

/// The cache is filled here and emptied by the engine's loop.
pub(crate) type SharedReceiverCache = Arc<Mutex<ReceiverCache<Item>>>;

/// Decodes messages. One per input socket; they share everything.
#[derive(Clone)]
pub(crate) struct Intake {
    pub(crate) receiver_cache: Option<SharedReceiverCache>,
    pub(crate) plugin: Option<Plugin>,
    /// Raised for slots that are written to; `None` when nobody looks.
    pub(crate) alarm: Option<Alarm>,
    pub(crate) held: Arc<Mutex<Held>>,
    pub(crate) block_size: usize,
    pub(crate) time: MonotonicTime,
    pub(crate) outbox: Outbox,
    pub(crate) work: mpsc::UnboundedSender<Work>,
    /// `None` without a KV connector.
    pub(crate) left_prompts: Option<LeftPrompts>,
    /// Outputs have a field for the reason of an error, as since vLLM 0.33.
    pub(crate) explains_errors: bool,
    /// When requests come; `None` when nobody measures.
    pub(crate) request_log: Option<Arc<MomentLog>>,
}

/// What the input thread's variables still refer to when a message has been dealt with.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// Items of the last ADD, vLLM's `req`. They are held until another one is decoded.
    decoded: Vec<Item>,
    /// Items of what last went on to the engine's loop, vLLM's `request`. They are held until
    /// something else does; there are none if it was no ADD.
    passed_on: Vec<Item>,
}

/// A prompt that a request waits for.
struct Getting {
    id: String,
    /// What it has to be.
    wanted: Computed,
    origin: Origin,
}

/// A message that ends the input thread.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Undecodable {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("sampling parameter {0} is out of range")]
    Sampling(&'static str),
    /// An assertion of vLLM's decoder.
    #[error("received an out-of-band tensor without a plugin that provides it")]
    NoPlugin,
}

/// Why a request is not passed on.
enum Turned {
    /// A tensor can't be had. Only this request fails.
    Refused(Refused),
    /// These items have no data and are not in the receiver cache. Only this request fails.
    Missing(Vec<String>),
    /// It ends the input thread.
    Undecodable(Undecodable),
}

impl Intake {
    /// Takes one message.
    ///
    /// # Errors
    /// It can't be decoded. vLLM's input thread ends then, which closes its sockets; the rest of
    /// the engine lives on and hears nothing more.
    pub(crate) fn take(&self, frames: &[Bytes]) -> Result<(), Undecodable> {
        let came = self.request_log.as_ref().map(|_| SystemTime::now());
        let message = request::decode(frames)?;
        // vLLM has one thread for all input sockets.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let mut getting = None;
        let work = match message {
            ClientMessage::Add(request) => {
                if let (Some(log), Some(came)) = (&self.request_log, came) {
                    log.write(came);
                }
                let handed = match self.handed(&request) {
                    Ok(handed) => handed,
                    Err(error) => {
                        let _ = self.work.send(Work::Die(error.to_string()));
                        return Ok(());
                    }
                };
                let Some(sequence) = self.admit(*request, &mut held)? else { return Ok(()) };
                let (work, get) = self.hand(sequence, handed);
                getting = get;
                work
            }
            ClientMessage::Abort(ids) => Work::Abort(ids),
            ClientMessage::Utility(call) => Work::Call(call),
        };
        held.passed_on = match work {
            Work::Add(_) | Work::Await(_) => held.decoded.clone(),
            _ => Vec::new(),
        };
        // The loop is gone only while everything is being torn down.
        let _ = self.work.send(work);
        getting.into_iter().for_each(|getting| self.get(getting));
        Ok(())
    }

    /// What a request asks for of its prompt beyond an answer.
    fn handed(&self, request: &EngineCoreRequest) -> Result<Option<Handed>, BadParams> {
        let extra = request.sampling_params.extra_args.as_ref();
        match (extra.and_then(|extra| extra.kv_transfer_params.as_ref()), &self.left_prompts) {
            (Some(params), Some(_)) => Handed::read(params),
            // vLLM warns, and goes on without.
            (Some(_), None) | (None, _) => Ok(None),
        }
    }

    /// A request that is to leave its prompt, or to get it from elsewhere first: what is to be done
    /// once it has been passed on.
    fn hand(&self, mut sequence: Sequence, handed: Option<Handed>) -> (Work, Option<Getting>) {
        match handed {
            None => (Work::Add(Box::new(sequence)), None),
            Some(Handed::Leave) => {
                sequence.left_as = self.left_prompts.as_ref().map(LeftPrompts::number);
                (Work::Add(Box::new(sequence)), None)
            }
            Some(Handed::Get(origin)) => {
                let (id, wanted) = (sequence.id.clone(), sequence.computed());
                (Work::Await(Box::new(sequence)), Some(Getting { id, wanted, origin }))
            }
        }
    }

    /// Gets a prompt from another engine, for a request that waits for it.
    fn get(&self, Getting { id, wanted, origin }: Getting) {
        let work = self.work.clone();
        tokio::spawn(async move {
            let got = left_prompts::get(&origin).await;
            // vLLM would go on with the keys and values of another prompt, in silence.
            let _ = work.send(match got {
                Some(got) if got != wanted => {
                    Work::Die(format!("request {id} got another prompt than its own"))
                }
                got => Work::Given(id, got.is_some()),
            });
        });
    }

    fn admit(
        &self,
        mut request: EngineCoreRequest,
        held: &mut Held,
    ) -> Result<Option<Sequence>, Undecodable> {
        if let Some(field) = sampling_rules::broken(&request.sampling_params) {
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
        match self.items(&mut request, held) {
            Ok(items) => return Ok(Some(Sequence::new(request, items, self.block_size))),
            Err(Turned::Refused(reason)) => {
                tracing::warn!(request = request.request_id, %reason, "refused a request");
                self.refuse(request, Vec::new(), None);
            }
            Err(Turned::Missing(missing)) => {
                tracing::debug!(request = request.request_id, ?missing, "receiver cache miss");
                self.refuse(request, missing, None);
            }
            Err(Turned::Undecodable(problem)) => return Err(problem),
        }
        Ok(None)
    }

    /// The items of a request, completed by the receiver cache, if there is one.
    fn items(
        &self,
        request: &mut EngineCoreRequest,
        held: &mut Held,
    ) -> Result<Vec<Option<Item>>, Turned> {
        // The request of before, whatever becomes of this one.
        held.decoded.clear();
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
        held.decoded.extend(sent.iter().flatten().cloned());
        let Some(cache) = &self.receiver_cache else {
            return Ok(sent);
        };
        let updated = cache.lock().unwrap_or_else(PoisonError::into_inner).update(received);
        let items = updated.map_err(Turned::Missing)?;
        held.decoded.clone_from(&items);
        Ok(items.into_iter().map(Some).collect())
    }

    /// An item whose tensors that are out of band have become views of slots.
    fn receive(&self, item: MmItem) -> Result<Item, Turned> {
        Item::receive(item, |tensor| self.slot_of(tensor))
    }

    fn slot_of(&self, tensor: &WireTensor) -> Result<Option<LentSlot>, Turned> {
        let TensorData::OutOfBand(map) = &tensor.data else {
            return Ok(None);
        };
        let plugin = self.plugin.as_ref().ok_or(Turned::Undecodable(Undecodable::NoPlugin))?;
        plugin.resolve(tensor, map, self.alarm.clone()).map(Some).map_err(Turned::Refused)
    }

    /// Tells the frontend to send a request again with the data of these items; without them, that
    /// it failed.
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
