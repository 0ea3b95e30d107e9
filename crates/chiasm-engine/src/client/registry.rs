//! The open requests and method calls of one engine.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use chiasm_backend::inbox::{Receiver, Sender, inbox};
use chiasm_backend::unread::UnreadShare;
use foldhash::fast::RandomState;
use tokio::sync::oneshot;

use crate::error::{DeathCause, EngineError};
use crate::wire::output::{Payload, ReceivedOutput};
use crate::wire::{EngineCoreOutputs, FailureMessage, Value};

/// An item of a request's stream.
pub(super) type StreamItem = Result<Payload, EngineError>;

/// The result of a method call.
pub(super) type CallResult = Result<Value, FailureMessage>;

/// The open requests and calls. Empty after the engine's death, and then it accepts no more.
///
/// A slow reader delays neither other requests nor the engine: its stream ends when too many
/// outputs are unread.
pub(super) struct Registry {
    /// The open streams by request id. A fast hash is enough: every id ends with random digits, so
    /// clients can't cause collisions.
    streams: HashMap<String, Stream, RandomState>,
    calls: HashMap<u64, oneshot::Sender<CallResult>>,
    last_call: u64,
    death: Option<DeathCause>,
}

/// The sender of one request's stream.
struct Stream {
    sender: Sender<StreamItem>,
    /// `true` if the request may have reached the engine.
    was_sent: bool,
}

impl Default for Registry {
    fn default() -> Self {
        // Ids start at a random number: an adopted engine may still answer calls of its earlier
        // frontend.
        let last_call = u64::from(rand::random::<u32>());
        Self { streams: HashMap::default(), calls: HashMap::new(), last_call, death: None }
    }
}

impl Registry {
    fn ensure_alive(&self) -> Result<(), EngineError> {
        match &self.death {
            Some(cause) => Err(EngineError::Dead { cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Opens a stream of a job, with at most `max_bytes` of unread outputs. Refuses an id that is
    /// open.
    pub(super) fn open_stream(
        &mut self,
        request_id: &str,
        max_bytes: usize,
        job: &UnreadShare,
    ) -> Result<Receiver<StreamItem>, EngineError> {
        if let Some(cause) = &self.death {
            return Err(EngineError::NotSent { cause: cause.clone() });
        }
        match self.streams.entry(request_id.to_owned()) {
            Entry::Occupied(_) => {
                Err(EngineError::invalid("request_id", "is in use by a running request"))
            }
            Entry::Vacant(entry) => {
                let (sender, receiver) = inbox(max_bytes, job);
                entry.insert(Stream { sender, was_sent: false });
                Ok(receiver)
            }
        }
    }

    /// Marks a request as sent. Call it before sending: the engine may have the request even if
    /// sending fails.
    pub(super) fn mark_sent(&mut self, request_id: &str) {
        if let Some(stream) = self.streams.get_mut(request_id) {
            stream.was_sent = true;
        }
    }

    /// Removes a stream. Returns `true` if it was open, so that the request must be aborted.
    pub(super) fn close_stream(&mut self, request_id: &str) -> bool {
        self.streams.remove(request_id).is_some()
    }

    /// Opens a method call. Returns its id and the receiver of its result.
    pub(super) fn open_call(
        &mut self,
    ) -> Result<(u64, oneshot::Receiver<CallResult>), EngineError> {
        self.ensure_alive()?;
        self.last_call += 1;
        let (sender, receiver) = oneshot::channel();
        self.calls.insert(self.last_call, sender);
        Ok((self.last_call, receiver))
    }

    /// Removes a method call.
    pub(super) fn cancel_call(&mut self, call_id: u64) {
        self.calls.remove(&call_id);
    }

    /// Returns the number of open requests.
    pub(super) fn open_requests(&self) -> usize {
        self.streams.len()
    }

    /// Passes outputs to their streams and calls. Returns the requests to abort: those whose stream
    /// ended because its reader was too slow.
    ///
    /// Outputs of aborted requests and results of calls that timed out are dropped. With
    /// `abort_unknown`, running requests without a stream are aborted too: an adopted engine may
    /// start queued requests of its earlier frontend at any time. This may abort a request of ours
    /// twice, which engines ignore.
    pub(super) fn dispatch(
        &mut self,
        outputs: EngineCoreOutputs<ReceivedOutput>,
        abort_unknown: bool,
    ) -> Vec<String> {
        let mut to_abort = Vec::new();
        for ReceivedOutput { request_id, payload } in outputs.outputs {
            let has_ended = payload.finish_reason().is_some();
            let Some(stream) = self.streams.get(&request_id) else {
                if abort_unknown && !has_ended {
                    to_abort.push(request_id);
                }
                continue;
            };
            if has_ended {
                stream.sender.send(Ok(payload));
                self.streams.remove(&request_id);
            } else if !stream.sender.try_send(Ok(payload)) {
                stream.sender.send(Err(EngineError::Unread));
                self.streams.remove(&request_id);
                to_abort.push(request_id);
            }
        }
        for request_id in outputs.finished_requests {
            if let Some(stream) = self.streams.remove(&request_id) {
                stream.sender.send(Err(EngineError::Ended));
            }
        }
        if let Some(answer) = outputs.utility_output
            && let Some(call) = self.calls.remove(&answer.call_id)
        {
            let _ = call.send(answer.result);
        }
        to_abort
    }

    /// Ends all streams and calls. Returns `false` if the engine was dead already.
    pub(super) fn mark_dead(&mut self, cause: DeathCause) -> bool {
        if self.death.is_some() {
            return false;
        }
        for (_, stream) in self.streams.drain() {
            let cause = cause.clone();
            stream.sender.send(Err(if stream.was_sent {
                EngineError::Dead { cause }
            } else {
                EngineError::NotSent { cause }
            }));
        }
        // A call whose sender is dropped reads the cause from the registry.
        self.calls.clear();
        self.death = Some(cause);
        true
    }

    /// Returns the cause of the engine's death; `None` while it is alive.
    pub(super) fn death(&self) -> Option<&DeathCause> {
        self.death.as_ref()
    }
}
